// What checked mode does at every access of a kernel to memory.
#pragma once
#include "found.h"

namespace metile::check {

constexpr uint64_t kCompared = 64;

// A write over another thread's write. Whether it wrote the same value shows once it is done: at the next access.
struct Pending {
  bool waiting;
  Found entry;
  uint64_t address, size;
  uint64_t contested;  // a bit for each byte that another thread wrote too
  uint8_t before[kCompared];
};
static Pending pending;

inline void settle_pending() {
  if (!METILE_RARE(pending.waiting)) return;
  pending.waiting = false;
  pending.entry.benign = true;
  for (uint64_t i = 0; i < pending.size; i++)
    if (pending.contested >> i & 1 && pending.before[i] != ((const uint8_t*)pending.address)[i])
      pending.entry.benign = false;
  add_found(pending.entry);
}

inline void await(const Found& entry, uint64_t address, uint64_t size) {
  if (size > kCompared) return add_found(entry);
  pending.waiting = true;
  pending.entry = entry;
  pending.address = address;
  pending.size = size;
  pending.contested = 0;
  memcpy(pending.before, (const void*)address, size);
}

// Memory that is nobody's business: of fibers, of the runtime, and constants in the kernel's image.
inline bool exempt(const Threadgroup* t, uint64_t address) {
  return on_fiber(t, address) || address - (uint64_t)t < sizeof(Threadgroup) || in_image(t->job, address);
}

__attribute__((noinline)) inline void outside(
    Threadgroup* t, uint64_t address, uint64_t size, bool write, uint64_t site) {
  Found entry = describe(t, write ? kWriteOutside : kReadOutside, site);
  Region region;
  if (nearest_region(t, address, &region))
    place_in(entry, region, address, size);
  else
    entry.offset = (int64_t)address, entry.size = size;
  add_found(entry);
  abandon(t);
}

inline void count_traffic(const Region& region, uint64_t size, bool write, uint64_t unique) {
  if (region.memory != kDeviceMemoryKind) return;
  Traffic& of = traffic[region.index];
  (write ? of.written : of.read) += size;
  (write ? of.unique_written : of.unique_read) += unique;
}

// Report what is wrong with a read or a write of one byte; true if anything is.
inline bool examine(const Cell& cell, int thread, bool write, bool atomic, const Region& region, Found* entry,
                    bool* same_value_possible) {
  const Memory memory = region.memory;
  if (!write && region.poisoned) {
    const bool ready = memory == kDeviceMemoryKind ? cell.written_in != 0 : cell.written_in == now.threadgroup;
    if (!ready) {
      entry->kind = kUninitialised;
      return true;
    }
  }
  if (write) {
    for (const Access& read : cell.reads) {
      if (!conflicts(read, thread, atomic, memory)) continue;
      entry->kind = kWriteAfterRead;
      name_other(*entry, read, memory);
      return true;
    }
  }
  if (!conflicts(cell.write, thread, atomic, memory)) return false;
  entry->kind = write ? kWriteAfterWrite : kReadAfterWrite;
  *same_value_possible = write && !atomic && !(cell.write.who & kAtomic);
  name_other(*entry, cell.write, memory);
  return true;
}

inline void on_access(uint64_t address, uint64_t size, bool write, bool atomic, uint64_t site) {
  Threadgroup* t = self();
  settle_pending();
  if (exempt(t, address)) return;
  Region region;
  if (METILE_RARE(!find_region(t, address, &region) || address + size > region.end))
    outside(t, address, size, write, site);
  const int thread = t->current;
  Cell* cell = region.cells + (address - region.begin);
  uint64_t unique = 0;
  bool reported = false;
  for (uint64_t i = 0; i < size; i++, cell++) {
    bool same_value_possible = false;
    Found entry = {};
    const bool looking = !reported || pending.waiting;
    if (looking && METILE_RARE(examine(*cell, thread, write, atomic, region, &entry, &same_value_possible))) {
      if (!reported || !same_value_possible) {
        Found full = describe(t, (FoundKind)entry.kind, site);
        full.other_thread = entry.other_thread;
        full.other_threadgroup = entry.other_threadgroup;
        place_in(full, region, address, size);
        pending.waiting = false;  // this one is no matter of values
        if (same_value_possible)
          await(full, address, size);
        else
          add_found(full);
        reported = true;
      }
      if (pending.waiting) pending.contested |= 1ull << i;
    }
    if (write) {
      unique += cell->written_in != now.threadgroup;
      note_write(*cell, thread, atomic, region.memory);
    } else {
      unique += cell->read_in != now.threadgroup;
      note_read(*cell, thread, atomic, region.memory);
    }
  }
  count_traffic(region, size, write, unique);
}

}  // namespace metile::check
