// KIVI (Liu et al., ICML 2024, arXiv:2402.02750): keys are quantized per channel in groups of 32 tokens, values per token in
// groups of 32 channels. A code stands for code * scale + minimum, both float16. Words are packed as the paper's code packs
// them: keys along tokens, values along channels. Or codes lie one a byte, for the entropy coder.
//
// One warp takes a tile of 32 tokens, so a group of keys or 32 groups of values for each 32 channels.
#include "exact.h"

struct KiviBlock {
  ExactTokens exact;
  u64 words;    // u32: keys [tokens * BITS / 32][channels], values [tokens][channels * BITS / 32], rounded up
  u64 symbols;  // u8 [groups][symbol_tokens][32], in place of words
  u64 scales;   // f16: keys [tokens / 32][channels], values [tokens][channels / 32], rounded up
  u64 minima;   // f16, likewise
  u32 symbol_tokens, reserved;
};

// What the channels of a group share. A constant group has scale 0: its code is 0.
struct KiviGroup {
  vf32 scale, step, minimum;

  static METHOD KiviGroup of(vu16 scale, vu16 minimum) {
    vf32 s = half_to_float(scale);
    return {s, select((vm32)(s == splatf(0.f)), splatf(1.f), s), half_to_float(minimum)};
  }
  METHOD vu32 encode(vf32 x, float top) const {
    vf32 level = select((vm32)(scale == splatf(0.f)), splatf(0.f), (x - minimum) / step);
    level = maximum(level, splatf(0.f));
    return round_to_int(select((vm32)(level > splatf(top)), splatf(top), level));
  }
  METHOD vf32 decode(vu32 code) const { return int_to_float(code) * scale + minimum; }
};

struct KiviSpan {
  vf32 low, high;

  static METHOD KiviSpan make() { return {splatf(65504.f), splatf(-65504.f)}; }
  METHOD void add(vf32 x) {
    low = select((vm32)(x < low), x, low);
    high = maximum(high, x);
  }
  METHOD vu16 scale(float top) const { return float_to_half((high - low) / top); }
};

FN u32 kivi_words(u32 numbers, u32 bits) { return (numbers * bits + 31) / 32; }
FN u8* kivi_symbols(const KiviBlock& block, u32 group, u32 token) {
  return (u8*)block.symbols + ((u64)group * block.symbol_tokens + token) * LANES;
}

// ------------------------------------------------------------------------------------------- keys

template <class E, u32 BITS, bool WHOLE>
FN void kivi_encode_keys(const Plane& plane, const KiviBlock& block, const ExactTile& tile, bool packed, u32 group,
                         const Column<E>& column, LossSums& loss) {
  constexpr u32 PER_WORD = 32 / BITS;
  const float top = (1 << BITS) - 1;
  u32 channels = plane.heads * plane.head_dim, first = group * LANES;
  KiviSpan span = KiviSpan::make();
  for (u32 i = 0; i < tile.coded(); ++i)
    if (!tile.keeps(i)) span.add(E::to_float(column.template load<WHOLE>(tile.start + i)));
  bool none = bits_set(tile.kept) == tile.coded();
  vu16 scale = none ? splat16(0) : span.scale(top), minimum = none ? splat16(0) : float_to_half(span.low);
  if (tile.coded()) {
    store_some((u16*)block.scales + (u64)tile.index() * channels + first, scale, column.active);
    store_some((u16*)block.minima + (u64)tile.index() * channels + first, minimum, column.active);
  }
  KiviGroup shared = KiviGroup::of(scale, minimum);
  u32* words = (u32*)block.words + (u64)tile.index() * BITS * channels + first;
  vu32 word = splat(0);
  for (u32 i = 0; i < tile.tokens(); ++i) {
    vf32 x = E::to_float(column.template load<WHOLE>(tile.start + i));
    vu32 code = splat(0);
    if (tile.keeps(i)) {
      loss.add_kept(x);
      if (i >= tile.coded()) continue;
    } else {
      code = shared.encode(x, top);
      loss.add(x, E::to_float(E::from_float(shared.decode(code))));
    }
    if (!packed) {
      store_u8(kivi_symbols(block, group, tile.start + i), narrow(select(column.idle(), splat(0), code)));
      continue;
    }
    word = word | code << i % PER_WORD * BITS;
    if (i % PER_WORD == PER_WORD - 1 || i == tile.coded() - 1) {
      store_some(words + (u64)(i / PER_WORD) * channels, word, column.active);
      word = splat(0);
    }
  }
}

