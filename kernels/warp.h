// One source for CUDA and for CPU SIMD.
//
// A kernel is written once, warp-synchronously, on *varying* values: one number per lane, 32 lanes a warp.
//   CUDA  a varying value is a per-thread scalar, a warp is 32 threads.
//   CPU   a varying value is a 32-lane clang vector, a warp is one step of a loop on one core.
// Plain scalars (u32, float, pointers) are *uniform*: the same in every lane. A lane usually stands for one channel.
//
// Both sides give the same bits: one rounding per operation, multiply-adds fused where they are written so and nowhere else
// (-ffp-contract=off, --fmad=false); sums across lanes in the fixed order of a butterfly.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 LANES = 32;

// A plane of a batch as it lies in memory: tokens x heads x head_dim, strides in bytes, the last axis contiguous.
// The same struct stands in kvzip/devices/descriptors.py.
struct Plane {
  u64 data;
  i64 token_stride, head_stride;
  u32 tokens, heads, head_dim, reserved;
};

#if defined(__CUDACC__) || defined(KVZIP_EMULATED)
#include "warp_cuda.h"
#else
#include "warp_cpu.h"
#endif

// ------------------------------------------------------------------------------------------- derived, on either side

FN vf32 infinity() { return as_float(splat(0x7f800000)); }
// Bits of a float and back.
FN vf32 absolute(vf32 x) { return as_float(as_bits(x) & 0x7fffffffu); }
FN vf32 maximum(vf32 a, vf32 b) { return select(a > b, a, b); }

// Adding this to |x| < 2^22 rounds it to the nearest integer, ties to even, and leaves that in the lowest bits.
constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23
constexpr u32 ROUNDER_BITS = 0x4b400000;
FN vu32 round_to_int(vf32 x) { return as_bits(x + ROUNDER) - ROUNDER_BITS; }
FN vf32 round_to_float(vf32 x) { return (x + ROUNDER) - ROUNDER; }

// What `join` makes of the lanes, in every lane. Neighbours first: so a sum is the same where a lane holds several neighbouring
// channels.
template <class V, class Join>
FN V warp_joined(V x, Join join) {
  x = join(x, shuffle_xor<1>(x));
  x = join(x, shuffle_xor<2>(x));
  x = join(x, shuffle_xor<4>(x));
  x = join(x, shuffle_xor<8>(x));
  return join(x, shuffle_xor<16>(x));
}
template <class V>
FN V warp_sum(V x) {
  return warp_joined(x, [](V a, V b) { return a + b; });
}
FN vf32 warp_max(vf32 x) {
  return warp_joined(x, [](vf32 a, vf32 b) { return maximum(a, b); });
}
// Of numbers that are not NaN.
FN vf32 warp_larger(vf32 x) {
  return warp_joined(x, [](vf32 a, vf32 b) { return larger(a, b); });
}
// The sum over the lanes before.
template <int D = 1>
FN vu32 warp_sum_before(vu32 x) {
  vu32 other = shuffle_xor<D>(x), before = select((lane_ids() & (u32)D) != 0u, other, splat(0));
  if constexpr (D < 16) return before + warp_sum_before<2 * D>(x + other);
  return before;
}

// Sums over the channels of strips, the same however many channels a lane has: 128 channels at a time as a tree of neighbours,
// one such tree after the other.
struct StripSum {
  vf32 total, quarters[3];
  u32 strips;

  static METHOD StripSum zero() { return {splatf(0.f), {splatf(0.f), splatf(0.f), splatf(0.f)}, 0}; }
  METHOD void add(const Pack<vf32>& pack) {
    if constexpr (PACK == 4) {
      total = total + warp_sum((pack.v[0] + pack.v[1]) + (pack.v[PACK - 2] + pack.v[PACK - 1]));
    } else {
      vf32 sum = warp_sum(pack.v[0]);
      if (++strips % 4)
        quarters[strips % 4 - 1] = sum;
      else
        total = whole(sum);
      if (strips % 4 == 0) quarters[0] = quarters[1] = quarters[2] = splatf(0.f);
    }
  }
  METHOD vf32 whole(vf32 last) const { return total + ((quarters[0] + quarters[1]) + (quarters[2] + last)); }
  METHOD vf32 sum() const { return PACK == 4 ? total : whole(splatf(0.f)); }
};

