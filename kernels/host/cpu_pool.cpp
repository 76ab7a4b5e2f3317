// The host side of the CPU target: one persistent pool of threads, and launches on the memory of MLX arrays.
//
// Loaded with ctypes.PyDLL, so every exported function is entered with Python's lock held. The few C-API
// names it needs are declared here: no Python headers have to be installed.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "host/lookahead.h"
#include "host/outputs.h"

extern "C" {
struct PyBuffer {  // Py_buffer, stable since Python 3.11
  void* data;
  void* owner;
  int64_t bytes, itemsize;
  int readonly, ndim;
  char* format;
  int64_t *shape, *strides, *suboffsets;
  void* internal;
};
int PyObject_GetBuffer(void* object, PyBuffer* view, int flags);
void PyBuffer_Release(PyBuffer* view);
int PyList_SetItem(void* list, int64_t index, void* item);  // takes over the reference to item
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}

namespace {

constexpr int kMaxArrays = 24, kMaxThreads = 256, kLayout = 1000;
constexpr int kStrides = 0x0010 | 0x0008;  // PyBUF_STRIDES

struct Array {  // what a kernel's entry reads of one input or output; strides in bytes
  void* data;
  int64_t ndim, shape[kMaxDims], strides[kMaxDims];
};

struct Scratch {  // threadgroup memory of one thread; `tag` tells what the last task staged there
  char* memory;
  int64_t bytes;
  uint64_t tag[4];
};

typedef void (*Entry)(const Array*, const int64_t*, uint32_t, Scratch*);

struct Job {
  Entry entry;
  const Array* arrays;
  const int64_t* numbers;
  uint32_t groups;
  int64_t scratch_bytes;
};

struct Pool {
  pthread_mutex_t launching, sleeping;  // one launch at a time; guards the sleepers' condition
  pthread_cond_t wake;
  int threads, started;
  int64_t spin_ns;
  Job job;
  uint64_t generation;              // counts launches; workers wait for the next
  uint64_t open;                    // the generation that may still be joined, 0 when none
  uint64_t left;                    // groups not taken yet: the first in the low half, the one after the last above
  uint32_t active, sleepers;        // workers inside the job; workers asleep
  Scratch scratch[kMaxThreads];
};

Pool pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 1, 0, 200000,
             {}, 0, 0, 0, 0, 0, {}};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

constexpr int64_t kHugePage = 2 << 20;
#if defined(__linux__)
constexpr int kAdviseHuge = 14, kAdviseCollapse = 25;  // MADV_HUGEPAGE; MADV_COLLAPSE, Linux 6.1
#endif

void reserve(Scratch& scratch, int64_t bytes) {
  if (scratch.bytes >= bytes) return;
  free(scratch.memory);
  scratch.memory = nullptr;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (posix_memalign(reinterpret_cast<void**>(&scratch.memory), kHugePage, bytes) != 0) abort();
#if defined(__linux__)
  madvise(scratch.memory, bytes, kAdviseHuge);  // a hint: nothing is lost where it is refused
#endif
  scratch.bytes = bytes;
  memset(scratch.tag, 0, sizeof scratch.tag);
}

// Take a group from the front or from the back of what is left; false when nothing is.
bool take(bool back, uint32_t* group) {
  uint64_t left = __atomic_load_n(&pool.left, __ATOMIC_RELAXED);
  for (;;) {
    const uint32_t first = static_cast<uint32_t>(left), end = left >> 32;
    if (first >= end) return false;
    const uint64_t rest = back ? left - (uint64_t{1} << 32) : left + 1;
    *group = back ? end - 1 : first;
    if (__atomic_compare_exchange_n(&pool.left, &left, rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
  }
}

// The calling thread works from the front and the workers from the back, so each walks through memory in order.
void take_groups(const Job& job, Scratch& scratch, bool back) {
  reserve(scratch, job.scratch_bytes);
  memset(scratch.tag, 0, sizeof scratch.tag);
  for (uint32_t group; take(back, &group);) job.entry(job.arrays, job.numbers, group, &scratch);
}

uint64_t wait_for_generation(uint64_t seen, int worker, Fetcher& fetcher) {
  const int64_t deadline = now_ns() + pool.spin_ns;
  for (int i = 0;; ++i) {
    const uint64_t generation = __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE);
    if (generation != seen) return generation;
    if (!fetcher.fetch(worker)) relax();
    if ((i & 63) == 63 && now_ns() > deadline) break;
  }
  pthread_mutex_lock(&pool.sleeping);
  __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&pool.generation, __ATOMIC_SEQ_CST) == seen) pthread_cond_wait(&pool.wake, &pool.sleeping);
  __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&pool.sleeping);
  return __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE);
}

