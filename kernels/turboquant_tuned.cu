// TurboQuant tuned: channel means out of the way, rotated rows on a uniform grid, symbols for kernels/symbols.cu.
//
// The step of a row follows its rms. It is told in eighths of an octave: step = 2^((code - 512) / 8). The codes of a tile (32
// tokens of a head) are its smallest, and what rows lie above it, in half octaves, packed to the tile's spread. A uniform step
// with an entropy coder behind it takes fewer bits than a codebook at equal error (Gish and Pierce, 1968).
#include "rans.h"
#include "rotation.h"

constexpr u32 LOW_BITS = 3;  // of symbols of 8 bits, stored as they are

struct TunedBlock {
  u64 symbols;   // u8 [heads][registers][pitch][32]
  u64 means;     // u16 [heads][registers][32], in MeanOf<E>
  u64 rotation;  // float [2][32 * registers]
  u64 codes;     // u16 [tiles][heads]: smallest code, width << 12
  u64 spreads;   // u32: `width` words of bits for each tile and head
  u64 starts;    // u32 [tiles][heads]: where they begin; decoding only
  u64 low;       // u32 [heads][registers][tokens][LOW_BITS]: what symbols have beyond the coder's 32; 0 if nothing
  u32 pitch, alphabet;
  u32 sinks;     // the first tokens, kept exact; encoding only
  float grain;   // the square of (step over rms), over head_dim
  float reach;   // the square of (step over largest magnitude) that a row may have at least
  float gain;    // what restored numbers are multiplied with

  METHOD u8* symbols_of(u32 register_of_plane, u32 token) const {
    return (u8*)symbols + ((u64)register_of_plane * pitch + token) * LANES;
  }
  METHOD u32* low_of(u32 register_of_plane, u32 token, u32 tokens) const {
    return (u32*)low + ((u64)register_of_plane * tokens + token) * LOW_BITS;
  }
};

constexpr u32 CODE_BIAS = 512, CODE_BITS = 12, HALF_OCTAVE = 4;
constexpr u32 NO_ROWS_CODE = CODE_BIAS - 320;  // of a step of 2^-40

// Means have 16 bits: they ride in the streams' start states.
template <class E>
struct MeanOf {
  typedef E type;
};
template <>
struct MeanOf<Fp32> {
  typedef Bf16 type;
};

// ------------------------------------------------------------------------------------------- means

FN vf32 largest_finite() { return as_float(splat(0x7f7fffff)); }

// The mean of every `step`th number from token `first` on, or of its distance from `center`, where that is at most `reach`;
// `center` if there is none.
template <class E, bool DISTANCE>
FN vf32 mean_within(const Plane& plane, u32 head, u32 r, u32 first, u32 step, vf32 center, vf32 reach) {
  vf32 sum = splatf(0.f);
  vu32 count = splat(0);
  for (u32 t = first; t < plane.tokens; t += step) {
    vf32 x = E::to_float(load_piece(row_of<E>(plane, t, head), plane.head_dim, r));
    vf32 distance = absolute(x - center);
    vm32 near = distance <= reach;
    sum = sum + select(near, DISTANCE ? distance : x, splatf(0.f));
    count = count + select(near, splat(1), splat(0));
  }
  return select(count != 0u, sum / int_to_float(count), center);
}

// One warp a register of a head. A token that is far out would take the mean along, and all others would pay for it: a quarter
// of the tokens tells what is far.
template <class E>
FN void channel_means(const Plane& plane, const TunedBlock& block, u32 group) {
  typedef typename MeanOf<E>::type M;
  u32 registers = registers_of(plane.head_dim), head = group / registers, r = group % registers, first = block.sinks;
  vf32 rough = mean_within<E, false>(plane, head, r, first, 4, splatf(0.f), largest_finite());
  vf32 reach = mean_within<E, true>(plane, head, r, first, 4, rough, largest_finite()) * 4.f;
  reach = select(reach < largest_finite(), reach, largest_finite());
  vf32 mean = mean_within<E, false>(plane, head, r, first, 1, rough, reach);
  store_u16((u16*)block.means + group * LANES, M::from_float(select(is_unfit(mean) == 0u, mean, splatf(0.f))));
}

