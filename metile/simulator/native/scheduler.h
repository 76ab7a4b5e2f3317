// Which fiber runs next. Lanes of a simdgroup take turns until all wait; then the next simdgroup runs.
#pragma once
#include "faults.h"

namespace metile {

// The top of a fiber's stack, staggered so that the tops do not share cache sets.
inline void** stack_top(Threadgroup* t, int index) {
  return (void**)(t->stacks + (index + 1) * kStackBytes - 64 - index * 7 % 61 * 128);
}

// Map counts are limited, so stacks beyond the first ones of a large pool go without a guard page.
inline void guard_stack(Threadgroup* t, int index) {
  static int guarded;
  t->guarded[index] = true;
  if (__atomic_fetch_add(&guarded, 1, __ATOMIC_RELAXED) < 12 * kThreads)
    mprotect(t->stacks + index * kStackBytes, kPage, PROT_NONE);
}

__attribute__((noinline)) inline void new_fiber(Threadgroup* t, int thread) {
  const int index = t->free_stack[--t->free_stacks];
  t->stack_index[thread] = index;
  if (METILE_RARE(!t->guarded[index])) guard_stack(t, index);
  void** stack = stack_top(t, index);
  *--stack = nullptr;
  *--stack = nullptr;
  *--stack = (void*)metile_begin_fiber;
  for (int i = 0; i < kSavedRegisters; i++) *--stack = nullptr;
  t->stack[thread] = stack;
}

// Suspend the current fiber, whose registers lie on `stack`; return the stack of the next.
inline void* suspend(Threadgroup* t, int next, void* stack) {
  t->stack[t->current] = stack;
  t->current = next;
  t->counts.switches++;
  if (METILE_RARE(!t->stack[next])) new_fiber(t, next);
  return t->stack[next];
}

inline int next_lane(uint32_t mask, int lane) {
  const uint32_t above = lane == 31 ? 0 : mask & (~0u << (lane + 1));
  return __builtin_ctz(above ? above : mask);
}

void complete_collective(Threadgroup* t, Simdgroup& g, int index);

// Let all threads that wait at the barrier go on.
inline void release_barrier(Threadgroup* t) {
  if (METILE_RARE(t->different_barriers) && !check::kChecked) {
    t->current = t->barrier_thread;
    fail(t, kDifferentBarriers, t->barrier_site, 0, t->other_barrier_site);
  }
  check::barrier_released(t);
  for (int i = 0; i < t->simdgroup_count; i++) {
    Simdgroup& g = t->simdgroups[i];
    g.running |= g.at_barrier;
    g.at_barrier = 0;
    g.interval++;
  }
  t->barrier_count = 0;
  t->counts.barriers++;
}

// A thread to run when none of a simdgroup can. Lanes in a collective whose others wait at a barrier or have returned
// go on by themselves: they are the active ones.
inline int next_thread(Threadgroup* t, int index) {
  for (int k = 0; k < t->simdgroup_count; k++) {
    const int at = index + k < t->simdgroup_count ? index + k : index + k - t->simdgroup_count;
    Simdgroup& g = t->simdgroups[at];
    if (!g.running && g.collecting) complete_collective(t, g, at);
    if (g.running) return at * kLanes + __builtin_ctz(g.running);
  }
  fail(t, kDeadlock, t->barrier_site);
}

// The thread to run after the current one returned; -1 when it was the last.
inline int after_return(Threadgroup* t) {
  const int thread = t->current, lane = thread % kLanes;
  Simdgroup& g = simdgroup_of(t, thread);
  g.running &= ~(1u << lane);
  g.live &= ~(1u << lane);
  if (--t->live == 0) return -1;
  if (t->barrier_count == t->live) release_barrier(t);
  if (g.running) return thread - lane + next_lane(g.running, lane);
  return next_thread(t, thread / kLanes);
}

inline void describe_thread(const Threadgroup* t, int thread, __msl_args& args) {
  const uint32_t row = t->size[0], plane = row * t->size[1];
  args.shared = &t->shared;
  args.position_in_threadgroup[0] = thread % row;
  args.position_in_threadgroup[1] = thread % plane / row;
  args.position_in_threadgroup[2] = thread / plane;
  for (int i = 0; i < 3; i++)
    args.position_in_grid[i] = t->shared.threadgroup_position[i] * t->shared.dispatch_threads_per_threadgroup[i] +
                               args.position_in_threadgroup[i];
  args.lane = thread % kLanes;
  args.simdgroup = thread / kLanes;
  args.index = thread;
}

}  // namespace metile

// Runs threads one after another on one stack for as long as the next one has not started elsewhere.
METILE_CALLED void metile_fiber_main() {
  using namespace metile;
  Threadgroup* t = self();
  for (;;) {
    __msl_args args;
    describe_thread(t, t->current, args);
    t->entry(&args);
    const int mine = t->stack_index[t->current], next = after_return(t);
    if (next < 0) metile_resume(t->worker_stack);
    t->current = next;
    if (!t->stack[next]) {
      t->stack[next] = &t->stack[next];  // started: any value but null
      t->stack_index[next] = mine;
      continue;
    }
    t->free_stack[t->free_stacks++] = mine;
    t->counts.switches++;
    metile_resume(t->stack[next]);
  }
}