template <class E, u32 BITS, bool WHOLE>
FN void kivi_decode_keys(const Plane& plane, const KiviBlock& block, const ExactTile& tile, bool packed, u32 group,
                         const Column<E>& column) {
  constexpr u32 PER_WORD = 32 / BITS;
  if (!tile.coded()) return;
  u32 channels = plane.heads * plane.head_dim;
  u64 first = (u64)tile.index() * channels + group * LANES;
  const u16 *scales = (const u16*)block.scales + first, *minima = (const u16*)block.minima + first;
  KiviGroup shared = WHOLE ? KiviGroup::of(load_u16(scales), load_u16(minima))
                           : KiviGroup::of(load_some(scales, column.active), load_some(minima, column.active));
  const u32* words = (const u32*)block.words + (u64)tile.index() * BITS * channels + group * LANES;
  for (u32 row = 0; row * PER_WORD < tile.coded(); ++row) {
    vu32 word = splat(0);
    if (packed) word = WHOLE ? load_u32(words + (u64)row * channels) : load_some(words + (u64)row * channels, column.active);
    u32 left = tile.coded() - row * PER_WORD, count = left < PER_WORD ? left : PER_WORD;
#pragma clang loop unroll_count(4)
    for (u32 i = 0; i < count; ++i) {
      u32 token = tile.start + row * PER_WORD + i;
      vu32 code = packed ? word & ((1u << BITS) - 1u) : widen(load_u8(kivi_symbols(block, group, token)));
      word = word >> BITS;
      column.template store<WHOLE>(token, E::from_float(shared.decode(code)));
    }
  }
}

// ------------------------------------------------------------------------------------------- values

template <class E, u32 BITS, bool WHOLE>
FN void kivi_encode_values(const Plane& plane, const KiviBlock& block, const ExactTile& tile, bool packed, u32 group,
                           const Column<E>& column, LossSums& loss) {
  const float top = (1 << BITS) - 1;
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  u64 row_words = kivi_words(channels, BITS);
  for (u32 i = 0; i < tile.tokens(); ++i) {
    u32 token = tile.start + i;
    vf32 x = E::to_float(column.template load<WHOLE>(token));
    vu16 scale = splat16(0), minimum = splat16(0);
    vu32 code = splat(0);
    if (tile.keeps(i)) {
      loss.add_kept(x);
      if (i >= tile.coded()) continue;
    } else {
      vf32 low = select(column.idle(), splatf(65504.f), x), high = select(column.idle(), splatf(-65504.f), x);
      KiviSpan span = {splatf(0.f) - warp_max(splatf(0.f) - low), warp_max(high)};
      scale = span.scale(top);
      minimum = float_to_half(span.low);
      KiviGroup shared = KiviGroup::of(scale, minimum);
      code = select(column.idle(), splat(0), shared.encode(x, top));
      vf32 restored = E::to_float(E::from_float(shared.decode(code)));
      loss.add(x, select(column.idle(), splatf(0.f), restored));
    }
    store_some((u16*)block.scales + (u64)token * groups + group, scale, 1);
    store_some((u16*)block.minima + (u64)token * groups + group, minimum, 1);
    if (packed)
      pack_lanes<BITS>((u32*)block.words + token * row_words + group * BITS, code, kivi_words(column.active, BITS));
    else
      store_u8(kivi_symbols(block, group, token), narrow(code));
  }
}