#define TUNED_MEANS(suffix, E)                                                                             \
  KERNEL(tuned_means_##suffix, const Plane* planes, const TunedBlock* blocks, u32 groups) {                \
    FOR_EACH_WARP(warp) { channel_means<E>(planes[warp / groups], blocks[warp / groups], warp % groups); } \
  }
FOR_ELEMENT_TYPES(TUNED_MEANS)

// ------------------------------------------------------------------------------------------- steps

// Four times the binary logarithm of a normal number, rounded down, plus CODE_BIAS.
FN vu32 quarter_octaves(vf32 x) {
  vu32 bits = as_bits(x), mantissa = bits & 0x7fffffu;
  vu32 quarter = select(mantissa >= 0x1837f0u, splat(1), splat(0)) + select(mantissa >= 0x3504f3u, splat(1), splat(0)) +
                 select(mantissa >= 0x5744fdu, splat(1), splat(0));
  return (bits >> 23) * 4u + quarter + (CODE_BIAS - 4 * 127);
}
// 2^((code - CODE_BIAS) / 8)
FN vf32 step_of(vu32 code) {
  const float roots[8] = {1.f,         1.09050773f, 1.18920712f, 1.29683955f,
                          1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};
  vf32 root = splatf(roots[0]);
  for (u32 i = 1; i < 8; ++i) root = select((code & 7u) == i, splatf(roots[i]), root);
  return as_float(((code >> 3) + (127 - CODE_BIAS / 8) & 0xffu) << 23) * root;
}

// A row of the plane: its numbers, and they less the means and rotated.
template <class E, int R>
FN void load_rotated(vf32* x, vf32* y, const Plane& plane, const TunedBlock& block, const Rotation& rotation, u32 token,
                     u32 head) {
  typedef typename MeanOf<E>::type M;
  u32 length = plane.head_dim;
  const u16* means = (const u16*)block.means + head * registers_of(length) * LANES;
  load_row<E, R>(x, plane, token, head);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r)
    y[r] = active_lanes(length, r)
               ? (x[r] - M::to_float(load_u16(means + r * LANES))) * load_floats(rotation.signs + r * LANES)
               : splatf(0.f);
  hadamard<R>(y, length);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r)
    if (active_lanes(length, r)) y[r] = y[r] * load_floats(rotation.scales + r * LANES);
}

// Symbols less the middle one, rotated back, times the step, plus the means; as stored in the plane.
template <class E, int R>
FN void restore_row(typename E::vraw* stored, vf32* y, const Plane& plane, const TunedBlock& block,
                    const Rotation& rotation, float step, u32 head) {
  typedef typename MeanOf<E>::type M;
  u32 length = plane.head_dim;
  const u16* means = (const u16*)block.means + head * registers_of(length) * LANES;
  hadamard<R>(y, length);
#pragma unroll(Unrolled<R>::STEPS)
  for (int r = 0; r < R; ++r) {
    if (!active_lanes(length, r)) continue;
    vf32 weight = load_floats(rotation.scales + r * LANES) * load_floats(rotation.signs + r * LANES);
    stored[r] = E::from_float(y[r] * weight * step + M::to_float(load_u16(means + r * LANES)));
  }
}

// ------------------------------------------------------------------------------------------- encoding

// Steps of a tile's rows, a row a lane.
struct TileSteps {
  u32 smallest, width;
  vu32 spread;

