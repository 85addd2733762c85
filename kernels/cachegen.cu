// CacheGen (Liu et al., SIGCOMM 2024, arXiv:2310.07240) as LMCache quantizes it, with rANS in place of its coder.
//
// A token's channels are scaled by the largest magnitude among them, its entry of the *max tensor*, and rounded to 2M + 1
// symbols. Symbols beyond the coder's 32 are split: a coded part, and `raw_bits` low bits stored as they are. Tokens that must
// not change, the attention sink and those with NaN or Inf, are kept exact: the first one rides in the start states of the
// streams (16-bit types), the others lie in `rows`.
#include "cachegen.h"

struct CacheGenBlock {
  u64 token_words;  // u32: the token section
  u64 tables;       // u32 [groups][12]: the lanes' table indexes, one word a bit
  u64 states;       // u32 [groups][STATE_WORDS]
  u64 words;        // u16: the streams
  u64 raw;          // u32 [coded tokens][groups][raw_bits]
  u64 rows;         // [exact tokens][channels]
  u32 token_word_count, word_count, raw_rows, row_count;
  u32 levels;       // M
  u32 raw_bits, family, symbols;
};

// ------------------------------------------------------------------------------------------- encoding

// One warp a tile: the largest magnitude of every token, from which follow the tile's part of the token section (written to
// its slot of TILE_WORDS, `count` words), the tokens' maxima as floats, and the mask of exact tokens: the `sinks` oldest,
// those with NaN or Inf, and those too small to divide by.
template <class E>
FN void cachegen_tile(const Plane& plane, u32 tile, u32 sinks, typename E::raw* running, u32* slot, u32* count,
                      float* maxima, u32* exact) {
  typedef typename E::vraw vraw;
  u32 groups = (plane.heads * plane.head_dim + LANES - 1) / LANES;
  u32 start = tile * TILE, tokens = plane.tokens - start < TILE ? plane.tokens - start : TILE;
  for (u32 g = 0; g < groups; ++g) {
    Column<E> column = Column<E>::make(plane, g);
    for (u32 t = 0; t < tokens; ++t) {
      vraw x = column.whole ? column.template load<true>(start + t) : column.template load<false>(start + t);
      vraw magnitude = x & E::narrowed(splat(E::ABS));
      if (g) magnitude = maximum(magnitude, load_lanes(running + t * LANES));
      store_lanes(running + t * LANES, magnitude);
    }
  }
  vu32 entries = splat(0);
  for (u32 t = 0; t < tokens; ++t) entries = with_lane(entries, t, largest(load_lanes(running + t * LANES)));

  vu32 token = lane_ids() + start;
  u32 present = tokens == TILE ? ~0u : (1u << tokens) - 1u;
  u32 unfit = ballot(token < sinks) | ballot(entries >= (u32)E::INFINITE) |
              (ballot(entries < (u32)E::TINY) & ballot(entries != 0u));
  u32 mask = unfit & present, coded = present & ~mask;
  vu32 is_coded = bit_of_lane(coded);
  u32 base = coded ? smallest(select(is_coded != 0u, entries, splat(~0u))) : 0;
  vu32 above = select(is_coded != 0u, entries - base, splat(0));
  u32 width = bit_width(largest(above));

  u32 flag = mask ? EXACT_FLAG : 0;
  if (TileHead<E>::WORDS == 1) {
    store_uniform(slot, flag | width << 16 | base);
  } else {
    store_uniform(slot, flag | width << 16);
    store_uniform(slot + 1, base);
  }
  u32 used = TileHead<E>::WORDS;
  if (mask) store_uniform(slot + used++, mask);
  store_bits(slot + used, above, width);
  store_uniform(count, used + width);
  store_uniform(exact, mask);
  store_u32((u32*)maxima, as_bits(E::to_float(E::narrowed(entries))));
}

#define CACHEGEN_TILES(suffix, E)                                                                                      \
  KERNEL(cachegen_tiles_##suffix, const Plane* planes, const u32* sinks, u32* slots, u32* counts, float* maxima,       \
         u32* exact, u32 tiles) {                                                                                      \
    WARP_SHARED(E::raw, running, TILE* LANES);                                                                         \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 block = warp / tiles, tile = warp % tiles;                                                                   \
      if (tile * TILE < planes[block].tokens)                                                                          \
        cachegen_tile<E>(planes[block], tile, sinks[block], running, slots + (u64)warp * TILE_WORDS, counts + warp,    \
                         maxima + (u64)warp * TILE, exact + warp);                                                     \
      else                                                                                                             \
        store_uniform(counts + warp, 0u), store_uniform(exact + warp, 0u);                                             \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_TILES)

