// The CPU side of warp.h: a varying value is a 32-lane clang vector. See warp.h.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FN static inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))
#define KERNEL(name, ...) extern "C" __attribute__((visibility("default"))) void name(int first_warp, int last_warp, __VA_ARGS__)
#define FOR_EACH_WARP(warp) for (int warp = first_warp; warp < last_warp; ++warp)
// The same, up to FLIGHT neighbouring warps of one row of `groups` at a time.
#define FOR_EACH_FLIGHT(warp, flight, groups)                                                   \
  for (int warp = first_warp, flight;                                                           \
       warp < last_warp && (flight = flight_of(warp, last_warp, (int)(groups))); warp += flight)
// The same, with the next warp where `joined` says that it goes with this one.
#define FOR_EACH_FLIGHT_WHERE(warp, flight, joined)                                                       \
  for (int warp = first_warp, flight;                                                                     \
       warp < last_warp && (flight = warp + 1 < last_warp && (joined) ? FLIGHT : 1, true); warp += flight)
// Scratch memory of one warp. On the CPU a warp runs alone, so it is on the stack.
#define WARP_SHARED(type, name, count) alignas(128) type name[count]
// How many warps a core keeps in flight to hide the latency of a serial decoder.
enum : int { FLIGHT = 2 };
FN int flight_of(int warp, int last_warp, int groups) {
  int left = last_warp - warp, in_row = groups - warp % groups;
  int flight = left < in_row ? left : in_row;
  return flight < FLIGHT ? flight : FLIGHT;
}

typedef u32 vu32 __attribute__((vector_size(128)));
typedef u16 vu16 __attribute__((vector_size(64)));
typedef u8 vu8 __attribute__((vector_size(32)));
typedef float vf32 __attribute__((vector_size(128)));
typedef i32 vm32 __attribute__((vector_size(128)));
typedef i16 vm16 __attribute__((vector_size(64)));

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define KVZIP_AVX512 1
#elif defined(__AVX2__)
#define KVZIP_AVX2 1
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define KVZIP_FMA 1
#endif