// A worker that wakes late finds the job closed and takes no part: nobody ever waits for a sleeper.
void* work(void* argument) {
  const int worker = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  Fetcher fetcher;
  for (uint64_t seen = 0;;) {
    seen = wait_for_generation(seen, worker, fetcher);
    __atomic_fetch_add(&pool.active, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.open, __ATOMIC_SEQ_CST) == seen) take_groups(pool.job, pool.scratch[worker], true);
    __atomic_fetch_sub(&pool.active, 1, __ATOMIC_SEQ_CST);
  }
  return nullptr;
}

void start_workers() {
  for (int i = 1; i < pool.threads; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, work, reinterpret_cast<void*>(static_cast<intptr_t>(i))) != 0) {
      pool.threads = i;
      break;
    }
    pthread_detach(thread);
  }
  pool.started = 1;
}

void call_workers() {
  const uint64_t generation = pool.generation + 1;
  __atomic_store_n(&pool.open, generation, __ATOMIC_SEQ_CST);
  __atomic_store_n(&pool.generation, generation, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST) == 0) return;
  pthread_mutex_lock(&pool.sleeping);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.sleeping);
}

// Run a job; the caller holds `launching`.
void run_next(const Job& job) {
  pool.job = job;
  __atomic_store_n(&pool.left, static_cast<uint64_t>(job.groups) << 32, __ATOMIC_RELAXED);
  if (job.groups > 1 && pool.threads > 1) call_workers();
  take_groups(job, pool.scratch[0], false);
  __atomic_store_n(&pool.open, 0, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&pool.active, __ATOMIC_SEQ_CST) != 0) relax();
}

void begin_launching() {
  pthread_mutex_lock(&pool.launching);
  if (!pool.started) start_workers();
}

void run(const Job& job) {
  begin_launching();
  run_next(job);
  pthread_mutex_unlock(&pool.launching);
}

void after_fork() {  // a child has none of the parent's threads: begin anew
  pthread_mutex_init(&pool.launching, nullptr);
  pthread_mutex_init(&pool.sleeping, nullptr);
  pthread_cond_init(&pool.wake, nullptr);
  pool.started = 0;
  pool.generation = pool.open = 0;
  pool.active = pool.sleepers = 0;
  forget_outputs();
}

Array describe(const PyBuffer& view) {
  Array array = {view.data, view.ndim, {}, {}};
  for (int d = 0; d < view.ndim; ++d) {
    array.shape[d] = view.shape[d];
    array.strides[d] = view.strides[d];
  }
  return array;
}

Array describe(void* memory, const int64_t* shape, int64_t ndim, int64_t itemsize) {
  Array array = {memory, ndim, {}, {}};
  for (int64_t d = ndim - 1, stride = itemsize; d >= 0; stride *= shape[d--]) {
    array.shape[d] = shape[d];
    array.strides[d] = stride;
  }
  return array;
}

bool rows_are_whole(const PyBuffer& view) {
  return view.ndim == 0 || view.shape[view.ndim - 1] == 1 || view.strides[view.ndim - 1] == view.itemsize;
}

// Whether the elements of a row lie side by side and all leading axes fold into one, as a matrix needs.
bool folds_to_matrix(const PyBuffer& view) {
  if (!rows_are_whole(view)) return false;
  int64_t rows = 0, stride = 0;  // of the axes inside the one at hand
  for (int d = view.ndim - 2; d >= 0; --d) {
    if (view.shape[d] == 1) continue;
    if (rows != 0 && view.strides[d] != rows * stride) return false;
    if (rows == 0) stride = view.strides[d], rows = 1;
    rows *= view.shape[d];
  }
  return true;
}

struct OutputSpec {  // shape and DLPack dtype of one output
  int64_t ndim, shape[kMaxDims];
  int32_t code, bits;
};

// An output in memory of its own, described in `array`; null when memory ran out.
Output* new_output(const OutputSpec& spec, Array* array) {
  int64_t bytes = spec.bits / 8;
  for (int d = 0; d < spec.ndim; ++d) bytes *= spec.shape[d];
  Output* output = static_cast<Output*>(calloc(1, sizeof(Output)));
  void* memory = output ? acquire(bytes) : nullptr;
  if (memory == nullptr) {
    free(output);
    return nullptr;
  }
  memcpy(output->shape, spec.shape, sizeof output->shape);
  output->bytes = bytes;
  output->tensor = {memory, 1, 0, static_cast<int32_t>(spec.ndim), static_cast<uint8_t>(spec.code),
                    static_cast<uint8_t>(spec.bits), 1, output->shape, nullptr, 0, nullptr, delete_output};
  *array = describe(memory, output->shape, spec.ndim, spec.bits / 8);
  return output;
}

