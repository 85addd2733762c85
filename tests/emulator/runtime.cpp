// CUDA threads as fibers on one CPU thread.
//
// A block's threads run in turns: each until it waits for others, at a barrier or a warp operation. In which order is chosen
// by a seed, so that a result that depends on it shows. What CUDA leaves undefined ends the launch with a Fault: lanes of a
// warp at different operations, accesses outside all buffers or off their alignment, and two threads that touch the same byte,
// one of them writing, with no barrier between (a race, whether or not it changed the result this time).
//
// Freestanding: no libc, no C++ library. The host (emulator/module.py) sees Launch and Fault.
#include "runtime.h"

namespace emulator {

// Saves the registers that a call keeps on this stack, whose pointer goes to the first argument, and goes on with the stack at
// the second. Not static: a compiler would see arguments that nobody uses.
#if defined(__x86_64__)
extern "C" __attribute__((naked)) void emulator_switch(void**, void*) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n retq");
}
constexpr u32 SAVED = 6, RETURN = 6, FRAME = 8;  // words: registers, then the return address, then alignment
#elif defined(__aarch64__)
extern "C" __attribute__((naked)) void emulator_switch(void**, void*) {
  asm("sub sp, sp, #160\n stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
      "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
      "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret");
}
constexpr u32 SAVED = 20, RETURN = 11, FRAME = 20;
#else
#error "no switch of stacks for this processor"
#endif

namespace {

constexpr u32 LANES = 32, MAX_THREADS = 1024, STACK_BYTES = 1 << 16;
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

// Who touched a byte, and when: block-wide and warp-wide barriers passed until then.
struct Stamp {
  u32 run, barriers, syncs;
  u16 thread, access;
};
struct Byte {
  u64 address;
  Stamp write, reads[2];
};

const Launch* launch;
Fault* fault;
Fiber fibers[MAX_THREADS];
Warp warps[MAX_THREADS / LANES];
alignas(64) u8 stacks[MAX_THREADS][STACK_BYTES];
void* scheduler;
u32 current, block, live, waiting, barriers;
u32 run, first_run;  // blocks are numbered through all launches, so that old stamps need no wiping
u64 last_buffer;

// The last accesses. Bytes that share a place push each other out: a race may be missed, none is invented.
constexpr u64 BYTES = 1 << 18;
Byte bytes[BYTES];

void yield() { emulator_switch(&fibers[current].stack_pointer, scheduler); }

// Ends the launch: the scheduler sees the fault, and no fiber is ever resumed.
[[noreturn]] void fail(const char* what, const char* doing, u32 other_thread, const char* other) {
  *fault = {what, doing, other, 0, 0, block, current, block, other_thread};
  for (;;) yield();
}

Warp& my_warp() { return warps[current / LANES]; }
u32 my_lane() { return current % LANES; }

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
  void** top = (void**)(stacks[thread] + STACK_BYTES) - FRAME;
  for (u32 word = 0; word < SAVED; ++word) top[word] = nullptr;
  top[RETURN] = (void*)fiber_main;
  fibers[thread] = {top, READY};
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

// ------------------------------------------------------------------------------------------- memory

const Buffer* buffer_of(u64 address, u32 size) {
  const Buffer* buffers = launch->buffers;
  const Buffer& last = buffers[last_buffer];
  if (last_buffer < launch->buffer_count && address >= last.start && address + size <= last.end) return &last;
  u64 low = 0, high = launch->buffer_count;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (buffers[middle].end <= address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == launch->buffer_count || address < buffers[low].start || address + size > buffers[low].end) return nullptr;
  last_buffer = low;
  return &buffers[low];
}

[[noreturn]] void fail_access(const char* what, u64 address, u32 size, Access access, const Stamp* other) {
  static const char* names[] = {"reads", "writes", "updates"};
  u32 other_block = other ? block - (run - other->run) : block, thread = other ? other->thread : current;
  *fault = {what, names[access], other ? names[other->access] : "", address, size, block, current, other_block, thread};
  for (;;) yield();
}

// Whether an access of then comes before all of now. What was before run `oldest` is over.
bool ordered(const Stamp& before, u32 oldest) {
  if (before.run < oldest) return true;
  if (before.run != run) return false;
  if (before.thread == current || before.barriers < barriers) return true;
  return before.thread / LANES == current / LANES && before.syncs < my_warp().syncs;
}

void check_race(u64 address, u32 size, Access access, u32 oldest) {
  Stamp now = {run, barriers, my_warp().syncs, (u16)current, (u16)access};
  for (u64 at = address; at < address + size; ++at) {
    Byte& byte = bytes[at % BYTES];
    if (byte.address != at) byte = {at, {}, {}};
    if (!ordered(byte.write, oldest) && !(access == ATOMIC && byte.write.access == ATOMIC))
      fail_access("races", address, size, access, &byte.write);
    if (access == READ) {
      // Two readers that do not wait for each other: whoever writes then is in conflict with one of them.
      Stamp& slot = byte.reads[byte.reads[0].thread != current && !ordered(byte.reads[0], oldest)];
      slot = now;
    } else {
      for (const Stamp& read : byte.reads)
        if (!ordered(read, oldest)) fail_access("races", address, size, access, &read);
      byte.write = now;
    }
  }
}

extern "C" u8 __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" u8 etext[] __attribute__((visibility("hidden")));

}  // namespace

