// threadgroup_barrier and simdgroup_barrier.
#pragma once
#include "collectives.h"

METILE_CALLED __attribute__((hot)) metile::Resume metile_barrier_step(uint32_t flags, void* stack) {
  using namespace metile;
  Threadgroup* t = self();
  const int thread = t->current, lane = thread % kLanes;
  Simdgroup& g = simdgroup_of(t, thread);
  const uint64_t site = site_of(stack);
  g.running &= ~(1u << lane);
  g.at_barrier |= 1u << lane;
  if (t->barrier_count++ == 0) {
    t->barrier_site = site;
    t->barrier_thread = thread;
    t->barrier_flags = flags;
    t->different_barriers = false;
  } else {
    t->barrier_flags &= flags;
    if (METILE_RARE(site != t->barrier_site)) {
      t->different_barriers = true;
      t->other_barrier_site = site;
      t->other_barrier_thread = thread;
    }
  }
  if (t->barrier_count == t->live) {
    release_barrier(t);
    return {nullptr, nullptr};
  }
  const int next =
      g.running ? thread - lane + next_lane(g.running, lane) : next_thread(t, thread / kLanes);
  return {nullptr, suspend(t, next, stack)};
}

METILE_CALLED metile::Resume metile_simdgroup_barrier_step(uint32_t flags, void* stack) {
  using namespace metile;
  if (!check::kChecked && flags == 0) return {nullptr, nullptr};  // orders no memory
  Threadgroup* t = self();
  Simdgroup& g = simdgroup_of(t, t->current);
  const uint32_t operation = kSimdgroupBarrier | (flags & 0xffff);
  const uint32_t running = arrive(g, t->current % kLanes, operation, site_of(stack));
  return leave(t, g, running, nullptr, stack);
}

METILE_EXPORT unsigned int __msl_lane() { return metile::self()->current % metile::kLanes; }
