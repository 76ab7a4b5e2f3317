// What threadgroups of one launch write for one another, read two floats at a time.
#pragma once

#ifndef METILE_EMULATED
// From the second-level cache, where `publish` has put them; side by side at a multiple of 8 bytes.
inline void load_published(float (&to)[2], const float* from) {
  const float2 pair = __ldcg((const float2*)from);
  to[0] = pair.x, to[1] = pair.y;
}
#endif
