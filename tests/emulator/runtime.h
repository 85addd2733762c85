// What emulated kernels may ask of the emulator. Both kinds of kernels stand on it: CUDA C++ (cuda.h) and PTX (ptx.h).
#pragma once

namespace emulator {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where the calling thread stands. Constant for a thread, so that compilers may ask once.
extern "C" __attribute__((const)) u32 emulator_thread();
extern "C" __attribute__((const)) u32 emulator_block();
extern "C" __attribute__((const)) u32 emulator_threads();
extern "C" __attribute__((const)) u32 emulator_blocks();

// Barriers. Only these order memory: CUDA's shuffles and votes do not.
extern "C" void emulator_sync_block();
extern "C" void emulator_sync_warp(u32 mask);

// Warp operations. All 32 lanes must come to the same one, with a full mask.
enum Shuffle : u32 { UP, DOWN, BUTTERFLY, INDEX };
enum Operation : u32 { ADD, MIN, MAX, SIGNED_MIN, SIGNED_MAX, AND, OR, XOR, EXCHANGE, ADD_FLOAT };
extern "C" u32 emulator_ballot(u32 mask, bool vote);
extern "C" u32 emulator_match(u32 mask, u64 value);
extern "C" u32 emulator_reduce(Operation operation, u32 mask, u32 value);
// `clamp` as PTX has it: the last lane of a segment in bits 0..4, the segment's mask in bits 8..12.
extern "C" u64 emulator_shuffle(Shuffle mode, u32 mask, u64 value, u32 distance, u32 clamp, bool* in_range);

// Says that memory is about to be touched: it must be aligned, inside a buffer, and no other thread's business.
enum Access : u32 { READ, WRITE, ATOMIC };
extern "C" void emulator_access(u64 address, u32 size, Access access);

// Atomics on 4 or 8 bytes; both give the old value.
extern "C" u64 emulator_atomic(Operation operation, u64 address, u32 size, u64 value);
extern "C" u64 emulator_compare_and_swap(u64 address, u32 size, u64 expected, u64 value);

// a * b + c in double, rounded to odd so that the float is what one rounding would give.
static inline float fused(float a, float b, float c) {
  double product = (double)a * b, sum = product + c, back = sum - product;
  double error = (product - (sum - back)) + (c - back);
  u64 bits = __builtin_bit_cast(u64, sum);
  if ((error < 0 || error > 0) && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
  return (float)__builtin_bit_cast(double, bits);
}
double fused(double a, double b, double c) = delete;

// A kernel as the host sees it. Each one is made known by a function `describe_NAME(Kernel*)`.
struct Kernel {
  void (*entry)(void** arguments);
  u8* shared;  // the block's shared memory
  u64 shared_bytes;
  u32 parameters, sizes[32];
};

}  // namespace emulator
