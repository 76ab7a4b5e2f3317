// Atomics. OpenCL predefines names that are Metal's, so those are renamed.
#define memory_order __msl_memory_order
#define memory_order_relaxed __msl_memory_order_relaxed
#define memory_order_acquire __msl_memory_order_acquire
#define memory_order_release __msl_memory_order_release
#define memory_order_acq_rel __msl_memory_order_acq_rel
#define memory_order_seq_cst __msl_memory_order_seq_cst
#define atomic_int __msl_atomic_int
#define atomic_uint __msl_atomic_uint
#define atomic_float __msl_atomic_float
#define atomic_bool __msl_atomic_bool
#define atomic_long __msl_atomic_long
#define atomic_ulong __msl_atomic_ulong

namespace metal {
enum memory_order {
  memory_order_relaxed = 0,
  memory_order_acquire = 2,
  memory_order_release = 3,
  memory_order_acq_rel = 4,
  memory_order_seq_cst = 5
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
template <class T>
struct atomic {
  T __v;
};
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(5);
}

template <class T>
METAL_FUNC T __msl_atomic_load(volatile T* p) {
  T r;
  __atomic_load(p, &r, 0);
  return r;
}
template <class T>
METAL_FUNC bool __msl_atomic_swap(volatile T* p, T* expected, T to) {
  return __atomic_compare_exchange(p, expected, &to, false, 0, 0);
}
template <class F, class T>
METAL_FUNC T __msl_atomic_update(volatile T* p, T operand) {
  T old = __msl_atomic_load<T>(p);
  while (!__msl_atomic_swap<T>(p, &old, F::template of<T>(old, operand))) {
  }
  return old;
}
struct __msl_subtracts {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return (T)(a - b); }
};

#define __MSL_FETCH(space, name, F)                                                                         \
  template <class T, class U>                                                                               \
  METAL_FUNC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object, U operand, memory_order) {  \
    return metal::__msl_atomic_update<F, T>((volatile T*)&object->__v, (T)operand);                         \
  }
#define __MSL_ATOMICS(space)                                                                                \
  template <class T>                                                                                        \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                 \
    return metal::__msl_atomic_load<T>((volatile T*)&object->__v);                                             \
  }                                                                                                         \
  template <class T, class U>                                                                               \
  METAL_FUNC void atomic_store_explicit(volatile space atomic<T>* object, U desired, memory_order) {        \
    T x = (T)desired;                                                                                       \
    __atomic_store((volatile T*)&object->__v, (T*)&x, 0);                                                   \
  }                                                                                                         \
  template <class T, class U>                                                                               \
  METAL_FUNC T atomic_exchange_explicit(volatile space atomic<T>* object, U desired, memory_order) {        \
    T x = (T)desired, old;                                                                                  \
    __atomic_exchange((volatile T*)&object->__v, (T*)&x, (T*)&old, 0);                                      \
    return old;                                                                                             \
  }                                                                                                         \
  template <class T, class U>                                                                               \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, thread T* expected, \
                                                        U desired, memory_order, memory_order) {            \
    return metal::__msl_atomic_swap<T>((volatile T*)&object->__v, (T*)expected, (T)desired);                   \
  }                                                                                                         \
  __MSL_FETCH(space, add, __msl_adds)                                                                       \
  __MSL_FETCH(space, sub, __msl_subtracts)                                                                  \
  __MSL_FETCH(space, min, __msl_mins)                                                                       \
  __MSL_FETCH(space, max, __msl_maxes)                                                                      \
  __MSL_FETCH(space, and, __msl_ands)                                                                       \
  __MSL_FETCH(space, or, __msl_ors)                                                                         \
  __MSL_FETCH(space, xor, __msl_xors)                                                                       \
  template <class T, class U>                                                                               \
  METAL_FUNC void atomic_min_explicit(volatile space atomic<T>* object, U operand, memory_order order) {    \
    atomic_fetch_min_explicit(object, operand, order);                                                      \
  }                                                                                                         \
  template <class T, class U>                                                                               \
  METAL_FUNC void atomic_max_explicit(volatile space atomic<T>* object, U operand, memory_order order) {    \
    atomic_fetch_max_explicit(object, operand, order);                                                      \
  }
__MSL_ATOMICS(device)
__MSL_ATOMICS(threadgroup)
#undef __MSL_ATOMICS
#undef __MSL_FETCH
}  // namespace metal
typedef metal::atomic<int> atomic_int;
typedef metal::atomic<uint> atomic_uint;
typedef metal::atomic<float> atomic_float;
typedef metal::atomic<bool> atomic_bool;
typedef metal::atomic<long> atomic_long;
typedef metal::atomic<ulong> atomic_ulong;
namespace metal {
using ::atomic_bool;
using ::atomic_float;
using ::atomic_int;
using ::atomic_long;
using ::atomic_uint;
using ::atomic_ulong;
}  // namespace metal
