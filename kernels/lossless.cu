// Lossless: floats split in sign, exponent and mantissa. Sign and exponent are one symbol, coded by rANS with a table of the
// octave family (kvzip/coding/octaves.py) per channel; mantissas are stored as they are, one word a bit, without the low bits
// that are zero throughout the block.
//
// A channel's window is 15 octaves down from its *top* exponent. Exponents outside are coded as symbol 15 of their sign and
// listed. Tokens that are zero in every channel are left out. The first coded token rides in the streams' start states, if a
// number fits there.
#include "bits.h"
#include "rans.h"

struct LosslessBlock {
  u64 head;       // u32: mantissa bits stored; then, if tokens are left out, one mask per tile of 32
  u64 tables;     // u32 [groups][TABLE_WORDS]: the lanes' table indexes and tops, one word a bit
  u64 states;     // u32 [groups][STATE_WORDS]
  u64 words;      // u16: the streams
  u64 mantissas;  // u32 [rows][groups][bits stored]
  u64 escapes;    // u32 [groups] numbers of escapes, then their exponents, u8; a 0 before an odd number
  u32 head_words, word_count, mantissa_words, escape_bytes;
};

// Where sign, exponent and mantissa of a type are.
struct FloatFormat {
  u32 mantissa_bits, exponent_bits;
  u32 special;  // the exponent of infinities and NaN; beyond all exponents where there is none
};

constexpr u32 OCTAVE_STEPS = 8;
constexpr u32 OCTAVE_RATIOS = 32;
constexpr u32 NO_RATIO = 15;
constexpr u32 LEVELS = 16;
constexpr u32 ESCAPE = LEVELS - 1;
constexpr u32 WINDOW_ABOVE = 2;  // octaves of the window above that of the root mean square
constexpr u32 INDEX_BITS = 8;
constexpr u32 TOP_BITS = 8;
constexpr u32 TABLE_WORDS = INDEX_BITS + TOP_BITS;
constexpr u32 OCTAVE_TABLES = OCTAVE_STEPS * OCTAVE_RATIOS;
constexpr u32 SAMPLED = 512;  // rows that are counted to choose tables
constexpr u32 TILE_TOKENS = 32;

// Elements by their width. The *head* of an element is its sign and exponent.
struct Bits8 {
  typedef u8 raw;
  typedef vu8 vraw;
  typedef vu16 wide;
  enum : bool { RIDES = true };
  static METHOD wide from(vraw x) { return widen_bytes(x); }
  static METHOD vraw to(wide x) { return narrow_bytes(x); }
  static METHOD vu16 head(wide x, u32 mantissa_bits) { return x >> (u16)mantissa_bits; }
  static METHOD wide joined(vu16 head, wide mantissa, u32 mantissa_bits) { return head << (u16)mantissa_bits | mantissa; }
  static METHOD wide load(const u32* planes, u32 bits, u32 dropped) { return load_bits16(planes, bits) << (u16)dropped; }
  static METHOD void store(u32* planes, wide x, u32 bits, u32 dropped) { store_bits16(planes, x >> (u16)dropped, bits); }
  static METHOD bool has_bit(wide x, u32 bit) { return ballot((x >> (u16)bit & (u16)1) != (u16)0) != 0; }
  static METHOD vu32 ridden(wide x) { return widen(x); }
  static METHOD wide unridden(vu16 rider) { return rider; }
};
struct Bits16 : Bits8 {
  typedef u16 raw;
  typedef vu16 vraw;
  static METHOD wide from(vraw x) { return x; }
  static METHOD vraw to(wide x) { return x; }
};
struct Bits32 {
  typedef u32 raw;
  typedef vu32 vraw;
  typedef vu32 wide;
  enum : bool { RIDES = false };
  static METHOD wide from(vraw x) { return x; }
  static METHOD vraw to(wide x) { return x; }
  static METHOD vu16 head(wide x, u32 mantissa_bits) { return narrow(x >> mantissa_bits); }
  static METHOD wide joined(vu16 head, wide mantissa, u32 mantissa_bits) { return widen(head) << mantissa_bits | mantissa; }
  static METHOD wide load(const u32* planes, u32 bits, u32 dropped) { return load_bits(planes, bits) << dropped; }
  static METHOD void store(u32* planes, wide x, u32 bits, u32 dropped) { store_bits(planes, x >> dropped, bits); }
  static METHOD bool has_bit(wide x, u32 bit) { return ballot((x >> bit & 1u) != 0u) != 0; }
  static METHOD vu32 ridden(wide) { return splat(0); }
  static METHOD wide unridden(vu16) { return splat(0); }
};
#define FOR_ELEMENT_WIDTHS(INSTANTIATE) INSTANTIATE(8, Bits8) INSTANTIATE(16, Bits16) INSTANTIATE(32, Bits32)

