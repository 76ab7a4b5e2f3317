// Outputs: buffers that MLX adopts through DLPack, recycled by size.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
void* PyCapsule_New(void* pointer, const char* name, void (*destructor)(void*));
void* PyCapsule_GetPointer(void* capsule, const char* name);
int PyCapsule_IsValid(void* capsule, const char* name);

struct DLManagedTensor {  // dlpack.h, version 0.8
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
}

namespace {

constexpr int kMaxDims = 8;  // of any array here

constexpr int kClasses = 40, kKept = 16;
struct {
  pthread_mutex_t lock;
  void* kept[kClasses][kKept];
  int count[kClasses];
} bins = {PTHREAD_MUTEX_INITIALIZER, {}, {}};

int size_class(int64_t bytes) {
  int c = 6;
  while ((int64_t{1} << c) < bytes) ++c;
  return c;
}

void* acquire(int64_t bytes) {
  const int c = size_class(bytes);
  void* memory = nullptr;
  pthread_mutex_lock(&bins.lock);
  if (bins.count[c] > 0) memory = bins.kept[c][--bins.count[c]];
  pthread_mutex_unlock(&bins.lock);
  if (memory == nullptr && posix_memalign(&memory, 64, int64_t{1} << c) != 0) return nullptr;
  return memory;
}

void recycle(void* memory, int64_t bytes) {
  const int c = size_class(bytes);
  pthread_mutex_lock(&bins.lock);
  const bool keep = c <= 24 && bins.count[c] < kKept;
  if (keep) bins.kept[c][bins.count[c]++] = memory;
  pthread_mutex_unlock(&bins.lock);
  if (!keep) free(memory);
}

void forget_outputs() {  // in a forked child: another thread may have been between the two lines that the lock guards
  pthread_mutex_init(&bins.lock, nullptr);
  memset(bins.count, 0, sizeof bins.count);
}

struct Output {  // the tensor handed to MLX and the numbers its pointers point to
  DLManagedTensor tensor;
  int64_t shape[kMaxDims], bytes;
};

void delete_output(DLManagedTensor* tensor) {
  Output* output = reinterpret_cast<Output*>(tensor);
  recycle(tensor->data, output->bytes);
  free(output);
}

void delete_capsule(void* capsule) {  // only one that nobody consumed still has this name
  if (PyCapsule_IsValid(capsule, "dltensor"))
    delete_output(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

}  // namespace