// Hand an output over as a capsule at a place of a list.
void give(Output* output, void* capsules, int place) {
  PyList_SetItem(capsules, place, PyCapsule_New(&output->tensor, "dltensor", delete_capsule));
}

}  // namespace

extern "C" {

struct Launch {  // everything of one launch but the input objects
  Entry entry;
  int64_t groups, scratch_bytes, poison;
  int64_t input_count, output_count;
  int64_t strided_inputs;  // bit i: the kernel takes input i with any strides but the last
  int64_t numbers[16];
  OutputSpec outputs[4];
};

// Set the number of threads, before the first launch or between launches of a fresh process.
void metile_configure(int threads, int64_t spin_ns) {
  static int hooked = 0;
  if (!hooked) hooked = 1, pthread_atfork(nullptr, nullptr, after_fork);
  if (!pool.started) pool.threads = threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads;
  pool.spin_ns = spin_ns;
}

int metile_threads() { return pool.threads; }

// Ask for huge pages under the memory of an array that will be streamed often; it stays where it is. Returns
// the bytes that the range covers when the system agreed, else 0.
int64_t metile_huge_pages(void* object) {
  PyBuffer view;
  if (PyObject_GetBuffer(object, &view, kStrides) != 0) return -1;
  int64_t bytes = view.itemsize;
  for (int d = 0; d < view.ndim; ++d) bytes *= view.shape[d];
  const uintptr_t first = reinterpret_cast<uintptr_t>(view.data) / kHugePage * kHugePage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(view.data) + bytes + kHugePage - 1) / kHugePage * kHugePage;
  int64_t agreed = 0;
  void* state = PyEval_SaveThread();  // a second for every few hundred megabytes: others go on meanwhile
#if defined(__linux__)
  for (uintptr_t page = first; page < last; page += kHugePage)
    if (madvise(reinterpret_cast<void*>(page), kHugePage, kAdviseCollapse) == 0) agreed += kHugePage;
#endif
  PyEval_RestoreThread(state);
  PyBuffer_Release(&view);
  return agreed;
}

// Let workers look ahead to an array's memory; returns 0, or -1 where the object has no buffer.
int metile_expect(void* object) {
  PyBuffer view;
  if (PyObject_GetBuffer(object, &view, kStrides) != 0) return -1;
  registered(view.data, true);
  PyBuffer_Release(&view);
  return 0;
}

// Run a kernel. `inputs` are objects with the buffer protocol (MLX arrays are evaluated by it); `capsules`,
// a list, receives one DLPack capsule an output. Returns 0, or 1 + the index of an input that gave no buffer (a Python
// error is then set), or kLayout + the index of one that does not fold to a matrix, or -1 when memory ran out.
int metile_launch(const Launch* launch, void** inputs, void* capsules) {
  PyBuffer views[kMaxArrays];
  Array arrays[kMaxArrays];
  const int count = static_cast<int>(launch->input_count);
  int held = 0, status = 0;
  for (; held < count; ++held) {
    if (PyObject_GetBuffer(inputs[held], &views[held], kStrides) != 0) {
      status = 1 + held;
      break;
    }
    const bool strided = launch->strided_inputs >> held & 1;
    if (views[held].ndim > kMaxDims || !(strided ? rows_are_whole(views[held]) : folds_to_matrix(views[held]))) {
      status = kLayout + held;
      PyBuffer_Release(&views[held]);
      break;
    }
    arrays[held] = describe(views[held]);
  }
  Output* outputs[4] = {};
  for (int i = 0; status == 0 && i < launch->output_count; ++i) {
    outputs[i] = new_output(launch->outputs[i], &arrays[count + i]);
    if (outputs[i] == nullptr)
      status = -1;
    else if (launch->poison)
      memset(arrays[count + i].data, 0xFF, outputs[i]->bytes);  // every float type reads NaN
  }
  if (status == 0) {
    const Job job = {launch->entry, arrays, launch->numbers, static_cast<uint32_t>(launch->groups), launch->scratch_bytes};
    Region regions[kTogether];
    int weights = 0;
    for (int i = 0; i < count && weights < kTogether; ++i)
      if (registered(arrays[i].data, false))
        regions[weights++] = Region{static_cast<const char*>(arrays[i].data), views[i].shape[0] * views[i].strides[0]};
    const Registered* now = note_launch(regions, weights);
    void* state = PyEval_SaveThread();
    run(job);
    PyEval_RestoreThread(state);
    if (now != nullptr) want_next(now);
  }
  for (int i = 0; i < held; ++i) PyBuffer_Release(&views[i]);
  for (int i = 0; i < launch->output_count && outputs[i]; ++i) {
    if (status == 0)
      give(outputs[i], capsules, i);
    else
      delete_output(&outputs[i]->tensor);
  }
  return status;
}

}  // extern "C"

#include "host/tape.h"