template <class To, class From>
FN To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_copy keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
template <class V>
FN V load_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// ------------------------------------------------------------------------------------------- lanes
FN vu32 lane_ids() {
  return (vu32){0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
}
FN vu32 splat(u32 x) { return (vu32){} + x; }
FN vu16 splat16(u32 x) { return (vu16){} + (u16)x; }
FN vf32 splatf(float x) { return x - (vf32){}; }
FN vf32 as_float(vu32 x) { return bit_copy<vf32>(x); }
FN vu32 as_bits(vf32 x) { return bit_copy<vu32>(x); }
FN float scalar_as_float(u32 x) { return bit_copy<float>(x); }
FN u32 scalar_as_bits(float x) { return bit_copy<u32>(x); }
FN vu16 narrow(vu32 x) { return __builtin_convertvector(x, vu16); }
FN vu32 widen(vu16 x) { return __builtin_convertvector(x, vu32); }
FN vu32 widen(vu32 x) { return x; }
FN vf32 int_to_float(vu32 x) { return __builtin_convertvector(bit_copy<vm32>(x), vf32); }
FN vu32 select(vm32 m, vu32 a, vu32 b) { return m ? a : b; }
FN vf32 select(vm32 m, vf32 a, vf32 b) { return m ? a : b; }
FN vu16 select(vm16 m, vu16 a, vu16 b) { return m ? a : b; }
FN vu32 maximum(vu32 a, vu32 b) { return (vm32)(a > b) ? a : b; }
FN vu16 maximum(vu16 a, vu16 b) { return (vm16)(a > b) ? a : b; }
// Of numbers that are not NaN: the larger one, the smaller one, and |x|.
FN vf32 larger(vf32 a, vf32 b) { return (vm32)(a > b) ? a : b; }
FN vf32 smaller(vf32 a, vf32 b) { return (vm32)(a < b) ? a : b; }
FN vf32 magnitude_of(vf32 x) { return as_float(as_bits(x) & 0x7fffffffu); }
// a * b + c, rounded once.
FN vf32 fused(vf32 a, vf32 b, vf32 c) {
#if KVZIP_FMA
  return __builtin_elementwise_fma(a, b, c);
#else
  // In float64 the product is exact, and the sum is rounded to odd: rounding that once more is like rounding once (Boldo and
  // Melquiond, IEEE Transactions on Computers 57, 2008).
  typedef double vf64 __attribute__((vector_size(256)));
  typedef i64 vi64 __attribute__((vector_size(256)));
  vf64 product = __builtin_convertvector(a, vf64) * __builtin_convertvector(b, vf64);
  vf64 addend = __builtin_convertvector(c, vf64), sum = product + addend, back = sum - product, zero = {};
  vf64 error = (product - (sum - back)) + (addend - back);
  vi64 bits = bit_copy<vi64>(sum), away = (vi64)(error > zero) == (vi64)(sum > zero);
  vi64 even = ((error < zero) | (error > zero)) & ((bits & 1) == 0);
  return __builtin_convertvector(bit_copy<vf64>(bits + (even & ~(away * 2))), vf32);
#endif
}
// The same where the product needs no rounding, or c is 0.
FN vf32 product_sum(vf32 a, vf32 b, vf32 c) {
#if KVZIP_FMA
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}
FN vu32 shift_right_signed(vu32 x, vu32 by) { return (vu32)((vm32)x >> (vm32)by); }
FN u32 forgotten(u32 x) { return x; }
FN void warp_sync() {}

#define LANES_XOR_8(d, b) (b) ^ d, ((b) + 1) ^ d, ((b) + 2) ^ d, ((b) + 3) ^ d, ((b) + 4) ^ d, ((b) + 5) ^ d, ((b) + 6) ^ d, ((b) + 7) ^ d
#define LANES_XOR(d) LANES_XOR_8(d, 0), LANES_XOR_8(d, 8), LANES_XOR_8(d, 16), LANES_XOR_8(d, 24)
template <int D, class V>
FN V shuffle_xor(V v) {
  return __builtin_shufflevector(v, v, LANES_XOR(D));
}

// Uniform results: the largest lane; a bit per lane.
FN u32 largest(vu32 x) { return __builtin_reduce_max(x); }
FN u32 largest(vu16 x) { return __builtin_reduce_max(x); }
FN u32 smallest(vu32 x) { return __builtin_reduce_min(x); }
FN float first_lane(vf32 x) { return x[0]; }
FN float lane_value(vf32 x, u32 lane) { return x[lane]; }
FN u32 first_lane(vu32 x) { return x[0]; }
FN u32 lane_value(vu32 x, u32 lane) { return x[lane]; }
FN u32 ballot(vm32 m) {
#if KVZIP_AVX512
  __m512i h[2];
  __builtin_memcpy(h, &m, sizeof h);
  return (u32)_mm512_movepi32_mask(h[0]) | (u32)_mm512_movepi32_mask(h[1]) << 16;
#else
  u32 bits = 0;
  for (int l = 0; l < 32; ++l) bits |= (u32)(m[l] & 1) << l;
  return bits;
#endif
}
FN u32 ballot(vm16 m) {
#if KVZIP_AVX512
  return _mm512_movepi16_mask(bit_copy<__m512i>(m));
#else
  return ballot(__builtin_convertvector(m, vm32));
#endif
}
FN bool all(vm32 m) { return __builtin_reduce_and(m); }
FN u32 uniform_sum(vu32 x) { return __builtin_reduce_add(x); }
// Lane l gets bit l of the word.
FN vu32 bit_of_lane(u32 word) { return (splat(word) >> lane_ids()) & 1u; }

// The lane's own value in an array of one value per lane, and a value put into one lane of it.
FN vu32 with_lane(vu32 v, u32 lane, u32 value) {
  return select((vm32)(lane_ids() == lane), splat(value), v);
}

// ------------------------------------------------------------------------------------------- memory
FN vu32 load_u32(const u32* p) { return load_as<vu32>(p); }
FN vu16 load_u16(const u16* p) { return load_as<vu16>(p); }
FN vu16 load_u8(const u8* p) { return __builtin_convertvector(load_as<vu8>(p), vu16); }
FN void store_u32(u32* p, vu32 v) { __builtin_memcpy(p, &v, sizeof v); }
FN void store_u16(u16* p, vu16 v) { __builtin_memcpy(p, &v, sizeof v); }
FN void store_u8(u8* p, vu16 v) {
  vu8 b = __builtin_convertvector(v, vu8);
  __builtin_memcpy(p, &b, sizeof b);
}
FN vu16 load_lanes(const u16* p) { return load_u16(p); }
FN vu32 load_lanes(const u32* p) { return load_u32(p); }
FN void store_lanes(u16* p, vu16 v) { store_u16(p, v); }
FN void store_lanes(u32* p, vu32 v) { store_u32(p, v); }
template <class T>
FN void store_uniform(T* p, T v) {
  *p = v;
}
FN vu16 load_lanes(const u8* p) { return load_u8(p); }
FN void store_lanes(u8* p, vu16 v) { store_u8(p, v); }
// The first `count` lanes from memory, the others 0; and into memory.
template <class T>
FN auto load_some(const T* p, u32 count) {
  if (__builtin_expect(count == LANES, true)) return load_lanes(p);
  decltype(load_lanes(p)) v = {};
  for (u32 l = 0; l < count; ++l) v[l] = p[l];
  return v;
}
template <class T, class V>
FN void store_some(T* p, V v, u32 count) {
  if (__builtin_expect(count == LANES, true)) return store_lanes(p, v);
  for (u32 l = 0; l < count; ++l) p[l] = (T)v[l];
}
// table[index of the lane]
FN vu16 gather_u16(const u16* table, vu32 index) {
  vu16 v;
  for (int l = 0; l < 32; ++l) v[l] = table[index[l]];
  return v;
}
FN vf32 gather_f32(const float* table, vu32 index) {
  vf32 v;
  for (int l = 0; l < 32; ++l) v[l] = table[index[l]];
  return v;
}
// table[row of the lane][lane], rows of 32 words
FN vu32 gather_row_u32(const u32* table, vu16 row) {
#if KVZIP_AVX512
  vu32 index = widen(row) * 32u + lane_ids();
  __m512i i[2], v[2];
  __builtin_memcpy(i, &index, sizeof i);
  v[0] = _mm512_i32gather_epi32(i[0], table, 4);
  v[1] = _mm512_i32gather_epi32(i[1], table, 4);
  return load_as<vu32>(v);
#else
  alignas(64) u16 rows[32];
  alignas(64) u32 out[32];
  store_u16(rows, row);
  for (int l = 0; l < 32; ++l) out[l] = table[rows[l] * 32 + l];
  return load_u32(out);
#endif
}
// ++table[row of the lane][lane]
FN void count_row_u16(u16* table, vu16 row) {
  alignas(64) u16 rows[32];
  store_u16(rows, row);
  for (int l = 0; l < 32; ++l) ++table[rows[l] * 32 + l];
}

// What divides many numbers, and one for each row. See the CUDA side.
struct Divisor {
  vf32 value;

  static METHOD Divisor make(vf32 x) { return {x}; }
  METHOD vm32 exact() const { return lane_ids() < LANES; }
  METHOD vf32 divide(vf32 x) const { return x / value; }
};
struct RowDivisors {
  const float* values;

  METHOD bool set(const float* of_rows, u32) {
    values = of_rows;
    return true;
  }
  METHOD Divisor at(u32 row) const { return {splatf(values[row])}; }
};

// Every lane copies its share of `count` elements.
template <class T>
FN void warp_copy(T* to, const T* from, u64 count) {
  __builtin_memcpy(to, from, count * sizeof(T));
}

// 32 consecutive channels of a plane, one per lane, starting at channel 32 * group. Lanes beyond the last channel are
// idle: they load 0 and store nothing. Inside one head the lanes are contiguous (`whole`), else each has its own offset.
template <class E>
struct Column {
  typedef typename E::raw raw;
  typedef typename E::vraw vraw;
  u8* base;
  i64 token_stride;
  u32 active;
  bool whole;
  i64 offsets[32];

  static METHOD Column make(const Plane& plane, u32 group) {
    u32 first = group * LANES, left = plane.heads * plane.head_dim - first;
    return at(plane, first, left < LANES ? left : LANES);
  }
  static METHOD Column at(const Plane& plane, u32 first, u32 active) {
    Column c;
    c.active = active;
    c.token_stride = plane.token_stride;
    bool joined = plane.head_stride == (i64)(plane.head_dim * sizeof(raw));
    c.whole = c.active == LANES && (joined || first % plane.head_dim + LANES <= plane.head_dim);
    c.base = (u8*)plane.data;
    i64 start = (i64)(first / plane.head_dim) * plane.head_stride + (i64)(first % plane.head_dim) * (i64)sizeof(raw);
    for (u32 l = 0; l < LANES; ++l) c.offsets[l] = start + l * sizeof(raw);
    if (c.whole) return c;
    for (u32 l = 0; l < c.active; ++l) {
      u32 channel = first + l;
      c.offsets[l] = (i64)(channel / plane.head_dim) * plane.head_stride + (i64)(channel % plane.head_dim) * (i64)sizeof(raw);
    }
    return c;
  }
  // Any channels, one per lane, of which the first `active` count; `whole` if they are neighbours.
  static METHOD Column of_channels(const Plane& plane, vu32 channels, u32 active) {
    Column c;
    c.base = (u8*)plane.data;
    c.token_stride = plane.token_stride;
    c.active = active;
    for (u32 l = 0; l < LANES; ++l)
      c.offsets[l] = (i64)(channels[l] / plane.head_dim) * plane.head_stride +
                     (i64)(channels[l] % plane.head_dim) * (i64)sizeof(raw);
    c.whole = active == LANES;
    for (u32 l = 0; l < LANES; ++l) c.whole = c.whole && c.offsets[l] == c.offsets[0] + (i64)(l * sizeof(raw));
    return c;
  }
  METHOD vm32 idle() const { return (vm32)(lane_ids() >= active); }
  template <bool WHOLE>
  METHOD vraw load(u32 token) const {
    const u8* p = base + (i64)token * token_stride;
    if (WHOLE) return load_as<vraw>(p + offsets[0]);
    vraw v = {};
    for (u32 l = 0; l < active; ++l) v[l] = *(const raw*)(p + offsets[l]);
    return v;
  }
  // Asks for a row that is loaded later, if it is there: rows far from each other do not come by themselves.
  METHOD void ask_for(u32 token) const {
    const u8* p = base + (i64)token * token_stride + offsets[0];
    for (u32 i = 0; i <= sizeof(vraw); i += 64) __builtin_prefetch(p + (i < sizeof(vraw) ? i : sizeof(vraw) - 1));
  }
  template <bool WHOLE>
  METHOD void store(u32 token, vraw v) const {
    u8* p = base + (i64)token * token_stride;
    if (WHOLE)
      __builtin_memcpy(p + offsets[0], &v, sizeof v);
    else
      for (u32 l = 0; l < active; ++l) *(raw*)(p + offsets[l]) = v[l];
  }
};

// A lane's share of a strip: PACK neighbouring channels, one on the CPU.
enum : int { PACK = 1, ROWS = 1 };
constexpr u32 STRIP = LANES * PACK;
template <class V>
struct Pack {
  V v[PACK];
};

// 32 * PACK consecutive channels of a plane. See the CUDA side.
template <class E>
struct Strip {
  Column<E> column;
  u32 first;
  bool whole;

  static METHOD Strip make(const Plane& plane, u32 strip) {
    u32 start = strip * LANES, left = plane.heads * plane.head_dim - start;
    return at(plane, start, left < LANES ? left : LANES);
  }
  static METHOD Strip at(const Plane& plane, u32 start, u32 count) {
    Strip strip = {Column<E>::at(plane, start, count), start, false};
    strip.whole = strip.column.whole;
    return strip;
  }
  METHOD vm32 idle(u32) const { return column.idle(); }
  METHOD vu32 channel(u32) const { return lane_ids() + first; }
  METHOD bool whole_with(const void*) const { return whole; }
  typedef Pack<typename E::vraw> Loaded;
  typedef Pack<vu32> LoadedBytes;
  static METHOD const Loaded& values(const Loaded& loaded) { return loaded; }
  static METHOD const Loaded& loaded(const Loaded& pack) { return pack; }
  static METHOD const LoadedBytes& bytes(const LoadedBytes& loaded) { return loaded; }
  template <bool WHOLE>
  METHOD Loaded load(u32 token) const {
    return {{column.template load<WHOLE>(token)}};
  }
  METHOD Loaded load_row(u32 token, u32 beyond = 0) const {
    return {{load_as<typename E::vraw>(column.base + (i64)token * column.token_stride + column.offsets[0] +
                                       beyond * sizeof(typename E::raw))}};
  }
  METHOD const u8* row(u32 token) const { return column.base + (i64)token * column.token_stride + column.offsets[0]; }
  METHOD const u8* load(const u8* p, Loaded (&rows)[ROWS]) const {
    rows[0] = {{load_as<typename E::vraw>(p)}};
    return p + column.token_stride;
  }
  METHOD void load(u32 token, Loaded (&rows)[ROWS]) const { load(row(token), rows); }
  static METHOD bool none_above(const Loaded (&rows)[ROWS], float limit) {
    typename E::vraw magnitude = rows[0].v[0] & E::narrowed(splat(E::ABS));
    return !__builtin_reduce_or(magnitude > E::from_exact(splatf(limit)));
  }
  METHOD vf32 zero_if_idle(vf32 x, u32) const { return whole ? x : select(column.idle(), splatf(0.f), x); }
  template <bool WHOLE>
  METHOD void store(u32 token, const Loaded& pack) const {
    column.template store<WHOLE>(token, pack.v[0]);
  }
  template <bool WHOLE>
  METHOD LoadedBytes load_bytes(const u8* row) const {
    return {{widen(WHOLE ? load_u8(row) : load_some(row, column.active))}};
  }
  static METHOD vu8 low_bytes(const Pack<vu32>& codes) { return __builtin_convertvector(codes.v[0], vu8); }
  static METHOD vu8 signed_bytes(const Pack<vu32>& codes, const Loaded& numbers) {
    vu8 signs = __builtin_convertvector(numbers.v[0] >> (8 * sizeof(typename E::raw) - 8), vu8) & (u8)0x80;
    return low_bytes(codes) | signs;
  }
  template <bool WHOLE>
  METHOD void store_bytes(u8* row, vu8 bytes) const {
    __builtin_memcpy(row, &bytes, WHOLE ? sizeof bytes : column.active);
  }
};

// table[index of the lane]; `neighbours` says whether the lanes' indexes follow each other.
FN vf32 gather_f32(const float* table, vu32 index, bool neighbours) {
  return neighbours ? load_as<vf32>(table + index[0]) : gather_f32(table, index);
}

// Rows below `count` in turn: `work(row, load(row))`. A processor looks ahead by itself.
enum Order : bool { FORWARDS, BACKWARDS };
template <Order ORDER, u32 AHEAD = 2, class Load, class Work>
FN void in_turn(u32 count, Load load, Work work) {
  for (u32 turn = 0; turn < count; ++turn) {
    u32 row = ORDER == BACKWARDS ? count - 1 - turn : turn;
    [[clang::always_inline]] work(row, load(row));
  }
}

// ------------------------------------------------------------------------------------------- half precision
// Integer forms, for processors without conversion instructions.
FN vf32 half_to_float(vu16 h) {
#if KVZIP_AVX512
  __m256i in[2];
  __m512 out[2];
  __builtin_memcpy(in, &h, sizeof in);
  out[0] = _mm512_cvtph_ps(in[0]);
  out[1] = _mm512_cvtph_ps(in[1]);
  return load_as<vf32>(out);
#elif defined(__F16C__)
  __m128i in[4];
  __m256 out[4];
  __builtin_memcpy(in, &h, sizeof in);
  for (int i = 0; i < 4; ++i) out[i] = _mm256_cvtph_ps(in[i]);
  return load_as<vf32>(out);
#elif defined(__aarch64__)
  typedef _Float16 vf16 __attribute__((vector_size(64)));
  return __builtin_convertvector(bit_copy<vf16>(h), vf32);
#else
  vu32 u = widen(h), sign = (u & 0x8000u) << 16, magnitude = u & 0x7fffu;
  vf32 normal = as_float((magnitude << 13) + 0x38000000u);
  vf32 subnormal = int_to_float(magnitude) * 5.9604644775390625e-8f;
  vf32 special = as_float((magnitude << 13) + 0x70000000u + select((vm32)(magnitude > 0x7c00u), splat(0x400000u), splat(0)) - select((vm32)((magnitude & 0x200u) != 0u & magnitude > 0x7c00u), splat(0x400000u), splat(0)));
  vf32 f = select((vm32)(magnitude < 0x400u), subnormal, select((vm32)(magnitude >= 0x7c00u), special, normal));
  return as_float(as_bits(f) | sign);
#endif
}
FN vu16 float_to_half(vf32 f) {
#if KVZIP_AVX512
  __m512 in[2];
  __m256i out[2];
  __builtin_memcpy(in, &f, sizeof in);
  out[0] = _mm512_cvtps_ph(in[0], 0);
  out[1] = _mm512_cvtps_ph(in[1], 0);
  return load_as<vu16>(out);
#elif defined(__F16C__)
  __m256 in[4];
  __m128i out[4];
  __builtin_memcpy(in, &f, sizeof in);
  for (int i = 0; i < 4; ++i) out[i] = _mm256_cvtps_ph(in[i], 0);
  return load_as<vu16>(out);
#elif defined(__aarch64__)
  typedef _Float16 vf16 __attribute__((vector_size(64)));
  return bit_copy<vu16>(__builtin_convertvector(f, vf16));
#else
  vu32 u = as_bits(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  vu32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  vu32 subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  vu32 nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  vu32 h = select((vm32)(magnitude < 0x38800000u), subnormal, normal);
  h = select((vm32)(magnitude >= 0x477ff000u), splat(0x7c00u), h);
  h = select((vm32)(magnitude > 0x7f800000u), nan, h);
  return narrow(sign | h);
#endif
}
// Of what is not NaN.
FN vf32 half_number(vu16 h) { return half_to_float(h); }
FN vu16 number_to_half(vf32 f) { return float_to_half(f); }
FN vf32 nearest_half(vf32 f) { return half_to_float(float_to_half(f)); }
FN vf32 nearest_bfloat(vf32 f) {
  vu32 u = as_bits(f);
  return as_float((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
}
FN float scalar_half_to_float(u32 bits) { return half_to_float(splat16(bits))[0]; }

// A positive float of MANTISSA bits whose exponents are those of float32 less BIAS, subnormal ones included. (Arithmetic on
// float32's own subnormals would take hundreds of cycles.)
template <u32 MANTISSA, u32 BIAS>
FN vf32 short_float(vu32 bits) {
  vf32 normal = as_float((bits << (23 - MANTISSA)) + (BIAS << 23));
  vf32 subnormal = int_to_float(bits) * scalar_as_float((BIAS + 1 - MANTISSA) << 23);
  return select(bits < (1u << MANTISSA), subnormal, normal);
}

// ------------------------------------------------------------------------------------------- rANS primitives
#if KVZIP_AVX2
// For each of 256 masks of 8 lanes: the word that each lane takes.
struct Expansion {
  u32 lanes[256][8];
  constexpr Expansion() : lanes() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int lane = 0; lane < 8; ++lane) lanes[mask][lane] = (mask >> lane & 1) ? next++ : 0;
    }
  }
};
static constexpr Expansion kExpansion;
#elif defined(__aarch64__)
// For each of 256 masks of 8 lanes: the bytes that each lane takes (none: beyond the table), and how many words they are.
struct Expansion {
  u8 bytes[256][16], words[256];
  constexpr Expansion() : bytes(), words() {
    for (int mask = 0; mask < 256; ++mask)
      for (int byte = 0; byte < 16; ++byte) {
        bool taken = mask >> byte / 2 & 1;
        bytes[mask][byte] = taken ? 2 * words[mask] + byte % 2 : 255;
        words[mask] += taken && byte % 2;
      }
  }
};
static constexpr Expansion kExpansion;
#endif

// Lanes with m shift in the next 16-bit words at p, in lane order. May read 32 words from p on.
FN vu32 pull_words(const u16*& p, vm32 m, vu32 x) {
#if KVZIP_AVX512
  __m512i h[2], mask[2];
  __builtin_memcpy(h, &x, sizeof h);
  __builtin_memcpy(mask, &m, sizeof mask);
  for (int i = 0; i < 2; ++i) {
    __mmask16 k = _mm512_movepi32_mask(mask[i]);
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    __m512i taken = _mm512_maskz_expand_epi32(k, words);
    h[i] = _mm512_mask_or_epi32(h[i], k, _mm512_slli_epi32(h[i], 16), taken);
    p += __builtin_popcount(k);
  }
  return load_as<vu32>(h);
#elif KVZIP_AVX2
  __m256i h[4], mask[4];
  __builtin_memcpy(h, &x, sizeof h);
  __builtin_memcpy(mask, &m, sizeof mask);
  for (int i = 0; i < 4; ++i) {
    int k = _mm256_movemask_ps(_mm256_castsi256_ps(mask[i]));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    __m256i taken = _mm256_permutevar8x32_epi32(words, _mm256_loadu_si256((const __m256i*)kExpansion.lanes[k]));
    h[i] = _mm256_blendv_epi8(h[i], _mm256_or_si256(_mm256_slli_epi32(h[i], 16), taken), mask[i]);
    p += __builtin_popcount(k);
  }
  return load_as<vu32>(h);
#elif defined(__aarch64__)
  const uint16x8_t weights = {1, 2, 4, 8, 16, 32, 64, 128};
  uint32x4_t h[8], mask[8];
  __builtin_memcpy(h, &x, sizeof h);
  __builtin_memcpy(mask, &m, sizeof mask);
  for (int i = 0; i < 8; i += 2) {
    uint16x8_t lanes = vcombine_u16(vmovn_u32(mask[i]), vmovn_u32(mask[i + 1]));
    u32 k = vaddvq_u16(vandq_u16(lanes, weights));
    uint8x16_t found = vqtbl1q_u8(load_as<uint8x16_t>(p), load_as<uint8x16_t>(kExpansion.bytes[k]));
    uint16x8_t words = vreinterpretq_u16_u8(found);
    // The word below, the state's low half above it.
    h[i] = vbslq_u32(mask[i], vsliq_n_u32(vmovl_u16(vget_low_u16(words)), h[i], 16), h[i]);
    h[i + 1] = vbslq_u32(mask[i + 1], vsliq_n_u32(vmovl_high_u16(words), h[i + 1], 16), h[i + 1]);
    p += kExpansion.words[k];
  }
  return load_as<vu32>(h);
#else
  alignas(64) u32 v[32];
  store_u32(v, x);
  for (int l = 0; l < 32; ++l) {
    v[l] = m[l] ? v[l] << 16 | *p : v[l];
    p -= m[l];
  }
  return load_u32(v);
#endif
}

// The mirror: lanes with m put their low 16 bits below p, the highest lane first. May write 32 words below p.
FN vu32 push_words(u16*& p, vm32 m, vu32 x) {
#if KVZIP_AVX512
  __m512i h[2], mask[2];
  __builtin_memcpy(h, &x, sizeof h);
  __builtin_memcpy(mask, &m, sizeof mask);
  for (int i = 1; i >= 0; --i) {
    __mmask16 k = _mm512_movepi32_mask(mask[i]);
    int n = __builtin_popcount(k);
    p -= n;
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(k, h[i]));
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), words);
    h[i] = _mm512_mask_srli_epi32(h[i], k, h[i], 16);
  }
  return load_as<vu32>(h);
