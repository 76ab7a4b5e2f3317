// The runtime of metile.simulator: what kernels call (abi.h), and what Python calls (below).
#include "barriers.h"
#include "matrix_lane.h"
#include "matrix_simdgroup.h"
#include "narrow.h"
#include "pool.h"

#ifdef METILE_CHECK
#include "checker.h"
#endif

namespace metile {

// A kernel's arguments and its grid, as Python lays them out.
struct Request {
  uint64_t entry, image_begin, image_end;
  uint64_t buffers[32], argument_bytes[8];
  uint64_t threadgroup_limit;
  uint32_t grid[3], threadgroup[3];
  int32_t workers;
};

// What Python reads when the launch is over.
struct Outcome {
  Fault fault;
  Counts counts;
  uint32_t faulted, stopped;
};

static Job job;

inline uint64_t pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace metile

// Memory that ends at a page nobody may touch, after another such page.
METILE_EXPORT uint64_t metile_allocate(uint64_t bytes) {
  using namespace metile;
  char* memory = (char*)mmap(nullptr, pages(bytes) + 2 * kPage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == (char*)MAP_FAILED) return 0;
  if (bytes && mprotect(memory + kPage, pages(bytes), PROT_READ | PROT_WRITE)) return 0;
  return (uint64_t)memory + kPage;
}

METILE_EXPORT void metile_release(uint64_t memory, uint64_t bytes) {
  munmap((char*)memory - metile::kPage, metile::pages(bytes) + 2 * metile::kPage);
}

METILE_EXPORT int metile_start(const metile::Request* request) {
  using namespace metile;
  job = {};
  job.entry = (Entry)request->entry;
  job.image_begin = request->image_begin;
  job.image_end = request->image_end;
  job.threadgroup_limit = request->threadgroup_limit;
  job.groups = 1;
  memcpy(job.shared.buffers, request->buffers, sizeof job.shared.buffers);
  memcpy(job.argument_bytes, request->argument_bytes, sizeof job.argument_bytes);
  for (int i = 0; i < 3; i++) {
    const uint32_t grid = request->grid[i];
    const uint32_t size = request->threadgroup[i] < grid ? request->threadgroup[i] : grid;
    job.shared.threads_per_grid[i] = grid;
    job.shared.dispatch_threads_per_threadgroup[i] = size;
    job.shared.threadgroups_per_grid[i] = size ? (grid + size - 1) / size : 0;
    job.groups *= job.shared.threadgroups_per_grid[i];
  }
  return start_job(&job, request->workers);
}

METILE_EXPORT int metile_wait(int milliseconds) { return metile::wait_for_job(milliseconds); }

METILE_EXPORT void metile_stop() { metile::stop_job(); }

METILE_EXPORT void metile_outcome(metile::Outcome* outcome) {
  outcome->fault = metile::job.fault;
  outcome->counts = metile::job.counts;
  outcome->faulted = metile::job.faulted;
  outcome->stopped = metile::job.stop;
}
