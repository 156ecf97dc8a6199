// Switching between stacks: the callee-saved registers, nothing else (about 5 ns; ucontext makes a system call).
#pragma once

#if defined(__ELF__) && (defined(__x86_64__) || defined(__aarch64__))
#  define QK_FIBER_ASM 1
#else
#  define QK_FIBER_ASM 0
#  include <ucontext.h>
#endif

namespace qk {
namespace host {

#if QK_FIBER_ASM

struct Context {
  void* stack_pointer;
};

extern "C" void qk_fiber_switch(void** save, void* load);
extern "C" void qk_fiber_start();

inline void switch_context(Context& from, Context& to) { qk_fiber_switch(&from.stack_pointer, to.stack_pointer); }

/// Prepares a context whose first switch calls `entry`, which must never return.
inline void make_context(Context& context, char* stack, long size, void (*entry)()) {
#  if defined(__x86_64__)
  constexpr int kFrame = 7, kEntry = 1;  // r15, r14 (the entry), r13, r12, rbx, rbp, the return address
  constexpr int kReturn = 6;
#  else
  constexpr int kFrame = 20, kEntry = 0;  // x19 (the entry) to x30, d8 to d15
  constexpr int kReturn = 11;
#  endif
  void** top = reinterpret_cast<void**>((reinterpret_cast<unsigned long>(stack) + size) & ~63ul) - kFrame;
  for (int i = 0; i < kFrame; ++i) top[i] = nullptr;
  top[kEntry] = reinterpret_cast<void*>(entry);  // the register that qk_fiber_start jumps to
  top[kReturn] = reinterpret_cast<void*>(&qk_fiber_start);
  context.stack_pointer = top;
}

#else

struct Context {
  ucontext_t machine;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.machine, &to.machine); }

inline void make_context(Context& context, char* stack, long size, void (*entry)()) {
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = stack;
  context.machine.uc_stack.ss_size = static_cast<decltype(context.machine.uc_stack.ss_size)>(size);
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, entry, 0);
}

#endif

}  // namespace host
}  // namespace qk