FN u32 groups_in(const Plane& plane) { return (plane.heads * plane.head_dim + LANES - 1) / LANES; }
FN bool is_zero(const u32* zeros, u32 token) { return zeros && in_mask(zeros, token); }

// The level of exponents in the window below `top`; ESCAPE for those outside.
FN vu16 level_of(vu16 exponent, vu16 top) {
  vu16 level = top - exponent;
  return select((vm16)(level < (u16)ESCAPE), level, splat16(ESCAPE));
}

// ------------------------------------------------------------------------------------------- encoding

// One warp a tile: the mask of tokens that are zero throughout, and the low mantissa bits that no number of it uses.
template <class E>
FN void lossless_tile(const Plane& plane, u32 tile, u32 mantissa_bits, typename E::raw* running, u32* zeros, u32* unused) {
  typedef typename E::wide wide;
  u32 start = tile * TILE_TOKENS, tokens = plane.tokens - start < TILE_TOKENS ? plane.tokens - start : TILE_TOKENS;
  for (u32 g = 0; g < groups_in(plane); ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 t = 0; t < tokens; ++t) {
      wide x = E::from(column.whole ? column.template load<true>(start + t) : column.template load<false>(start + t));
      if (g) x = x | load_lanes(running + t * LANES);
      store_lanes(running + t * LANES, x);
    }
  }
  u32 mask = 0, bits = 0;
  wide all = load_lanes(running);
  for (u32 t = 0; t < tokens; ++t) {
    wide x = load_lanes(running + t * LANES);
    if (largest(x) == 0) mask |= 1u << t;
    all = all | x;
  }
  while (bits < mantissa_bits && !E::has_bit(all, bits)) ++bits;
  store_uniform(zeros, mask);
  store_uniform(unused, bits);
}

#define LOSSLESS_TILES(suffix, E)                                                                                      \
  KERNEL(lossless_tiles_##suffix, const Plane* planes, u32* zeros, u32* unused, u32 tiles, u32 mantissa_bits) {        \
    WARP_SHARED(E::raw, running, TILE_TOKENS* LANES);                                                                  \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      if (warp % tiles * TILE_TOKENS < plane.tokens)                                                                   \
        lossless_tile<E>(plane, warp % tiles, mantissa_bits, running, zeros + warp, unused + warp);                    \
      else                                                                                                             \
        store_uniform(zeros + warp, 0u), store_uniform(unused + warp, mantissa_bits);                                  \
    }                                                                                                                  \
  }
FOR_ELEMENT_WIDTHS(LOSSLESS_TILES)

// A channel's table: the top of its window, and which of the family.
struct Octaves {
  vu32 scale;  // of the root mean square: 8 times its binary exponent, from 2^-BIAS on
  vu32 ratio;
  enum : u32 { BIAS = 64 };

  METHOD vu32 top(u32 exponent_bits) const {
    vu32 octave = (scale >> 3) + WINDOW_ABOVE;
    vu32 top = select(octave < (u32)BIAS, splat(0), octave - (u32)BIAS);
    return select(top >> exponent_bits != 0u, splat((1u << exponent_bits) - 1u), top);
  }
  METHOD vu32 index() const { return (scale & 7u) * OCTAVE_RATIOS + ratio; }
};

// What the counted rows cost; their symbols are counted in a window below `counted_top`.
FN vu32 octave_cost(const u16* histogram, vu32 counted_top, const Octaves& octaves, u32 exponent_bits, const u16* costs) {
  vu32 start = octaves.index() * MAX_SYMBOLS, shift = octaves.top(exponent_bits) - counted_top, cost = splat(0);
  for (u32 s = 0; s < MAX_SYMBOLS; ++s) {
    vu32 level = shift + s % LEVELS;
    level = select(level < ESCAPE, level, splat(ESCAPE));
    if (s % LEVELS == ESCAPE) level = splat(ESCAPE);
    vu32 count = widen(load_u16(histogram + s * LANES));
    cost = cost + count * widen(gather_u16(costs + s / LEVELS * LEVELS, start + level));
  }
  return cost;
}

