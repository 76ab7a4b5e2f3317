// What the runtime knows of a threadgroup while it runs: a fiber a thread, 32 threads a simdgroup.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../abi.h"

#define METILE_EXPORT extern "C" __attribute__((visibility("default")))
#define METILE_CALLED extern "C" __attribute__((visibility("hidden"), used))  // from assembly
#define METILE_RARE(condition) __builtin_expect(!!(condition), 0)

namespace metile {

using Phase = __msl_phase;
using Pair = __msl_pair;
using Entry = void (*)(__msl_args*);

constexpr int kLanes = 32;
constexpr int kThreads = 1024;
constexpr int kSimdgroups = kThreads / kLanes;
constexpr int kTiles = 512;      // live matrices of a simdgroup
constexpr int kVariables = 128;  // threadgroup variables of a kernel
constexpr uint64_t kPage = 4096;
constexpr uint64_t kStackBytes = 20 * kPage;  // of a fiber, with its guard page
constexpr uint64_t kStacksBytes = kThreads * kStackBytes;
constexpr uint64_t kArenaBytes = 4 << 20;  // threadgroup memory of a worker, gaps included
constexpr uint32_t kMatrixOperation = 0x10000, kMatrixTouch = 0x20000, kSimdgroupBarrier = 0x30000;

enum FaultKind : uint32_t {
  kNoFault,
  kBadAccess,
  kArithmetic,
  kTrap,
  kStackOverflow,
  kStopped,
  kDifferentBarriers,
  kInactiveLanes,
  kTooManyMatrices,
  kDeadlock,
  kThreadgroupMemory,
};

// Read by Python: why a launch ended early.
struct Fault {
  uint32_t kind, thread, threadgroup[3], signal;
  uint64_t address, site, other_site;
};

struct alignas(64) Tile {
  uint8_t bytes[256];
};

// simdgroup_matrix once a simdgroup: operations and matrices are numbered in program order, the same for every lane.
struct Matrices {
  bool ready;
  uint32_t operation, created;  // the next number
  uint32_t lane_operation[kLanes], lane_created[kLanes];
  int free_count;
  uint16_t free_tiles[kTiles], tile_of[kTiles];  // tile_of: by number of creation, modulo kTiles
  uint32_t touched[kTiles];                      // the interval in which a lane's elements were last handed out
  uint32_t deleted[kTiles];                      // mask of the lanes that have dropped it
  Tile tiles[kTiles];
};

struct alignas(64) Simdgroup {
  uint32_t running, collecting, at_barrier;  // masks of lanes
  uint32_t lanes, live;                      // masks: that exist, that have not returned
  uint32_t phase, interval;                  // of the collective being gathered
  bool mixed;                                // its lanes came from different call sites
  uint32_t operations[kLanes];
  uint64_t site, sites[kLanes];
  Phase phases[2];
  Matrices matrices;
};

struct Variable {
  const void* key;
  uint8_t* address;
  uint64_t size;
  const char* name;
};

struct Counts {
  uint64_t switches, collectives, barriers, matrix_operations, threads, threadgroup_bytes;
};

struct Job;

struct Threadgroup {
  int current, count, simdgroup_count, live, barrier_count;
  int free_stacks, variable_count, argument_count;
  void* worker_stack;
  void* stack[kThreads];  // of a suspended fiber; null before a thread starts
  uint16_t stack_index[kThreads], free_stack[kThreads];
  uint32_t size[3], barrier_flags;
  bool different_barriers;
  uint64_t barrier_site, other_barrier_site;
  int barrier_thread, other_barrier_thread;
  Entry entry;
  Job* job;
  __msl_shared shared;
  uint8_t *stacks, *arena, *signal_stack;
  uint64_t arena_used, variable_bytes;
  Variable variables[kVariables];
  uint64_t arguments[8];
  Counts counts;
  bool abandoned;
  bool guarded[kThreads];
  Simdgroup simdgroups[kSimdgroups];
};

// One launch, shared by the workers.
struct Job {
  Entry entry;
  __msl_shared shared;
  uint64_t argument_bytes[8];
  uint64_t threadgroup_limit;
  uint64_t image_begin, image_end;  // of the kernel's shared library
  uint64_t groups, next;
  uint32_t stop, faulted;
  Fault fault;
  Counts counts;
};

static __thread Threadgroup* current_threadgroup __attribute__((tls_model("initial-exec")));

inline Threadgroup* self() { return current_threadgroup; }
inline Simdgroup& simdgroup_of(Threadgroup* t, int thread) { return t->simdgroups[thread / kLanes]; }
inline bool on_fiber(const Threadgroup* t, uint64_t address) {
  return address - (uint64_t)t->stacks < kStacksBytes;
}

}  // namespace metile
