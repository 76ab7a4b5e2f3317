// The accumulator at the decode end where weights are quantized: levels are multiplied, and each group's sum is scaled.
#pragma once

// x[m0 : m0+ROWS, :] in threadgroup memory as floats, and the sum of each group of it.
template <typename T, typename F, int ROWS>
struct RowStage<Packed<T, F>, ROWS> {
  float *memory, *totals;  // [ROWS][columns], [ROWS][groups]
  long stride, groups;     // groups to whole registers

  static constexpr long held(long depth) { return round_up(ceil_div(depth, F::group), metile::lanes); }
  static constexpr long bytes(long depth) { return ROWS * (depth + held(depth)) * long(sizeof(float)); }

  void load(const Group& group, long offset, Matrix<const T> x, long m0) {
    stride = x.columns, groups = held(x.columns);
    memory = group.memory<float>(offset);
    totals = memory + ROWS * stride;
    unsigned long* tag = group.scratch->tag;
    if (tag[0] == (unsigned long)x.data && tag[1] == (unsigned long)m0) return;
    tag[0] = (unsigned long)x.data, tag[1] = m0;
    for (int m = 0; m < ROWS; ++m)
      for (long g = 0; g < groups; ++g) {
        vfloat total = vfloat(0);
        for (long k = g * F::group; k < (g + 1) * F::group && k < stride; k += metile::lanes) {
          const vfloat value = m0 + m < x.rows ? metile::load(x.row(m0 + m) + k) : vfloat(0);
          metile::store(memory + m * stride + k, value);
          total += value;
        }
        totals[m * groups + g] = metile::reduce_add(total);
      }
  }
};

template <typename T, typename F, int P, int ROWS, int BN, int WN, int KU>
struct RowAccumulator<Packed<T, F>, P, ROWS, BN, WN, KU, 0> {
  typedef RowStage<Packed<T, F>, ROWS> Staged;
  typedef metile::Chunk<F> Chunk;
  static constexpr long bytes = long(P) * ROWS * BN * 4;
  float* memory;  // [P][ROWS][BN]

  explicit RowAccumulator(const Group& group, long offset) : memory(group.memory<float>(offset)) {}

  // = x . w[n0 : n0+BN, :]^T
  void multiply(const Staged& x, const PackedMatrix<T, F> (&w)[P], long n0) {
    for (int p = 0; p < P; ++p)
      for (long n = 0; n < BN && n0 + n < w[p].rows; ++n) row(x, w[p], n0 + n, memory + p * ROWS * BN + n);
  }

  template <typename E>
  void store(Matrix<T> y, long m0, long n0, const E& epilogue) const {
    metile::store_rows<P, ROWS, BN>(memory, y, m0, n0, epilogue);
  }

 private:
  static void row(const Staged& x, const PackedMatrix<T, F>& w, long n, float* to) {
    vfloat sums[ROWS] = {};
    const uchar* codes = metile::code_row(w, n);
    for (long k = 0; k < w.columns; k += Chunk::count) {
      const Chunk chunk(codes, k);
      vfloat part[ROWS] = {};
      for (int r = 0; r < Chunk::registers; ++r) {
        const vfloat level = chunk.level(r);
        for (int m = 0; m < ROWS; ++m) part[m] += level * metile::load(x.memory + m * x.stride + k + r * metile::lanes);
      }
      const vfloat scale = vfloat(w.scale(n, k));
      for (int m = 0; m < ROWS; ++m) sums[m] += part[m] * scale;
    }
    for (int m = 0; m < ROWS; ++m) to[m * BN] = metile::reduce_add(sums[m]) + biased(x, w, n, m);
  }

  static float biased(const Staged& x, const PackedMatrix<T, F>& w, long n, int m) {
    if (!F::is_biased) return 0;
    vfloat sum = vfloat(0);
    const long groups = w.columns / F::group;
    for (long g = 0; g < groups; g += metile::lanes)
      sum += metile::load(x.totals + m * x.groups + g) * metile::load(w.biases.row(n) + g, groups - g);
    return metile::reduce_add(sum);
  }
};
