// CUDA threads as fibers on one CPU thread.
//
// A block's threads run in turns: each until it waits for others, at a barrier or a warp operation. In which order is chosen
// by a seed, so that a result that depends on it shows. What CUDA leaves undefined ends the launch with a Fault: lanes of a
// warp at different operations, accesses outside all buffers or off their alignment, and two threads that touch the same byte,
// one of them writing, with no barrier between (a race, whether or not it changed the result this time).
//
// Freestanding: no libc, no C++ library. The host (emulator/module.py) sees Launch and Fault.
#include "memory.h"

namespace emulator {

namespace {

// Ends the launch: the scheduler sees the fault, and no fiber is ever resumed.
[[noreturn]] void fail(const char* what, const char* doing, u32 other_thread, const char* other) {
  *fault = {what, doing, other, 0, 0, block, current, block, other_thread};
  for (;;) yield();
}

u32 first_lane(u32 lanes) { return current / LANES * LANES + __builtin_ctz(lanes); }

// All lanes of the warp bring a value; the last one works out everybody's result and lets the others go on.
template <class Results>
u64 together(const char* operation, u32 mask, u64 value, u64 operand, Results results) {
  Warp& warp = my_warp();
  if (mask != ~0u) fail("a mask that leaves lanes out", operation, current, operation);
  if (warp.ended) fail("lanes of a warp part", operation, first_lane(warp.ended), "its end");
  if (warp.arrived && warp.operation != operation)
    fail("lanes of a warp part", operation, first_lane(warp.arrived), warp.operation);
  warp.operation = operation;
  warp.values[my_lane()] = value;
  warp.operands[my_lane()] = operand;
  warp.arrived |= 1u << my_lane();
  if (warp.arrived == ~0u) {
    warp.arrived = 0;
    u32 first = current - my_lane();
    for (u32 lane = 0; lane < LANES; ++lane) fibers[first + lane].state = READY;
    u64 all[LANES];
    for (u32 lane = 0; lane < LANES; ++lane) all[lane] = results(warp, lane);
    for (u32 lane = 0; lane < LANES; ++lane) warp.values[lane] = all[lane];
  } else {
    fibers[current].state = IN_WARP;
    yield();
  }
  return warp.values[my_lane()];
}

void release_barrier() {
  if (waiting != live) return;
  waiting = 0;
  ++barriers;
  for (u32 thread = 0; thread < launch->threads; ++thread)
    if (fibers[thread].state == AT_BARRIER) fibers[thread].state = READY;
}

void fiber_main() {
  launch->kernel->entry(launch->arguments);
  Warp& warp = my_warp();
  if (warp.arrived) fail("lanes of a warp part", "its end", first_lane(warp.arrived), warp.operation);
  warp.ended |= 1u << my_lane();
  fibers[current].state = ENDED;
  --live;
  if (live) release_barrier();
  for (;;) yield();
}

void start_fiber(u32 thread) {
  *(u64*)stacks[thread] = CANARY;
  fibers[thread] = {fresh_stack(stacks[thread] + STACK_BYTES, fiber_main), READY};
}

u32 random(u32& state) {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}

// Nobody can go on: some lanes wait where others never come.
void report_deadlock() {
  for (u32 thread = 0; thread < launch->threads; ++thread)
    if (fibers[thread].state == IN_WARP) {
      u32 other = thread / LANES * LANES;
      while (fibers[other].state == IN_WARP) ++other;
      *fault = {"lanes of a warp part", warps[thread / LANES].operation, "__syncthreads", 0, 0, block, thread, block, other};
      return;
    }
}

void run_block(u32 randomness) {
  u32 threads = launch->threads, order[MAX_THREADS];
  live = threads, waiting = 0, barriers = 0, ++run;
  __builtin_memset(launch->kernel->shared, POISON, launch->kernel->shared_bytes);
  __builtin_memset(warps, 0, sizeof warps);
  for (u32 thread = 0; thread < threads; ++thread) start_fiber(thread), order[thread] = thread;
  bool shuffled = randomness != 0;
  for (u32 i = threads; shuffled && i > 1; --i) {
    u32 j = random(randomness) % i, swapped = order[i - 1];
    order[i - 1] = order[j], order[j] = swapped;
  }
  while (live && !fault->what) {
    // Another thread begins each round, and every other round goes backwards.
    u32 start = shuffled ? random(randomness) % threads : 0, step = shuffled && randomness & 1 ? threads - 1 : 1;
    bool stuck = true;
    for (u32 i = 0, at = start; i < threads && !fault->what; ++i, at = (at + step) % threads) {
      if (fibers[order[at]].state != READY) continue;
      current = order[at];
      stuck = false;
      emulator_switch(&scheduler, fibers[current].stack_pointer);
      if (*(u64*)stacks[current] != CANARY) *fault = {"overflows its stack", "", "", 0, 0, block, current, block, current};
    }
    if (stuck) return report_deadlock();
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------- threads and warps

extern "C" u32 emulator_thread() { return current; }
extern "C" u32 emulator_block() { return block; }
extern "C" u32 emulator_threads() { return launch->threads; }
extern "C" u32 emulator_blocks() { return launch->blocks; }

extern "C" void emulator_sync_block() {
  fibers[current].state = AT_BARRIER;
  ++waiting;
  release_barrier();
  if (fibers[current].state == AT_BARRIER) yield();
}

extern "C" void emulator_sync_warp(u32 mask) {
  together("__syncwarp", mask, 0, 0, [](Warp& warp, u32 lane) {
    warp.syncs += lane == 0;
    return 0ull;
  });
}

extern "C" u32 emulator_ballot(u32 mask, bool vote) {
  return together("a vote", mask, vote, 0, [](Warp& warp, u32) {
    u64 votes = 0;
    for (u32 lane = 0; lane < LANES; ++lane) votes |= warp.values[lane] << lane;
    return votes;
  });
}

extern "C" u32 emulator_match(u32 mask, u64 value) {
  return together("a match", mask, value, 0, [](Warp& warp, u32 lane) {
    u64 equals = 0;
    for (u32 other = 0; other < LANES; ++other) equals |= (u64)(warp.values[other] == warp.values[lane]) << other;
    return equals;
  });
}

extern "C" u32 emulator_reduce(Operation operation, u32 mask, u32 value) {
  return together("a reduction", mask, value, operation, [](Warp& warp, u32) {
    u32 result = warp.values[0];
    for (u32 lane = 1; lane < LANES; ++lane)
      result = combined<u32, int>((Operation)warp.operands[0], result, warp.values[lane]);
    return (u64)result;
  });
}

// The lane that `lane` hears, by the rules of PTX's shfl.sync.
static u32 shuffle_source(Shuffle mode, u32 lane, u32 distance, u32 clamp, bool& in_range) {
  u32 segment = clamp >> 8 & 31, first = lane & segment, last = first | (clamp & 31 & ~segment);
  u32 source = mode == UP     ? lane - (distance & 31)
               : mode == DOWN ? lane + (distance & 31)
               : mode == INDEX ? first | (distance & 31 & ~segment)
                               : lane ^ (distance & 31);
  in_range = mode == UP ? (int)source >= (int)last : source <= last;
  return in_range ? source : lane;
}

extern "C" u64 emulator_shuffle(Shuffle mode, u32 mask, u64 value, u32 distance, u32 clamp, bool* in_range) {
  static const char* names[] = {"a shuffle up", "a shuffle down", "a butterfly shuffle", "a shuffle by index"};
  shuffle_source(mode, my_lane(), distance, clamp, *in_range);
  return together(names[mode], mask, value, (u64)mode << 48 | (u64)clamp << 32 | distance, [](Warp& warp, u32 lane) {
    u64 operand = warp.operands[lane];
    bool ignored;
    return warp.values[shuffle_source((Shuffle)(operand >> 48), lane, (u32)operand, operand >> 32 & 0xffff, ignored)];
  });
}

// ------------------------------------------------------------------------------------------- the host's side

extern "C" __attribute__((visibility("default"))) void emulator_launch(const Launch* what, Fault* result) {
  launch = what, fault = result, last_buffer = 0, first_run = run + 1;
  u32 randomness = launch->seed;
  for (block = 0; block < launch->blocks && !fault->what; ++block) {
    run_block(randomness);
    if (randomness) random(randomness);
  }
}

}  // namespace emulator
