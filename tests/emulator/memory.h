// Whether a thread may touch the memory that it is about to touch. Part of runtime.cpp.
#pragma once
#include "state.h"

namespace emulator {
namespace {

// Who touched a byte, and when: block-wide and warp-wide barriers passed until then.
struct Stamp {
  u32 run, barriers, syncs;
  u16 thread, access;
};
struct Byte {
  u64 address;
  Stamp write, reads[2];
};

// The last accesses. Bytes that share a place push each other out: a race may be missed, none is invented.
constexpr u64 BYTES = 1 << 18;
Byte bytes[BYTES];

u64 last_buffer;

bool inside(u64 address, u32 size, u64 start, u64 end) {
  return address >= start && address < end && end - address >= size;
}

const Buffer* buffer_of(u64 address, u32 size) {
  const Buffer* buffers = launch->buffers;
  const Buffer& last = buffers[last_buffer];
  if (last_buffer < launch->buffer_count && inside(address, size, last.start, last.end)) return &last;
  u64 low = 0, high = launch->buffer_count;
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (buffers[middle].end <= address)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == launch->buffer_count || !inside(address, size, buffers[low].start, buffers[low].end)) return nullptr;
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
  u64 stack = (u64)stacks[current];
  if (inside(address, size, stack, stack + STACK_BYTES)) return;
  if (address % size) fail_access("is misaligned", address, size, access, nullptr);
  u64 shared = (u64)launch->kernel->shared;
  if (inside(address, size, shared, shared + launch->kernel->shared_bytes))
    return check_race(address, size, access, run);  // each block has its own
  if (const Buffer* buffer = buffer_of(address, size)) {
    if (access != READ && !buffer->writable) fail_access("is into a read-only buffer", address, size, access, nullptr);
    return check_race(address, size, access, first_run);
  }
  // Constants of the module itself lie before its code.
  if (access == READ && inside(address, size, (u64)__ehdr_start, (u64)etext)) return;
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

}  // namespace emulator