extern "C" void emulator_access(u64 address, u32 size, Access access) {
  if (address % size) fail_access("is misaligned", address, size, access, nullptr);
  if (address >= (u64)stacks[current] && address + size <= (u64)stacks[current] + STACK_BYTES) return;
  u64 shared = (u64)launch->kernel->shared;
  if (address >= shared && address + size <= shared + launch->kernel->shared_bytes)
    return check_race(address, size, access, run);  // each block has its own
  if (const Buffer* buffer = buffer_of(address, size)) {
    if (access != READ && !buffer->writable) fail_access("is into a read-only buffer", address, size, access, nullptr);
    return check_race(address, size, access, first_run);
  }
  // Constants of the module itself lie before its code.
  if (access == READ && address >= (u64)__ehdr_start && address + size <= (u64)etext) return;
  fail_access("is out of bounds", address, size, access, nullptr);
}

// clang's -fsanitize-coverage=trace-loads,trace-stores calls these before every access of a kernel.
#define TRACE(size)                                                                            \
  extern "C" void __sanitizer_cov_load##size(u8* p) { emulator_access((u64)p, size, READ); }   \
  extern "C" void __sanitizer_cov_store##size(u8* p) { emulator_access((u64)p, size, WRITE); }
TRACE(1)
TRACE(2)
TRACE(4)
TRACE(8)
TRACE(16)

template <class T, class Signed>
static T combined(Operation operation, T a, T b) {
  switch (operation) {
    case ADD: return a + b;
    case MIN: return a < b ? a : b;
    case MAX: return a > b ? a : b;
    case SIGNED_MIN: return (Signed)a < (Signed)b ? a : b;
    case SIGNED_MAX: return (Signed)a > (Signed)b ? a : b;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    case EXCHANGE: return b;
    case ADD_FLOAT: return __builtin_bit_cast(u32, __builtin_bit_cast(float, (u32)a) + __builtin_bit_cast(float, (u32)b));
  }
}

// Fibers are never interrupted, so plain code is atomic.
static u64 load(u64 address, u32 size) {
  emulator_access(address, size, ATOMIC);
  return size == 8 ? *(u64*)address : *(u32*)address;
}
static void store(u64 address, u32 size, u64 value) {
  if (size == 8)
    *(u64*)address = value;
  else
    *(u32*)address = (u32)value;
}
extern "C" u64 emulator_atomic(Operation operation, u64 address, u32 size, u64 value) {
  u64 old = load(address, size);
  u64 updated = size == 8 ? combined<u64, long long>(operation, old, value) : combined<u32, int>(operation, old, value);
  store(address, size, updated);
  return old;
}
extern "C" u64 emulator_compare_and_swap(u64 address, u32 size, u64 expected, u64 value) {
  u64 old = load(address, size);
  if (old == expected) store(address, size, value);
  return old;
}

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