#else
  alignas(64) u32 v[32];
  store_u32(v, x);
  for (int l = 31; l >= 0; --l) {
    p[-1] = (u16)v[l];
    p += m[l];
  }
  return select(m, x >> 16, x);
#endif
}

// cumulative: [N + 1][32] counts per lane. The largest symbol with cumulative <= slot, and its interval [low, high).
// A tree of selects finds it for all 32 lanes without a gather: each level halves the candidates.
template <int N>
FN vu16 find_symbol(const u16* cumulative, vu16 slot, vu16& low, vu16& high) {
  vu16 tree[N / 2];
  low = load_u16(cumulative);
  high = load_u16(cumulative + N * 32);
  vu16 middle = load_u16(cumulative + N / 2 * 32);
  vm16 m = slot >= middle;
  low = select(m, middle, low);
  high = select(m, high, middle);
  vu16 symbol = bit_copy<vu16>(m) & (u16)(N / 2);
#pragma clang loop unroll(full)
  for (int i = 1; i < N / 2; ++i) tree[i] = select(m, load_u16(cumulative + (i + N / 2) * 32), load_u16(cumulative + i * 32));
#pragma clang loop unroll(full)
  for (int d = N / 4; d; d >>= 1) {
    middle = tree[d];
    m = slot >= middle;
    low = select(m, middle, low);
    high = select(m, high, middle);
    symbol |= bit_copy<vu16>(m) & (u16)d;
#pragma clang loop unroll(full)
    for (int i = 1; i < d; ++i) tree[i] = select(m, tree[i + d], tree[i]);
  }
  return symbol;
}

