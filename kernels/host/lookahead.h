// Looking ahead: while Python prepares the next launch, idle workers bring the weights it will read into their caches.
//
// A model runs its layers in the same order at every token, so the weights that followed last time follow again. Only
// weights that were registered are looked ahead to: those of a patched model, never those of a measurement that wants
// them cold. A prefetch cannot fault, whatever has become of the memory.
#pragma once

#include <stdint.h>

namespace {

struct Region {
  const char* data;
  int64_t bytes;
};

constexpr int kTogether = 2;                // weight matrices that one launch reads
constexpr uint32_t kRegistered = 1 << 14;   // places for registered weights, a power of two
constexpr int64_t kAheadBytes = 1280 << 10; // what a worker's own cache holds beside its work
constexpr int kAheadLines = 8;              // fetched between two looks for work

struct Registered {
  const void* data;
  Region next[kTogether];  // what the launch after the one that reads `data` read last time
};

struct {
  Registered place[kRegistered];
  uint32_t count;
  Registered* last;                  // of the launch before
  Region wanted[kTogether];          // what idle workers fetch now
  uint64_t version;                  // odd while `wanted` is written
} lookahead;

Registered* registered(const void* data, bool insert) {
  uint32_t slot = static_cast<uint32_t>((reinterpret_cast<uintptr_t>(data) >> 4) * 2654435761u) & (kRegistered - 1);
  for (uint32_t step = 0; step < kRegistered; ++step, slot = (slot + 1) & (kRegistered - 1)) {
    if (lookahead.place[slot].data == data) return &lookahead.place[slot];
    if (lookahead.place[slot].data != nullptr) continue;
    if (!insert || lookahead.count > kRegistered / 2) return nullptr;
    ++lookahead.count;
    lookahead.place[slot].data = data;
    return &lookahead.place[slot];
  }
  return nullptr;
}

// Note that a launch reads `regions`; the launch before it learns what comes next. Called with Python's lock held.
Registered* note_launch(const Region* regions, int count) {
  Registered* now = count ? registered(regions[0].data, false) : nullptr;
  if (now == nullptr) return nullptr;
  if (lookahead.last != nullptr)
    for (int i = 0; i < kTogether; ++i) lookahead.last->next[i] = i < count ? regions[i] : Region{nullptr, 0};
  lookahead.last = now;
  return now;
}

// The launch that `now` describes is done: from here until the next one, workers may fetch what follows it.
void want_next(const Registered* now) {
  __atomic_fetch_add(&lookahead.version, 1, __ATOMIC_ACQ_REL);
  for (int i = 0; i < kTogether; ++i) lookahead.wanted[i] = now ? now->next[i] : Region{nullptr, 0};
  __atomic_fetch_add(&lookahead.version, 1, __ATOMIC_RELEASE);
}

// One idle worker's way through what is wanted: from the end, where workers begin, each its own stretch.
struct Fetcher {
  uint64_t version = 0;
  Region left[kTogether] = {};

  // Fetch a few lines; return whether there was anything to fetch.
  bool fetch(int worker) {
    const uint64_t now = __atomic_load_n(&lookahead.version, __ATOMIC_ACQUIRE);
    if (now & 1) return false;
    if (now != version) begin(now, worker);
    bool any = false;
    for (Region& region : left) {
      for (int i = 0; i < kAheadLines && region.bytes > 0; ++i, region.bytes -= 64) {
        __builtin_prefetch(region.data + region.bytes - 64, 0, 2);
        any = true;
      }
    }
    return any;
  }

 private:
  void begin(uint64_t now, int worker) {
    Region wanted[kTogether];
    for (int i = 0; i < kTogether; ++i) wanted[i] = lookahead.wanted[i];
    if (__atomic_load_n(&lookahead.version, __ATOMIC_ACQUIRE) != now) return;
    version = now;
    for (int i = 0; i < kTogether; ++i) {
      const int64_t most = kAheadBytes / kTogether, end = wanted[i].bytes - (worker - 1) * most;
      const int64_t bytes = end < 0 ? 0 : end < most ? end : most;
      left[i] = Region{wanted[i].data + (end - bytes), bytes};
    }
  }
};

}  // namespace
