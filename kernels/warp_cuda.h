// The CUDA side of warp.h: a varying value is a per-thread scalar. See warp.h.
#pragma once

#define FN static __device__ __forceinline__
#define METHOD __device__ __forceinline__
enum : int { WARPS_PER_BLOCK = 4 };
// Blocks that a multiprocessor shall have room for: five leave a thread 96 registers, four 128.
#ifndef BLOCKS_AT_ONCE
#define BLOCKS_AT_ONCE 5
#endif
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(128, BLOCKS_AT_ONCE) name(int warps, __VA_ARGS__)
#define FOR_EACH_WARP(warp) \
  for (int warp = (int)(blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / 32), once = 1; once && warp < warps; once = 0)
#define FOR_EACH_FLIGHT(warp, flight, groups) \
  enum : int { flight = 1 };                  \
  FOR_EACH_WARP(warp)
#define FOR_EACH_FLIGHT_WHERE(warp, flight, joined) FOR_EACH_FLIGHT(warp, flight, 1)
// Scratch memory of one warp, in shared memory.
#define WARP_SHARED(type, name, count)                        \
  __shared__ type name##_of_block[WARPS_PER_BLOCK * (count)]; \
  type* name = name##_of_block + threadIdx.x / 32 * (count)
// A GPU hides latency by itself.
enum : int { FLIGHT = 1 };

typedef u32 vu32;
typedef u32 vu16;
typedef float vf32;
typedef bool vm32;
typedef bool vm16;

