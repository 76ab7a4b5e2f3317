// One 8x8x8 multiply-accumulate of simdgroup_matrix, a whole tile at a time, accumulated in float.
#pragma once
#include "state.h"

namespace metile {

using Row = float __attribute__((ext_vector_type(8)));
using HalfRow = _Float16 __attribute__((ext_vector_type(8)));
using ShortRow = uint16_t __attribute__((ext_vector_type(8)));
using WordRow = uint32_t __attribute__((ext_vector_type(8)));

enum ElementType : uint32_t { kFloat, kHalf, kBfloat };

inline int element_row(int lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
inline int element_column(int lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

inline ShortRow round_to_bfloat(Row values) {
  WordRow bits;
  memcpy(&bits, &values, sizeof bits);
  const WordRow rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
  const auto nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return __builtin_convertvector(nan ? quiet : rounded, ShortRow);
}

inline Row load_row(const void* tile, uint32_t type, int row) {
  Row values;
  if (type == kFloat) {
    memcpy(&values, (const float*)tile + 8 * row, sizeof values);
  } else if (type == kHalf) {
    HalfRow halves;
    memcpy(&halves, (const uint16_t*)tile + 8 * row, sizeof halves);
    values = __builtin_convertvector(halves, Row);
  } else {
    ShortRow shorts;
    memcpy(&shorts, (const uint16_t*)tile + 8 * row, sizeof shorts);
    const WordRow bits = __builtin_convertvector(shorts, WordRow) << 16;
    memcpy(&values, &bits, sizeof values);
  }
  return values;
}

inline void store_row(void* tile, uint32_t type, int row, Row values) {
  if (type == kFloat) {
    memcpy((float*)tile + 8 * row, &values, sizeof values);
  } else if (type == kHalf) {
    const HalfRow halves = __builtin_convertvector(values, HalfRow);
    memcpy((uint16_t*)tile + 8 * row, &halves, sizeof halves);
  } else {
    const ShortRow shorts = round_to_bfloat(values);
    memcpy((uint16_t*)tile + 8 * row, &shorts, sizeof shorts);
  }
}

// d = a b + c; `types` as in abi.h.
inline __attribute__((always_inline)) void multiply_accumulate(
    void* d, const void* a, const void* b, const void* c, uint32_t types) {
  const uint32_t of_d = types & 3, of_a = types >> 2 & 3, of_b = types >> 4 & 3, of_c = types >> 6 & 3;
  Row left[8], right[8], sum[8];
  for (int i = 0; i < 8; i++) {
    left[i] = load_row(a, of_a, i);
    right[i] = load_row(b, of_b, i);
    sum[i] = load_row(c, of_c, i);
  }
  const float* elements = (const float*)a;
  float converted[64] __attribute__((aligned(32)));
  if (of_a != kFloat) {
    memcpy(converted, left, sizeof converted);
    elements = converted;
  }
#pragma clang loop unroll(full)
  for (int k = 0; k < 8; k++) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) sum[i] = __builtin_elementwise_fma((Row)elements[8 * i + k], right[k], sum[i]);
  }
  for (int i = 0; i < 8; i++) store_row(d, of_d, i, sum[i]);
}

}  // namespace metile
