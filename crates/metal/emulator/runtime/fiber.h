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
