// PTX's instructions in C++, for what ptx.py makes of a kernel. Registers are unsigned integers that hold bits, as in PTX.
#pragma once
#include "runtime.h"

namespace emulator {

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned __int128 u128;
typedef __int128 i128;

#define PTX static inline __attribute__((always_inline))

template <class T>
struct Traits {};
template <> struct Traits<u8> { typedef u8 Bits; typedef u16 Wide; };
template <> struct Traits<i8> { typedef u8 Bits; typedef i16 Wide; };
template <> struct Traits<u16> { typedef u16 Bits; typedef u32 Wide; };
template <> struct Traits<i16> { typedef u16 Bits; typedef i32 Wide; };
template <> struct Traits<u32> { typedef u32 Bits; typedef u64 Wide; };
template <> struct Traits<i32> { typedef u32 Bits; typedef i64 Wide; };
template <> struct Traits<u64> { typedef u64 Bits; typedef u128 Wide; };
template <> struct Traits<i64> { typedef u64 Bits; typedef i128 Wide; };
template <> struct Traits<float> { typedef u32 Bits; };
template <> struct Traits<double> { typedef u64 Bits; };
template <> struct Traits<bool> { typedef bool Bits; };
template <class T> using Bits = typename Traits<T>::Bits;
template <class T> using Wide = typename Traits<T>::Wide;

// The low bits of a register as a T, and a T into a register: with its sign if that is wider.
template <class T, class Register>
PTX T as(Register x) { return __builtin_bit_cast(T, (Bits<T>)x); }
template <class Register, class T>
PTX void set(Register& to, T value) { to = (Register)value; }
template <class Register>
PTX void set(Register& to, float value) { to = __builtin_bit_cast(u32, value); }
template <class Register>
PTX void set(Register& to, double value) { to = __builtin_bit_cast(u64, value); }

// ------------------------------------------------------------------------------------------- arithmetic
// Results that are no number are one and the same, as the hardware makes them.
template <class T>
PTX T number(T x) { return x; }
PTX float number(float x) { return x == x ? x : as<float>(0x7fffffffu); }
PTX double number(double x) { return x == x ? x : as<double>(0x7fffffffffffffffull); }

template <class T>
PTX Wide<T> wide(T x) { return x; }
template <class T>
PTX T high(T a, T b) { return (T)(wide(a) * wide(b) >> 8 * sizeof(T)); }
// Division by zero gives all ones, the remainder is the dividend.
template <class T>
PTX T quotient(T a, T b) { return b == 0 ? (T)~(T)0 : b == (T)-1 && (T)-1 < 0 ? (T)-a : (T)(a / b); }
template <class T>
PTX T remainder(T a, T b) { return b == 0 ? a : b == (T)-1 && (T)-1 < 0 ? (T)0 : (T)(a % b); }

template <class T>
PTX T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
PTX T larger(T a, T b) { return a > b ? a : b; }
PTX float smaller(float a, float b) { return a != a ? number(b) : b != b ? a : a < b || (a == b && as<i32>(as<u32>(a)) < 0) ? a : b; }
PTX float larger(float a, float b) { return a != a ? number(b) : b != b ? a : a > b || (a == b && as<i32>(as<u32>(b)) < 0) ? a : b; }
PTX float larger_or_nan(float a, float b) { return number(a != a ? a : b != b ? b : larger(a, b)); }
template <class T>
PTX T magnitude(T x) { return x < 0 ? -x : x; }
PTX float magnitude(float x) { return __builtin_fabsf(x); }
PTX float square_root(float x) { return __builtin_elementwise_sqrt(x); }
PTX double square_root(double x) { return __builtin_elementwise_sqrt(x); }
template <class T>
PTX T inverted(T x) { return (T)~x; }
PTX bool inverted(bool x) { return !x; }

// Shifts by too much give zeros, or the sign.
template <class T>
PTX T shift_left(T x, u32 n) { return n < 8 * sizeof(T) ? (T)(x << n) : (T)0; }
template <class T>
PTX T shift_right(T x, u32 n) { return (T)(x >> (n < 8 * sizeof(T) ? n : 8 * sizeof(T) - 1) >> (n < 8 * sizeof(T) || (T)-1 < 0 ? 0 : 1)); }
PTX u32 funnel_left(u32 low, u32 high, u32 n) { return (u32)(((u64)high << 32 | low) << n >> 32); }
PTX u32 funnel_right(u32 low, u32 high, u32 n) { return (u32)(((u64)high << 32 | low) >> n); }

template <class T>
PTX u32 leading_zeros(T x) { return x ? sizeof(T) == 8 ? __builtin_clzll(x) : __builtin_clz(x) : 8 * sizeof(T); }
PTX u32 reversed(u32 x) { return __builtin_bitreverse32(x); }
PTX u64 reversed(u64 x) { return __builtin_bitreverse64(x); }
// Where the highest bit that differs from the sign is.
template <class T>
PTX u32 highest_bit(T x) {
  Bits<T> bits = (T)-1 < 0 && x < 0 ? ~x : x;
  return bits ? 8 * sizeof(T) - 1 - leading_zeros(bits) : ~0u;
}
template <class T>
PTX T extract_bits(T x, u32 start, u32 length) {
  u32 size = 8 * sizeof(T);
  start &= 255, length &= 255;
  if (!length) return 0;
  u32 end = start + length < size ? start + length : size;
  if (start >= size) return (T)-1 < 0 && x < 0 ? (T)-1 : (T)0;
  return (T)((T)((Bits<T>)x << (size - end)) >> (size - end + start));
}
template <class T>
PTX T insert_bits(T field, T into, u32 start, u32 length) {
  T mask = shift_left((T)(shift_left((T)1, length & 255) - 1), start & 255);
  return (T)((into & ~mask) | (shift_left(field, start & 255) & mask));
}
PTX u32 permuted_bytes(u32 a, u32 b, u32 selectors) {
  u64 both = (u64)b << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    u32 selector = selectors >> 4 * i & 15, byte = (u32)(both >> 8 * (selector & 7) & 255);
    result |= (selector & 8 ? byte & 128 ? 255 : 0 : byte) << 8 * i;
  }
  return result;
}
PTX u32 lookup3(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}