// The table for a column: first the average exponent, then steps of half the size each, up and down in either direction.
template <class E, bool WHOLE>
FN Octaves choose_octaves(const Plane& plane, const u32* zeros, const Column<E>& column, const FloatFormat& format,
                          u16* histogram, const u16* costs) {
  u32 stride = (plane.tokens + SAMPLED - 1) / SAMPLED, exponents = (1u << format.exponent_bits) - 1u;
  vu32 sum = splat(0), count = splat(0);
  u32 samples = (plane.tokens + stride - 1) / stride;
  auto load = [&](u32 s) { return column.template load<WHOLE>(s * stride); };
  in_turn<FORWARDS, 4>(samples, load, [&](u32 s, typename E::vraw row) {
    if (is_zero(zeros, s * stride)) return;
    vu32 exponent = widen(E::head(E::from(row), format.mantissa_bits)) & exponents;
    vm32 finite = exponent - 1u < format.special - 1u;
    sum = sum + select(finite, exponent, splat(0));
    count = count + select(finite, splat(1), splat(0));
  });
  vu32 n = select(count == 0u, splat(1), count);
  vu32 average = divide(sum + (n >> 1), n), counted_top = average + 6u;

  for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(histogram + s * LANES, splat16(0));
  vu16 top = narrow(counted_top);
  in_turn<FORWARDS, 4>(samples, load, [&](u32 s, typename E::vraw row) {
    if (is_zero(zeros, s * stride)) return;
    vu16 head = E::head(E::from(row), format.mantissa_bits);
    vu16 sign = head >> (u16)format.exponent_bits;
    count_row_u16(histogram, sign * (u16)LEVELS + level_of(head & (u16)exponents, top));
  });
  warp_sync();

  // A normal distribution's average exponent is an octave and a half below its root mean square.
  Octaves best = {(average + (u32)Octaves::BIAS) * OCTAVE_STEPS + 12u, splat(NO_RATIO)};
  vu32 best_cost = octave_cost(histogram, counted_top, best, format.exponent_bits, costs);
  for (u32 step = 8; step; step /= 2) {
    u32 scale_step = step > 1 ? step / 2 : 1;
    for (u32 i = 0; i < 4; ++i) {
      Octaves tried = best;
      if (i == 0) tried.ratio = select(best.ratio + step < OCTAVE_RATIOS, best.ratio + step, splat(OCTAVE_RATIOS - 1));
      if (i == 1) tried.ratio = select(best.ratio < step, splat(0), best.ratio - step);
      if (i == 2) tried.scale = best.scale + scale_step;
      if (i == 3) tried.scale = best.scale - scale_step;
      vu32 cost = octave_cost(histogram, counted_top, tried, format.exponent_bits, costs);
      vm32 better = cost < best_cost;
      best.scale = select(better, tried.scale, best.scale);
      best.ratio = select(better, tried.ratio, best.ratio);
      best_cost = select(better, cost, best_cost);
    }
  }
  return best;
}

struct LosslessScratch {
  u16* words_end;    // streams and escapes are written backwards from here
  u8* escapes_end;
  RansSymbols* symbols;
};

