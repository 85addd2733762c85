// Bytes and numbers of few bits, on both sides of warp.h.
#pragma once
#include "warp.h"

#if defined(__CUDACC__) || defined(KVZIP_EMULATED)

typedef u32 vu8;
FN vu16 widen_bytes(vu8 x) { return x; }
FN vu8 narrow_bytes(vu16 x) { return x & 0xffu; }
FN u32 bits_set(u32 word) { return (u32)__popc(word); }
FN vu32 gather_u32(const u32* table, vu32 index) { return table[index]; }
// Numbers of up to 16 bits, one word a bit.
FN vu16 load_bits16(const u32* planes, u32 bits) {
  u32 v = 0;
  for (u32 b = 0; b < bits; ++b) v |= (planes[b] >> lane() & 1u) << b;
  return v;
}
FN void store_bits16(u32* planes, vu16 v, u32 bits) {
  for (u32 b = 0; b < bits; ++b) {
    u32 word = ballot((v >> b & 1u) != 0u);
    if (lane() == 0) planes[b] = word;
  }
}
// Lanes with m take the next bytes at p, in lane order; the others keep x.
FN vu16 pull_bytes(const u8*& p, bool m, vu16 x) {
  u32 takers = ballot(m);
  if (m) x = p[__popc(takers & ((1u << lane()) - 1))];
  p += __popc(takers);
  return x;
}
// The mirror: lanes with m put their low bytes below p, the highest lane first.
FN void push_bytes(u8*& p, bool m, vu16 x) {
  u32 givers = ballot(m);
  p -= __popc(givers);
  if (m) p[__popc(givers & ((1u << lane()) - 1))] = (u8)x;
}

#else

typedef u8 vu8x4 __attribute__((vector_size(4)));
typedef u8 vu8x8 __attribute__((vector_size(8)));
typedef u8 vu8x16 __attribute__((vector_size(16)));
FN vu16 widen_bytes(vu8 x) { return __builtin_convertvector(x, vu16); }
FN vu8 narrow_bytes(vu16 x) { return __builtin_convertvector(x, vu8); }
FN u32 bits_set(u32 word) { return (u32)__builtin_popcount(word); }
FN vu32 gather_u32(const u32* table, vu32 index) {
#if KVZIP_AVX512
  __m512i h[2];
  __builtin_memcpy(h, &index, sizeof h);
  for (int i = 0; i < 2; ++i) h[i] = _mm512_i32gather_epi32(h[i], table, 4);
  return load_as<vu32>(h);
#else
  vu32 v;
  for (int l = 0; l < 32; ++l) v[l] = table[index[l]];
  return v;
#endif
}
// Numbers of up to 16 bits, one word a bit.
FN vu16 load_bits16(const u32* planes, u32 bits) {
#if KVZIP_AVX512
  __m512i v = _mm512_setzero_si512(), bit = _mm512_set1_epi16(1);
  for (u32 b = 0; b < bits; ++b, bit = _mm512_slli_epi16(bit, 1)) v = _mm512_mask_add_epi16(v, planes[b], v, bit);
  return bit_copy<vu16>(v);
#else
  const vu8 own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                   1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  vu8 halves[2] = {};
  for (u32 b = 0; b < bits; ++b) {
    vu8x4 word = load_as<vu8x4>(planes + b);
    vu8 spread = __builtin_shufflevector(word, word, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                         2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    halves[b / 8] |= (vu8)((spread & own) != 0) & (u8)(1 << b % 8);
  }
  vu16 low = widen_bytes(halves[0]);
  return bits > 8 ? low | widen_bytes(halves[1]) << 8 : low;
#endif
}
FN void store_bits16(u32* planes, vu16 v, u32 bits) {
  for (u32 b = 0; b < bits; ++b) planes[b] = ballot((vm16)((v & (u16)(1 << b)) != 0));
}
// Lanes with m take the next bytes at p, in lane order; the others keep x.
FN vu16 pull_bytes(const u8*& p, vm16 m, vu16 x) {
  for (u32 lanes = ballot(m); lanes; lanes &= lanes - 1) x[__builtin_ctz(lanes)] = *p++;
  return x;
}
// The mirror: lanes with m put their low bytes below p, the highest lane first.
FN void push_bytes(u8*& p, vm16 m, vu16 x) {
  p -= __builtin_popcount(ballot(m));
  u8* at = p;
  for (u32 lanes = ballot(m); lanes; lanes &= lanes - 1) *at++ = (u8)x[__builtin_ctz(lanes)];
}

#endif