constexpr u32 SAMPLE_ROWS = 512;  // tokens whose symbols are counted to choose tables

// What the groups of a block encode with; each group has its own part of symbols, words, histogram and tables.
struct CacheGenScratch {
  const float* maxima;  // of the block's tokens
  const u32* exact;     // of its tiles
  u8* symbols;          // [tokens][32]
  u64 symbol_capacity;  // of a group
  u16* words_end;       // the streams are written backwards from here
  u32 word_capacity;
  u16* histogram;       // [32][32]
  u16* cumulative;      // [33][32]
  float* errors;        // squared error, energy, largest error
};

// Quantizes a group: symbols, raw bits, histogram, errors and rider. Returns the numbers of rows coded and counted.
template <class E, bool WHOLE>
FN u32 cachegen_quantize_group(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>& column,
                               const CacheGenScratch& scratch, vu32& rider, u32& counted) {
  u32 groups = (plane.heads * plane.head_dim + LANES - 1) / LANES;
  u32 stride = (plane.tokens + SAMPLE_ROWS - 1) / SAMPLE_ROWS;
  float levels = (float)block.levels;
  vm32 idle = column.idle();
  vf32 squared = splatf(0.f), energy = splatf(0.f), worst = splatf(0.f);
  u32 rows = 0;
  bool riding = false;
  rider = splat(0);
  counted = 0;

  for (u32 s = 0; s < MAX_SYMBOLS; ++s) store_u16(scratch.histogram + s * LANES, splat16(0));
  auto load = [&](u32 t) { return column.template load<WHOLE>(t); };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, typename E::vraw bits) {
    vf32 x = E::to_float(bits);
    if (in_mask(scratch.exact, t)) {
      if (!riding && sizeof(typename E::raw) == 2) rider = widen(bits);
      riding = true;
      // No error, but energy, if it is a number.
      energy = energy + select(absolute(x) < infinity(), x * x, splatf(0.f));
      return;
    }
    float top = scratch.maxima[t];
    float factor = top != 0.f ? levels / top : 0.f, offset = top != 0.f ? levels : 0.f;
    vu32 symbol = round_to_int(x * factor + offset);
    // The decoder divides by `levels` first: a difference far below the error that is measured.
    vf32 difference = E::to_float(E::from_float(int_to_float(symbol - block.levels) * (top / levels))) - x;
    squared = squared + difference * difference;
    energy = energy + x * x;
    worst = maximum(worst, absolute(difference));

    vu16 coded = narrow(select(idle, splat(0), symbol >> block.raw_bits));
    store_u8(scratch.symbols + (u64)rows * LANES, coded);
    if (block.raw_bits)
      store_bits((u32*)block.raw + ((u64)rows * groups + group) * block.raw_bits, symbol, block.raw_bits);
    if (rows++ % stride == 0) {
      count_row_u16(scratch.histogram, coded);
      ++counted;
    }
  });
  warp_sync();
  float sums[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
  for (u32 i = 0; i < 3; ++i) store_uniform(scratch.errors + i, sums[i]);
  return rows;
}

// A row of each of `FLIGHTS` groups.
template <int FLIGHTS>
struct CacheGenSymbols {
  vu16 of[FLIGHTS];
};

// `FLIGHTS` neighbouring groups of one block: quantize, choose tables, code side by side with tables of N symbols.
template <class E, int N, int FLIGHTS, bool WHOLE>
FN void cachegen_encode_groups(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>* columns,
                               const CacheGenScratch& scratch, const u16* families, const u16* costs,
                               const u32* variances) {
  u64 family = (u64)block.family * TABLES;
  RansEncoder encoders[FLIGHTS];
  CacheGenScratch parts[FLIGHTS];
  u32 rows = 0;
  for (int f = 0; f < FLIGHTS; ++f) {
    CacheGenScratch& part = parts[f] = scratch;
    part.symbols += f * scratch.symbol_capacity;
    part.words_end += f * scratch.word_capacity;
    part.cumulative += f * (N + 1) * LANES;
    part.errors += f * 3;
    vu32 rider;
    u32 counted;
    rows = cachegen_quantize_group<E, WHOLE>(plane, block, group + f, columns[f], part, rider, counted);
    vu32 table = choose_tables(part.histogram, counted, block.symbols, costs + family * MAX_SYMBOLS, variances);
    load_tables<N>(part.cumulative, families + family * TABLE_STRIDE, table, columns[f].idle());
    store_bits((u32*)block.tables + (u64)(group + f) * TABLE_BITS, table, TABLE_BITS);
    encoders[f] = RansEncoder::make(part.words_end, rider);
  }
  auto load = [&](u32 row) {
    CacheGenSymbols<FLIGHTS> symbols;
    for (int f = 0; f < FLIGHTS; ++f) symbols.of[f] = load_u8(parts[f].symbols + (u64)row * LANES);
    return symbols;
  };
  in_turn<BACKWARDS, 4>(rows, load, [&](u32, const CacheGenSymbols<FLIGHTS>& symbols) {
#pragma clang loop unroll(full)
    for (int f = 0; f < FLIGHTS; ++f) encoders[f].template put<N>(parts[f].cumulative, symbols.of[f]);
  });
  for (int f = 0; f < FLIGHTS; ++f) {
    u32* states = (u32*)block.states + (u64)(group + f) * STATE_WORDS;
    store_uniform(states, (u32)(parts[f].words_end - encoders[f].position));
    store_u32(states + 1, encoders[f].x);
  }
}

