// The accumulator of a threadgroup at the decode end: a few rows of x against BN rows of weights, each weight read once
// and in order, k split over the lanes.
#pragma once

namespace metile {

#if METILE_ISA_AMX || METILE_ISA_AVX512_BF16
inline vfloat lane_step(vfloat sum, vpairs x, vpairs weight) { return __builtin_ia32_dpbf16ps_512(sum, x, weight); }
#endif
inline vfloat lane_step(vfloat sum, vfloat x, vfloat weight) { return sum + x * weight; }

template <typename T>
struct LaneUnit {  // what one register holds of a row: floats, whatever T is
  typedef vfloat vector;
  typedef float element;
  static constexpr int width = lanes;
  static vfloat read(const float* from) { return load(from); }
  static vfloat weights(const T* from) { return load(from); }
  static vfloat weights(const T* from, long count) { return load(from, count); }
};
#if METILE_ISA_AMX || METILE_ISA_AVX512_BF16
template <>
struct LaneUnit<bfloat> {  // or 32 bfloats, multiplied in pairs
  typedef vpairs vector;
  typedef bfloat element;
  static constexpr int width = 2 * lanes;
  static vpairs read(const bfloat* from) { return load_bits<vpairs>(from); }
  static vpairs weights(const bfloat* from) { return load_bits<vpairs>(from); }
  static vpairs weights(const bfloat* from, long count) {
    return __builtin_bit_cast(vpairs, load_units(from, count, (uint*)nullptr));
  }
};
#endif

// Epilogue and store of the sums [P][ROWS][BN] of a threadgroup.
template <int P, int ROWS, int BN, typename T, typename E>
inline void store_rows(const float* sums, Matrix<T> y, long m0, long n0, const E& epilogue) {
  for (long m = 0; m < ROWS && m0 + m < y.rows; ++m)
    for (long n = 0; n < BN; n += lanes) {
      vfloat values[P];
      for (int p = 0; p < P; ++p) values[p] = load(sums + (p * ROWS + m) * BN + n);
      finish(epilogue, y, values, m0 + m, n0 + n, y.columns - n0 - n);
    }
}

}  // namespace metile

// x[0 : ROWS, :] in threadgroup memory, in the element type of the multiply, zero-filled to whole registers.
template <typename T, int ROWS>
struct RowStage {
  typedef metile::LaneUnit<T> Lane;
  typedef typename Lane::element element;
  element* memory;
  long stride;

  static constexpr long bytes(long depth) { return ROWS * round_up(depth, Lane::width) * long(sizeof(element)); }

  void load(const Group& group, long offset, Matrix<const T> x, long m0) {
    memory = group.memory<element>(offset);
    stride = round_up(x.columns, Lane::width);
    unsigned long* tag = group.scratch->tag;
    if (tag[0] == (unsigned long)x.data && tag[1] == (unsigned long)m0) return;
    tag[0] = (unsigned long)x.data, tag[1] = m0;
    for (int m = 0; m < ROWS; ++m) {
      element* to = memory + m * stride;
      for (long k = 0; k < stride; k += metile::lanes) {
        const bool inside = m0 + m < x.rows && k < x.columns;
        metile::store(to + k, inside ? metile::load(x.row(m0 + m) + k, x.columns - k) : vfloat(0));
      }
    }
  }
};

// WN simdgroups of BN / WN weight rows, taken KU registers of k at a time. DEPTH is the depth of k if it is known.
template <typename T, int P, int ROWS, int BN, int WN, int KU, int DEPTH>
struct RowAccumulator {
  typedef metile::LaneUnit<T> Lane;
  static constexpr int tile_n = BN / WN;
  static constexpr long bytes = long(P) * ROWS * BN * 4;
  float* memory;  // [P][ROWS][BN]

  explicit RowAccumulator(const Group& group, long offset) : memory(group.memory<float>(offset)) {}

  // = x . w[n0 : n0+BN, :]^T
  void multiply(const RowStage<T, ROWS>& x, const Matrix<const T> (&w)[P], long n0) {
    for (long n = 0; n < BN && n0 + n < w[0].rows; n += tile_n) tile(x, w, n0, n);
  }

  template <typename E>
  void store(Matrix<T> y, long m0, long n0, const E& epilogue) const {
    metile::store_rows<P, ROWS, BN>(memory, y, m0, n0, epilogue);
  }

 private:
  void tile(const RowStage<T, ROWS>& x, const Matrix<const T> (&w)[P], long n0, long n) {
    const T* rows[P][tile_n];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i) rows[p][i] = w[p].row(min_of(n0 + n + i, w[p].rows - 1));
    vfloat sums[P][tile_n][ROWS] = {};
    const long depth = w[0].columns;
    long k = 0;
    for (; k + KU * Lane::width <= depth; k += KU * Lane::width)
#pragma clang loop unroll(full)
      for (int u = 0; u < KU; ++u) column(sums, x, rows, k + u * Lane::width);
    for (; k + Lane::width <= depth; k += Lane::width) column(sums, x, rows, k);
    if (k < depth) {
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < tile_n; ++i) {
          const typename Lane::vector weight = Lane::weights(rows[p][i] + k, depth - k);
          for (int m = 0; m < ROWS; ++m)
            sums[p][i][m] = metile::lane_step(sums[p][i][m], Lane::read(x.memory + m * x.stride + k), weight);
        }
    }
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int m = 0; m < ROWS; ++m) memory[(p * ROWS + m) * BN + n + i] = metile::reduce_add(sums[p][i][m]);
  }

  static void column(vfloat (&sums)[P][tile_n][ROWS], const RowStage<T, ROWS>& x, const T* const (&rows)[P][tile_n], long k) {
    typename Lane::vector part[ROWS];
    for (int m = 0; m < ROWS; ++m) part[m] = Lane::read(x.memory + m * x.stride + k);
#pragma clang loop unroll(full)
    for (int p = 0; p < P; ++p)
#pragma clang loop unroll(full)
      for (int i = 0; i < tile_n; ++i) {
        const typename Lane::vector weight = Lane::weights(rows[p][i] + k);
#pragma clang loop unroll(full)
        for (int m = 0; m < ROWS; ++m) sums[p][i][m] = metile::lane_step(sums[p][i][m], part[m], weight);
      }
  }
};
