// Threadgroup variables and threadgroup arguments: one arena a worker, laid out at first use, filled with 0xff for
// every threadgroup. Checked mode puts gaps between them, so that no index off by a few hits a neighbour.
#pragma once
#include "checks.h"
#include "faults.h"

namespace metile {

constexpr uint64_t kGap = check::kChecked ? 1024 : 0;

// The offending size goes into the fault's address.
inline uint8_t* place(Threadgroup* t, const void* key, uint64_t size, uint64_t align, const char* name) {
  t->variable_bytes = (t->variable_bytes + align - 1) / align * align + size;
  if (t->variable_bytes > t->job->threadgroup_limit || t->variable_count == kVariables)
    fail(t, kThreadgroupMemory, kernel_site(t, (uint64_t)__builtin_frame_address(0)), t->variable_bytes);
  const uint64_t at = (t->arena_used + kGap + align - 1) / align * align;
  t->arena_used = at + size + kGap;
  uint8_t* address = t->arena + at;
  memset(address, 0xff, size);
  t->variables[t->variable_count++] = {key, address, size, name};
  if (t->variable_bytes > t->counts.threadgroup_bytes) t->counts.threadgroup_bytes = t->variable_bytes;
  return address;
}

inline void place_arguments(Threadgroup* t) {
  static const char* const names[8] = {"threadgroup(0)", "threadgroup(1)", "threadgroup(2)", "threadgroup(3)",
                                       "threadgroup(4)", "threadgroup(5)", "threadgroup(6)", "threadgroup(7)"};
  for (int i = 0; i < 8; i++) {
    const uint64_t size = t->job->argument_bytes[i];
    t->arguments[i] = size ? (uint64_t)place(t, &t->arguments[i], size, 16, names[i]) : 0;
  }
}

inline void poison(Threadgroup* t) {
  for (int i = 0; i < t->variable_count; i++) memset(t->variables[i].address, 0xff, t->variables[i].size);
}

}  // namespace metile

METILE_EXPORT unsigned long __msl_tg(const void* key, unsigned long size, unsigned long align, const char* name) {
  using namespace metile;
  Threadgroup* t = self();
  for (int i = 0; i < t->variable_count; i++)
    if (t->variables[i].key == key) return (unsigned long)t->variables[i].address;
  return (unsigned long)place(t, key, size, align < 16 ? 16 : align, name);
}
