// CacheGen's quantization on its own, for coders that take whole planes of symbols: u8 [tokens][groups * 32], 0 in idle lanes.
// The symbols are LMCache's in every token, those of exact tokens too.
#include "cachegen.h"

// One warp a group of 32 channels. maxima: [block][tiles * 32]; exact: [block][tiles] masks; `errors` gets squared error, energy
// and largest error.
template <class E, bool WHOLE>
FN void quantize_group(const Plane& plane, u32 level_count, const Column<E>& column, const float* maxima, const u32* exact,
                       u8* symbols, u64 stride, float* errors) {
  float levels = (float)level_count;
  vf32 squared = splatf(0.f), energy = splatf(0.f), worst = splatf(0.f);
  auto load = [&](u32 t) { return column.template load<WHOLE>(t); };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, typename E::vraw bits) {
    float top = maxima[t], factor = levels / top;
    vf32 x = E::to_float(bits), level = x * factor + levels;
    // What is no number, as in a token of zeros, is symbol 0.
    vu32 symbol = select(as_bits(absolute(level)) < 0x7f800000u, round_to_int(level), splat(0));
    store_u8(symbols + t * stride, narrow(select(column.idle(), splat(0), symbol)));
    if (in_mask(exact, t)) {
      // No error, but energy, if it is a number.
      energy = energy + select(absolute(x) < infinity(), x * x, splatf(0.f));
      return;
    }
    vf32 difference = E::to_float(E::from_float(int_to_float(symbol - level_count) / levels * top)) - x;
    squared = squared + difference * difference;
    energy = energy + x * x;
    worst = maximum(worst, absolute(difference));
  });
  float sums[3] = {first_lane(warp_sum(squared)), first_lane(warp_sum(energy)), first_lane(warp_max(worst))};
  for (u32 i = 0; i < 3; ++i) store_uniform(errors + i, sums[i]);
}

#define CACHEGEN_QUANTIZE(suffix, E)                                                                                  \
  KERNEL(cachegen_quantize_##suffix, const Plane* planes, const u32* levels, const float* maxima, const u32* exact,   \
         u8* symbols, float* errors, u32 groups, u32 tiles) {                                                         \
    FOR_EACH_WARP(warp) {                                                                                             \
      u32 block = warp / groups, group = warp % groups;                                                               \
      u64 stride = groups * LANES;                                                                                    \
      u8* mine = symbols + (u64)block * tiles * TILE * stride + group * LANES;                                        \
      Column<E> column = Column<E>::make(planes[block], group);                                                       \
      const float* tops = maxima + (u64)block * tiles * TILE;                                                         \
      const u32* masks = exact + (u64)block * tiles;                                                                  \
      if (column.whole)                                                                                               \
        quantize_group<E, true>(planes[block], levels[block], column, tops, masks, mine, stride, errors + warp * 3);  \
      else                                                                                                            \
        quantize_group<E, false>(planes[block], levels[block], column, tops, masks, mine, stride, errors + warp * 3); \
    }                                                                                                                 \
  }
FOR_ELEMENT_TYPES(CACHEGEN_QUANTIZE)

struct TokenSection {
  u64 words;  // u32
  u64 rows;   // [exact tokens][channels]
  u32 word_count, row_count;
};

// One warp a block: the token section as maxima and masks. Of a damaged one the rest is zeros.
template <class E>
FN u32 read_tokens(const Plane& plane, const TokenSection& section, float* maxima, u32* exact, u32 tiles) {
  u32 at = 0, rows = 0, found = OK;
  for (u32 i = 0; i < tiles; ++i) {
    Tile tile = {splat(0), 0, true};
    if (i * TILE < plane.tokens && found == OK) tile = read_tile<E>((const u32*)section.words, section.word_count, at);
    if (!tile.fits) found = BAD_TOKENS;
    u32 left = i * TILE < plane.tokens ? plane.tokens - i * TILE : 0;
    u32 mask = left < TILE ? tile.exact & ((1u << left) - 1u) : tile.exact;
    for (u32 rest = mask; rest; rest &= rest - 1u) ++rows;
    store_u32((u32*)maxima + i * TILE, as_bits(E::to_float(E::narrowed(tile.entries))));
    store_uniform(exact + i, mask);
  }
  if (found == OK && at != section.word_count) found = BAD_TOKENS;
  return found == OK && rows != section.row_count ? (u32)BAD_ROWS : found;
}

#define CACHEGEN_TOKENS(suffix, E)                                                                                   \
  KERNEL(cachegen_tokens_##suffix, const Plane* planes, const TokenSection* sections, float* maxima, u32* exact,     \
         u32* status, u32 tiles) {                                                                                   \
    FOR_EACH_WARP(block) {                                                                                           \
      u32 found = read_tokens<E>(planes[block], sections[block], maxima + (u64)block * tiles * TILE,                 \
                                 exact + (u64)block * tiles, tiles);                                                 \
      store_uniform(status + block, found);                                                                          \
    }                                                                                                                \
  }
FOR_ELEMENT_TYPES(CACHEGEN_TOKENS)

// One warp a group. Exact tokens come from the section's rows, if it has so many.
template <class E, bool WHOLE>
FN void dequantize_group(const Plane& plane, const TokenSection& section, u32 group, u32 level_count, const Column<E>& column,
                         const float* maxima, const u32* exact, const u8* symbols, u64 stride) {
  float levels = (float)level_count;
  u32 rows = 0;
  auto load = [&](u32 t) { return load_u8(symbols + t * stride); };
  in_turn<FORWARDS>(plane.tokens, load, [&](u32 t, vu16 symbols_of_token) {
    if (in_mask(exact, t)) {
      if (rows == section.row_count) return;
      const typename E::raw* row = (const typename E::raw*)section.rows + (u64)rows++ * plane.heads * plane.head_dim;
      column.template store<WHOLE>(t, load_some(row + (u64)group * LANES, column.active));
      return;
    }
    vu32 symbol = widen(symbols_of_token);
    column.template store<WHOLE>(t, E::from_float(int_to_float(symbol - level_count) / levels * maxima[t]));
  });
}

#define CACHEGEN_DEQUANTIZE(suffix, E)                                                                                   \
  KERNEL(cachegen_dequantize_##suffix, const Plane* planes, const TokenSection* sections, const u32* levels,             \
         const float* maxima, const u32* exact, const u8* symbols, u32 groups, u32 tiles) {                              \
    FOR_EACH_WARP(warp) {                                                                                                \
      u32 block = warp / groups, group = warp % groups;                                                                  \
      u64 stride = groups * LANES;                                                                                       \
      const u8* mine = symbols + (u64)block * tiles * TILE * stride + group * LANES;                                     \
      Column<E> column = Column<E>::make(planes[block], group);                                                          \
      const float* tops = maxima + (u64)block * tiles * TILE;                                                            \
      const u32* masks = exact + (u64)block * tiles;                                                                     \
      if (column.whole)                                                                                                  \
        dequantize_group<E, true>(planes[block], sections[block], group, levels[block], column, tops, masks, mine, stride);  \
      else                                                                                                               \
        dequantize_group<E, false>(planes[block], sections[block], group, levels[block], column, tops, masks, mine, stride); \
    }                                                                                                                    \
  }
FOR_ELEMENT_TYPES(CACHEGEN_DEQUANTIZE)
