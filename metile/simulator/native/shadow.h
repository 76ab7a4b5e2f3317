// Shadow memory of checked mode: for every byte of a buffer or threadgroup variable, who wrote and who read it last.
// Time is counted in epochs, one counter for each kind of memory; a barrier that flags a kind begins a new one.
#pragma once
#include "threadgroup.h"

namespace metile::check {

enum Memory : int { kThreadgroupMemoryKind, kDeviceMemoryKind };

// `who`: the thread, and whether it was atomic, and whether several threads did so atomically since the last barrier.
struct Access {
  uint32_t epoch;  // 0: none
  uint16_t order;  // simdgroup barriers that the thread's simdgroup had passed
  uint16_t who;
};
constexpr uint16_t kThreadMask = 0x3ff, kAtomic = 0x400, kSeveral = 0x800;

struct Cell {
  Access write, reads[2];
  uint32_t written_in, read_in;  // the number of the threadgroup
};

struct Region {
  uint64_t begin, end;
  Cell* cells;
  Memory memory;
  bool poisoned;  // reads before the first write are defects
  int32_t index;  // of the buffer, or of the threadgroup variable
};

struct Traffic {
  uint64_t read, written, unique_read, unique_written;
};

// Where the running thread stands.
struct Now {
  uint32_t epoch[2], begin[2];  // begin: the first epoch of this threadgroup
  uint32_t threadgroup;         // number, from 1
  uint16_t order[kSimdgroups][2];
};

static Now now;
static Region buffers[32];
static int buffer_count;
static Traffic traffic[32];
static Cell* arena_cells;

inline int thread_of(const Access& access) { return access.who & kThreadMask; }
inline bool from_other_threadgroup(const Access& access, Memory memory) { return access.epoch < now.begin[memory]; }

// True if everything of an earlier access of this threadgroup is ordered before what `thread` does now.
inline bool ordered(const Access& access, int thread, Memory memory) {
  if (access.epoch != now.epoch[memory]) return true;
  if (access.who & kSeveral) return false;
  const int other = thread_of(access);
  return other == thread ||
         (other / kLanes == thread / kLanes && access.order < now.order[thread / kLanes][memory]);
}

inline bool conflicts(const Access& access, int thread, bool atomic, Memory memory) {
  if (!access.epoch || (atomic && access.who & kAtomic)) return false;
  if (from_other_threadgroup(access, memory)) return memory == kDeviceMemoryKind;
  return !ordered(access, thread, memory);
}

inline Access this_access(int thread, bool atomic, Memory memory) {
  return {now.epoch[memory], now.order[thread / kLanes][memory], (uint16_t)(thread | (atomic ? kAtomic : 0))};
}

inline void note_write(Cell& cell, int thread, bool atomic, Memory memory) {
  Access access = this_access(thread, atomic, memory);
  const Access& last = cell.write;
  if (atomic && last.epoch == access.epoch && last.who & kAtomic && thread_of(last) != thread) access.who |= kSeveral;
  cell.write = access;
  cell.written_in = now.threadgroup;
}

// Of many readers two are kept, of different simdgroups where there are such: enough for any later write to meet one.
inline void note_read(Cell& cell, int thread, bool atomic, Memory memory) {
  const Access access = this_access(thread, atomic, memory);
  Access &first = cell.reads[0], &second = cell.reads[1];
  cell.read_in = now.threadgroup;
  const bool foreign = memory == kDeviceMemoryKind && first.epoch && from_other_threadgroup(first, memory);
  if (foreign) {
    if (!second.epoch || !from_other_threadgroup(second, memory)) second = first;
    first = access;
  } else if (!first.epoch || ordered(first, thread, memory)) {
    const bool plain = first.epoch == access.epoch && thread_of(first) == thread && !(first.who & kAtomic);
    if (!(plain && atomic)) first = access;
  } else if (!second.epoch || (!(memory == kDeviceMemoryKind && from_other_threadgroup(second, memory)) &&
                               (ordered(second, thread, memory) || from_other_threadgroup(second, memory)))) {
    second = access;
  } else if (thread_of(first) / kLanes == thread_of(second) / kLanes && !from_other_threadgroup(second, memory)) {
    second = access;
  }
}

inline bool add_buffer(int index, uint64_t address, uint64_t bytes, bool poisoned) {
  Cell* cells = nullptr;
  if (bytes) {
    cells = (Cell*)map_memory(bytes * sizeof(Cell));
    if (!cells) return false;
  }
  buffers[buffer_count++] = {address, address + bytes, cells, kDeviceMemoryKind, poisoned, index};
  return true;
}

inline void drop_buffers() {
  for (int i = 0; i < buffer_count; i++)
    if (buffers[i].cells) munmap(buffers[i].cells, (buffers[i].end - buffers[i].begin) * sizeof(Cell));
  buffer_count = 0;
}

inline bool begin_launch() {
  drop_buffers();
  now = {};
  now.epoch[0] = now.epoch[1] = 1;
  memset(traffic, 0, sizeof traffic);
  if (!arena_cells) arena_cells = (Cell*)map_memory(kArenaBytes * sizeof(Cell));
  if (!arena_cells) return false;
  madvise(arena_cells, kArenaBytes * sizeof(Cell), MADV_DONTNEED);
  return true;
}

inline bool variable_region(const Threadgroup* t, int i, Region* region) {
  const Variable& variable = t->variables[i];
  const uint64_t begin = (uint64_t)variable.address;
  Cell* cells = arena_cells + (variable.address - t->arena);
  *region = {begin, begin + variable.size, cells, kThreadgroupMemoryKind, true, i};
  return true;
}

// The region of an address; false where it lies in none.
inline bool find_region(const Threadgroup* t, uint64_t address, Region* region) {
  if (address - (uint64_t)t->arena < kArenaBytes) {
    for (int i = 0; i < t->variable_count; i++)
      if (address - (uint64_t)t->variables[i].address < t->variables[i].size) return variable_region(t, i, region);
    return false;
  }
  static int last;  // the buffer of the access before, perhaps of a launch with more of them
  if (last >= buffer_count) last = 0;
  for (int k = 0; k < buffer_count; k++) {
    const Region& buffer = buffers[(last + k) % buffer_count];
    if (address - buffer.begin >= buffer.end - buffer.begin) continue;
    last = (last + k) % buffer_count;
    *region = buffer;
    return true;
  }
  return false;
}

// The region nearest to an address that lies in none; false where all are far.
inline bool nearest_region(const Threadgroup* t, uint64_t address, Region* region) {
  uint64_t best = 1 << 20;
  bool found = false;
  const auto consider = [&](const Region& candidate) {
    const uint64_t distance =
        address < candidate.begin ? candidate.begin - address : address >= candidate.end ? address - candidate.end : 0;
    if (distance < best) {
      best = distance;
      *region = candidate;
      found = true;
    }
  };
  for (int i = 0; i < buffer_count; i++) consider(buffers[i]);
  for (int i = 0; i < t->variable_count; i++) {
    Region candidate;
    variable_region(t, i, &candidate);
    consider(candidate);
  }
  return found;
}

}  // namespace metile::check
