// What a compiler calls to narrow a float to bfloat where the processor has no instruction for it, and its own library
// has no such function.
#pragma once

#include "state.h"

#if !defined(__AVX512BF16__)
typedef __bf16 Bfloat;

namespace {

Bfloat narrowed(float value) {  // round to nearest even; a NaN stays one
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  const unsigned rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const unsigned short narrow = value != value ? (bits >> 16 | 0x40) : rounded;
  return __builtin_bit_cast(Bfloat, narrow);
}

}  // namespace

METILE_EXPORT Bfloat __truncsfbf2(float value) { return narrowed(value); }
#endif
