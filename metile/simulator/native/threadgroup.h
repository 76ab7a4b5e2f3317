// Running the threadgroups of a job on one worker.
#pragma once
#include "scheduler.h"
#include "threadgroup_memory.h"

namespace metile {

inline void* map_memory(uint64_t bytes) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

inline void begin_simdgroup(Simdgroup& g, int lanes) {
  g.running = g.lanes = g.live = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  g.collecting = g.at_barrier = g.phase = 0;
  g.interval = 1;
  g.mixed = false;
  g.matrices.ready = false;
}

inline void set_position(Threadgroup* t, uint64_t index) {
  __msl_shared& shared = t->shared;
  const uint64_t width = shared.threadgroups_per_grid[0], height = shared.threadgroups_per_grid[1];
  shared.threadgroup_position[0] = index % width;
  shared.threadgroup_position[1] = index / width % height;
  shared.threadgroup_position[2] = index / (width * height);
  for (int i = 0; i < 3; i++) {
    const uint32_t whole = shared.dispatch_threads_per_threadgroup[i];
    const uint32_t left = shared.threads_per_grid[i] - shared.threadgroup_position[i] * whole;
    t->size[i] = shared.threads_per_threadgroup[i] = left < whole ? left : whole;
  }
}

inline void run_threadgroup(Threadgroup* t, uint64_t index) {
  set_position(t, index);
  t->count = t->live = t->size[0] * t->size[1] * t->size[2];
  t->simdgroup_count = t->shared.simdgroups = (t->count + kLanes - 1) / kLanes;
  t->barrier_count = 0;
  t->different_barriers = t->abandoned = false;
  for (int i = 0; i < t->simdgroup_count; i++) {
    const int left = t->count - i * kLanes;
    begin_simdgroup(t->simdgroups[i], left < kLanes ? left : kLanes);
  }
  t->free_stacks = t->count;
  for (int i = 0; i < t->count; i++) {
    t->stack[i] = nullptr;
    t->free_stack[i] = t->count - 1 - i;
  }
  poison(t);
  check::threadgroup_begins(t);
  t->counts.threads += t->count;
  t->current = 0;
  new_fiber(t, 0);
  metile_switch(&t->worker_stack, t->stack[0]);
  check::threadgroup_ends(t);
}

inline void add_counts(Job* job, const Counts& counts) {
  __atomic_fetch_add(&job->counts.switches, counts.switches, __ATOMIC_RELAXED);
  __atomic_fetch_add(&job->counts.collectives, counts.collectives, __ATOMIC_RELAXED);
  __atomic_fetch_add(&job->counts.barriers, counts.barriers, __ATOMIC_RELAXED);
  __atomic_fetch_add(&job->counts.matrix_operations, counts.matrix_operations, __ATOMIC_RELAXED);
  __atomic_fetch_add(&job->counts.threads, counts.threads, __ATOMIC_RELAXED);
  uint64_t most = __atomic_load_n(&job->counts.threadgroup_bytes, __ATOMIC_RELAXED);
  while (most < counts.threadgroup_bytes && !__atomic_compare_exchange_n(&job->counts.threadgroup_bytes, &most,
                                                                         counts.threadgroup_bytes, false,
                                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void run_job(Threadgroup* t, Job* job) {
  t->job = job;
  t->entry = job->entry;
  t->shared = job->shared;
  t->counts = {};
  t->arena_used = t->variable_bytes = 0;
  t->variable_count = 0;
  place_arguments(t);
  memcpy(t->shared.threadgroup_arguments, t->arguments, sizeof t->arguments);
  while (!__atomic_load_n(&job->stop, __ATOMIC_ACQUIRE) && !__atomic_load_n(&job->faulted, __ATOMIC_ACQUIRE)) {
    const uint64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (index >= job->groups) break;
    run_threadgroup(t, index);
  }
  add_counts(job, t->counts);
  t->job = nullptr;
}

inline Threadgroup* new_threadgroup() {
  Threadgroup* t = (Threadgroup*)map_memory(sizeof(Threadgroup));
  if (!t) return nullptr;
  t->stacks = (uint8_t*)map_memory(kStacksBytes);
  t->arena = (uint8_t*)map_memory(kArenaBytes);
  t->signal_stack = (uint8_t*)map_memory(64 << 10);
  return t->stacks && t->arena && t->signal_stack ? t : nullptr;
}

}  // namespace metile