// The interval [low, high) of a symbol below N: the same tree, led by the symbol's bits.
template <int N>
FN vu16 pick_count(const u16* counts, vu16 symbol) {
  vu16 tree[N / 2];
  vm16 m = (vm16)((symbol & (u16)(N / 2)) != 0);
#pragma clang loop unroll(full)
  for (int i = 0; i < N / 2; ++i) tree[i] = select(m, load_u16(counts + (i + N / 2) * 32), load_u16(counts + i * 32));
#pragma clang loop unroll(full)
  for (int d = N / 4; d; d >>= 1) {
    m = (vm16)((symbol & (u16)d) != 0);
#pragma clang loop unroll(full)
    for (int i = 0; i < d; ++i) tree[i] = select(m, tree[i + d], tree[i]);
  }
  return tree[0];
}
template <int N>
FN void interval_of_symbol(const u16* cumulative, vu16 symbol, vu16& low, vu16& high) {
  low = pick_count<N>(cumulative, symbol);
  high = pick_count<N>(cumulative + 32, symbol);
}

// a / b for b <= 2^12 and a / b < 2^20: the float estimate is off by one at most.
FN vu32 divide(vu32 a, vu32 b) {
  vm32 q = __builtin_convertvector(__builtin_convertvector(a, vf32) / __builtin_convertvector((vm32)b, vf32), vm32);
  vm32 rest = (vm32)(a - (vu32)q * b);
  q += rest >> 31;
  rest = (vm32)(a - (vu32)q * b);
  q -= (vm32)((vu32)rest >= b);
  return (vu32)q;
}
// a / b for any a and a uniform b.
FN vu32 divide_by(vu32 a, u32 b) { return a / b; }

