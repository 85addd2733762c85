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

// The mean of every `step`th of the tokens from `first` on, or of its distance from `center`, where that is at most `reach`;
// `center` if there is none.
template <class E, bool DISTANCE>
FN vf32 mean_within(const Column<E>& column, u32 tokens, u32 first, u32 step, vf32 center, vf32 reach) {
  vf32 sum = splatf(0.f);
  vu32 count = splat(0);
  auto load = [&](u32 i) {
    u32 token = first + i * step;
    return column.whole ? column.template load<true>(token) : column.template load<false>(token);
  };
  in_turn<FORWARDS, ROWS>((tokens - first + step - 1) / step, load, [&](u32, typename E::vraw bits) {
    vf32 x = E::to_float(bits), distance = magnitude_of(x - center);
    vm32 near = distance <= reach;
    sum = sum + select(near, DISTANCE ? distance : x, splatf(0.f));
    count = count + select(near, splat(1), splat(0));
  });
  return select(count != 0u, sum / int_to_float(count), center);
}

// One warp a register of a head. A token that is far out would take the mean along, and all others would pay for it: a quarter
// of the tokens tells what is far.
template <class E>
FN void channel_means(const Plane& plane, const TunedBlock& block, u32 group) {
  typedef typename MeanOf<E>::type M;
  u32 registers = registers_of(plane.head_dim), r = group % registers, active = active_lanes(plane.head_dim, r);
  vu32 lane_of_head = r * LANES + lane_ids(), inside = select(lane_ids() < active, lane_of_head, splat(r * LANES));
  Column<E> column = Column<E>::of_channels(plane, inside + group / registers * plane.head_dim, active);
  u32 tokens = plane.tokens, first = block.sinks;
  vf32 rough = mean_within<E, false>(column, tokens, first, 4, splatf(0.f), largest_finite());
  vf32 reach = mean_within<E, true>(column, tokens, first, 4, rough, largest_finite()) * 4.f;
  reach = select(reach < largest_finite(), reach, largest_finite());
  vf32 mean = mean_within<E, false>(column, tokens, first, 1, rough, reach);
  store_u16((u16*)block.means + group * LANES, M::from_float(select(is_unfit(mean) == 0u, mean, splatf(0.f))));
}

#define TUNED_MEANS(suffix, E)                                                                             \
  KERNEL(tuned_means_##suffix, const Plane* planes, const TunedBlock* blocks, u32 groups) {                \
    FOR_EACH_WARP(warp) { channel_means<E>(planes[warp / groups], blocks[warp / groups], warp % groups); } \
  }
FOR_ELEMENT_TYPES(TUNED_MEANS)

// ------------------------------------------------------------------------------------------- rows

// A row of symbols, whose registers lie apart.
struct Symbols {
  const u8* row;
  u32 pitch;
  METHOD vu16 operator()(int r) const { return load_u8(row + (u64)(r * LANES) * pitch); }
};
// The symbols of a tile's rows, a byte a lane.
struct TileSymbols {
  u8* base;
  u32 pitch, length;
  bool split;

  static METHOD TileSymbols make(const TunedBlock& block, u32 length, const RowTile& tile) {
    u8* first = block.symbols_of(tile.head * registers_of(length), tile.start);
    return {first, block.pitch, length, block.low != 0};
  }
  template <int R>
  METHOD Registers<R, Symbols> load(u32 row) const {
    return Registers<R, Symbols>::make({base + row * LANES, pitch}, length);
  }
  // 0 in idle lanes. The coder takes 32 symbols: of more it gets the high bits, the low ones are stored as they are.
  template <int R>
  METHOD void store(u32 row, vu32* symbols, const TunedBlock& block, const RowTile& tile, u32 tokens) const {
    u32 length = in_this_row<R>(this->length);
    u8* p = base + row * LANES;
#pragma unroll
    for (int r = 0; r < R; ++r) symbols[r] = zero_if_idle(symbols[r], active_lanes(length, r));
    if (split)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (!active_lanes(length, r)) continue;
        store_bits(block.low_of(tile.head * registers_of(length) + r, tile.start + row, tokens), symbols[r], LOW_BITS);
        symbols[r] = symbols[r] >> LOW_BITS;
      }
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (active_lanes(length, r)) store_u8(p + (u64)(r * LANES) * pitch, narrow(symbols[r]));
  }
};

// The means of a head's channels.
template <class E>
struct Means {
  const u16* row;
  METHOD vf32 operator()(int r) const { return MeanOf<E>::type::to_float(load_u16(row + r * LANES)); }
};
// What rotates the rows of a head less their means, and back.
template <class E, int R>
struct Centered {
  u32 length;
  Registers<R, Means<E>> means;
  Rotation<R> rotation;

  static METHOD Centered make(const TunedBlock& block, u32 length, u32 head) {
    Means<E> means = {(const u16*)block.means + head * registers_of(length) * LANES};
    return {length, Registers<R, Means<E>>::make(means, length), Rotation<R>::make(block.rotation, length)};
  }
  METHOD void rotate(vf32* y, const Row<E, R>& x) const {
    u32 length = in_this_row<R>(this->length);
#pragma unroll
    for (int r = 0; r < R; ++r)
      y[r] = active_lanes(length, r) ? (x.at(r) - means.at(r)) * rotation.signs.at(r) : splatf(0.f);
    hadamard<R>(y, length);
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (active_lanes(length, r)) y[r] = y[r] * rotation.scales.at(r);
  }
  // Symbols less the middle one, rotated back, times the step, plus the means: `put(r, numbers)` as the plane holds them.
  template <class Put>
  METHOD void restore(vf32* y, float step, Put put) const {
    u32 length = in_this_row<R>(this->length);
    hadamard<R>(y, length);
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (active_lanes(length, r))
        put(r, E::nearest(y[r] * (rotation.scales.at(r) * rotation.signs.at(r)) * step + means.at(r)));
  }
};

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