// One warp a group of 32 channels, `coded` tokens of it.
template <class E, bool WHOLE>
FN void lossless_encode_group(const Plane& plane, const LosslessBlock& block, u32 group, const Column<E>& column,
                              const FloatFormat& format, u32 coded, const LosslessScratch& scratch, const u16* family,
                              const u16* costs, u32* escape_count) {
  typedef typename E::wide wide;
  const u32* head_words = (const u32*)block.head;
  const u32* zeros = block.head_words > 1 ? head_words + 1 : nullptr;
  u32 groups = groups_in(plane), bits = head_words[0], dropped = format.mantissa_bits - bits;
  vm32 idle = column.idle();
  Octaves octaves = choose_octaves<E, WHOLE>(plane, zeros, column, format, scratch.symbols->counts, costs);
  vu32 index = octaves.index(), tops = octaves.top(format.exponent_bits);
  auto table = scratch.symbols->load<MAX_SYMBOLS>(family, index, idle);

  u32 first = 0;
  if (E::RIDES) {
    while (is_zero(zeros, first)) ++first;
    ++first;
  }
  vu32 rider = first ? E::ridden(E::from(column.template load<WHOLE>(first - 1))) : splat(0);
  RansEncoder encoder = RansEncoder::make(scratch.words_end, rider);
  u8* escapes = scratch.escapes_end;
  vu16 top = narrow(tops), exponents = splat16((1u << format.exponent_bits) - 1u);
  vu16 in_use = narrow(select(idle, splat(0), splat(0xffff)));
  u32 row = coded - (E::RIDES ? 1 : 0);
  auto load = [&](u32 t) { return column.template load<WHOLE>(first + t); };
  in_turn<BACKWARDS>(plane.tokens - first, load, [&](u32 t, typename E::vraw loaded) {
    if (is_zero(zeros, first + t)) return;
    wide x = E::from(loaded);
    vu16 head = E::head(x, format.mantissa_bits), exponent = head & exponents;
    vu16 level = level_of(exponent, top) & in_use;
    vm16 escaped = level == (u16)ESCAPE;
    if (ballot(escaped)) push_bytes(escapes, escaped, exponent);
    vu16 symbol = level + (head >> (u16)format.exponent_bits) * (u16)LEVELS;
    encoder.put(table.find(widen(symbol)));
    E::store((u32*)block.mantissas + ((u64)--row * groups + group) * bits, x, bits, dropped);
  });

  u32* states = (u32*)block.states + (u64)group * STATE_WORDS;
  store_uniform(states, (u32)(scratch.words_end - encoder.position));
  store_u32(states + 1, encoder.x);
  u32* tables = (u32*)block.tables + (u64)group * TABLE_WORDS;
  store_bits(tables, index, INDEX_BITS);
  store_bits(tables + INDEX_BITS, tops, TOP_BITS);
  u32 count = (u32)(scratch.escapes_end - escapes);
  if (count & 1) store_uniform(escapes - 1, (u8)0);
  store_uniform(escape_count, count);
}

#define LOSSLESS_ENCODE(suffix, E)                                                                                     \
  KERNEL(lossless_encode_##suffix, const Plane* planes, const LosslessBlock* blocks, const u32* coded,                 \
         const u16* family, const u16* costs, u16* words, u8* escapes, u32* escape_counts, u32 groups,                 \
         u32 word_capacity, u32 escape_capacity, u32 mantissa_bits, u32 exponent_bits, u32 special) {                  \
    WARP_SHARED(RansSymbols, symbols, 1);                                                                              \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 block = warp / groups, group = warp % groups;                                                                \
      if (coded[block] == 0) {                                                                                         \
        store_uniform(escape_counts + warp, 0u);                                                                       \
        continue;                                                                                                      \
      }                                                                                                                \
      Column<E> column = Column<E>::make(planes[block], group);                                                        \
      FloatFormat format = {mantissa_bits, exponent_bits, special};                                                    \
      u16* words_end = words + ((u64)warp + 1) * word_capacity;                                                        \
      LosslessScratch scratch = {words_end, escapes + ((u64)warp + 1) * escape_capacity, symbols};                     \
      if (column.whole)                                                                                                \
        lossless_encode_group<E, true>(planes[block], blocks[block], group, column, format, coded[block], scratch,     \
                                       family, costs, escape_counts + warp);                                           \
      else                                                                                                             \
        lossless_encode_group<E, false>(planes[block], blocks[block], group, column, format, coded[block], scratch,    \
                                        family, costs, escape_counts + warp);                                          \
    }                                                                                                                  \
  }
FOR_ELEMENT_WIDTHS(LOSSLESS_ENCODE)

// ------------------------------------------------------------------------------------------- decoding

// The escapes of a group: a run of exponents.
struct Escapes {
  const u8* position;
  const u8* end;

  static METHOD Escapes make(const LosslessBlock& block, u32 groups, u32 group, bool& fits) {
    const u32* counts = (const u32*)block.escapes;
    const u8* bytes = (const u8*)(counts + groups);
    u64 end = 0, count = 0;
    if (counts) {
      for (u32 g = 0; g <= group; ++g) end += ((u64)counts[g] + 1) / 2 * 2;
      count = counts[group];
    }
    fits = end <= block.escape_bytes;
    return {bytes + (fits ? end - count : 0), bytes + (fits ? end : 0)};
  }
};