// ------------------------------------------------------------------------------------------- conversions
PTX float from_half(u16 x) { return number((float)__builtin_bit_cast(_Float16, x)); }
PTX u16 to_half(float x) { return x == x ? __builtin_bit_cast(u16, (_Float16)x) : (u16)0x7fff; }
PTX u16 to_bfloat(float x) {
  u32 bits = as<u32>(as<Bits<float>>(__builtin_bit_cast(u32, x)));
  return x == x ? (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : (u16)0x7fff;
}
// Two numbers in one register.
PTX float from_bfloat(u16 x) { return as<float>((u32)x << 16); }
template <float (*FROM)(u16), u16 (*TO)(float), float (*F)(float, float)>
PTX u32 pairwise(u32 a, u32 b) {
  return (u32)TO(F(FROM((u16)(a >> 16)), FROM((u16)(b >> 16)))) << 16 | TO(F(FROM((u16)a), FROM((u16)b)));
}
// To an integer, by a rounding that was done before; held inside its range, 0 for what is no number.
template <class T>
PTX T saturated(float x) {
  constexpr bool is_signed = (T)-1 < 0;
  float limit = is_signed ? -(float)((T)1 << (8 * sizeof(T) - 1)) : 2.f * (float)((Bits<T>)1 << (8 * sizeof(T) - 1));
  limit = limit < 0 ? -limit : limit;
  T largest = is_signed ? (T) ~((T)1 << (8 * sizeof(T) - 1)) : (T)-1;
  if (x != x) return 0;
  if (x >= limit) return largest;
  if (is_signed ? x < -limit : x < 0) return is_signed ? (T)~largest : (T)0;
  return (T)x;
}
PTX float nearest(float x) {
  float sign = __builtin_copysignf(8388608.f, x);
  return __builtin_fabsf(x) < 8388608.f ? __builtin_copysignf(x + sign - sign, x) : x;
}
PTX float towards_zero(float x) { return __builtin_fabsf(x) < 8388608.f ? __builtin_copysignf((float)(i32)x, x) : x; }
PTX float downwards(float x) { return towards_zero(x) > x ? towards_zero(x) - 1.f : towards_zero(x); }
PTX float upwards(float x) { return towards_zero(x) < x ? towards_zero(x) + 1.f : towards_zero(x); }

// ------------------------------------------------------------------------------------------- memory
// Several elements are one access, and must be aligned as one.
template <class T, u32 COUNT = 1>
PTX const T* read(u64 address) {
  emulator_access(address, sizeof(T) * COUNT, READ);
  return (const T*)address;
}
template <class T, u32 COUNT = 1>
PTX T* write(u64 address) {
  emulator_access(address, sizeof(T) * COUNT, WRITE);
  return (T*)address;
}

// ------------------------------------------------------------------------------------------- warps
PTX u32 lane_index() { return emulator_thread() % 32; }
PTX bool all_or_none(u32 ballot) { return ballot == 0 || ballot == ~0u; }

}  // namespace emulator