// Of each tile and head: its code, SPREAD_WORDS of which `widths` are used, the rows that must be kept exact, its errors.
constexpr u32 SPREAD_WORDS = 12;
struct TunedTiles {
  u16* codes;
  u32 *spreads, *widths, *exact;
  float* sums;
};

template <class E, int R>
FN void encode_tuned(const Plane& plane, u32 length, const TunedBlock& block, const RowTile& tile, const TunedTiles& tiles,
                     u32 index) {
  u32 middle = block.alphabet / 2, rows = tile.rows();
  float grain = block.grain, reach = block.reach;
  TileRows<E> numbers = TileRows<E>::make(plane, length, tile);
  TileSymbols symbols = TileSymbols::make(block, length, tile);
  Centered<E, R> centered = Centered<E, R>::make(block, length, tile.head);
  auto load = [&](u32 i) { return numbers.template load<R>(i); };
  vu32 wanted = splat(0);
  rows_in_turn<R>(rows, load, [&](u32 i, const Row<E, R>& x) {
    vf32 y[R], squares = splatf(0.f), top = splatf(0.f);
    centered.rotate(y, x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      squares = squares + y[r] * y[r];
      top = larger(top, magnitude_of(y[r]));
    }
    squares = warp_sum(squares);
    // With NaN among them the squares say so.
    top = warp_larger(top);
    vf32 step = larger(squares * grain, top * top * reach);
    vu32 bits = select(is_unfit(squares) != 0u, splat(0x7f800000), as_bits(step));
    wanted = select(lane_ids() == i, bits, wanted);
  });
  wanted = select(lane_ids() + tile.start < block.sinks, splat(0x7f800000), wanted);
  TileSteps steps = TileSteps::choose(wanted, rows);
  u32 unfit = ballot(wanted >= 0x7f800000u);
  vf32 values = steps.values(), inverses = splatf(1.f) / values, restored = values * block.gain;
  store_uniform(tiles.codes + index, (u16)(steps.smallest | steps.width << CODE_BITS));
  store_uniform(tiles.widths + index, steps.width);
  store_bits(tiles.spreads + (u64)index * SPREAD_WORDS, steps.spread, steps.width);

  RowErrors errors = RowErrors::make();
  vf32 low = splatf(-(float)middle), high = splatf((float)(block.alphabet - 1 - middle));
  rows_in_turn<R>(rows, load, [&](u32 i, const Row<E, R>& x) {
    vf32 y[R];
    vu32 symbol[R];
    if (unfit >> i & 1) {
#pragma unroll
      for (int r = 0; r < R; ++r) symbol[r] = splat(middle);
      symbols.store<R>(i, symbol, block, tile, plane.tokens);
      errors.keep<E, R>(x, i);
      return;
    }
    centered.rotate(y, x);
    float inverse = lane_value(inverses, i), step = lane_value(restored, i);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      vf32 place = smaller(larger(y[r] * inverse, low), high);
      symbol[r] = round_to_int(place) + middle;
      y[r] = round_to_float(place);
    }
    symbols.store<R>(i, symbol, block, tile, plane.tokens);
    centered.restore(y, step, [&](int r, vf32 numbers) { y[r] = zero_if_idle(numbers, active_lanes(length, r)); });
    errors.add<E, R>(x, y, i);
  });
  store_uniform(tiles.exact + index, errors.exact);
  errors.store(tiles.sums + (u64)index * 3);
}

// A warp a tile. `codes` [blocks][tiles][heads].
#define TUNED_ENCODE(suffix, E)                                                                                        \
  KERNEL(tuned_encode_##suffix, const Plane* planes, const TunedBlock* blocks, u16* codes, u32* spreads, u32* widths,  \
         u32* exact, float* sums, u32 tiles) {                                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      RowTile tile = RowTile::make(planes, warp, tiles);                                                               \
      TunedTiles to = {codes, spreads, widths, exact, sums};                                                           \
      FOR_ROW_SIZE(encode_tuned, E, planes[tile.block], blocks[tile.block], tile, to, (u32)warp);                      \
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
FN void decode_tuned(const Plane& plane, u32 length, const TunedBlock& block, const RowTile& tile, u32 at) {
  u32 middle = block.alphabet / 2, rows = tile.rows();
  if (rows == 0) return;
  TileRows<E> numbers = TileRows<E>::make(plane, length, tile);
  TileSymbols symbols = TileSymbols::make(block, length, tile);
  Centered<E, R> centered = Centered<E, R>::make(block, length, tile.head);
  u32 code = ((const u16*)block.codes)[at];
  TileSteps steps = {code & ((1u << CODE_BITS) - 1), code >> CODE_BITS, splat(0)};
  steps.spread = load_bits((const u32*)block.spreads + ((const u32*)block.starts)[at], steps.width);
  vf32 values = steps.values() * block.gain;
  auto load = [&](u32 i) { return symbols.template load<R>(i); };
  rows_in_turn<R>(rows, load, [&](u32 i, const Registers<R, Symbols>& row) {
    u32 length = in_this_row<R>(numbers.length);
    vf32 y[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
      y[r] = active_lanes(length, r) ? int_to_float(widen(row.at(r)) - middle) : splatf(0.f);
    centered.restore(y, lane_value(values, i), [&](int r, vf32 x) { numbers.store(i, r, E::from_exact(x)); });
  });
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