// ------------------------------------------------------------------------------------------- instructions
#ifndef KVZIP_EMULATED  // the tests' emulator brings its own
FN float cvt_f32_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
FN u16 cvt_f16_f32(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
FN u32 cvt_bf16x2_f32(float high, float low) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
FN u32 cvt_f16x2_f32(float high, float low) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two numbers at a time.
#define OF_PAIRS(name, instruction)                                        \
  FN u32 name(u32 a, u32 b) {                                              \
    u32 pair;                                                              \
    asm(instruction " %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));         \
    return pair;                                                           \
  }
OF_PAIRS(min_bf16x2, "min.bf16x2")
OF_PAIRS(max_bf16x2, "max.bf16x2")
OF_PAIRS(min_f16x2, "min.f16x2")
OF_PAIRS(max_f16x2, "max.f16x2")
// a * b + c, rounded once.
FN float fused(float a, float b, float c) {
  float f;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(f) : "f"(a), "f"(b), "f"(c));
  return f;
}
FN float larger_or_nan(float a, float b) {
  float f;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(f) : "f"(a), "f"(b));
  return f;
}
#endif

// ------------------------------------------------------------------------------------------- lanes
FN u32 lane() { return threadIdx.x & 31; }
FN vu32 lane_ids() { return lane(); }
FN vu32 splat(u32 x) { return x; }
FN vu16 splat16(u32 x) { return x; }
FN vf32 splatf(float x) { return x; }
FN vf32 as_float(vu32 x) { return __uint_as_float(x); }
FN vu32 as_bits(vf32 x) { return __float_as_uint(x); }
FN float scalar_as_float(u32 x) { return __uint_as_float(x); }
FN u32 scalar_as_bits(float x) { return __float_as_uint(x); }
FN vu16 narrow(vu32 x) { return x & 0xffffu; }
FN vu32 widen(vu32 x) { return x; }
FN vf32 int_to_float(vu32 x) { return (float)(int)x; }
FN vu32 select(bool m, vu32 a, vu32 b) { return m ? a : b; }
FN vf32 select(bool m, vf32 a, vf32 b) { return m ? a : b; }
FN vu32 maximum(vu32 a, vu32 b) { return a > b ? a : b; }
// Of numbers that are not NaN: the larger one, the smaller one, and |x|.
FN vf32 larger(vf32 a, vf32 b) { return fmaxf(a, b); }
FN vf32 smaller(vf32 a, vf32 b) { return fminf(a, b); }
FN vf32 magnitude_of(vf32 x) { return fabsf(x); }
// a * b + c where the product needs no rounding, or c is 0: then rounding once is rounding twice.
FN vf32 product_sum(vf32 a, vf32 b, vf32 c) { return fused(a, b, c); }
FN vu32 shift_right_signed(vu32 x, vu32 by) { return (u32)((int)x >> by); }
// A number of which the compiler knows nothing: what follows from it takes no registers from one turn of a loop to the next.
FN u32 forgotten(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Likewise an address: else the compiler adds up all that it is made of anew for each row.
template <class T>
FN T* settled(u64 address) {
  asm("" : "+l"(address));
  return (T*)address;
}
FN void warp_sync() { __syncwarp(); }
template <int D>
FN vf32 shuffle_xor(vf32 v) {
  return __shfl_xor_sync(~0u, v, D);
}
template <int D>
FN vu32 shuffle_xor(vu32 v) {
  return __shfl_xor_sync(~0u, v, D);
}

// Uniform results: the largest lane; a bit per lane.
FN u32 largest(vu32 x) {
  for (int d = 16; d; d >>= 1) x = maximum(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
FN u32 smallest(vu32 x) { return ~largest(~x); }
FN float first_lane(vf32 x) { return __shfl_sync(~0u, x, 0); }
FN float lane_value(vf32 x, u32 l) { return __shfl_sync(~0u, x, l); }
FN u32 first_lane(vu32 x) { return __shfl_sync(~0u, x, 0); }
FN u32 lane_value(vu32 x, u32 l) { return __shfl_sync(~0u, x, l); }
FN u32 ballot(bool m) { return __ballot_sync(~0u, m); }
FN bool all(bool m) { return __all_sync(~0u, m); }
FN u32 uniform_sum(vu32 x) { return __reduce_add_sync(~0u, x); }
// Lane l gets bit l of the word.
FN vu32 bit_of_lane(u32 word) { return word >> lane() & 1u; }
FN vu32 with_lane(vu32 v, u32 l, u32 value) { return lane() == l ? value : v; }

// ------------------------------------------------------------------------------------------- memory
FN vu32 load_u32(const u32* p) { return p[lane()]; }
FN vu16 load_u16(const u16* p) { return p[lane()]; }
FN vu16 load_u8(const u8* p) { return p[lane()]; }
FN void store_u32(u32* p, vu32 v) { p[lane()] = v; }
FN void store_u16(u16* p, vu16 v) { p[lane()] = (u16)v; }
FN void store_u8(u8* p, vu16 v) { p[lane()] = (u8)v; }
FN vu16 load_lanes(const u16* p) { return p[lane()]; }
FN vu32 load_lanes(const u32* p) { return p[lane()]; }
FN void store_lanes(u16* p, vu32 v) { p[lane()] = (u16)v; }
FN void store_lanes(u32* p, vu32 v) { p[lane()] = v; }
template <class T>
FN void store_uniform(T* p, T v) {
  if (lane() == 0) *p = v;
}
FN vu16 load_lanes(const u8* p) { return p[lane()]; }
FN void store_lanes(u8* p, vu32 v) { p[lane()] = (u8)v; }
// The first `count` lanes from memory, the others 0; and into memory.
template <class T>
FN vu32 load_some(const T* p, u32 count) {
  return lane() < count ? p[lane()] : 0;
}
template <class T>
FN void store_some(T* p, vu32 v, u32 count) {
  if (lane() < count) p[lane()] = (T)v;
}
FN vu16 gather_u16(const u16* table, vu32 index) { return table[index]; }
FN vf32 gather_f32(const float* table, vu32 index) { return table[index]; }
FN vu32 gather_row_u32(const u32* table, vu16 row) { return table[row * 32 + lane()]; }
FN void count_row_u16(u16* table, vu16 row) { ++table[row * 32 + lane()]; }
template <class T>
FN void warp_copy(T* to, const T* from, u64 count) {
  for (u64 i = lane(); i < count; i += 32) to[i] = from[i];
  __syncwarp();
}

// What divides many numbers. Its reciprocal is found once; then two fused steps make a quotient the nearest one (Markstein,
// IBM Journal of Research and Development 34, 1990): the remainder is exact, and mends the quotient before that is rounded.
struct alignas(8) Divisor {
  float value, reciprocal;

  static METHOD Divisor make(float x) { return {x, 1.f / x}; }
  // Whether that holds for quotients from 2^-23 on: below 2^-80 float32 cannot hold the remainder.
  METHOD vm32 exact() const { return value >= as_float((127 - 80) << 23); }
  METHOD float divide(float x) const {
    float quotient = x * reciprocal;
    return fused(fused(-value, quotient, x), reciprocal, quotient);
  }
};
// The divisors of up to 32 rows, in a warp's shared memory: a lane makes each.
struct RowDivisors {
  Divisor of_row[LANES];

  // Whether they are exact.
  METHOD bool set(const float* values, u32 count) {
    Divisor own = Divisor::make(lane() < count ? values[lane()] : 1.f);
    __syncwarp();
    of_row[lane()] = own;
    __syncwarp();
    return all(own.exact());
  }
  METHOD Divisor at(u32 row) const { return of_row[row]; }
};

// 32 consecutive channels of a plane, one per lane, starting at channel 32 * group; idle lanes load 0 and store nothing.
template <class E>
struct Column {
  u8* base;
  i64 token_stride;
  u32 active;  // how many lanes have a channel
  enum : bool { whole = false };

  static METHOD Column make(const Plane& plane, u32 group) {
    Column c;
    u32 channel = group * LANES + lane();
    u32 left = plane.heads * plane.head_dim - group * LANES;
    c.active = left < LANES ? left : LANES;
    if (lane() >= c.active) channel = 0;
    c.token_stride = plane.token_stride;
    c.base = (u8*)plane.data + (i64)(channel / plane.head_dim) * plane.head_stride +
             (i64)(channel % plane.head_dim) * (i64)sizeof(typename E::raw);
    return c;
  }
  // Any channels, one per lane, of which the first `active` count.
  static METHOD Column of_channels(const Plane& plane, vu32 channel, u32 active) {
    Column c;
    c.active = active;
    c.token_stride = plane.token_stride;
    c.base = (u8*)plane.data + (i64)(channel / plane.head_dim) * plane.head_stride +
             (i64)(channel % plane.head_dim) * (i64)sizeof(typename E::raw);
    return c;
  }
  METHOD vm32 idle() const { return lane() >= active; }
  template <bool WHOLE>
  METHOD typename E::vraw load(u32 token) const {
    return lane() < active ? *(const typename E::raw*)(base + (i64)token * token_stride) : 0;
  }
  // A processor may ask for a row that it loads later. Here loads are under way together.
  METHOD void ask_for(u32) const {}
  template <bool WHOLE>
  METHOD void store(u32 token, typename E::vraw v) const {
    if (lane() < active) *(typename E::raw*)(base + (i64)token * token_stride) = (typename E::raw)v;
  }
};

// A lane's share of a strip: PACK neighbouring channels, so that it loads and stores 8 bytes of 16-bit types at once. ROWS
// loads that do not wait for one another keep the memory busy: nothing must look at what they bring before all are under way.
enum : int { PACK = 4, ROWS = 8 };
constexpr u32 STRIP = LANES * PACK;
template <class V>
struct Pack {
  V v[PACK];
};
// A pack in memory. As words: numbers that are loaded together stay in one register.
template <class T, u32 ALIGNMENT = PACK * sizeof(T)>
struct alignas(ALIGNMENT) Packed {
  enum : u32 { BITS = 8 * sizeof(T), PER_WORD = 32 / BITS, COUNT = PACK / PER_WORD };
  u32 words[COUNT];

  METHOD u32 get(u32 i) const { return words[i / PER_WORD] >> i % PER_WORD * BITS & (~0u >> (32 - BITS)); }
  METHOD void put(u32 i, u32 x) { words[i / PER_WORD] |= x << i % PER_WORD * BITS; }
};

// 32 * PACK consecutive channels of a plane, for kernels that memory bounds. `whole`: a lane's channels are either all there
// or none, lie side by side and aligned.
template <class E>
struct Strip {
  typedef typename E::raw raw;
  typedef Packed<raw> Loaded;
  typedef Packed<u8> LoadedBytes;
  const Plane& plane;
  u8* base;
  i64 token_stride;
  u32 first, active;  // the lane's first channel; how many of the strip's channels there are
  bool whole;

  static METHOD Strip make(const Plane& plane, u32 strip) {
    u32 start = strip * STRIP, left = plane.heads * plane.head_dim - start;
    return at(plane, start, left < STRIP ? left : STRIP);
  }
  // `count` channels from `start` on, up to STRIP.
  static METHOD Strip at(const Plane& plane, u32 start, u32 count) {
    u64 together = plane.data | (u64)plane.token_stride | (u64)plane.head_stride;
    bool whole = (plane.head_dim | start | count) % PACK == 0 && together % sizeof(Loaded) == 0;
    Strip s = {plane, nullptr, plane.token_stride, start + lane() * PACK, count, whole};
    s.base = s.address(s.has(0) ? s.first : start + (whole ? count - PACK : 0));
    return s;
  }
  METHOD bool whole_with(const void* bytes) const { return whole && (u64)bytes % sizeof(LoadedBytes) == 0; }
  METHOD u8* address(u32 channel) const {
    return (u8*)plane.data + (i64)(channel / plane.head_dim) * plane.head_stride +
           (i64)(channel % plane.head_dim) * (i64)sizeof(raw);
  }
  METHOD bool has(u32 i) const { return lane() * PACK + i < active; }
  METHOD vm32 idle(u32 i) const { return !has(i); }
  METHOD vu32 channel(u32 i) const { return first + i; }

  METHOD vf32 zero_if_idle(vf32 x, u32 i) const { return has(i) ? x : 0.f; }
  // Whether no |x| is above `limit` or NaN.
  template <u32 N>
  static METHOD bool none_above(const Loaded (&rows)[N], float limit) {
    float top = 0.f;
    for (u32 r = 0; r < N; ++r)
      for (int i = 0; i < PACK; ++i) top = larger_or_nan(top, magnitude_of(E::number(rows[r].get(i))));
    return all(top <= limit);
  }

  static METHOD Pack<typename E::vraw> values(const Loaded& loaded) {
    Pack<typename E::vraw> pack;
    for (int i = 0; i < PACK; ++i) pack.v[i] = loaded.get(i);
    return pack;
  }
  static METHOD Loaded loaded(const Pack<typename E::vraw>& pack) {
    Loaded loaded = {};
    for (int i = 0; i < PACK; ++i) loaded.put(i, pack.v[i]);
    return loaded;
  }
  static METHOD Pack<vu32> bytes(const LoadedBytes& loaded) {
    Pack<vu32> pack;
    for (int i = 0; i < PACK; ++i) pack.v[i] = loaded.get(i);
    return pack;
  }
  template <bool WHOLE>
  METHOD Loaded load(u32 token) const {
    Loaded loaded = {};
    if (WHOLE && has(0)) loaded = *(const Loaded*)(base + (i64)token * token_stride);
    for (int i = 0; i < PACK; ++i)
      if (!WHOLE && has(i)) loaded.put(i, *(const raw*)(address(first + i) + (i64)token * token_stride));
    return loaded;
  }
  // A row of a whole strip, or of that so many channels beyond; and those from `token` on. Idle lanes get the last lane's
  // channels, which costs nothing.
  METHOD Loaded load_row(u32 token, u32 beyond = 0) const {
    return *(const Loaded*)(base + (i64)token * token_stride + beyond * sizeof(raw));
  }
  METHOD const u8* row(u32 token) const { return base + (i64)token * token_stride; }
  // From such an address on; returns the next one.
  template <u32 N>
  METHOD const u8* load(const u8* p, Loaded (&rows)[N]) const {
    for (u32 r = 0; r < N; ++r, p += token_stride) rows[r] = *(const Loaded*)p;
    return p;
  }
  template <u32 N>
  METHOD void load(u32 token, Loaded (&rows)[N]) const {
    load(row(token), rows);
  }
  template <bool WHOLE>
  METHOD void store(u32 token, const Loaded& row) const {
    if (WHOLE && has(0)) *(Loaded*)(base + (i64)token * token_stride) = row;
    for (int i = 0; i < PACK; ++i)
      if (!WHOLE && has(i)) *(raw*)(address(first + i) + (i64)token * token_stride) = (raw)row.get(i);
  }
  // The strip's part of a row of bytes, one a channel.
  template <bool WHOLE>
  METHOD LoadedBytes load_bytes(const u8* row) const {
    LoadedBytes loaded = {};
    row += lane() * PACK;
    if (WHOLE && has(0)) loaded = *(const LoadedBytes*)row;
    for (int i = 0; i < PACK; ++i)
      if (!WHOLE && has(i)) loaded.put(i, row[i]);
    return loaded;
  }
  // The lowest bytes of codes; and with the signs of numbers, where their highest bits are 0.
  static METHOD u32 low_bytes(const Pack<vu32>& codes) {
    const u32(&c)[PACK] = codes.v;
    return __byte_perm(__byte_perm(c[0], c[1], 0x40), __byte_perm(c[2], c[3], 0x40), 0x5410);
  }
  static METHOD u32 signed_bytes(const Pack<vu32>& codes, const Loaded& numbers) {
    const u32(&w)[Loaded::COUNT] = numbers.words;
    u32 bytes = low_bytes(codes), signs;
    if constexpr (sizeof(raw) == 2)
      signs = __byte_perm(w[0], w[1], 0x7531);
    else
      signs = __byte_perm(__byte_perm(w[0], w[1], 0x73), __byte_perm(w[2], w[3], 0x73), 0x5410);
    return bytes | (signs & 0x80808080u);
  }
  template <bool WHOLE>
  METHOD void store_bytes(u8* row, u32 bytes) const {
    row += lane() * PACK;
    if (WHOLE && has(0)) *(u32*)row = bytes;
    for (int i = 0; i < PACK; ++i)
      if (!WHOLE && has(i)) row[i] = (u8)(bytes >> 8 * i);
  }
};

// table[index of the lane]; `neighbours` says whether the lanes' indexes follow each other.
FN vf32 gather_f32(const float* table, vu32 index, bool neighbours) { return table[index]; }

// Rows below `count` in turn, `work(row, load(row))`, with the next ones under way meanwhile: by itself no load passes the stores
// of the work before it. AHEAD rows are asked for at once and worked on a turn later, when their registers may be moved
// without waiting; the last turn asks for its own again, so that no row is touched that is not there.
enum Order : bool { FORWARDS, BACKWARDS };
template <Order ORDER, u32 AHEAD = 2, class Load, class Work>
FN void in_turn(u32 count, Load load, Work work) {
  // Of 64 bits, so that all rows of a turn are found from one.
  auto row_of = [=](u32 turn, u64 i) { return ORDER == BACKWARDS ? (count - 1 - turn) - i : turn + i; };
  decltype(load(0)) loaded[AHEAD], under_way[AHEAD];
  u32 turn = 0;
  if (AHEAD <= count)
    for (u32 i = 0; i < AHEAD; ++i) loaded[i] = load(row_of(0, i));
  for (; turn + AHEAD <= count; turn += AHEAD) {
    u32 next = turn + 2 * AHEAD <= count ? turn + AHEAD : turn;
    for (u32 i = 0; i < AHEAD; ++i) under_way[i] = load(row_of(next, i));
    for (u32 i = 0; i < AHEAD; ++i) work(row_of(turn, i), loaded[i]);
    for (u32 i = 0; i < AHEAD; ++i) loaded[i] = under_way[i];
  }
  if constexpr (AHEAD > 1)
#pragma unroll 1
    for (; turn < count; ++turn) work(row_of(turn, 0), load(row_of(turn, 0)));
}

// ------------------------------------------------------------------------------------------- half precision
// The conversion instructions forget what NaN it was; CPUs only make it quiet.
FN vf32 half_to_float(vu16 h) {
  float f = cvt_f32_f16((u16)h);
  return (h & 0x7fffu) > 0x7c00u ? as_float((h & 0x8000u) << 16 | 0x7fc00000u | (h & 0x3ffu) << 13) : f;
}
FN vu16 float_to_half(vf32 f) {
  u32 h = cvt_f16_f32(f);
  u32 u = as_bits(f);
  return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 & 0x8000u) | 0x7e00u | (u >> 13 & 0x3ffu) : h;
}
// Of what is not NaN.
FN vf32 half_number(vu16 h) { return cvt_f32_f16((u16)h); }
FN vu16 number_to_half(vf32 f) { return cvt_f16_f32(f); }
FN vf32 nearest_half(vf32 f) { return cvt_f32_f16(cvt_f16_f32(f)); }
FN vf32 nearest_bfloat(vf32 f) { return as_float(cvt_bf16x2_f32(f, 0.f)); }
FN float scalar_half_to_float(u32 bits) { return half_to_float(bits); }

// A positive float of MANTISSA bits whose exponents are those of float32 less BIAS, subnormal ones included.
template <u32 MANTISSA, u32 BIAS>
FN vf32 short_float(vu32 bits) {
  return as_float(bits << (23 - MANTISSA)) * as_float((127 + BIAS) << 23);
}

// ------------------------------------------------------------------------------------------- rANS primitives
// Lanes with m shift in the next 16-bit words at p, in lane order.
FN vu32 pull_words(const u16*& p, bool m, vu32 x) {
  u32 takers = ballot(m), before = takers & ((1u << lane()) - 1);
  if (m) x = x << 16 | p[__popc(before)];
  p += __popc(takers);
  return x;
}
// The mirror: lanes with m put their low 16 bits below p, the highest lane first.
FN vu32 push_words(u16*& p, bool m, vu32 x) {
  u32 givers = ballot(m), before = givers & ((1u << lane()) - 1);
  p -= __popc(givers);
  if (m) p[__popc(before)] = (u16)x;
  return m ? x >> 16 : x;
}
// cumulative: [N + 1][32] counts per lane. The largest symbol with cumulative <= slot, and its interval [low, high).
template <int N>
FN vu16 find_symbol(const u16* cumulative, vu16 slot, vu16& low, vu16& high) {
  constexpr u32 ROW = 32 * sizeof(u16);
  const u8* table = (const u8*)cumulative;
  u32 at = lane() * (u32)sizeof(u16);
  asm("" : "+r"(at));  // else the compiler adds up all steps anew for each address
#pragma unroll
  for (u32 d = N / 2; d; d >>= 1) {
    if (slot >= *(const u16*)(table + at + d * ROW)) at += d * ROW;
    asm("" : "+r"(at));
  }
  low = *(const u16*)(table + at);
  high = *(const u16*)(table + at + ROW);
  return at / ROW;
}
FN vu32 divide(vu32 a, vu32 b) { return a / b; }
FN vu32 divide_by(vu32 a, u32 b) { return a / b; }

// ------------------------------------------------------------------------------------------- range coder primitives
// Zeros above the highest one of x > 0.
FN vu32 leading_zeros(vu32 x) { return __clz((int)x); }
// The four bytes at each lane's offset, the first the highest.
FN vu32 gather_big_endian(const u8* p, vu32 offset) {
  p += offset;
  return (u32)p[0] << 24 | (u32)p[1] << 16 | (u32)p[2] << 8 | p[3];
}
// Lanes with m put their low 16 bits, the higher byte first, at their position, which is even and moves on.
FN void put_halves(u8* p, vu32& position, bool m, vu32 x) {
  if (m) *(u16*)(p + position) = (u16)__byte_perm(x, 0, 0x4401);
  position += m ? 2 : 0;
}
// Lanes with m add one to the number that ends before their position.
FN void increment_before(u8* p, vu32 position, bool m) {
  if (m)
    while (++p[--position] == 0) {
    }
}

// ------------------------------------------------------------------------------------------- arithmetic and packed numbers
FN vf32 square_root(vf32 x) { return __fsqrt_rn(x); }
FN double scalar_square_root(double x) { return __dsqrt_rn(x); }
// The whole part of 0 <= x < 2^31.
FN vu32 truncate(vf32 x) { return (u32)(int)x; }
// What the lane below 16 has that each lane's index names.
FN vf32 lookup_16(vf32 table, vu32 index) { return __shfl_sync(~0u, table, index); }
FN vu32 lookup_16(vu32 table, vu32 index) { return __shfl_sync(~0u, table, index); }
// Up to 15 ascending bounds.
struct Bounds {
  float of_8, of_4, of_12, of_2, of_1;  // what a rank is at least that much more behind; the last two by the rank so far

  static METHOD Bounds make(const float* bounds, u32 count) {
    // No number is beyond NaN.
    auto at = [=](u32 i) { return i < count ? bounds[i] : as_float(~0u); };
    return {at(7), at(3), at(11), at((lane() & 12u) + 1), at(lane() & 14u)};
  }
  // How many of them are at most x; of NaN none.
  METHOD vu32 rank(vf32 x) const {
    bool upper = x >= of_8;
    u32 rank = upper ? 8 : 0;
    rank += x >= (upper ? of_12 : of_4) ? 4 : 0;
    rank += x >= lookup_16(of_2, rank) ? 2 : 0;
    return rank + (x >= lookup_16(of_1, rank) ? 1 : 0);
  }
};
// `count` numbers of B <= 4 bits, a stream of bits, least significant first.
template <int B>
FN vu32 load_packed(const u8* p, u32 count) {
  if (lane() >= count) return 0;
  u32 bit = lane() * B, byte = bit / 8, bits = p[byte];
  if (bit % 8 + B > 8) bits |= (u32)p[byte + 1] << 8;
  return bits >> bit % 8 & ((1u << B) - 1);
}
// The mirror, of numbers 32 r + lane in v[r] that are 0 from `count` on. Four at a time share the work, one in each byte.
template <int B, int R>
FN void store_packed(u8* p, const vu32* v, u32 count) {
  constexpr u32 ROW = 4 * B;
#pragma unroll
  for (int first = 0; first < R; first += 4) {
    u32 low = 0;
#pragma unroll
    for (int q = 0; q < 4 && first + q < R; ++q) low |= v[first + q] << 8 * q;
    low |= shuffle_xor<1>(low) << B;
    u32 high = 0, byte = lane() / 2;
    bool ends = false;
    if constexpr (B == 3) {
      // Four numbers are 12 bits, eight three bytes: the first and the second from the lower four, the last from the others.
      u32 next = shuffle_xor<2>(low);
      low |= (next & 0x03030303u) << 6;
      next = next >> 2 & 0x0f0f0f0fu;
      u32 others = shuffle_xor<4>(low);
      ends = (lane() & 4) != 0;
      high = next | (others & 0x0f0f0f0fu) << 4;
      low = ends ? (low >> 4 & 0x0f0f0f0fu) | next << 4 : low;
      byte = lane() / 8 * 3 + (ends ? 2 : 0);
    }
    bool first_lane_of_byte = (lane() & (B == 3 ? 3 : 1)) == 0;
#pragma unroll
    for (int q = 0; q < 4 && first + q < R; ++q) {
      u32 before = (first + q) * LANES, bytes = count > before ? ((count - before) * B + 7) / 8 : 0;
      u8* to = p + (first + q) * ROW + byte;
      if (first_lane_of_byte && byte < bytes) to[0] = (u8)(low >> 8 * q);
      if (B == 3 && first_lane_of_byte && !ends && byte + 1 < bytes) to[1] = (u8)(high >> 8 * q);
    }
  }
}