  // From the squares of the steps that the first `rows` lanes want. Rows that want next to none, or no number, do not count.
  static METHOD TileSteps choose(vu32 wanted, u32 rows) {
    vu32 code = quarter_octaves(as_float(wanted));
    vu32 counts = select(lane_ids() < rows, splat(1), splat(0)) & select(wanted < 0x7f800000u, splat(1), splat(0)) &
                  select(wanted >= (127u - 80u) << 23, splat(1), splat(0));
    TileSteps steps = {NO_ROWS_CODE, 0, splat(0)};
    if (ballot(counts != 0u) == 0) return steps;
    u32 low = smallest_of(code, counts), high = largest(select(counts != 0u, code, splat(0)));
    // In the middle of the rows' steps if one does for all.
    steps.smallest = low + (high - low < HALF_OCTAVE ? (high - low + 1) / 2 : HALF_OCTAVE / 2);
    vu32 above = select((counts != 0u) & (code > steps.smallest), code - steps.smallest, splat(0));
    steps.spread = (above + HALF_OCTAVE / 2) / HALF_OCTAVE;
    steps.width = bit_width(largest(steps.spread));
    return steps;
  }
  static METHOD u32 smallest_of(vu32 code, vu32 counts) { return ::smallest(select(counts != 0u, code, splat(~0u))); }
  METHOD vf32 values() const { return step_of(spread * HALF_OCTAVE + smallest); }
};

// The coder takes 32 symbols: of those of a tile it gets the high bits, the low ones are stored as they are.
FN void split_symbols(const TunedBlock& block, const RowTile& tile, u32 registers, u32 tokens) {
  for (u32 g = tile.head * registers; g < (tile.head + 1) * registers; ++g)
    for (u32 t = tile.start; t < tile.stop; ++t) {
      vu32 symbol = widen(load_u8(block.symbols_of(g, t)));
      store_bits(block.low_of(g, t, tokens), symbol, LOW_BITS);
      store_u8(block.symbols_of(g, t), narrow(symbol >> LOW_BITS));
    }
}

template <class E, int R>
FN void encode_tuned(const Plane& plane, const TunedBlock& block, const RowTile& tile, u16* code, u32* spread, u32* width,
                     u32* exact, float* sums) {
  u32 length = plane.head_dim, middle = block.alphabet / 2, rows = tile.rows(), first = tile.head * registers_of(length);
  Rotation rotation = Rotation::make(block.rotation, length);
  vf32 x[R], y[R];
  vu32 wanted = splat(0);
  for (u32 i = 0; i < rows; ++i) {
    load_rotated<E, R>(x, y, plane, block, rotation, tile.start + i, tile.head);
    vf32 squares = splatf(0.f), top = splatf(0.f);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      squares = squares + y[r] * y[r];
      top = maximum(top, absolute(y[r]));
    }
    squares = warp_sum(squares);
    top = warp_max(top);
    vf32 step = maximum(squares * block.grain, top * top * block.reach);
    vu32 bits = select(is_unfit(squares) != 0u, splat(0x7f800000), as_bits(step));
    wanted = select(lane_ids() == i, bits, wanted);
  }
  wanted = select(lane_ids() + tile.start < block.sinks, splat(0x7f800000), wanted);
  TileSteps steps = TileSteps::choose(wanted, rows);
  u32 unfit = ballot(wanted >= 0x7f800000u);
  vf32 values = steps.values(), inverses = splatf(1.f) / values;
  store_uniform(code, (u16)(steps.smallest | steps.width << CODE_BITS));
  store_uniform(width, steps.width);
  store_bits(spread, steps.spread, steps.width);

  RowErrors errors = RowErrors::make();
  float low = -(float)middle, high = (float)(block.alphabet - 1 - middle);
  for (u32 i = 0; i < rows; ++i) {
    u32 t = tile.start + i;
    bool kept = unfit >> i & 1;
    float inverse = lane_value(inverses, i), step = lane_value(values, i) * block.gain;
    load_rotated<E, R>(x, y, plane, block, rotation, t, tile.head);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r) {
      vf32 place = kept ? splatf(0.f) : y[r] * inverse;
      place = maximum(place, splatf(low));
      vu32 symbol = round_to_int(select(place < high, place, splatf(high))) + middle;
      if (active_lanes(length, r))
        store_u8(block.symbols_of(first + r, t), narrow(select(lane_ids() < active_lanes(length, r), symbol, splat(0))));
      y[r] = int_to_float(symbol - middle);
    }
    if (kept) {
      errors.keep<R>(x, i);
      continue;
    }
    typename E::vraw stored[R];
    restore_row<E, R>(stored, y, plane, block, rotation, step, tile.head);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      y[r] = select(lane_ids() < active_lanes(length, r), E::to_float(stored[r]), splatf(0.f));
    errors.add<R>(x, y, i);
  }
  store_uniform(exact, errors.exact);
  errors.store(sums);
  if (block.low) split_symbols(block, tile, registers_of(length), plane.tokens);
}

