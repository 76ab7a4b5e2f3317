// The list of findings: one entry a defect, a place in the code and a variable, with a count.
#pragma once
#include "shadow.h"

namespace metile::check {

enum FoundKind : uint32_t {
  kWriteAfterWrite,
  kReadAfterWrite,
  kWriteAfterRead,
  kUninitialised,
  kReadOutside,
  kWriteOutside,
  kOtherBarrier,
  kReturnedThread,
  kPartialSimdgroup,
  kArrayBounds,
  kDeadlocked,
  kPartialMatrix,
};

// Read by Python. `variable`: the index of a buffer, 32 + that of a threadgroup variable, or -1.
struct Found {
  uint32_t kind, benign, thread, threadgroup[3], other_thread, other_threadgroup;
  int32_t variable;
  uint32_t count;
  int64_t offset;
  uint64_t size, site, other_site;
};

constexpr int kMaxFound = 4096;
static Found found[kMaxFound];
static int found_count;
static uint32_t abandoned;  // threadgroups that were given up

inline void add_found(Found entry) {
  for (int i = 0; i < found_count; i++) {
    Found& known = found[i];
    if (known.kind == entry.kind && known.site == entry.site && known.variable == entry.variable &&
        known.benign == entry.benign) {
      known.count++;
      return;
    }
  }
  if (found_count == kMaxFound) return;
  entry.count = 1;
  found[found_count++] = entry;
}

inline Found describe(const Threadgroup* t, FoundKind kind, uint64_t site) {
  Found entry = {};
  entry.kind = kind;
  entry.thread = t->current;
  memcpy(entry.threadgroup, t->shared.threadgroup_position, sizeof entry.threadgroup);
  entry.variable = -1;
  entry.site = site;
  return entry;
}

inline void place_in(Found& entry, const Region& region, uint64_t address, uint64_t size) {
  entry.variable = region.memory == kDeviceMemoryKind ? region.index : 32 + region.index;
  entry.offset = (int64_t)(address - region.begin);
  entry.size = size;
}

inline void name_other(Found& entry, const Access& access, Memory memory) {
  entry.other_thread = thread_of(access);
  entry.other_threadgroup = from_other_threadgroup(access, memory);
}

// Give up the threadgroup: what would come next must not run.
__attribute__((noreturn)) inline void abandon(Threadgroup* t) {
  t->abandoned = true;
  metile_resume(t->worker_stack);
}

}  // namespace metile::check
