// The functions that clang's thread sanitizer calls before every access; its own runtime is not linked.
#pragma once
#include "access.h"

#define METILE_SITE (uint64_t) __builtin_return_address(0)
#define METILE_ACCESS(name, bytes, write)                                                  \
  METILE_EXPORT void __tsan_##name##bytes(void* p) {                                       \
    metile::check::on_access((uint64_t)p, bytes, write, false, METILE_SITE);               \
  }                                                                                        \
  METILE_EXPORT void __tsan_unaligned_##name##bytes(void* p) {                             \
    metile::check::on_access((uint64_t)p, bytes, write, false, METILE_SITE);               \
  }                                                                                        \
  METILE_EXPORT void __tsan_volatile_##name##bytes(void* p) {                              \
    metile::check::on_access((uint64_t)p, bytes, write, false, METILE_SITE);               \
  }
#define METILE_ACCESSES(bytes)                                                             \
  METILE_ACCESS(read, bytes, false)                                                        \
  METILE_ACCESS(write, bytes, true)                                                        \
  METILE_EXPORT void __tsan_read_write##bytes(void* p) {                                   \
    metile::check::on_access((uint64_t)p, bytes, false, false, METILE_SITE);               \
    metile::check::on_access((uint64_t)p, bytes, true, false, METILE_SITE);                \
  }                                                                                        \
  METILE_EXPORT void __tsan_unaligned_read_write##bytes(void* p) {                         \
    metile::check::on_access((uint64_t)p, bytes, false, false, METILE_SITE);               \
    metile::check::on_access((uint64_t)p, bytes, true, false, METILE_SITE);                \
  }

METILE_ACCESSES(1)
METILE_ACCESSES(2)
METILE_ACCESSES(4)
METILE_ACCESSES(8)
METILE_ACCESSES(16)

METILE_EXPORT void __tsan_init() {}
METILE_EXPORT void __tsan_func_entry(void*) {}
METILE_EXPORT void __tsan_func_exit() {}
METILE_EXPORT void __tsan_atomic_thread_fence(int) {}
METILE_EXPORT void __tsan_atomic_signal_fence(int) {}

METILE_EXPORT void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
  if (!bytes) return to;
  metile::check::on_access((uint64_t)from, bytes, false, false, METILE_SITE);
  metile::check::on_access((uint64_t)to, bytes, true, false, METILE_SITE);
  return memcpy(to, from, bytes);
}

METILE_EXPORT void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
  if (!bytes) return to;
  metile::check::on_access((uint64_t)from, bytes, false, false, METILE_SITE);
  metile::check::on_access((uint64_t)to, bytes, true, false, METILE_SITE);
  return memmove(to, from, bytes);
}

METILE_EXPORT void* __tsan_memset(void* to, int value, uint64_t bytes) {
  if (bytes) metile::check::on_access((uint64_t)to, bytes, true, false, METILE_SITE);
  return memset(to, value, bytes);
}

#define METILE_ATOMIC_UPDATE(bits, type, name)                                                         \
  METILE_EXPORT type __tsan_atomic##bits##_##name(volatile type* p, type value, int) {                 \
    metile::check::on_access((uint64_t)p, bits / 8, false, true, METILE_SITE);                         \
    metile::check::on_access((uint64_t)p, bits / 8, true, true, METILE_SITE);                          \
    return __atomic_##name(p, value, __ATOMIC_SEQ_CST);                                                \
  }
#define METILE_ATOMIC_EXCHANGE_IF(bits, type, name)                                                    \
  METILE_EXPORT bool __tsan_atomic##bits##_compare_exchange_##name(volatile type* p, type* expected,   \
                                                                   type value, int, int) {             \
    metile::check::on_access((uint64_t)p, bits / 8, false, true, METILE_SITE);                         \
    metile::check::on_access((uint64_t)p, bits / 8, true, true, METILE_SITE);                          \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
#define METILE_ATOMICS(bits, type)                                                                     \
  METILE_EXPORT type __tsan_atomic##bits##_load(const volatile type* p, int) {                         \
    metile::check::on_access((uint64_t)p, bits / 8, false, true, METILE_SITE);                         \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                    \
  METILE_EXPORT void __tsan_atomic##bits##_store(volatile type* p, type value, int) {                  \
    metile::check::on_access((uint64_t)p, bits / 8, true, true, METILE_SITE);                          \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                    \
  METILE_EXPORT type __tsan_atomic##bits##_exchange(volatile type* p, type value, int) {               \
    metile::check::on_access((uint64_t)p, bits / 8, false, true, METILE_SITE);                         \
    metile::check::on_access((uint64_t)p, bits / 8, true, true, METILE_SITE);                          \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                    \
  METILE_EXPORT type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type expected,       \
                                                                type value, int, int) {                \
    metile::check::on_access((uint64_t)p, bits / 8, false, true, METILE_SITE);                         \
    metile::check::on_access((uint64_t)p, bits / 8, true, true, METILE_SITE);                          \
    __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    return expected;                                                                                   \
  }                                                                                                    \
  METILE_ATOMIC_EXCHANGE_IF(bits, type, strong)                                                        \
  METILE_ATOMIC_EXCHANGE_IF(bits, type, weak)                                                          \
  METILE_ATOMIC_UPDATE(bits, type, fetch_add)                                                          \
  METILE_ATOMIC_UPDATE(bits, type, fetch_sub)                                                          \
  METILE_ATOMIC_UPDATE(bits, type, fetch_and)                                                          \
  METILE_ATOMIC_UPDATE(bits, type, fetch_or)                                                           \
  METILE_ATOMIC_UPDATE(bits, type, fetch_xor)                                                          \
  METILE_ATOMIC_UPDATE(bits, type, fetch_nand)

METILE_ATOMICS(8, uint8_t)
METILE_ATOMICS(16, uint16_t)
METILE_ATOMICS(32, uint32_t)
METILE_ATOMICS(64, uint64_t)