// ------------------------------------------------------------------------------------------- element types
// Each type knows its raw bits and how to come from and go to float32. ABS masks off the sign; magnitudes from INFINITE on
// are no numbers. Those below TINY have reciprocals near the end of float32 (2^-110); or, of float16 (2^-19), so few units that
// a quantizer's steps do not show in rounded numbers. `from_exact` is for numbers that need no rounding. Of what is not NaN:
// `number` is `to_float`, `from_number` is `from_float`, and `nearest` is both.

struct Bf16 {
  typedef u16 raw;
  typedef vu16 vraw;
  enum : u32 { ABS = 0x7fff, INFINITE = 0x7f80, TINY = 0x0880 };
  static METHOD vu16 narrowed(vu32 b) { return narrow(b); }
  static METHOD vf32 to_float(vu16 b) { return as_float(widen(b) << 16); }
  static METHOD vu16 from_float(vf32 f) {
    vu32 u = as_bits(f);
    vu32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return narrow(select((u & 0x7fffffffu) > 0x7f800000u, (u >> 16) | 0x40u, rounded));
  }
  static METHOD vu16 from_exact(vf32 f) { return narrow(as_bits(f) >> 16); }
  static METHOD vf32 number(vu16 b) { return to_float(b); }
  static METHOD vu16 from_number(vf32 f) { return narrow(as_bits(nearest_bfloat(f)) >> 16); }
  static METHOD vf32 nearest(vf32 f) { return nearest_bfloat(f); }
};

struct Fp16 {
  typedef u16 raw;
  typedef vu16 vraw;
  enum : u32 { ABS = 0x7fff, INFINITE = 0x7c00, TINY = 0x20 };
  static METHOD vu16 narrowed(vu32 b) { return narrow(b); }
  static METHOD vf32 to_float(vu16 b) { return half_to_float(b); }
  static METHOD vu16 from_float(vf32 f) { return float_to_half(f); }
  static METHOD vu16 from_exact(vf32 f) { return float_to_half(f); }
  static METHOD vf32 number(vu16 b) { return half_number(b); }
  static METHOD vu16 from_number(vf32 f) { return number_to_half(f); }
  static METHOD vf32 nearest(vf32 f) { return nearest_half(f); }
};

struct Fp32 {
  typedef u32 raw;
  typedef vu32 vraw;
  enum : u32 { ABS = 0x7fffffff, INFINITE = 0x7f800000, TINY = 0x08800000 };
  static METHOD vu32 narrowed(vu32 b) { return b; }
  static METHOD vf32 to_float(vu32 b) { return as_float(b); }
  static METHOD vu32 from_float(vf32 f) { return as_bits(f); }
  static METHOD vu32 from_exact(vf32 f) { return as_bits(f); }
  static METHOD vf32 number(vu32 b) { return as_float(b); }
  static METHOD vu32 from_number(vf32 f) { return as_bits(f); }
  static METHOD vf32 nearest(vf32 f) { return f; }
};

FN float scalar_to_float(Bf16, u32 bits) { return scalar_as_float(bits << 16); }
FN float scalar_to_float(Fp16, u32 bits) { return scalar_half_to_float(bits); }
FN float scalar_to_float(Fp32, u32 bits) { return scalar_as_float(bits); }

// The bits of a 32-bit number that are in use.
FN u32 bit_width(u32 x) {
  u32 width = 0;
  for (u32 step = 16; step; step >>= 1)
    if (x >> (width + step - 1)) width += step;
  return width + (x >> width != 0);
}

// Whether the bit of a token is set, in masks of 32 tokens a word.
FN bool in_mask(const u32* masks, u32 token) { return masks[token / 32] >> token % 32 & 1; }

// Kernels that come in one version per element type.
#define FOR_ELEMENT_TYPES(INSTANTIATE) INSTANTIATE(bf16, Bf16) INSTANTIATE(f16, Fp16) INSTANTIATE(f32, Fp32)
