// What the emulator knows while a launch runs: of one translation unit, runtime.cpp.
#pragma once
#include "stack_switch.h"

namespace emulator {
namespace {

constexpr u32 LANES = 32, MAX_THREADS = 1024, STACK_BYTES = 1 << 19;
constexpr u64 CANARY = 0x6b767a6970206f6b;
constexpr u8 POISON = 0xa5;

struct Buffer {
  u64 start, end;
  u32 writable, reserved;
};

struct Launch {
  const Kernel* kernel;
  void** arguments;
  const Buffer* buffers;  // sorted, disjoint
  u64 buffer_count;
  u32 blocks, threads, seed, reserved;
};

struct Fault {
  const char* what;    // null: all is well
  const char* doing;   // the operation of the thread at fault
  const char* other;   // and of the one it is in conflict with
  u64 address, size;
  u32 block, thread, other_block, other_thread;
};

enum State : u32 { READY, IN_WARP, AT_BARRIER, ENDED };

struct Fiber {
  void* stack_pointer;
  State state;
};

struct Warp {
  const char* operation;  // at which the lanes of `arrived` wait
  u32 arrived, ended, syncs;
  u64 values[LANES], operands[LANES];
};

const Launch* launch;
Fault* fault;
Fiber fibers[MAX_THREADS];
Warp warps[MAX_THREADS / LANES];
alignas(64) u8 stacks[MAX_THREADS][STACK_BYTES];
void* scheduler;
u32 current, block, live, waiting, barriers;
u32 run, first_run;  // blocks are numbered through all launches, so that old stamps need no wiping

void yield() { emulator_switch(&fibers[current].stack_pointer, scheduler); }

Warp& my_warp() { return warps[current / LANES]; }
u32 my_lane() { return current % LANES; }

}  // namespace
}  // namespace emulator
