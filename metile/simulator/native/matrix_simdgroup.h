// simdgroup_matrix once a simdgroup: the first lane to come to operation k does it for all. Where a lane may have
// touched elements of an operand by itself since the last collective, all lanes meet first.
#pragma once
#include "collectives.h"

namespace metile {

inline void reset(Matrices& m) {
  m.ready = true;
  m.operation = m.created = 0;
  memset(m.lane_operation, 0, sizeof m.lane_operation);
  memset(m.lane_created, 0, sizeof m.lane_created);
  memset(m.touched, 0, sizeof m.touched);
  memset(m.deleted, 0, sizeof m.deleted);
  for (int i = 0; i < kTiles; i++) m.free_tiles[i] = kTiles - 1 - i;
  m.free_count = kTiles;
}

inline uint32_t tile_index(const Matrices& m, const void* tile) { return (const Tile*)tile - m.tiles; }

inline bool touched(const Simdgroup& g, const void* tile) {
  return tile && g.matrices.touched[tile_index(g.matrices, tile)] == g.interval;
}

// True for the lane that must do the operation.
inline bool leads(Threadgroup* t, const void* a, const void* b = nullptr, const void* c = nullptr,
                  const void* d = nullptr) {
  const int lane = t->current % kLanes;
  Simdgroup& g = simdgroup_of(t, t->current);
  Matrices& m = g.matrices;
  const uint32_t mine = m.lane_operation[lane]++;
  if (mine != m.operation) return false;
  if (METILE_RARE(touched(g, a) || touched(g, b) || touched(g, c) || touched(g, d))) {
    metile_rendezvous();
    if (mine != m.operation) return false;
  }
  m.operation++;
  return true;
}

inline void copy_rows(void* to, uint64_t to_stride, const void* from, uint64_t from_stride, uint32_t size) {
  for (int i = 0; i < 8; i++) {
    char* row = (char*)to + i * to_stride * size;
    const char* source = (const char*)from + i * from_stride * size;
    if (size == 4)
      memcpy(row, source, 32);
    else
      memcpy(row, source, 16);
  }
}

}  // namespace metile

METILE_EXPORT void* __msl_mnew() {
  using namespace metile;
  Threadgroup* t = self();
  Simdgroup& g = simdgroup_of(t, t->current);
  Matrices& m = g.matrices;
  if (METILE_RARE(!m.ready)) reset(m);
  const uint32_t mine = m.lane_created[t->current % kLanes]++;
  // Tiles are free once every lane has dropped them, so a lane far ahead of the others lets them catch up.
  for (int tries = 0; mine == m.created && !m.free_count; tries++) {
    if (tries == 2 * kLanes) fail(t, kTooManyMatrices, kernel_site(t, (uint64_t)&tries));
    metile_yield();
  }
  if (mine == m.created) m.tile_of[m.created++ % kTiles] = m.free_tiles[--m.free_count];
  return &m.tiles[m.tile_of[mine % kTiles]];
}

METILE_EXPORT void __msl_mdel(void* tile) {
  using namespace metile;
  Threadgroup* t = self();
  Simdgroup& g = simdgroup_of(t, t->current);
  const uint32_t index = tile_index(g.matrices, tile);
  uint32_t& deleted = g.matrices.deleted[index];
  deleted |= 1u << t->current % kLanes;
  if (g.live & ~deleted) return;  // a lane that has returned needs it no more
  deleted = 0;
  g.matrices.free_tiles[g.matrices.free_count++] = index;
}

METILE_EXPORT void* __msl_mtouch(void* tile, unsigned int size) {
  using namespace metile;
  Threadgroup* t = self();
  Simdgroup& g = simdgroup_of(t, t->current);
  const int lane = t->current % kLanes;
  g.matrices.touched[tile_index(g.matrices, tile)] = g.interval;
  return (char*)tile + (element_row(lane) * 8 + element_column(lane)) * size;
}

METILE_EXPORT void __msl_mcopy(void* to, const void* from, unsigned int size) {
  if (metile::leads(metile::self(), to, from)) memcpy(to, from, 64 * size);
}

METILE_EXPORT void __msl_mfill(void* to, const void* off_and_on_diagonal, unsigned int size) {
  if (!metile::leads(metile::self(), to)) return;
  const char* values = (const char*)off_and_on_diagonal;
  for (int i = 0; i < 64; i++) memcpy((char*)to + i * size, values + (i % 9 ? 0 : size), size);
}

METILE_EXPORT void __msl_mload(void* to, const void* from, unsigned long stride, bool transpose, unsigned int size) {
  if (!metile::leads(metile::self(), to)) return;
  if (!transpose) return metile::copy_rows(to, 8, from, stride, size);
  for (int i = 0; i < 8; i++)
    for (unsigned long j = 0; j < 8; j++)
      memcpy((char*)to + (i * 8 + j) * size, (const char*)from + (j * stride + i) * size, size);
}

METILE_EXPORT void __msl_mstore(const void* from, void* to, unsigned long stride, bool transpose, unsigned int size) {
  if (!metile::leads(metile::self(), from)) return;
  if (!transpose) return metile::copy_rows(to, stride, from, 8, size);
  for (int i = 0; i < 8; i++)
    for (unsigned long j = 0; j < 8; j++)
      memcpy((char*)to + (j * stride + i) * size, (const char*)from + (i * 8 + j) * size, size);
}

METILE_EXPORT __attribute__((hot)) void __msl_mmma(
    void* d, const void* a, const void* b, const void* c, unsigned int types) {
  using namespace metile;
  Threadgroup* t = self();
  if (!leads(t, d, a, b, c)) return;
  t->counts.matrix_operations++;
  constexpr uint32_t half = kHalf << 2 | kHalf << 4, bfloat = kBfloat << 2 | kBfloat << 4;
  if (types == 0)
    multiply_accumulate(d, a, b, c, 0);
  else if (types == half)
    multiply_accumulate(d, a, b, c, half);
  else if (types == bfloat)
    multiply_accumulate(d, a, b, c, bfloat);
  else
    multiply_accumulate(d, a, b, c, types);
}
