// Fibers: stacks between which a thread of the host switches by itself.
//
// A switch saves what a call must preserve and nothing else: no signal mask, no floating-point mode.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define LILY_UCONTEXT 1
#include <ucontext.h>
#endif

struct Fiber {
#ifdef LILY_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

#ifdef LILY_UCONTEXT

inline void fiber_switch(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

inline void fiber_prepare(Fiber& fiber, unsigned char* stack, size_t bytes, void (*start)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, start, 0);
}

#else

extern "C" void lily_fiber_switch(void** save, void* load);

inline void fiber_switch(Fiber& from, Fiber& to) { lily_fiber_switch(&from.stack_pointer, to.stack_pointer); }

// A stack that looks as if `start` had called lily_fiber_switch before its first instruction.
inline void fiber_prepare(Fiber& fiber, unsigned char* stack, size_t bytes, void (*start)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(63);
#if defined(__x86_64__)
  // Six saved registers, the address that `ret` takes, and a return address that `start` never uses.
  auto* words = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) words[i] = nullptr;
  words[6] = reinterpret_cast<void*>(start);
#else
  // x19 to x28, x29 and x30, d8 to d15.
  auto* words = reinterpret_cast<void**>(top) - 20;
  for (int i = 0; i < 20; ++i) words[i] = nullptr;
  words[11] = reinterpret_cast<void*>(start);
#endif
  fiber.stack_pointer = words;
}

#endif

// ---- a switch that is part of the code around it ---------------------------------------------------------------------------

// A fiber that switches where it stands: the compiler saves what is alive there, and the processor learns of each place where
// it leads. On other processors than x86-64 it is the switch above.
#if defined(__x86_64__)

struct InlineFiber {
  void* at;
  void* stack;
  void* frame;
};

#ifdef __AVX512F__
#define LILY_MORE_REGISTERS                                                                                                        \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", \
      "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define LILY_MORE_REGISTERS
#endif

__attribute__((always_inline)) inline void fiber_jump(InlineFiber& from, InlineFiber& to) {
  auto *save = &from, *load = &to;
  // Nothing is written to the stack: below its end the compiler may have values of its own.
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rax, (%0)\n\t"
      "movq %%rsp, 8(%0)\n\t"
      "movq %%rbp, 16(%0)\n\t"
      "movq 8(%1), %%rsp\n\t"
      "movq 16(%1), %%rbp\n\t"
      "jmpq *(%1)\n"
      "1:\n"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3",
        "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15" LILY_MORE_REGISTERS);
}
inline void fiber_prepare(InlineFiber& fiber, unsigned char* stack, size_t bytes, void (*start)()) {
  // As if `start` had just been called.
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(63);
  fiber.at = reinterpret_cast<void*>(start);
  fiber.stack = reinterpret_cast<void*>(top - 8);
  fiber.frame = nullptr;
}

#else

struct InlineFiber : Fiber {};
inline void fiber_jump(InlineFiber& from, InlineFiber& to) { fiber_switch(from, to); }

#endif
