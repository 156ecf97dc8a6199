// For runtime.cpp alone. Switching between stacks: the callee-saved registers, nothing else (about
// 5 ns; ucontext makes a system call).
#pragma once

#ifndef QK_FIBER_ASM
#  if (defined(__ELF__) || defined(__APPLE__)) && (defined(__x86_64__) || defined(__aarch64__))
#    define QK_FIBER_ASM 1
#  else
#    define QK_FIBER_ASM 0
#  endif
#endif
#if !QK_FIBER_ASM
#  include <ucontext.h>
#endif

// Apple's assembler puts a _ before names of C and knows neither .type nor .size.
#if defined(__APPLE__)
#  define QK_ASM_BEGIN(name) \
    ".text\n.private_extern _" #name "\n.globl _" #name "\n.p2align 4\n_" #name ":\n"
#  define QK_ASM_END(name) ""
#else
#  define QK_ASM_BEGIN(name) \
    ".text\n.hidden " #name "\n.globl " #name "\n.type " #name ", %function\n" #name ":\n"
#  define QK_ASM_END(name) ".size " #name ", .-" #name "\n"
#endif

#if QK_FIBER_ASM && defined(__x86_64__)
__asm__(QK_ASM_BEGIN(qk_fiber_switch) R"(
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)" QK_ASM_END(qk_fiber_switch) QK_ASM_BEGIN(qk_fiber_start) R"(
  callq *%r14
  ud2
)" QK_ASM_END(qk_fiber_start));
#elif QK_FIBER_ASM && defined(__aarch64__)
__asm__(QK_ASM_BEGIN(qk_fiber_switch) R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)" QK_ASM_END(qk_fiber_switch) QK_ASM_BEGIN(qk_fiber_start) R"(
  blr x19
  brk #1
)" QK_ASM_END(qk_fiber_start));
#endif

namespace qk {
namespace host {

#if QK_FIBER_ASM

struct Context {
  void* stack_pointer;
};

extern "C" void qk_fiber_switch(void** save, void* load);
extern "C" void qk_fiber_start();

inline void switch_context(Context& from, Context& to) {
  qk_fiber_switch(&from.stack_pointer, to.stack_pointer);
}

/// Prepares a context whose first switch calls `entry`, which must never return.
inline void make_context(Context& context, char* stack, long size, void (*entry)()) {
#  if defined(__x86_64__)
  constexpr int kFrame = 7,
                kEntry = 1;  // r15, r14 (the entry), r13, r12, rbx, rbp, the return address
  constexpr int kReturn = 6;
#  else
  constexpr int kFrame = 20, kEntry = 0;  // x19 (the entry) to x30, d8 to d15
  constexpr int kReturn = 11;
#  endif
  void** top =
      reinterpret_cast<void**>((reinterpret_cast<unsigned long>(stack) + size) & ~63ul) - kFrame;
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
