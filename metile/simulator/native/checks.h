// What checked mode watches of the scheduler; nothing in the fast library.
#pragma once
#include "state.h"

namespace metile::check {

#ifdef METILE_CHECK
constexpr bool kChecked = true;
void threadgroup_begins(Threadgroup* t);
void threadgroup_ends(Threadgroup* t);
void barrier_released(Threadgroup* t);
void simdgroup_barrier_released(Threadgroup* t, int simdgroup, uint32_t lanes, uint32_t flags, uint64_t site);
bool failed(Threadgroup* t, const Fault& fault);  // true: reported as a finding, the launch goes on
#else
constexpr bool kChecked = false;
inline void threadgroup_begins(Threadgroup*) {}
inline void threadgroup_ends(Threadgroup*) {}
inline void barrier_released(Threadgroup*) {}
inline void simdgroup_barrier_released(Threadgroup*, int, uint32_t, uint32_t, uint64_t) {}
inline bool failed(Threadgroup*, const Fault&) { return false; }
#endif

}  // namespace metile::check
