// simdgroup_matrix a lane at a time: every lane brings two elements of each operand, the last to arrive multiplies.
#pragma once
#include "collectives.h"

METILE_CALLED metile::Resume metile_matrix_step(
    metile::Pair a, metile::Pair b, metile::Pair c, void* stack) {
  using namespace metile;
  Threadgroup* t = self();
  const int lane = t->current % kLanes;
  Simdgroup& g = simdgroup_of(t, t->current);
  Pair* elements = (Pair*)g.phases[g.phase].data + (element_row(lane) * 8 + element_column(lane)) / 2;
  elements[0] = a;
  elements[32] = b;
  elements[64] = c;
  return leave(t, g, arrive(g, lane, kMatrixOperation, site_of(stack)), elements + 64, stack);
}