template <class E, u32 BITS, bool WHOLE>
FN void kivi_decode_values(const Plane& plane, const KiviBlock& block, const ExactTile& tile, bool packed, u32 group,
                           const Column<E>& column) {
  u32 channels = plane.heads * plane.head_dim, groups = (channels + LANES - 1) / LANES;
  u64 row_words = kivi_words(channels, BITS);
  const u16* scales = (const u16*)block.scales + group;
  const u16* minima = (const u16*)block.minima + group;
  const u32* words = (const u32*)block.words + group * BITS;
  for (u32 token = tile.start; token < tile.coded_stop; ++token) {
    u64 at = (u64)token * groups;
    KiviGroup shared = KiviGroup::of(splat16(scales[at]), splat16(minima[at]));
    vu32 code = packed ? unpack_lanes<BITS>(words + token * row_words) : widen(load_u8(kivi_symbols(block, group, token)));
    column.template store<WHOLE>(token, E::from_float(shared.decode(code)));
  }
}

// ------------------------------------------------------------------------------------------- tiles

#define KIVI_TILES(suffix, E, kind, BITS)                                                                              \
  KERNEL(kivi_encode_##kind##BITS##_##suffix, const Plane* planes, const KiviBlock* blocks, float* errors, u32 tiles,  \
         u32 limit, u32 packed) {                                                                                      \
    WARP_SHARED(E::raw, running, EXACT_TILE* LANES);                                                                   \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      const KiviBlock& block = blocks[warp / tiles];                                                                   \
      LossSums loss = LossSums::make();                                                                                \
      if (warp % tiles * EXACT_TILE < plane.tokens) {                                                                  \
        ExactTile tile = mark_unfit<E>(plane, block.exact, warp % tiles, limit, running);                              \
        for (u32 g = 0; g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {                                 \
          Column<E> column = Column<E>::make(plane, g);                                                                \
          if (column.whole)                                                                                            \
            kivi_encode_##kind<E, BITS, true>(plane, block, tile, packed, g, column, loss);                            \
          else                                                                                                         \
            kivi_encode_##kind<E, BITS, false>(plane, block, tile, packed, g, column, loss);                           \
        }                                                                                                              \
      }                                                                                                                \
      loss.store(errors + (u64)warp * 3);                                                                              \
    }                                                                                                                  \
  }                                                                                                                    \
  KERNEL(kivi_decode_##kind##BITS##_##suffix, const Plane* planes, const KiviBlock* blocks, u32* status, u32 tiles,    \
         u32 packed) {                                                                                                 \
    FOR_EACH_WARP(warp) {                                                                                              \
      const Plane& plane = planes[warp / tiles];                                                                       \
      const KiviBlock& block = blocks[warp / tiles];                                                                   \
      u32 found = OK;                                                                                                  \
      if (warp % tiles * EXACT_TILE < plane.tokens) {                                                                  \
        ExactTile tile = ExactTile::make(plane, block.exact, warp % tiles);                                            \
        found = tile.misfit(block.exact);                                                                              \
        for (u32 g = 0; found == OK && g < (plane.heads * plane.head_dim + LANES - 1) / LANES; ++g) {                  \
          Column<E> column = Column<E>::make(plane, g);                                                                \
          if (column.whole) {                                                                                          \
            kivi_decode_##kind<E, BITS, true>(plane, block, tile, packed, g, column);                                  \
            restore_rows<E, true>(block.exact, tile, plane.heads * plane.head_dim, g, column);                         \
          } else {                                                                                                     \
            kivi_decode_##kind<E, BITS, false>(plane, block, tile, packed, g, column);                                 \
            restore_rows<E, false>(block.exact, tile, plane.heads * plane.head_dim, g, column);                        \
          }                                                                                                            \
        }                                                                                                              \
      }                                                                                                                \
      store_uniform(status + warp, found);                                                                             \
    }                                                                                                                  \
  }
#define KIVI_KERNELS(suffix, E) \
  KIVI_TILES(suffix, E, keys, 2) KIVI_TILES(suffix, E, keys, 4) KIVI_TILES(suffix, E, values, 2) KIVI_TILES(suffix, E, values, 4)
FOR_ELEMENT_TYPES(KIVI_KERNELS)