// A warp a tile. `codes` [blocks][tiles][heads], `spreads` SPREAD_WORDS a tile and head, of which `widths` are used; `exact`
// the rows that must be kept exact.
constexpr u32 SPREAD_WORDS = 12;
#define TUNED_ENCODE(suffix, E)                                                                                        \
  KERNEL(tuned_encode_##suffix, const Plane* planes, const TunedBlock* blocks, u16* codes, u32* spreads, u32* widths,  \
         u32* exact, float* sums, u32 tiles) {                                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      RowTile tile = RowTile::make(planes, warp, tiles);                                                               \
      FOR_ROW_SIZE(encode_tuned, E, planes[tile.block], blocks[tile.block], tile, codes + warp,                        \
                   spreads + (u64)warp * SPREAD_WORDS, widths + warp, exact + warp, sums + (u64)warp * 3);             \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(TUNED_ENCODE)

// ------------------------------------------------------------------------------------------- decoding

FN void join_symbols(const TunedBlock& block, const RowTile& tile, u32 registers, u32 tokens) {
  for (u32 g = tile.head * registers; g < (tile.head + 1) * registers; ++g)
    for (u32 t = tile.start; t < tile.stop; ++t) {
      vu32 high = widen(load_u8(block.symbols_of(g, t))) << LOW_BITS;
      store_u8(block.symbols_of(g, t), narrow(high | load_bits(block.low_of(g, t, tokens), LOW_BITS)));
    }
}

template <class E, int R>
FN void decode_tuned(const Plane& plane, const TunedBlock& block, const RowTile& tile, u32 at) {
  u32 length = plane.head_dim, middle = block.alphabet / 2, rows = tile.rows(), first = tile.head * registers_of(length);
  if (rows == 0) return;
  Rotation rotation = Rotation::make(block.rotation, length);
  u32 code = ((const u16*)block.codes)[at];
  TileSteps steps = {code & ((1u << CODE_BITS) - 1), code >> CODE_BITS, splat(0)};
  steps.spread = load_bits((const u32*)block.spreads + ((const u32*)block.starts)[at], steps.width);
  vf32 values = steps.values();
  for (u32 i = 0; i < rows; ++i) {
    u32 t = tile.start + i;
    vf32 y[R];
    typename E::vraw stored[R];
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      if (active_lanes(length, r)) y[r] = int_to_float(widen(load_u8(block.symbols_of(first + r, t))) - middle);
    restore_row<E, R>(stored, y, plane, block, rotation, lane_value(values, i) * block.gain, tile.head);
    typename E::raw* row = row_of<E>(plane, t, tile.head);
#pragma unroll(Unrolled<R>::STEPS)
    for (int r = 0; r < R; ++r)
      if (active_lanes(length, r)) store_piece(row, stored[r], length, r);
  }
}

#define TUNED_DECODE(suffix, E)                                                             \
  KERNEL(tuned_decode_##suffix, const Plane* planes, const TunedBlock* blocks, u32 tiles) { \
    FOR_EACH_WARP(warp) {                                                                   \
      RowTile tile = RowTile::make(planes, warp, tiles);                                    \
      u32 at = tile.start / ROW_TILE * planes->heads + tile.head;                           \
      const Plane& plane = planes[tile.block];                                              \
      const TunedBlock& block = blocks[tile.block];                                         \
      if (block.low) join_symbols(block, tile, registers_of(plane.head_dim), plane.tokens); \
      FOR_ROW_SIZE(decode_tuned, E, plane, block, tile, at);                                \
    }                                                                                       \
  }
FOR_ELEMENT_TYPES(TUNED_DECODE)
