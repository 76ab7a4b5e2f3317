// Switching between fibers. A switch happens only inside a call, so the callee-saved registers are all there is to
// keep. Resuming pops the return address and jumps: many call sites would mispredict a `ret`.
#pragma once
#include "state.h"

#if !defined(__x86_64__)
#error "metile.simulator runs on x86-64 only"
#endif

namespace metile {

// What a step of a collective returns: the value of the call, and the stack to resume (null: this fiber's own).
struct Resume {
  void* value;
  void* stack;
};

constexpr int kSavedRegisters = 7;  // with rax, through which a suspended call gets its value

inline uint64_t site_of(void* stack) { return ((uint64_t*)stack)[kSavedRegisters]; }
inline void set_value(void* stack, void* value) { ((void**)stack)[0] = value; }

}  // namespace metile

extern "C" void metile_switch(void** save, void* load);
extern "C" void metile_resume(void* load) __attribute__((noreturn));
extern "C" void metile_begin_fiber();

asm(R"(
.macro METILE_SAVE
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  pushq %rax
.endm
.macro METILE_RESTORE
  popq %rax
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.endm
.macro METILE_STEP name, step, stack_argument
.globl \name
.type \name, @function
.p2align 5
\name:
  METILE_SAVE
  movq %rsp, \stack_argument
  call \step
  movq %rax, (%rsp)
  testq %rdx, %rdx
  jz 1f
  movq %rdx, %rsp
1:
  METILE_RESTORE
.endm
.text
.globl metile_switch
.hidden metile_switch
.p2align 5
metile_switch:
  METILE_SAVE
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  METILE_RESTORE
.globl metile_resume
.hidden metile_resume
metile_resume:
  movq %rdi, %rsp
  METILE_RESTORE
.globl metile_begin_fiber
.hidden metile_begin_fiber
metile_begin_fiber:
  call metile_fiber_main
  ud2
METILE_STEP __msl_coll, metile_collective_step, %rdx
METILE_STEP __msl_tgbar, metile_barrier_step, %rsi
METILE_STEP __msl_sgbar, metile_simdgroup_barrier_step, %rsi
METILE_STEP __msl_mma3, metile_matrix_step, %rdi
METILE_STEP metile_rendezvous, metile_rendezvous_step, %rdi
METILE_STEP metile_yield, metile_yield_step, %rdi
)");
