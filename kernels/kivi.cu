// KIVI (Liu et al., ICML 2024, arXiv:2402.02750): keys are quantized per channel in groups of 32 tokens, values per token in
// groups of 32 channels. A code stands for code * scale + minimum, both float16. Words are packed as the paper's code packs
// them: keys along tokens, values along channels. Or codes lie one a byte, for the entropy coder.
//
// One warp takes a tile of 32 tokens, so a group of keys or 32 groups of values for each 32 channels.
#include "affine.h"

struct KiviBlock {
  ExactTokens exact;
  u64 words;    // u32: keys [tokens * BITS / 32][channels], values [tokens][channels * BITS / 32], rounded up
  u64 symbols;  // u8 [groups][symbol_tokens][32], in place of words
  u64 scales;   // f16: keys [tokens / 32][channels], values [tokens][channels / 32], rounded up
  u64 minima;   // f16, likewise
  u32 symbol_tokens, reserved;
};

FN Affine affine_of(vu16 scale, vu16 minimum) { return Affine::make(half_number(scale), half_number(minimum)); }

// Scales and minima of N groups, from their smallest and largest numbers.
template <u32 BITS, u32 N>
struct KiviGroups {
  Halves<N> scales, minima;

  static METHOD KiviGroups of(const vf32 (&low)[N], const vf32 (&high)[N]) {
    vf32 scales[N], minima[N];
    for (u32 n = 0; n < N; ++n) {
      scales[n] = Divisor::make(splatf((1 << BITS) - 1)).divide((high[n] - low[n]) + 0.f);
      minima[n] = low[n] + 0.f;
    }
    return {Halves<N>::nearest(scales), Halves<N>::nearest(minima)};
  }
  METHOD Affine affine(u32 n) const { return Affine::make(scales.number(n), minima.number(n)); }
};

// A decoder's status: encoders write no scale or minimum that is not finite.
FN u32 check_halves(const KiviBlock& block, u64 first, u32 count) {
  bool finite = all_below<Fp16>((const u16*)block.scales + first, count, Fp16::INFINITE) &&
                all_below<Fp16>((const u16*)block.minima + first, count, Fp16::INFINITE);
  return finite ? OK : BAD_VALUE;
}

// ------------------------------------------------------------------------------------------- keys

template <class E_, u32 BITS_>
struct KiviKeys {
  typedef E_ E;
  enum : u32 { BITS = BITS_, PER_WORD = 32 / BITS, TOP = (1 << BITS) - 1 };
  const Plane& plane;
  const KiviBlock& block;

  static METHOD KiviKeys make(const Plane& plane, const KiviBlock& block) { return {plane, block}; }
  METHOD u32 channels() const { return plane.heads * plane.head_dim; }
  METHOD u32* words(const ExactTile& tile) const { return (u32*)block.words + (u64)tile.index() * BITS * channels(); }
  METHOD u16* scales(const ExactTile& tile) const { return (u16*)block.scales + (u64)tile.index() * channels(); }
  METHOD u16* minima(const ExactTile& tile) const { return (u16*)block.minima + (u64)tile.index() * channels(); }
  METHOD u32 check(const ExactTile& tile) const {
    return tile.coded() ? check_halves(block, (u64)tile.index() * channels(), channels()) : OK;
  }

  template <bool WHOLE>
  static METHOD Extremes<E> extremes(const ExactTile& tile, const Strip<E>& strip) {
    typedef typename Strip<E>::Loaded Loaded;
    u32 kept = tile.all_kept(), some = 0;
    while (kept >> some & 1) ++some;
    auto load = [&](u32 row) {
      u32 token = tile.start + row;
      return WHOLE ? strip.load_row(token) : strip.template load<false>(token);
    };
    Extremes<E> found = Extremes<E>::of(load(some));
    for (u32 i = 0; i < tile.coded();) {
      if (WHOLE && i + ROWS <= EXACT_TILE && !(kept >> i & ((1u << ROWS) - 1u))) {
        Loaded rows[ROWS];
        strip.load(tile.start + i, rows);
        for (u32 r = 0; r < ROWS; ++r, ++i) found.add(rows[r]);
      } else {
        if (!tile.keeps(i)) found.add(load(i));
        ++i;
      }
    }
    return found;
  }