// ------------------------------------------------------------------------------------------- range coder primitives
// Zeros above the highest one of x > 0.
FN vu32 leading_zeros(vu32 x) {
#if KVZIP_AVX512 && defined(__AVX512CD__)
  __m512i h[2];
  __builtin_memcpy(h, &x, sizeof h);
  for (int i = 0; i < 2; ++i) h[i] = _mm512_lzcnt_epi32(h[i]);
  return load_as<vu32>(h);
#else
  // The exponent of a float. Without the one behind the highest nothing rounds up to the next power of two.
  vu32 exponent = as_bits(int_to_float(x & ~(x >> 1))) >> 23;
  return select((vm32)(x >= 0x80000000u), splat(0), 158u - exponent);
#endif
}
// The four bytes at each lane's offset, the first the highest.
FN vu32 gather_big_endian(const u8* p, vu32 offset) {
#if KVZIP_AVX512
  __m512i h[2];
  __builtin_memcpy(h, &offset, sizeof h);
  const __m512i reversed = _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
  for (int i = 0; i < 2; ++i) h[i] = _mm512_shuffle_epi8(_mm512_i32gather_epi32(h[i], p, 1), reversed);
  return load_as<vu32>(h);
#else
  alignas(64) u32 v[32];
  store_u32(v, offset);
  for (int l = 0; l < 32; ++l) v[l] = __builtin_bswap32(load_as<u32>(p + v[l]));
  return load_u32(v);
#endif
}
// Lanes with m put their low 16 bits, the higher byte first, at their position, which is even and moves on.
FN void put_halves(u8* p, vu32& position, vm32 m, vu32 x) {
  alignas(64) u32 at[32], v[32];
  store_u32(at, position);
  store_u32(v, x);
  for (u32 lanes = ballot(m); lanes; lanes &= lanes - 1) {
    int l = __builtin_ctz(lanes);
    u16 half = __builtin_bswap16((u16)v[l]);
    __builtin_memcpy(p + at[l], &half, sizeof half);
  }
  position = position + ((vu32)m & 2u);
}
// Lanes with m add one to the number that ends before their position.
FN void increment_before(u8* p, vu32 position, vm32 m) {
  for (u32 lanes = ballot(m); lanes; lanes &= lanes - 1)
    for (u8* at = p + position[__builtin_ctz(lanes)]; ++*--at == 0;) {
    }
}

