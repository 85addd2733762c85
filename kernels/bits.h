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
// One stream of bits along the lanes, least significant first: lane l has bits l * BITS and up of BITS words.
template <u32 BITS>
FN vu32 unpack_lanes(const u32* words) {
  u32 bit = lane() * BITS;
  return words[bit / 32] >> bit % 32 & ((1u << BITS) - 1u);
}
// The mirror, into `count` words.
template <u32 BITS>
FN void pack_lanes(u32* words, vu32 x, u32 count) {
  x <<= lane() * BITS % 32;
  for (u32 d = 1; d < 32 / BITS; d *= 2) x |= __shfl_xor_sync(~0u, x, d);
  u32 word = lane() / (32 / BITS);
  if (lane() % (32 / BITS) == 0 && word < count) words[word] = x;
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
// One stream of bits along the lanes, least significant first: lane l has bits l * BITS and up of BITS words.
template <u32 BITS>
FN vu32 unpack_lanes(const u32* words) {
  static_assert(BITS == 2 || BITS == 4 || BITS == 8, "a number is a whole part of a byte");
  if constexpr (BITS == 8) {
    return widen(widen_bytes(load_as<vu8>(words)));
  } else {
    vu8x16 bytes;
    if constexpr (BITS == 4) {
      bytes = load_as<vu8x16>(words);
    } else {
      vu8x8 quarters = load_as<vu8x8>(words), low = quarters & (u8)15, high = quarters >> (u8)4;
      bytes = __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    }
    vu8x16 low = bytes & (u8)((1 << BITS) - 1), high = bytes >> (u8)BITS;
    vu8 all = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,  //
                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return widen(widen_bytes(all));
  }
}
// The mirror, into `count` words.
template <u32 BITS>
FN void pack_lanes(u32* words, vu32 x, u32 count) {
  vu8 bytes = narrow_bytes(narrow(x));
  if constexpr (BITS == 8) {
    __builtin_memcpy(words, &bytes, count * sizeof(u32));
  } else {
    vu8x16 pairs = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) |
                   __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31) << (u8)BITS;
    if constexpr (BITS == 2) {
      vu8x8 fours = __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14) |
                    __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7, 9, 11, 13, 15) << (u8)4;
      __builtin_memcpy(words, &fours, count * sizeof(u32));
    } else {
      __builtin_memcpy(words, &pairs, count * sizeof(u32));
    }
  }
}

#endif