template <class E, int FLIGHTS>
FN void cachegen_encode_any(const Plane& plane, const CacheGenBlock& block, u32 group, const CacheGenScratch& scratch,
                            const u16* families, const u16* costs, const u32* variances) {
  Column<E> columns[FLIGHTS];
  bool whole = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    columns[f] = Column<E>::make(plane, group + f);
    whole = whole && columns[f].whole;
  }
#define ENCODE(N, WHOLE) \
  cachegen_encode_groups<E, N, FLIGHTS, WHOLE>(plane, block, group, columns, scratch, families, costs, variances)
  if (whole && block.symbols <= 16)
    ENCODE(16, true);
  else if (whole)
    ENCODE(32, true);
  else if (block.symbols <= 16)
    ENCODE(16, false);
  else
    ENCODE(32, false);
#undef ENCODE
}

#define CACHEGEN_ENCODE(suffix, E)                                                                                     \
  KERNEL(cachegen_encode_##suffix, const Plane* planes, const CacheGenBlock* blocks, const float* maxima,              \
         const u32* exact, const u16* families, const u16* costs, const u32* variances, u8* symbols, u16* words,       \
         float* errors, u32 groups, u32 tiles, u32 word_capacity) {                                                    \
    WARP_SHARED(u16, histogram, MAX_SYMBOLS* LANES);                                                                   \
    WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);                                                    \
    FOR_EACH_FLIGHT(warp, flight, groups) {                                                                            \
      u32 index = warp / groups, group = warp % groups;                                                                \
      const Plane plane = planes[index];                                                                               \
      const CacheGenBlock block = blocks[index];                                                                       \
      u64 symbol_capacity = (u64)tiles * TILE * LANES;                                                                 \
      CacheGenScratch scratch = {maxima + (u64)index * tiles * TILE,                                                   \
                                 exact + (u64)index * tiles,                                                           \
                                 symbols + (u64)warp * symbol_capacity,                                                \
                                 symbol_capacity,                                                                      \
                                 words + ((u64)warp + 1) * word_capacity,                                              \
                                 word_capacity,                                                                        \
                                 histogram,                                                                            \
                                 cumulative,                                                                           \
                                 errors + (u64)warp * 3};                                                              \
      if (flight == FLIGHT)                                                                                            \
        cachegen_encode_any<E, FLIGHT>(plane, block, group, scratch, families, costs, variances);                      \
      else                                                                                                             \
        cachegen_encode_any<E, 1>(plane, block, group, scratch, families, costs, variances);                           \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_ENCODE)

// ------------------------------------------------------------------------------------------- decoding