  template <bool PACKED, bool WHOLE>
  METHOD void encode_strip(const ExactTile& tile, const Strip<E>& strip, u32 start, TileLoss& loss) const {
    constexpr u32 AT_ONCE = rows_at_once<E>(4);
    Affine affines[PACK];
    bool plain = WHOLE;
    Pack<vu32> scale = no_codes(), minimum = no_codes(), word = no_codes(), found;
    if (tile.all_kept() != ~0u) {
      Extremes<E> own = extremes<WHOLE>(tile, strip);
      Pack<vf32> low = own.low(), high = own.high();
      auto groups = KiviGroups<BITS, PACK>::of(low.v, high.v);
      for (int j = 0; j < PACK; ++j) {
        affines[j] = groups.affine(j);
        scale.v[j] = groups.scales.bits(j);
        minimum.v[j] = groups.minima.bits(j);
        plain = plain & all(affines[j].plain(low.v[j], high.v[j], 0.f, TOP));
      }
    }
    if (tile.coded()) {
      store_channels(strip, WHOLE, scales(tile) + start, scale);
      store_channels(strip, WHOLE, minima(tile) + start, minimum);
    }
    u32* words_of_strip = words(tile) + start;
    auto symbols = CodeRows<BITS, false>::make(block.symbols, block.symbol_tokens, channels(), start);
    auto store = [&](u32 row) {
      for (int j = 0; j < PACK && PACKED; ++j) word.v[j] = shift_in<BITS>(word.v[j], found.v[j]);
      if (!PACKED) symbols.store(symbols.row(tile.start + row), found);
    };
    u32 singly = plain ? tile.all_kept() : ~0u;
    StripLoss sums = StripLoss::zero();
    for (u32 i = 0; i < tile.tokens();) {
      if (i % AT_ONCE || (singly >> i & ((1u << AT_ONCE) - 1u))) {
        encode_row<WHOLE>(tile, strip, affines, i, found, sums);
        if (i++ >= tile.coded()) continue;
        store(i - 1);
      } else {
        typename Strip<E>::Loaded rows[AT_ONCE];
        strip.load(tile.start + i, rows);
        for (u32 r = 0; r < AT_ONCE; ++r, ++i) {
          found = quantize(strip, rows[r], [&](int j) { return affines[j]; }, 0, sums);
          store(i);
        }
      }
      u32 codes = i % PER_WORD;
      if (!PACKED || (codes && i != tile.coded())) continue;
      // A full word, or the last one, whose codes are still at its top.
      for (int j = 0; j < PACK; ++j) found.v[j] = codes ? word.v[j] >> (32 - codes * BITS) : word.v[j];
      store_channels(strip, WHOLE, words_of_strip + (u64)((i - 1) / PER_WORD) * channels(), found);
    }
    loss.add(strip, sums);
  }

  template <bool WHOLE>
  static METHOD void encode_row(const ExactTile& tile, const Strip<E>& strip, const Affine (&affines)[PACK], u32 row,
                                Pack<vu32>& found, StripLoss& loss) {
    auto numbers = strip.values(strip.template load<WHOLE>(tile.start + row));
    for (int j = 0; j < PACK; ++j) {
      vf32 x = E::to_float(numbers.v[j]);
      found.v[j] = splat(0);
      if (tile.keeps(row)) {
        loss.add_kept(j, x);
      } else {
        found.v[j] = quantize_within(strip, j, x, affines[j], 0.f, TOP, 0, loss);
      }
    }
  }

  template <bool PACKED, bool WHOLE>
  METHOD void decode_strip(const ExactTile& tile, const Strip<E>& strip, u32 start) const {
    constexpr u32 AT_ONCE = WHOLE ? (u32)ROWS : 1;
    if (!tile.coded()) return;
    Pack<vu32> scale = load_channels(strip, WHOLE, scales(tile) + start);
    Pack<vu32> minimum = load_channels(strip, WHOLE, minima(tile) + start), word = no_codes();
    Affine affines[PACK];
    for (int j = 0; j < PACK; ++j) affines[j] = affine_of(narrow(scale.v[j]), narrow(minimum.v[j]));
    const u32* words_of_strip = words(tile) + start;
    auto symbols = CodeRows<BITS, false>::make(block.symbols, block.symbol_tokens, channels(), start);
    for (u32 first = 0; first < tile.coded(); first += PER_WORD) {
      u32 stop = first + PER_WORD < tile.coded() ? first + PER_WORD : tile.coded();
      if (PACKED) word = load_channels(strip, WHOLE, words_of_strip + (u64)(first / PER_WORD) * channels());
#pragma clang loop unroll_count(4)
      for (u32 i = first; i < stop; i += AT_ONCE) {
        typename CodeRows<BITS, false>::Loaded loaded[AT_ONCE];
        for (u32 r = 0; r < AT_ONCE && !PACKED; ++r)
          loaded[r] = symbols.load(symbols.row(tile.start + (i + r < stop ? i + r : i)));
        for (u32 r = 0; r < AT_ONCE && i + r < stop; ++r) {
          Pack<vu32> found = PACKED ? word : symbols.codes(loaded[r]);
          Pack<vf32> x;
          for (int j = 0; j < PACK; ++j) {
            x.v[j] = affines[j].number(int_to_float(found.v[j] & (u32)TOP));
            word.v[j] = word.v[j] >> BITS;
          }
          strip.template store<WHOLE>(tile.start + i + r, nearest_row<E>(x));
        }
      }
    }
  }

