// CUDA C++ as a CPU's compiler takes it: put in front of a kernel's source.
#pragma once
#include "runtime.h"

// Kernels are checked, what calls them is not: see building.py.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
// One block runs at a time: its shared memory may be static. `used`: other fibers change it where the compiler sees no call
// that could.
#define __shared__ static __attribute__((section("shared"), used))

struct EmulatedDim {
  unsigned x, y, z;
};
#define threadIdx (EmulatedDim{emulator::emulator_thread(), 0, 0})
#define blockIdx (EmulatedDim{emulator::emulator_block(), 0, 0})
#define blockDim (EmulatedDim{emulator::emulator_threads(), 1, 1})
#define gridDim (EmulatedDim{emulator::emulator_blocks(), 1, 1})

#define EMULATED static inline __attribute__((always_inline))

struct alignas(4) uchar4 { unsigned char x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
EMULATED uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
EMULATED uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
EMULATED To emulated_bits(From from) {
  To to = {};
  __builtin_memcpy(&to, &from, sizeof from < sizeof to ? sizeof from : sizeof to);
  return to;
}

// ------------------------------------------------------------------------------------------- barriers and warps
EMULATED void __syncthreads() { emulator::emulator_sync_block(); }
EMULATED void __syncwarp(unsigned mask = ~0u) { emulator::emulator_sync_warp(mask); }
EMULATED void __threadfence() {}
EMULATED void __threadfence_block() {}

template <class T>
EMULATED T emulated_shuffle(emulator::Shuffle mode, unsigned mask, T value, unsigned distance, int width) {
  bool in_range;
  unsigned clamp = (unsigned)(32 - width) << 8 | (mode == emulator::UP ? 0u : 31u);
  emulator::u64 bits = emulated_bits<emulator::u64>(value);
  return emulated_bits<T>(emulator::emulator_shuffle(mode, mask, bits, distance, clamp, &in_range));
}
template <class T>
EMULATED T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulated_shuffle(emulator::INDEX, mask, value, lane, width);
}
template <class T>
EMULATED T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulated_shuffle(emulator::UP, mask, value, distance, width);
}
template <class T>
EMULATED T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulated_shuffle(emulator::DOWN, mask, value, distance, width);
}
template <class T>
EMULATED T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  return emulated_shuffle(emulator::BUTTERFLY, mask, value, distance, width);
}
EMULATED unsigned __ballot_sync(unsigned mask, int vote) { return emulator::emulator_ballot(mask, vote != 0); }
EMULATED int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
EMULATED int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }
EMULATED unsigned __match_any_sync(unsigned mask, unsigned value) { return emulator::emulator_match(mask, value); }
EMULATED unsigned __reduce_add_sync(unsigned mask, unsigned x) { return emulator::emulator_reduce(emulator::ADD, mask, x); }
EMULATED unsigned __reduce_min_sync(unsigned mask, unsigned x) { return emulator::emulator_reduce(emulator::MIN, mask, x); }
EMULATED unsigned __reduce_max_sync(unsigned mask, unsigned x) { return emulator::emulator_reduce(emulator::MAX, mask, x); }
EMULATED unsigned __reduce_and_sync(unsigned mask, unsigned x) { return emulator::emulator_reduce(emulator::AND, mask, x); }
EMULATED unsigned __reduce_or_sync(unsigned mask, unsigned x) { return emulator::emulator_reduce(emulator::OR, mask, x); }

// ------------------------------------------------------------------------------------------- atomics
template <class T>
EMULATED T emulated_atomic(emulator::Operation operation, T* p, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics are on 32 or 64 bits");
  emulator::u64 bits = emulated_bits<emulator::u64>(value);
  return emulated_bits<T>(emulator::emulator_atomic(operation, (emulator::u64)p, sizeof(T), bits));
}
template <class T>
EMULATED T atomicAdd(T* p, T v) { return emulated_atomic(emulator::ADD, p, v); }
EMULATED float atomicAdd(float* p, float v) { return emulated_atomic(emulator::ADD_FLOAT, p, v); }
template <class T>
EMULATED T atomicMax(T* p, T v) { return emulated_atomic((T)-1 < 0 ? emulator::SIGNED_MAX : emulator::MAX, p, v); }
template <class T>
EMULATED T atomicMin(T* p, T v) { return emulated_atomic((T)-1 < 0 ? emulator::SIGNED_MIN : emulator::MIN, p, v); }
template <class T>
EMULATED T atomicOr(T* p, T v) { return emulated_atomic(emulator::OR, p, v); }
template <class T>
EMULATED T atomicAnd(T* p, T v) { return emulated_atomic(emulator::AND, p, v); }
template <class T>
EMULATED T atomicExch(T* p, T v) { return emulated_atomic(emulator::EXCHANGE, p, v); }
template <class T>
EMULATED T atomicCAS(T* p, T expected, T v) {
  return (T)emulator::emulator_compare_and_swap((emulator::u64)p, sizeof(T), (emulator::u64)expected, (emulator::u64)v);
}