// `FLIGHTS` neighbouring groups of one block at once.
template <class E, int N, int FLIGHTS, bool WHOLE>
FN u32 cachegen_decode_groups(const Plane& plane, const CacheGenBlock& block, u32 group, const Column<E>* columns,
                              u16* cumulative, const u16* families) {
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  const u16* family = families + (u64)block.family * TABLES * TABLE_STRIDE;
  RansDecoder decoders[FLIGHTS];
  bool fits = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    bool fit;
    decoders[f] = RansDecoder::make((const u32*)block.states, (const u16*)block.words, block.word_count, group + f, fit);
    fits = fits && fit;
    vu32 table = load_bits((const u32*)block.tables + (u64)(group + f) * TABLE_BITS, TABLE_BITS);
    load_tables<N>(cumulative + f * (N + 1) * LANES, family, table, columns[f].idle());
  }
  if (!fits) return BAD_STREAM;

  const u32* token_words = (const u32*)block.token_words;
  // Out of the block once: the compiler has to suppose that decoded values overwrite it.
  u32 middle = block.levels, raw_bits = block.raw_bits;
  float levels = (float)middle;
  u32 at = 0, coded_rows = 0, exact_rows = 0, rider = ~0u;
  for (u32 start = 0; start < plane.tokens; start += TILE) {
    u32 stop = start + TILE < plane.tokens ? start + TILE : plane.tokens;
    Tile tile = read_tile<E>(token_words, block.token_word_count, at);
    if (!tile.fits) return BAD_TOKENS;
    u32 mask = tile.exact;
    vf32 maxima = E::to_float(E::narrowed(tile.entries));

    for (u32 t = start; t < stop; ++t) {
      if (mask >> (t - start) & 1) {
        if (rider == ~0u && sizeof(typename E::raw) == 2) {
          rider = t;
          continue;
        }
        if (exact_rows >= block.row_count) return BAD_ROWS;
        const typename E::raw* row = (const typename E::raw*)block.rows + (u64)exact_rows++ * channels;
        for (int f = 0; f < FLIGHTS; ++f)
          columns[f].template store<WHOLE>(t, load_some(row + (u64)(group + f) * LANES, columns[f].active));
        continue;
      }
      float top = lane_value(maxima, t - start);
#pragma clang loop unroll(full)
      for (int f = 0; f < FLIGHTS; ++f) {
        vu32 symbol = widen(decoders[f].template next<N>(cumulative + f * (N + 1) * LANES));
        if (raw_bits) {
          if (coded_rows >= block.raw_rows) return BAD_RAW;
          const u32* raw = (const u32*)block.raw + ((u64)coded_rows * groups + group + f) * raw_bits;
          symbol = symbol << raw_bits | load_bits(raw, raw_bits);
        }
        vf32 x = int_to_float(symbol - middle) / levels * top;
        columns[f].template store<WHOLE>(t, E::from_float(x));
      }
      ++coded_rows;
    }
  }
  if (at != block.token_word_count) return BAD_TOKENS;
  if (exact_rows != block.row_count) return BAD_ROWS;
  if (raw_bits && coded_rows != block.raw_rows) return BAD_RAW;
  for (int f = 0; f < FLIGHTS; ++f) {
    if (!decoders[f].finished()) return BAD_STREAM;
    if (rider != ~0u) columns[f].template store<WHOLE>(rider, E::narrowed(widen(decoders[f].rider())));
  }
  return OK;
}

template <class E, int FLIGHTS>
FN u32 cachegen_decode_any(const Plane& plane, const CacheGenBlock& block, u32 group, u16* cumulative,
                           const u16* families) {
  Column<E> columns[FLIGHTS];
  bool whole = true;
  for (int f = 0; f < FLIGHTS; ++f) {
    columns[f] = Column<E>::make(plane, group + f);
    whole = whole && columns[f].whole;
  }
  if (whole) {
    if (block.symbols <= 16)
      return cachegen_decode_groups<E, 16, FLIGHTS, true>(plane, block, group, columns, cumulative, families);
    return cachegen_decode_groups<E, 32, FLIGHTS, true>(plane, block, group, columns, cumulative, families);
  }
  if (block.symbols <= 16)
    return cachegen_decode_groups<E, 16, FLIGHTS, false>(plane, block, group, columns, cumulative, families);
  return cachegen_decode_groups<E, 32, FLIGHTS, false>(plane, block, group, columns, cumulative, families);
}

#define CACHEGEN_DECODE(suffix, E)                                                                                     \
  KERNEL(cachegen_decode_##suffix, const Plane* planes, const CacheGenBlock* blocks, const u16* families, u32* status, \
         u32 groups) {                                                                                                 \
    WARP_SHARED(u16, cumulative, FLIGHT*(MAX_SYMBOLS + 1) * LANES);                                                    \
    FOR_EACH_FLIGHT(warp, flight, groups) {                                                                            \
      u32 block = warp / groups, group = warp % groups, found;                                                         \
      if (flight == FLIGHT)                                                                                            \
        found = cachegen_decode_any<E, FLIGHT>(planes[block], blocks[block], group, cumulative, families);             \
      else                                                                                                             \
        found = cachegen_decode_any<E, 1>(planes[block], blocks[block], group, cumulative, families);                  \
      for (int f = 0; f < flight; ++f) store_uniform(status + warp + f, found);                                        \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_DECODE)
