// Integers of 4 or 8 bits with a scale per token and head. Symmetric: (code - half) * scale. Asymmetric: code * scale +
// minimum. A scale is the smallest bfloat16 that reaches the largest number: 16 bits whose range is that of float32. A
// minimum is one of the numbers themselves.
//
// Codes are packed along channels; or they are split for the entropy coder: symbols of up to 5 bits, one a byte, and low
// bits as they are. One warp takes a tile of 32 tokens.
#include "affine.h"

struct IntegerBlock {
  ExactTokens exact;
  u64 words;    // u32 [tokens][channels * BITS / 32, rounded up]
  u64 symbols;  // u8 [groups][symbol_tokens][32], in place of words,
  u64 low;      // and u32 [tokens][groups][LOW]
  u64 scales;   // bf16 [tokens][heads]
  u64 minima;   // [tokens][heads], of the plane's type; asymmetric only
  u32 symbol_tokens, reserved;
};

// Scales and minima of tokens.
template <class E>
struct IntegerShared {
  const u16* scales;
  const typename E::raw* minima;
  u32 heads;
  bool symmetric;

  template <bool ONE>
  METHOD Affine at(u32 token, vu32 index) const {
    u64 row = (u64)token * heads;
    vf32 scale = as_float(widen(load_shared<ONE>(scales + row, index)) << 16);
    if (symmetric) return Affine::make(scale, splatf(0.f));
    return Affine::make(scale, E::number(load_shared<ONE>(minima + row, index)));
  }
};

template <class E_, u32 BITS_>
struct IntegerForm {
  typedef E_ E;
  // Scales from 2^(128 - BITS) on would overflow. What is encoded is below 2^126 and has far smaller ones.
  enum : u32 { BITS = BITS_, HALF = 1 << (BITS - 1), LOW = BITS > 5 ? BITS - 5 : 0, SCALE_LIMIT = (255 - BITS) << 7 };
  enum : u32 { AT_ONCE = 1 };
  enum : u32 { SMALLEST = 1 << 7 };  // of the scales that encoders write, but for 0: the least whose reciprocal is finite
  const Plane& plane;
  const IntegerBlock& block;
  bool symmetric;
  CodeMemory codes;

  static METHOD IntegerForm make(const Plane& plane, const IntegerBlock& block, bool symmetric) {
    return {plane, block, symmetric, {block.words, block.symbols, block.low, block.symbol_tokens}};
  }
  METHOD u32 width() const { return plane.head_dim; }
  METHOD u32 groups() const { return plane.heads; }
  METHOD IntegerShared<E> shared() const {
    return {(u16*)block.scales, (typename E::raw*)block.minima, plane.heads, symmetric};
  }
  METHOD u32 zero() const { return symmetric ? HALF : 0; }
  METHOD void store(const ExactTile& tile, u32 head, const vf32 (&lows)[1], const vf32 (&highs)[1], Affine (&affines)[1]) const {
    vf32 low = lows[0], high = highs[0];
    float levels = symmetric ? HALF - 1 : (1u << BITS) - 1;
    vf32 span = symmetric ? larger(magnitude_of(low), magnitude_of(high)) : (high - low) + 0.f;
    u64 first = (u64)tile.start * plane.heads + head;
    vm32 kept = bit_of_lane(tile.kept) != 0u;
    vu32 scale = (as_bits(span / levels) + 0xffffu) >> 16;
    scale = select(scale == 0u, scale, maximum(scale, splat(SMALLEST)));
    store_strided((u16*)block.scales + first, select(kept, splat(0), scale), plane.heads, tile.tokens());
    vf32 minimum = splatf(0.f);
    if (!symmetric) {
      minimum = low + 0.f;
      vu32 raw = select(kept, splat(0), widen(E::from_number(minimum)));
      store_strided((typename E::raw*)block.minima + first, raw, plane.heads, tile.tokens());
    }
    affines[0] = Affine::make(as_float(scale << 16), minimum);
  }
  // A decoder's status: whether no scale and minimum would make infinities of finite numbers, and NaN of those.
  METHOD u32 check(const ExactTile& tile) const {
    u32 count = tile.tokens() * plane.heads;
    u64 first = (u64)tile.start * plane.heads;
    bool fine = all_below<Bf16>((const u16*)block.scales + first, count, SCALE_LIMIT);
    if (!symmetric) fine = fine && all_below<E>((const typename E::raw*)block.minima + first, count, E::INFINITE);
    return fine ? OK : BAD_VALUE;
  }
  template <bool PACKED>
  METHOD void encode(const ExactTile& tile, AffineScratch* scratch, TileLoss& loss) const {
    encode_groups<IntegerForm, PACKED>(*this, tile, scratch, loss);
  }
  template <bool PACKED>
  METHOD void decode(const ExactTile& tile) const {
    decode_groups<IntegerForm, PACKED>(*this, tile);
  }
};

#define INTEGER_TILES(suffix, E, BITS)                                                                                 \
  KERNEL(integers_encode##BITS##_##suffix, const Plane* planes, const IntegerBlock* blocks, float* errors, u32 tiles,  \
         u32 limit, u32 symmetric, u32 packed) {                                                                       \
    WARP_SHARED(AffineScratch, scratch, 1);                                                                            \
    FOR_EACH_WARP(warp) {                                                                                              \
      auto form = IntegerForm<E, BITS>::make(planes[warp / tiles], blocks[warp / tiles], symmetric != 0);              \
      encode_warp(form, warp % tiles, limit, packed != 0, scratch, errors + (u64)warp * 3);                            \
    }                                                                                                                  \
  }                                                                                                                    \
  KERNEL(integers_decode##BITS##_##suffix, const Plane* planes, const IntegerBlock* blocks, u32* status, u32 tiles,    \
         u32 symmetric, u32 packed) {                                                                                  \
    FOR_EACH_WARP(warp) {                                                                                              \
      auto form = IntegerForm<E, BITS>::make(planes[warp / tiles], blocks[warp / tiles], symmetric != 0);              \
      store_uniform(status + warp, decode_warp(form, warp % tiles, packed != 0));                                      \
    }                                                                                                                  \
  }
#define INTEGER_KERNELS(suffix, E) INTEGER_TILES(suffix, E, 4) INTEGER_TILES(suffix, E, 8)
FOR_ELEMENT_TYPES(INTEGER_KERNELS)
