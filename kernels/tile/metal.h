// The tile vocabulary on an Apple GPU.
//
// A threadgroup is METILE_SIMDGROUPS simdgroups of 32 lanes. Matrices are multiplied in fragments of 8 x 8 by the
// simdgroup matrix unit; sums stay in registers until the epilogue has seen them. targets/metal.py defines
// METILE_SIMDGROUPS and puts this text, the includes written out, before a kernel.
#pragma once

#include <metal_stdlib>
#include <metal_simdgroup_matrix>

using namespace metal;

typedef int Index;

// A number that a kernel is compiled for.
#define METILE_FIXED(number) number

#include "metal/group.h"
#include "metal/arrays.h"
#include "metal/values.h"
#include "packed.h"
#include "metal/team.h"
#include "metal/stage.h"
#include "metal/matrix.h"
#include "metal/rows.h"
#include "metal/softmax.h"
#include "metal/query_rows.h"
#include "schedule.h"
