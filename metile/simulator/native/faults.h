// Giving up a threadgroup: its fibers are left as they are, and the worker goes on from where it entered them.
#pragma once
#include "checks.h"
#include "context.h"

namespace metile {

// Keep the first fault of a launch; the other workers then stop at their next threadgroup.
inline void record(Threadgroup* t, Fault fault) {
  t->abandoned = true;
  fault.thread = t->current;
  memcpy(fault.threadgroup, t->shared.threadgroup_position, sizeof fault.threadgroup);
  if (fault.kind != kStopped && check::failed(t, fault)) return;
  uint32_t expected = 0;
  if (!__atomic_compare_exchange_n(&t->job->faulted, &expected, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
  t->job->fault = fault;
}

__attribute__((noreturn, noinline)) inline void fail(
    Threadgroup* t, FaultKind kind, uint64_t site = 0, uint64_t address = 0, uint64_t other_site = 0) {
  Fault fault = {};
  fault.kind = kind;
  fault.site = site;
  fault.address = address;
  fault.other_site = other_site;
  record(t, fault);
  metile_resume(t->worker_stack);
}

inline bool in_image(const Job* job, uint64_t address) {
  return address - job->image_begin < job->image_end - job->image_begin;
}

// The kernel's innermost return address above a stack pointer: where a call into the runtime or libc came from.
inline uint64_t kernel_site(const Threadgroup* t, uint64_t pointer) {
  if (!on_fiber(t, pointer)) return 0;
  const uint64_t end = pointer - (pointer - (uint64_t)t->stacks) % kStackBytes + kStackBytes;
  for (pointer = (pointer + 7) & ~7ul; pointer + 8 <= end; pointer += 8) {
    const uint64_t word = *(const uint64_t*)pointer;
    if (in_image(t->job, word)) return word;
  }
  return 0;
}

}  // namespace metile
