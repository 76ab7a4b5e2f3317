// Checked mode: what it does at the turns of a threadgroup, and what Python reads of it.
#pragma once
#include "tsan.h"

namespace metile::check {

void threadgroup_begins(Threadgroup*) {
  for (int memory = 0; memory < 2; memory++) now.begin[memory] = ++now.epoch[memory];
  now.threadgroup++;
  memset(now.order, 0, sizeof now.order);
}

void threadgroup_ends(Threadgroup* t) {
  settle_pending();
  abandoned += t->abandoned;
}

inline void begin_epochs(uint32_t flags) {
  if (flags & 1) now.epoch[kDeviceMemoryKind]++;
  if (flags & 2) now.epoch[kThreadgroupMemoryKind]++;
}

inline int first_returned(const Threadgroup* t) {
  for (int i = 0; i < t->simdgroup_count; i++) {
    const Simdgroup& g = t->simdgroups[i];
    if (const uint32_t returned = g.lanes & ~g.live) return i * kLanes + __builtin_ctz(returned);
  }
  return -1;
}

void barrier_released(Threadgroup* t) {
  settle_pending();
  Found entry = describe(t, kOtherBarrier, t->barrier_site);
  entry.thread = t->barrier_thread;
  if (t->different_barriers) {
    entry.other_thread = t->other_barrier_thread;
    entry.other_site = t->other_barrier_site;
    add_found(entry);
  }
  if (t->live < t->count) {
    entry.kind = kReturnedThread;
    entry.other_thread = first_returned(t);
    add_found(entry);
  }
  begin_epochs(t->barrier_flags);
}

void simdgroup_barrier_released(Threadgroup* t, int simdgroup, uint32_t lanes, uint32_t flags, uint64_t site) {
  settle_pending();
  const uint32_t all = t->simdgroups[simdgroup].lanes;
  if (lanes != all) {
    Found entry = describe(t, kPartialSimdgroup, site);
    entry.thread = simdgroup * kLanes + __builtin_ctz(lanes);
    entry.other_thread = simdgroup * kLanes + __builtin_ctz(all & ~lanes);
    add_found(entry);
    return;
  }
  if (flags & 1) now.order[simdgroup][kDeviceMemoryKind]++;
  if (flags & 2) now.order[simdgroup][kThreadgroupMemoryKind]++;
}

bool failed(Threadgroup* t, const Fault& fault) {
  FoundKind kind;
  if (fault.kind == kTrap)
    kind = kArrayBounds;
  else if (fault.kind == kDeadlock)
    kind = kDeadlocked;
  else if (fault.kind == kInactiveLanes)
    kind = kPartialMatrix;
  else
    return false;
  add_found(describe(t, kind, fault.site));
  return true;
}

}  // namespace metile::check

METILE_EXPORT int metile_check_begin() {
  metile::check::found_count = 0;
  metile::check::abandoned = 0;
  metile::check::pending.waiting = false;
  return metile::check::begin_launch();
}

METILE_EXPORT int metile_check_buffer(int index, uint64_t address, uint64_t bytes, int poisoned) {
  return metile::check::add_buffer(index, address, bytes, poisoned);
}

METILE_EXPORT int metile_check_found(metile::check::Found** entries, uint32_t* abandoned) {
  *entries = metile::check::found;
  *abandoned = metile::check::abandoned;
  return metile::check::found_count;
}

METILE_EXPORT void metile_check_traffic(int index, metile::check::Traffic* traffic) {
  *traffic = metile::check::traffic[index];
}

// The next range of a buffer that no thread wrote, from byte `from` on; false where there is none.
METILE_EXPORT int metile_check_unwritten(int index, uint64_t from, uint64_t* begin, uint64_t* end) {
  using namespace metile::check;
  for (int i = 0; i < buffer_count; i++) {
    const Region& region = buffers[i];
    if (region.index != index) continue;
    const uint64_t bytes = region.end - region.begin;
    while (from < bytes && region.cells[from].written_in) from++;
    *begin = from;
    while (from < bytes && !region.cells[from].written_in) from++;
    *end = from;
    return *begin < *end;
  }
  return 0;
}

// Name and size of a threadgroup variable of the last launch, by the index in a finding less 32.
METILE_EXPORT const char* metile_check_variable(int index, uint64_t* bytes) {
  const metile::Threadgroup* t = metile::pool.threadgroups[0];
  if (!t || index >= t->variable_count) return nullptr;
  *bytes = t->variables[index].size;
  return t->variables[index].name;
}

METILE_EXPORT void metile_check_end() { metile::check::drop_buffers(); }
