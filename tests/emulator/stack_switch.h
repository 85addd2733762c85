// From one stack to another, on x86-64 and AArch64.
#pragma once
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

// The stack pointer of a new stack below `end` whose first switch calls `function`.
static void** fresh_stack(u8* end, void (*function)()) {
  void** top = (void**)end - FRAME;
  for (u32 word = 0; word < SAVED; ++word) top[word] = nullptr;
  top[RETURN] = (void*)function;
  return top;
}

}  // namespace emulator