// ------------------------------------------------------------------------------------------- arithmetic and packed numbers
FN vf32 square_root(vf32 x) { return __builtin_elementwise_sqrt(x); }
FN double scalar_square_root(double x) {
  typedef double Pair __attribute__((vector_size(16)));
  return __builtin_elementwise_sqrt((Pair){x, x})[0];
}
// The whole part of 0 <= x < 2^31.
FN vu32 truncate(vf32 x) { return (vu32)__builtin_convertvector(x, vm32); }
// What the lane below 16 has that each lane's index names.
FN vf32 lookup_16(vf32 table, vu32 index) {
#if KVZIP_AVX512
  __m512i i[2];
  __m512 entries = load_as<__m512>(&table), v[2];
  __builtin_memcpy(i, &index, sizeof i);
  v[0] = _mm512_permutexvar_ps(i[0], entries);
  v[1] = _mm512_permutexvar_ps(i[1], entries);
  return load_as<vf32>(v);
#elif KVZIP_AVX2
  __m256i i[4];
  __m256 entries[4], v[4];
  __builtin_memcpy(i, &index, sizeof i);
  __builtin_memcpy(entries, &table, sizeof entries);
  for (int q = 0; q < 4; ++q) {
    __m256 low = _mm256_permutevar8x32_ps(entries[0], i[q]), high = _mm256_permutevar8x32_ps(entries[1], i[q]);
    v[q] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i[q], 28)));
  }
  return load_as<vf32>(v);
