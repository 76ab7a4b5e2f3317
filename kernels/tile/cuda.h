// The tile vocabulary on an NVIDIA GPU, from compute capability 8.0 on.
//
// A threadgroup is METILE_SIMDGROUPS warps. Matrices are multiplied by the tensor cores in fragments of 16 rows of
// weights, 8 rows of x and 16 of k; float32 is multiplied exactly, without them. Sums stay in registers until the
// epilogue has seen them. Slices of k come through a ring of METILE_STAGES buffers of shared memory, all of which is
// dynamic: it begins at Group::scratch, aligned to 16 bytes.
//
// `inline` stands before every function, members too: it says here that a function runs on the GPU. METILE_VIEWS leaves
// out the block orders, whose tables only --device-as-default-execution-space places in the GPU's memory.
#pragma once

#ifndef METILE_EMULATED
#undef __device__  // the compiler's macro says `device`, a word that programs use, and that is nothing here
#define inline __attribute__((__device__)) __forceinline__
#endif
#define kernel
#define device
#define threadgroup
#define constant const
#define thread

#ifndef METILE_STAGES
#define METILE_STAGES 4
#endif

typedef int Index;
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

// A number that a kernel is compiled for.
#define METILE_FIXED(number) number

#include "cuda/group.h"
#include "cuda/machine.h"
#include "cuda/warpgroup.h"
#include "cuda/arrays.h"
#include "cuda/values.h"
#include "packed.h"
#include "cuda/team.h"
#include "cuda/stage.h"
#include "cuda/weights.h"
#include "cuda/packed_chunk.h"
#include "cuda/packed_weights.h"
#include "cuda/matrix.h"
#include "cuda/rows.h"
#include "cuda/packed_rows.h"
#include "cuda/softmax.h"
#include "cuda/head_rows.h"
#include "cuda/published.h"
#include "cuda/query_rows.h"
#ifndef METILE_VIEWS
#include "schedule.h"
#endif
