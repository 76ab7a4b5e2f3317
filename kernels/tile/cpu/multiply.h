// Multiply-accumulate of one register tile: TN rows of weights against TM rows of x, over a depth of k.
// The accumulator is held transposed, [weight row][x lane]: weights are used as they lie in memory and only x, the
// smaller side, is ever repacked.
#pragma once

namespace metile {

inline vfloat step(vfloat sum, vfloat x, float weight) { return sum + x * vfloat(weight); }
#if METILE_ISA_AMX || METILE_ISA_AVX512_BF16
typedef __bf16 vpairs __attribute__((vector_size(64)));
inline vfloat step(vfloat sum, vuint x, uint weight) {
  return __builtin_ia32_dpbf16ps_512(sum, __builtin_bit_cast(vpairs, x), __builtin_bit_cast(vpairs, vuint(weight)));
}
#endif

template <typename U>
inline U load_one(const U* from) {
  U value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename U> struct UnitVector { typedef vfloat type; };
template <> struct UnitVector<uint> { typedef vuint type; };

// sums[p][n][h] += weights[p][n][k] * x[h][k][lane] over k; row n of operand p begins at weights[p] + n * stride.
template <int P, int TN, int H, typename U>
inline void outer_product(vfloat (&sums)[P][TN][H], const U* x, long panel_stride, const U* const (&weights)[P],
                          long stride, long depth) {
  typedef typename UnitVector<U>::type V;
  for (long k = 0; k < depth; ++k) {
    V column[H];
    for (int h = 0; h < H; ++h) column[h] = load_bits<V>(x + h * panel_stride + k * lanes);
#pragma clang loop unroll(full)
    for (int p = 0; p < P; ++p)
#pragma clang loop unroll(full)
      for (int n = 0; n < TN; ++n)
#pragma clang loop unroll(full)
        for (int h = 0; h < H; ++h) sums[p][n][h] = step(sums[p][n][h], column[h], load_one(weights[p] + n * stride + k));
  }
}

// Up to `rows` x `depth` elements of weights as units, zero-filled to TN rows of whole units, `stride` units apart.
template <int TN, typename T, typename U>
inline void convert_weights(U* to, long stride, const T* from, long from_stride, long rows, long depth) {
  constexpr int width = Unit<T>::width;
  for (int n = 0; n < TN; ++n)
    for (long k = 0; k < depth; k += lanes * width) {
      const vfloat value = n < rows ? load_units(from + n * from_stride + k, depth - k, (U*)nullptr) : vfloat(0);
      __builtin_memcpy(to + n * stride + k / width, &value, sizeof value);
    }
}

#if METILE_ISA_AMX

// Tiles 0-3 accumulate, 4-5 hold x, 6-7 weights; every tile is 16 rows of 64 bytes.
struct TileConfig {
  unsigned char palette = 1, start = 0, reserved[14] = {};
  unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

template <int G, int H>
struct TileAccumulator {  // G groups of 16 weight rows, H panels of 16 rows of x; G * H <= 4, H <= 2
  static_assert(G * H <= 4 && H <= 2, "four accumulator tiles");

  template <int I = 0>
  static void clear() {
    __builtin_ia32_tilezero(I);
    if constexpr (I + 1 < G * H) clear<I + 1>();
  }
  template <int I = 0>
  static void load(float* const (&to)[G], long stride) {
    __builtin_ia32_tileloadd64(I, to[I / H] + (I % H) * 16, stride * 4);
    if constexpr (I + 1 < G * H) load<I + 1>(to, stride);
  }
  template <int I = 0>
  static void store(float* const (&to)[G], long stride) {
    __builtin_ia32_tilestored64(I, to[I / H] + (I % H) * 16, stride * 4);
    if constexpr (I + 1 < G * H) store<I + 1>(to, stride);
  }
  // One step of 32 elements of k: `x` is a panel's 16 units, weights[g] the 16 rows of group g, `stride` bytes apart.
  static void multiply(const uint* x, long panel_stride, const void* const (&weights)[G], long stride) {
    __builtin_ia32_tileloadd64(4, x, 64);
    if constexpr (H > 1) __builtin_ia32_tileloadd64(5, x + panel_stride, 64);
    group<0>(weights, stride);
  }

 private:
  template <int I>
  static void group(const void* const (&weights)[G], long stride) {
    __builtin_ia32_tileloadd64(6 + I % 2, weights[I], stride);
    __builtin_ia32_tdpbf16ps(I * H, 6 + I % 2, 4);
    if constexpr (H > 1) __builtin_ia32_tdpbf16ps(I * H + 1, 6 + I % 2, 5);
    if constexpr (I + 1 < G) group<I + 1>(weights, stride);
  }
};

#endif

}  // namespace metile

namespace metile {

#if METILE_ISA_AMX
inline void begin_task() {
  const TileConfig config;
  __builtin_ia32_tile_loadconfig(&config);
}
inline void end_task() { __builtin_ia32_tilerelease(); }
#else
inline void begin_task() {}
inline void end_task() {}
#endif

}  // namespace metile