  // Calls `code` for each strip: with whether it is whole, and its first channel.
  template <class Code>
  METHOD void for_each_strip(Code code) const {
    for (u32 start = 0; start < channels(); start += STRIP) {
      Strip<E> strip = Strip<E>::make(plane, start / STRIP);
      code(strip, aligned(strip, block.words | block.scales | block.minima), start);
    }
  }
  template <bool PACKED>
  METHOD void encode(const ExactTile& tile, AffineScratch*, TileLoss& loss) const {
    for_each_strip([&](const Strip<E>& strip, bool whole, u32 start) {
      whole ? encode_strip<PACKED, true>(tile, strip, start, loss) : encode_strip<PACKED, false>(tile, strip, start, loss);
    });
  }
  template <bool PACKED>
  METHOD void decode(const ExactTile& tile) const {
    for_each_strip([&](const Strip<E>& strip, bool whole, u32 start) {
      whole ? decode_strip<PACKED, true>(tile, strip, start) : decode_strip<PACKED, false>(tile, strip, start);
    });
  }
};

// ------------------------------------------------------------------------------------------- values

// Scales and minima of tokens.
struct KiviShared {
  const u16 *scales, *minima;
  u32 groups;

  template <bool ONE>
  METHOD Affine at(u32 token, vu32 index) const {
    const u16 *scale = scales + (u64)token * groups, *minimum = minima + (u64)token * groups;
    return affine_of(load_shared<ONE>(scale, index), load_shared<ONE>(minimum, index));
  }
};

template <class E_, u32 BITS_>
struct KiviValues {
  typedef E_ E;
  enum : u32 { BITS = BITS_, LOW = 0, AT_ONCE = STRIP / LANES };
  const Plane& plane;
  const KiviBlock& block;
  CodeMemory codes;
  u16 *scales, *minima;
  u32 count;

  static METHOD KiviValues make(const Plane& plane, const KiviBlock& block) {
    return {plane, block, {block.words, block.symbols, 0, block.symbol_tokens}, (u16*)block.scales, (u16*)block.minima,
            (plane.heads * plane.head_dim + LANES - 1) / LANES};
  }
  METHOD u32 width() const { return LANES; }
  METHOD u32 groups() const { return count; }
  METHOD u32 zero() const { return 0; }
  METHOD bool side_by_side() const { return ((u64)scales | (u64)minima) % 8 == 0 && count % AT_ONCE == 0; }
  METHOD KiviShared shared() const { return {scales, minima, count}; }
  template <u32 N>
  METHOD void store(const ExactTile& tile, u32 index, const vf32 (&low)[N], const vf32 (&high)[N], Affine (&affines)[N]) const {
    auto groups = KiviGroups<BITS, N>::of(low, high);
    for (u32 n = 0; n < N; ++n) affines[n] = groups.affine(n);
    vm32 kept = bit_of_lane(tile.kept) != 0u;
    u64 first = (u64)tile.start * count + index;
    groups.scales.store_strided(scales + first, count, tile.coded(), kept);
    groups.minima.store_strided(minima + first, count, tile.coded(), kept);
  }
  METHOD u32 check(const ExactTile& tile) const {
    return check_halves(block, (u64)tile.start * count, tile.coded() * count);
  }
  template <bool PACKED>
  METHOD void encode(const ExactTile& tile, AffineScratch* scratch, TileLoss& loss) const {
    encode_groups<KiviValues, PACKED>(*this, tile, scratch, loss);
  }
  template <bool PACKED>
  METHOD void decode(const ExactTile& tile) const {
    decode_groups<KiviValues, PACKED>(*this, tile);
  }
};

// ------------------------------------------------------------------------------------------- tiles

#define KIVI_TILES(suffix, E, kind, Kind, BITS)                                                                        \
  KERNEL(kivi_encode_##kind##BITS##_##suffix, const Plane* planes, const KiviBlock* blocks, float* errors, u32 tiles,  \
         u32 limit, u32 packed) {                                                                                      \
    WARP_SHARED(AffineScratch, scratch, 1);                                                                            \
    FOR_EACH_WARP(warp)                                                                                                \
    encode_warp(Kind<E, BITS>::make(planes[warp / tiles], blocks[warp / tiles]), warp % tiles, limit, packed != 0,     \
                scratch, errors + (u64)warp * 3);                                                                      \
  }                                                                                                                    \
  KERNEL(kivi_decode_##kind##BITS##_##suffix, const Plane* planes, const KiviBlock* blocks, u32* status, u32 tiles,    \
         u32 packed) {                                                                                                 \
    FOR_EACH_WARP(warp) {                                                                                              \
      auto coder = Kind<E, BITS>::make(planes[warp / tiles], blocks[warp / tiles]);                                    \
      store_uniform(status + warp, decode_warp(coder, warp % tiles, packed != 0));                                     \
    }                                                                                                                  \
  }
#define KIVI_KERNELS(suffix, E)                                                     \
  KIVI_TILES(suffix, E, keys, KiviKeys, 2) KIVI_TILES(suffix, E, keys, KiviKeys, 4) \
  KIVI_TILES(suffix, E, values, KiviValues, 2) KIVI_TILES(suffix, E, values, KiviValues, 4)
FOR_ELEMENT_TYPES(KIVI_KERNELS)