// `FLIGHTS` neighbouring groups of one block at once.
template <class E, int FLIGHTS, bool WHOLE>
FN u32 lossless_decode_groups(const Plane& plane, const LosslessBlock& block, u32 group, const Column<E>* columns,
                              const FloatFormat& format, u16* cumulative, const u16* family) {
  typedef typename E::wide wide;
  const u32* head_words = (const u32*)block.head;
  const u32* zeros = block.head_words > 1 ? head_words + 1 : nullptr;
  u32 groups = groups_in(plane), bits = head_words[0], dropped = format.mantissa_bits - bits;
  if (bits > format.mantissa_bits) return BAD_VALUE;

  RansDecoder decoders[FLIGHTS];
  Escapes escapes[FLIGHTS];
  vu16 tops[FLIGHTS];
  if (block.states)
    for (int f = 0; f < FLIGHTS; ++f) {
      bool fit;
      decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fit);
      if (!fit) return BAD_STREAM;
      escapes[f] = Escapes::make(block, groups, group + f, fit);
      if (!fit) return BAD_ESCAPES;
      const u32* tables = (const u32*)block.tables + (u64)(group + f) * TABLE_WORDS;
      load_tables<MAX_SYMBOLS>(cumulative + f * (MAX_SYMBOLS + 1) * LANES, family, load_bits(tables, INDEX_BITS),
                               columns[f].idle());
      tops[f] = narrow(load_bits(tables + INDEX_BITS, TOP_BITS));
    }

  vu16 exponents = splat16((1u << format.exponent_bits) - 1u);
  const u32* mantissas = (const u32*)block.mantissas + (u64)group * bits;
  u32 row_words = groups * bits;
  u32 left = block.mantissa_words, rider = ~0u;
  for (u32 t = 0; t < plane.tokens; ++t) {
    if (is_zero(zeros, t)) {
      for (int f = 0; f < FLIGHTS; ++f) columns[f].template store<WHOLE>(t, typename E::vraw{});
      continue;
    }
    if (!block.states) return BAD_TOKENS;
    if (E::RIDES && rider == ~0u) {
      rider = t;
      continue;
    }
    if (row_words > left) return BAD_RAW;
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) {
      vu16 symbol = decoders[f].template next<MAX_SYMBOLS>(cumulative + f * (MAX_SYMBOLS + 1) * LANES);
      vu16 level = symbol & (u16)ESCAPE, exponent = tops[f] - level;
      vm16 escaped = level == (u16)ESCAPE;
      if (u32 lanes = ballot(escaped)) {
        if ((u32)(escapes[f].end - escapes[f].position) < bits_set(lanes)) return BAD_ESCAPES;
        exponent = pull_bytes(escapes[f].position, escaped, exponent);
      }
      vu16 head = (symbol >> (u16)4) << (u16)format.exponent_bits | (exponent & exponents);
      wide mantissa = E::load(mantissas + f * bits, bits, dropped);
      columns[f].template store<WHOLE>(t, E::to(E::joined(head, mantissa, format.mantissa_bits)));
    }
    mantissas += row_words;
    left -= row_words;
  }
  if (left) return BAD_RAW;
  if (!block.states) return OK;
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    if (escapes[f].position != escapes[f].end) return BAD_ESCAPES;
    if (rider != ~0u) columns[f].template store<WHOLE>(rider, E::to(E::unridden(decoders[f].rider())));
  }
  return OK;
}

template <class E, int FLIGHTS>
FN u32 lossless_decode_any(const Plane& plane, const LosslessBlock& block, u32 group, const FloatFormat& format,
                           u16* cumulative, const u16* family) {
  Column<E> columns[FLIGHTS];
  bool whole = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    columns[f] = Column<E>::make(plane, group + f);
    whole = whole && columns[f].whole;
  }
  if (whole) return lossless_decode_groups<E, FLIGHTS, true>(plane, block, group, columns, format, cumulative, family);
  return lossless_decode_groups<E, FLIGHTS, false>(plane, block, group, columns, format, cumulative, family);
}

#define LOSSLESS_DECODE(suffix, E)                                                                                     \
  KERNEL(lossless_decode_##suffix, const Plane* planes, const LosslessBlock* blocks, const u16* family, u32* status,   \
         u32 groups, u32 mantissa_bits, u32 exponent_bits) {                                                           \
    WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);                                                    \
    FloatFormat format = {mantissa_bits, exponent_bits, 0};                                                            \
    FOR_EACH_FLIGHT(warp, flight, groups) {                                                                            \
      u32 block = warp / groups, group = warp % groups, found;                                                         \
      if (flight == FLIGHT)                                                                                            \
        found = lossless_decode_any<E, FLIGHT>(planes[block], blocks[block], group, format, cumulative, family);       \
      else                                                                                                             \
        found = lossless_decode_any<E, 1>(planes[block], blocks[block], group, format, cumulative, family);            \
      for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);                                        \
    }                                                                                                                  \
  }
FOR_ELEMENT_WIDTHS(LOSSLESS_DECODE)
