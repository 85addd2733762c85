// CacheGen's quantization on its own, for coders that take whole planes of symbols: u8 [tokens][groups * 32]. The symbols are
// LMCache's in every token, those of exact tokens too. Nothing is stored beyond the last channel.
#include "cachegen.h"
#include "exact.h"
#include "strips.h"

FN u64 symbol_stride(const Plane& plane) { return (plane.heads * plane.head_dim + LANES - 1) / LANES * LANES; }
FN u32 strips_of(const Plane& plane) { return (plane.heads * plane.head_dim + STRIP - 1) / STRIP; }

// A row of a strip to its symbols. KEPT: of an exact token.
template <class E, bool WHOLE, bool KEPT>
FN void quantize_row(const Strip<E>& strip, const typename Strip<E>::Loaded& row, const TokenScale& scale, float middle,
                     u8* symbols, StripLoss& loss) {
  auto numbers = strip.values(row);
  Pack<vu32> codes;
  for (int i = 0; i < PACK; ++i) {
    vf32 x = KEPT ? E::to_float(numbers.v[i]) : E::number(numbers.v[i]), raised = scale.raise(x);
    codes.v[i] = as_bits(raised);
    if (KEPT) {
      // What is no number is symbol 0.
      codes.v[i] = select((vm32)(absolute(raised) < infinity()), codes.v[i], splat(0));
      loss.add_kept(i, x);
    } else {
      loss.add(i, x, scale.template restored<E>(raised, middle) - x);
    }
  }
  strip.template store_bytes<WHOLE>(symbols, strip.low_bytes(codes));
}

// `rows` tokens from `start` on. `scales`, `symbols`: of the first one; there, of the strip.
template <class E, bool WHOLE>
FN void quantize_strip(const Strip<E>& strip, u32 start, u32 rows, u32 exact, const TokenScale* scales, float middle,
                       u8* symbols, u64 stride, TileLoss& loss) {
  StripLoss sums = StripLoss::zero();
  for (u32 row = 0; row < rows;) {
    if (WHOLE && row + ROWS <= rows && !(exact >> row & ((1u << ROWS) - 1u))) {
      typename Strip<E>::Loaded loaded[ROWS];
      strip.load(start + row, loaded);
      for (u32 r = 0; r < ROWS; ++r, symbols += stride)
        quantize_row<E, WHOLE, false>(strip, loaded[r], scales[r], middle, symbols, sums);
      row += ROWS, scales += ROWS;
      continue;
    }
    auto loaded = strip.template load<WHOLE>(start + row);
    if (exact >> row & 1)
      quantize_row<E, WHOLE, true>(strip, loaded, *scales, middle, symbols, sums);
    else
      quantize_row<E, WHOLE, false>(strip, loaded, *scales, middle, symbols, sums);
    ++row, ++scales, symbols += stride;
  }
  loss.add(strip, sums);
}

template <class E>
FN void quantize_tile(const Plane& plane, u32 tile, u32 levels, const TokenScale* scales, u32 exact, u8* symbols,
                      float* errors) {
  u32 start = tile * TILE, left = start < plane.tokens ? plane.tokens - start : 0, rows = left < TILE ? left : TILE;
  u64 stride = symbol_stride(plane);
  float middle = raised_middle(levels);
  TileLoss loss = TileLoss::zero();
  for (u32 s = 0; rows && s < strips_of(plane); ++s) {
    Strip<E> strip = Strip<E>::make(plane, s);
    u8* of_strip = symbols + s * STRIP;
    if (strip.whole)
      quantize_strip<E, true>(strip, start, rows, exact, scales, middle, of_strip, stride, loss);
    else
      quantize_strip<E, false>(strip, start, rows, exact, scales, middle, of_strip, stride, loss);
  }
  loss.store(errors);
}

// One warp a tile, `tiles` of each block. exact: masks; `errors` gets squared error, energy and largest error of each tile.
#define CACHEGEN_QUANTIZE(suffix, E)                                                                                   \
  KERNEL(cachegen_quantize_##suffix, const Plane* planes, const u32* levels, const TokenScale* scales,                 \
         const u32* exact, u8* symbols, float* errors, u32 tiles) {                                                    \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      quantize_tile<E>(plane, warp % tiles, levels[warp / tiles], scales + (u64)warp * TILE, exact[warp],              \
                       symbols + (u64)warp * TILE * symbol_stride(plane), errors + (u64)warp * 3);                     \
    }                                                                                                                  \
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

template <class E, bool WHOLE>
FN void dequantize_strip(const Strip<E>& strip, u32 start, u32 stop, u32 levels, const Steps& steps, const float* tops,
                         const u8* symbols, u64 stride) {
  constexpr u32 AT_ONCE = WHOLE ? ROWS : 1;
  for (u32 first = start; first < stop; first += AT_ONCE) {
    typename Strip<E>::LoadedBytes loaded[AT_ONCE];
    for (u32 r = 0; r < AT_ONCE; ++r)
      loaded[r] = strip.template load_bytes<WHOLE>(symbols + (first + r < stop ? first + r : first) * stride);
    for (u32 r = 0; r < AT_ONCE && first + r < stop; ++r) {
      Pack<vu32> codes = strip.bytes(loaded[r]);
      Pack<vf32> x;
      for (int i = 0; i < PACK; ++i) x.v[i] = steps.number(codes.v[i] - levels, tops[first + r]);
      strip.template store<WHOLE>(first + r, nearest_row<E>(x));
    }
  }
}

// Exact tokens come from the section's rows, if it has them.
template <class E>
FN void dequantize_tile(const Plane& plane, const TokenSection& section, u32 index, u32 levels, const float* tops,
                        const u32* exact, const u8* symbols) {
  ExactTokens kept = {(u64)exact, section.rows, plane.tokens, section.row_count};
  decode_tile<E>(plane, kept, index, [&](const ExactTile& tile) {
    u64 stride = symbol_stride(plane);
    Steps steps = Steps::make((float)levels);
    for (u32 s = 0; s < strips_of(plane); ++s) {
      Strip<E> strip = Strip<E>::make(plane, s);
      const u8* of_strip = symbols + s * STRIP;
      if (strip.whole)
        dequantize_strip<E, true>(strip, tile.start, tile.stop, levels, steps, tops, of_strip, stride);
      else
        dequantize_strip<E, false>(strip, tile.start, tile.stop, levels, steps, tops, of_strip, stride);
    }
    return (u32)OK;
  });
}

// One warp a tile.
#define CACHEGEN_DEQUANTIZE(suffix, E)                                                                                 \
  KERNEL(cachegen_dequantize_##suffix, const Plane* planes, const TokenSection* sections, const u32* levels,           \
         const float* maxima, const u32* exact, const u8* symbols, u32 tiles) {                                        \
    FOR_EACH_WARP(warp) {                                                                                              \
      u32 block = warp / tiles;                                                                                        \
      const Plane& plane = planes[block];                                                                              \
      dequantize_tile<E>(plane, sections[block], warp % tiles, levels[block], maxima + (u64)block * tiles * TILE,      \
                         exact + (u64)block * tiles, symbols + (u64)block * tiles * TILE * symbol_stride(plane));      \
    }                                                                                                                  \
  }
FOR_ELEMENT_TYPES(CACHEGEN_DEQUANTIZE)
