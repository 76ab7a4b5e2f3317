// What compiled kernels and the runtime say to each other. Included by the prelude (C++ for OpenCL) and by the
// runtime (C++), so only types that mean the same in both.
#pragma once

extern "C" {

// One collective operation of a simdgroup: every active lane leaves its operand in data[lane], the last to arrive
// releases all. `done` and `result` belong to the lane that computes for all.
struct __msl_phase {
  unsigned int active, done, pad[14];
  unsigned char data[32][32];
  unsigned char result[64];
};

// What all threads of a threadgroup share: pointers of buffers and of threadgroup arguments by index, sizes in threads.
struct __msl_shared {
  unsigned long buffers[32];
  unsigned long threadgroup_arguments[8];
  unsigned int threadgroup_position[3], threads_per_grid[3], threadgroups_per_grid[3];
  unsigned int threads_per_threadgroup[3];           // of this threadgroup: the last one may be partial
  unsigned int dispatch_threads_per_threadgroup[3];  // as asked for
  unsigned int simdgroups;
};

// What one thread is entered with.
struct __msl_args {
  const struct __msl_shared* shared;
  unsigned int position_in_grid[3], position_in_threadgroup[3];
  unsigned int lane, simdgroup, index;
};

typedef float __msl_pair __attribute__((ext_vector_type(2)));

// Two calls stay two: which of them a lane is at tells what it waits for.
struct __msl_phase* __msl_coll(const void* operand, unsigned int size) __attribute__((nomerge));
void __msl_tgbar(unsigned int flags) __attribute__((nomerge));  // mem_flags: 1 device, 2 threadgroup
void __msl_sgbar(unsigned int flags) __attribute__((nomerge));
unsigned int __msl_lane();

// The address of a threadgroup variable: `key` tells the variables of a kernel apart.
unsigned long __msl_tg(const void* key, unsigned long size, unsigned long align, const char* name);

// simdgroup_matrix, a lane at a time: two elements of each operand in, two of the result out.
const __msl_pair* __msl_mma3(__msl_pair a, __msl_pair b, __msl_pair c);

// simdgroup_matrix, once a simdgroup: a matrix is a tile of the simdgroup, the first lane to come to an operation does
// it. `size` is of an element; `types` holds two bits each for d, a, b, c: 0 float, 1 half, 2 bfloat.
void* __msl_mnew();
void __msl_mdel(void* tile);
void __msl_mcopy(void* to, const void* from, unsigned int size);
void __msl_mfill(void* to, const void* off_and_on_diagonal, unsigned int size);
void* __msl_mtouch(void* tile, unsigned int size);  // this lane's two elements
void __msl_mload(void* to, const void* from, unsigned long stride, bool transpose, unsigned int size);
void __msl_mstore(const void* from, void* to, unsigned long stride, bool transpose, unsigned int size);
void __msl_mmma(void* d, const void* a, const void* b, const void* c, unsigned int types);
}
