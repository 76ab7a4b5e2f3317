// Vector registers: loads and stores of every dtype as float lanes, exp, and transposition.
#pragma once

typedef float vfloat __attribute__((ext_vector_type(METILE_LANES)));
typedef uint vuint __attribute__((ext_vector_type(METILE_LANES)));
typedef int vint __attribute__((ext_vector_type(METILE_LANES)));

namespace metile {

constexpr int lanes = METILE_LANES;
typedef unsigned short vushort __attribute__((ext_vector_type(METILE_LANES)));
typedef half vhalf __attribute__((ext_vector_type(METILE_LANES)));

template <typename V, typename T>
inline V load_bits(const T* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

inline vfloat load(const float* from) { return load_bits<vfloat>(from); }
inline vfloat load(const half* from) { return __builtin_convertvector(load_bits<vhalf>(from), vfloat); }
inline vfloat load(const bfloat* from) {
  return __builtin_bit_cast(vfloat, __builtin_convertvector(load_bits<vushort>(from), vuint) << 16);
}

inline void store(float* to, vfloat value) { __builtin_memcpy(to, &value, sizeof value); }
inline void store(half* to, vfloat value) {
  const vhalf narrow = __builtin_convertvector(value, vhalf);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}
#if METILE_ISA_AMX || METILE_ISA_AVX512_BF16
inline vushort bfloat_bits(vfloat value) {  // round to nearest even; denormals become 0
  typedef __bf16 vbfloat __attribute__((ext_vector_type(METILE_LANES)));
  return __builtin_bit_cast(vushort, __builtin_convertvector(value, vbfloat));
}
#else
inline vushort bfloat_bits(vfloat value) {  // round to nearest even; a NaN stays one
  const vuint bits = __builtin_bit_cast(vuint, value);
  const vuint rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const vint is_nan = value != value;
  return __builtin_convertvector(is_nan ? (bits >> 16) | 0x40 : rounded, vushort);
}
#endif
inline void store(bfloat* to, vfloat value) {
  const vushort narrow = bfloat_bits(value);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}

template <typename F = vfloat, typename T>
inline vfloat load(const T* from, long count) {  // lanes past `count` read zero
  if (count >= lanes) return load(from);
  T part[lanes] = {};
  for (long i = 0; i < count; ++i) part[i] = from[i];
  return load(part);
}

template <typename T>
inline void store(T* to, vfloat value, long count) {
  if (count >= lanes) return store(to, value);
  T part[lanes];
  store(part, value);
  for (long i = 0; i < count; ++i) to[i] = part[i];
}

// The value as dtype T holds it, back as floats.
template <typename T>
inline vfloat round_to(vfloat value) {
  T part[lanes];
  store(part, value);
  return load(part);
}

inline float reduce_add(vfloat value) {
  float sum = 0;
  float part[lanes];
  store(part, value);
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  sum = part[0];
  return sum;
}

inline float larger(float a, float b) { return a > b ? a : b; }
inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }
inline vfloat minimum(vfloat a, vfloat b) { return a < b ? a : b; }

inline float reduce_max(vfloat value) {
  float best = value[0];
  for (int i = 1; i < lanes; ++i) best = value[i] > best ? value[i] : best;
  return best;
}

// e^x to 2 units in the last place: x = n ln2 + r, |r| <= ln2/2, a degree-6 polynomial in r (Cephes expf).
inline vfloat exponential(vfloat x) {
  x = minimum(vfloat(88.37f), maximum(vfloat(-87.33f), x));  // x comes second: a NaN stays one
  const vfloat n = __builtin_elementwise_roundeven(x * 1.44269504f);
  const vfloat r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vint power = (__builtin_convertvector(n, vint) + 127) << 23;
  return p * __builtin_bit_cast(vfloat, power);
}

inline float reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }

template <int Step, int... Lane>
struct Exchange {  // swap the off-diagonal blocks of width Step of two rows
  static void apply(vfloat& a, vfloat& b) {
    const vfloat low = __builtin_shufflevector(a, b, ((Lane & Step) ? lanes + Lane - Step : Lane)...);
    b = __builtin_shufflevector(a, b, ((Lane & Step) ? lanes + Lane : Lane + Step)...);
    a = low;
  }
};

template <typename Index, Index... Lane>
struct Lanes {
  template <int Step>
  static void exchange(vfloat (&rows)[lanes]) {
#pragma clang loop unroll(full)
    for (int i = 0; i < lanes; ++i)
      if (!(i & Step)) Exchange<Step, Lane...>::apply(rows[i], rows[i + Step]);
  }
};

// Transpose a square of lanes x lanes elements of 32 bits.
inline void transpose(vfloat (&rows)[lanes]) {
  using All = __make_integer_seq<Lanes, int, lanes>;
  All::template exchange<1>(rows);
  All::template exchange<2>(rows);
#if METILE_LANES >= 8
  All::template exchange<4>(rows);
#endif
#if METILE_LANES >= 16
  All::template exchange<8>(rows);
#endif
}

}  // namespace metile

// The names programs use.
using metile::exponential;
using metile::load;
using metile::maximum;
using metile::reciprocal_root;
using metile::reduce_add;
using metile::reduce_max;
using metile::round_to;
using metile::store;
inline float float_of_bits(long bits) { return __builtin_bit_cast(float, int(bits)); }