#else
  alignas(64) float entries[LANES];
  __builtin_memcpy(entries, &table, sizeof entries);
  return gather_f32(entries, index & 15u);
#endif
}
FN vu32 lookup_16(vu32 table, vu32 index) { return as_bits(lookup_16(as_float(table), index)); }
// Up to 15 ascending bounds.
struct Bounds {
  const float* bounds;
  u32 count;

  static METHOD Bounds make(const float* bounds, u32 count) { return {bounds, count}; }
  // How many of them are at most x; of NaN none.
  METHOD vu32 rank(vf32 x) const {
    vu32 rank = splat(0);
    for (u32 i = 0; i < count; ++i) rank = rank + select(x >= bounds[i], splat(1), splat(0));
    return rank;
  }
};

typedef u8 Bytes16 __attribute__((vector_size(16)));
typedef u8 Bytes128 __attribute__((vector_size(128)));
template <class T, T... I>
struct Sequence {};
template <int B, int... I>
FN vu16 byte_pairs(Bytes16 b, Sequence<int, I...>) {
  return bit_copy<vu16>(__builtin_shufflevector(b, b, (I / 2 * B / 8 + I % 2)...));
}
template <int B, int... I>
FN Bytes16 stream_bytes(Bytes128 b, Sequence<int, I...>) {
  return __builtin_shufflevector(b, b, (I < 4 * B ? I / B * 32 + I % B : 0)...);
}
// `count` numbers of B <= 4 bits, a stream of bits, least significant first. A load may read 16 bytes from p on.
template <int B>
FN vu32 load_packed(const u8* p, u32 count) {
  Bytes16 bytes = {};
  if (count == LANES)
    bytes = load_as<Bytes16>(p);
  else
    for (u32 i = 0; i < (count * B + 7) / 8; ++i) bytes[i] = p[i];
  vu16 pairs = byte_pairs<B>(bytes, __make_integer_seq<Sequence, int, 64>());
  return widen(pairs) >> (lane_ids() * (u32)B & 7u) & ((1u << B) - 1);
}
// The mirror, of numbers 32 r + lane in v[r] that are 0 from `count` on.
template <int B, int R>
FN void store_packed(u8* p, const vu32* v, u32 count) {
  for (u32 r = 0; r < R && r * LANES < count; ++r, p += 4 * B) {
    vu32 x = v[r] | shuffle_xor<1>(v[r]) << B;
    x = x | shuffle_xor<2>(x) << 2 * B;
    x = x | shuffle_xor<4>(x) << 4 * B;
    Bytes16 bytes = stream_bytes<B>(bit_copy<Bytes128>(x), __make_integer_seq<Sequence, int, 16>());
    if (u32 left = count - r * LANES; left >= LANES)
      __builtin_memcpy(p, &bytes, 4 * B);
    else
      for (u32 i = 0; i < (left * B + 7) / 8; ++i) p[i] = bytes[i];
  }
}
