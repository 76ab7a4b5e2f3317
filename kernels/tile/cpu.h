// The tile vocabulary on a CPU.
//
// A threadgroup is one task of the pool and runs on one thread; its simdgroups are turns of a loop, lanes are the
// elements of a vector register, threadgroup memory is scratch that stays in the thread's cache. The programs above
// this header say load, multiply_accumulate, reduce, store; which instructions that takes is decided here, by the
// METILE_ISA_* macro and METILE_LANES that targets/cpu.py defines.
#pragma once

#define kernel
#define device
#define threadgroup
#define constant const
#define thread

// A number that a GPU must know to compile a kernel; here, one that is known at launch.
#define METILE_FIXED(number) 0

typedef unsigned int uint;
typedef unsigned char uchar;
typedef long Index;
typedef __bf16 bfloat;
typedef _Float16 half;

#include "cpu/group.h"
#include "cpu/vector.h"
#include "packed.h"
#include "cpu/team.h"
#include "cpu/stage.h"
#include "cpu/multiply.h"
#include "cpu/codes.h"
#include "cpu/matrix.h"
#include "cpu/rows.h"
#include "cpu/packed_rows.h"
#include "cpu/softmax.h"
#include "schedule.h"