// ------------------------------------------------------------------------------------------- numbers
EMULATED unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
EMULATED float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
EMULATED int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMULATED int __ffs(int x) { return __builtin_ffs(x); }
EMULATED unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
EMULATED unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((emulator::u64)a * b >> 32); }
EMULATED unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((emulator::u64)high << 32 | low) << (shift & 31)) >> 32);
}
EMULATED unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((emulator::u64)high << 32 | low) >> (shift & 31));
}
EMULATED unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  emulator::u64 both = (emulator::u64)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
EMULATED float __fsqrt_rn(float x) { return __builtin_elementwise_sqrt(x); }
EMULATED double __dsqrt_rn(double x) { return __builtin_elementwise_sqrt(x); }
template <class T>
EMULATED T __ldg(const T* p) { return *p; }
EMULATED float fabsf(float x) { return __builtin_fabsf(x); }
EMULATED float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
EMULATED float fminf(float a, float b) { return a < b || b != b ? a : b; }
// Instructions as the hardware does them: all NaN become one.
EMULATED float larger_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b); }
EMULATED float fused(float a, float b, float c) { return emulator::fused(a, b, c); }
EMULATED unsigned emulated_bfloat(float x) {
  unsigned bits = __float_as_uint(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
EMULATED unsigned cvt_bf16x2_f32(float high, float low) { return emulated_bfloat(high) << 16 | emulated_bfloat(low); }
EMULATED float cvt_f32_f16(unsigned short bits) {
  float x = emulated_bits<_Float16>(bits);
  return x == x ? x : __uint_as_float(0x7fffffffu);
}
EMULATED unsigned short cvt_f16_f32(float x) {
  return x == x ? emulated_bits<unsigned short>((_Float16)x) : (unsigned short)0x7fff;
}
EMULATED unsigned cvt_f16x2_f32(float high, float low) { return (unsigned)cvt_f16_f32(high) << 16 | cvt_f16_f32(low); }
EMULATED float emulated_upper(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
EMULATED float emulated_lower(unsigned pair) { return __uint_as_float(pair << 16); }
#define EMULATED_PAIRS(name, f)                                                                         \
  EMULATED unsigned name##_bf16x2(unsigned a, unsigned b) {                                             \
    return cvt_bf16x2_f32(f(emulated_upper(a), emulated_upper(b)), f(emulated_lower(a), emulated_lower(b))); \
  }                                                                                                     \
  EMULATED unsigned name##_f16x2(unsigned a, unsigned b) {                                              \
    return cvt_f16x2_f32(f(cvt_f32_f16(a >> 16), cvt_f32_f16(b >> 16)), f(cvt_f32_f16(a), cvt_f32_f16(b))); \
  }
EMULATED_PAIRS(min, fminf)
EMULATED_PAIRS(max, fmaxf)

// ------------------------------------------------------------------------------------------- the host's way in
namespace emulator {

template <int... I>
struct Indices {};

template <class... T, int... I>
EMULATED void call(void (*kernel)(T...), void** arguments, Indices<I...>) {
  kernel(*(T*)arguments[I]...);
}
template <class Index, Index... I>
using AsIndices = Indices<I...>;
template <class... T>
EMULATED void call(void (*kernel)(T...), void** arguments) {
  call(kernel, arguments, __make_integer_seq<AsIndices, int, sizeof...(T)>{});
}
extern "C" u8 __start_shared[] __attribute__((weak, visibility("hidden")));
extern "C" u8 __stop_shared[] __attribute__((weak, visibility("hidden")));

template <class... T>
EMULATED void describe(Kernel* kernel, void (*entry)(void**), void (*)(T...)) {
  u64 shared_bytes = __start_shared ? __stop_shared - __start_shared : 0;
  *kernel = {entry, __start_shared, shared_bytes, sizeof...(T), {sizeof(T)...}};
}

}  // namespace emulator
