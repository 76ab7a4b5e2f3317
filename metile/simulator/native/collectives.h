// simd_sum, simd_shuffle, ...: lanes leave their operands in a phase; the last to arrive releases all. Lanes that came
// from different call sites are released a call site at a time, the lowest address first.
#pragma once
#include "matrix_multiply.h"
#include "scheduler.h"

namespace metile {

// Note a lane's arrival; return the lanes that still run.
inline uint32_t arrive(Simdgroup& g, int lane, uint32_t operation, uint64_t site) {
  g.sites[lane] = site;
  if (!g.collecting) {
    g.site = site;
    g.mixed = false;
  } else if (g.site != site) {
    g.mixed = true;
  }
  g.operations[lane] = operation;
  g.running &= ~(1u << lane);
  g.collecting |= 1u << lane;
  return g.running;
}

// Move the lanes that are not of the lowest call site to the other phase; return their mask.
__attribute__((noinline)) inline uint32_t set_aside(Threadgroup* t, Simdgroup& g, int index) {
  uint64_t lowest = ~0ul;
  uint32_t aside = 0;
  for (int i = 0; i < kLanes; i++)
    if (g.collecting >> i & 1 && g.sites[i] < lowest) lowest = g.sites[i];
  const Phase& phase = g.phases[g.phase];
  Phase& other = g.phases[g.phase ^ 1];
  g.mixed = false;
  uint64_t site = 0;
  for (int i = 0; i < kLanes; i++) {
    if (!(g.collecting >> i & 1) || g.sites[i] == lowest) continue;
    aside |= 1u << i;
    memcpy(other.data[i], phase.data[i], sizeof other.data[i]);
    set_value(t->stack[index * kLanes + i], &other);
    if (site && site != g.sites[i]) g.mixed = true;
    site = g.sites[i];
  }
  g.site = site;
  return aside;
}

__attribute__((hot)) inline void complete_collective(Threadgroup* t, Simdgroup& g, int index) {
  Phase& phase = g.phases[g.phase];
  const uint32_t aside = METILE_RARE(g.mixed) ? set_aside(t, g, index) : 0;
  const uint32_t active = g.collecting & ~aside, operation = g.operations[__builtin_ctz(active)];
  if (operation == kMatrixOperation) {
    if (METILE_RARE(active != ~0u)) fail(t, kInactiveLanes, g.sites[__builtin_ctz(active)]);
    float* matrices = (float*)phase.data;
    multiply_accumulate(matrices + 128, matrices, matrices + 64, matrices + 128, 0);
    t->counts.matrix_operations++;
  } else if (operation >= kSimdgroupBarrier) {
    check::simdgroup_barrier_released(t, index, active, operation & 0xffff, g.sites[__builtin_ctz(active)]);
  }
  phase.active = active;
  phase.done = 0;
  g.phase ^= 1;
  g.running |= active;
  g.collecting = aside;
  g.interval++;
  t->counts.collectives++;
}

// Go on to another lane, or complete the collective and go on; `value` is what the call returns.
inline Resume leave(Threadgroup* t, Simdgroup& g, uint32_t running, void* value, void* stack) {
  const int thread = t->current, lane = thread % kLanes;
  if (__builtin_expect(running != 0, 1)) return {value, suspend(t, thread - lane + next_lane(running, lane), stack)};
  if (__builtin_expect(!g.mixed, 1)) {
    complete_collective(t, g, thread / kLanes);
    return {value, nullptr};
  }
  set_value(stack, value);
  t->stack[thread] = stack;
  complete_collective(t, g, thread / kLanes);
  value = ((void**)stack)[0];
  if (g.running >> lane & 1) return {value, nullptr};
  return {value, suspend(t, thread - lane + __builtin_ctz(g.running), stack)};
}

}  // namespace metile

METILE_CALLED __attribute__((hot)) metile::Resume metile_collective_step(
    const void* operand, uint32_t size, void* stack) {
  using namespace metile;
  Threadgroup* t = self();
  const int lane = t->current % kLanes;
  Simdgroup& g = simdgroup_of(t, t->current);
  Phase* phase = &g.phases[g.phase];
  if (__builtin_expect(size == 4, 1))
    memcpy(phase->data[lane], operand, 4);
  else
    memcpy(phase->data[lane], operand, size < sizeof phase->data[0] ? size : sizeof phase->data[0]);
  return leave(t, g, arrive(g, lane, 0, site_of(stack)), phase, stack);
}

// All lanes come to the same operation of a matrix before one does it.
extern "C" __attribute__((visibility("hidden"))) void metile_rendezvous();
METILE_CALLED metile::Resume metile_rendezvous_step(void* stack) {
  using namespace metile;
  Threadgroup* t = self();
  Simdgroup& g = simdgroup_of(t, t->current);
  return leave(t, g, arrive(g, t->current % kLanes, kMatrixTouch, 0), nullptr, stack);
}

// Let the other lanes run first.
extern "C" __attribute__((visibility("hidden"))) void metile_yield();
METILE_CALLED metile::Resume metile_yield_step(void* stack) {
  using namespace metile;
  Threadgroup* t = self();
  const int lane = t->current % kLanes, next = next_lane(simdgroup_of(t, t->current).running, lane);
  if (next == lane) return {nullptr, nullptr};
  return {nullptr, suspend(t, t->current - lane + next, stack)};
}
