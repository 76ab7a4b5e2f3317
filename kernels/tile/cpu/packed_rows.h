// The accumulator at the decode end where weights are quantized: levels are multiplied as they are, and what a group
// gives is scaled. Beside levels that are small integers x is rounded to 16 bits, a scale a group (packed_shorts.h).
#pragma once

namespace metile {

// Scales of a row as floats, `count` of them.
template <typename F, typename S>
inline vfloat scale_values(F, const S* from, long count) { return load(from, count); }
inline vuint load_bytes(const uchar* from, long count) {
  typedef uchar Bytes __attribute__((ext_vector_type(METILE_LANES)));
  uchar part[lanes] = {};
  __builtin_memcpy(part, from, min_of(count, lanes));
  return __builtin_convertvector(load_bits<Bytes>(part), vuint);
}
inline vfloat powers(vuint stored) { return __builtin_bit_cast(vfloat, stored == 0 ? vuint(0x00400000) : stored << 23); }
inline vfloat scale_values(Mxfp4, const uchar* from, long count) { return powers(load_bytes(from, count)); }
inline vfloat scale_values(Mxfp8, const uchar* from, long count) { return powers(load_bytes(from, count)); }
inline vfloat scale_values(Nvfp4, const uchar* from, long count) { return levels(Mxfp8(), load_bytes(from, count)); }

// Rows of x as floats, beside levels as floats: what every machine can do.
template <typename F, int ROWS>
struct FloatRows {
  static constexpr float unit = 1, offset = 0;  // weight = scale * unit * (multiplied - offset) + bias
  static constexpr long bytes(long columns) { return 4 * columns; }  // of a row of x

  static void stage(char* to, const float* group, long k) {
    __builtin_memcpy(to + 4 * k, group, 4 * F::group);
  }

  // sums[r][m] += scales . (levels of weight row r . row m of x), group by group.
  template <int R>
  static void multiply(vfloat (&sums)[R][ROWS], const char* x, const uchar* const (&codes)[R], const float* scales,
                       long apart, long columns) {
    typedef metile::Chunk<F> Chunk;
    for (int r = 0; r < R; ++r)
      for (long k = 0; k < columns; k += Chunk::count) {
        const Chunk chunk(codes[r], k);
        vfloat part[ROWS] = {};
        for (int i = 0; i < Chunk::registers; ++i) {
          const vfloat level = chunk.level(i);
          for (int m = 0; m < ROWS; ++m)
            part[m] += level * load(reinterpret_cast<const float*>(x + m * bytes(columns)) + k + i * lanes);
        }
        for (int m = 0; m < ROWS; ++m) sums[r][m] += part[m] * scales[r * apart + k / F::group];
      }
  }
};

template <typename T, typename F, int ROWS>
struct PackedRows { typedef FloatRows<F, ROWS> type; };

}  // namespace metile

#include "packed_shorts.h"

// x[m0 : m0+ROWS, :] in threadgroup memory as it is multiplied, and the sum of each group of it.
template <typename T, typename F, int ROWS>
struct RowStage<Packed<T, F>, ROWS> {
  typedef typename metile::PackedRows<T, F, ROWS>::type Rows;
  char* memory;
  float* totals;  // [ROWS][groups]
  long groups;    // to whole registers, and one more

  static constexpr long held(long depth) { return round_up(depth / F::group, metile::lanes) + metile::lanes; }
  static constexpr long bytes(long depth) { return round_up(ROWS * (Rows::bytes(depth) + 4 * held(depth)), 64); }

  void load(const Group& group, long offset, Matrix<const T> x, long m0) {
    groups = held(x.columns);
    memory = group.memory<char>(offset);
    totals = reinterpret_cast<float*>(memory + ROWS * Rows::bytes(x.columns));
    unsigned long* tag = group.scratch->tag;
    if (tag[0] == (unsigned long)x.data && tag[1] == (unsigned long)m0) return;
    tag[0] = (unsigned long)x.data, tag[1] = m0;
    for (int m = 0; m < ROWS; ++m) {
      __builtin_memset(memory + m * Rows::bytes(x.columns), 0, Rows::bytes(x.columns));
      for (long g = 0; g < groups; ++g) totals[m * groups + g] = 0;
      for (long k = 0; k < x.columns && m0 + m < x.rows; k += F::group) stage(x, m0 + m, m, k);
    }
  }

 private:
  void stage(Matrix<const T> x, long row, int m, long k) const {
    float values[F::group];
    vfloat total = vfloat(0);
    for (int i = 0; i < F::group; i += metile::lanes) {
      const vfloat value = metile::load(x.row(row) + k + i);
      metile::store(values + i, value);
      total += value;
    }
    totals[m * groups + k / F::group] = metile::reduce_add(total);
    Rows::stage(memory + m * Rows::bytes(x.columns), values, k);
  }
};

// BN weight rows, BN / WN of them at a time; KU says nothing here.
template <typename T, typename F, int P, int ROWS, int BN, int WN, int KU>
struct RowAccumulator<Packed<T, F>, P, ROWS, BN, WN, KU, 0> {
  typedef RowStage<Packed<T, F>, ROWS> Staged;
  typedef typename Staged::Rows Rows;
  static constexpr int tile_n = BN / WN;
  static constexpr long most_groups = 2048;  // metile/ops/linear_cpu.py admits no more
  static constexpr long bytes = 4 * (long(P) * ROWS * BN + tile_n * most_groups);
  float *memory, *scales;  // [P][ROWS][BN], [tile_n][groups]

  explicit RowAccumulator(const Group& group, long offset)
      : memory(group.memory<float>(offset)), scales(memory + P * ROWS * BN) {}

  // = x . w[n0 : n0+BN, :]^T
  void multiply(const Staged& x, const PackedMatrix<T, F> (&w)[P], long n0) {
    for (int p = 0; p < P; ++p)
      for (long n = 0; n < BN && n0 + n < w[p].rows; n += tile_n) tile(x, w[p], n0 + n, memory + p * ROWS * BN + n);
  }

  template <typename E>
  void store(Matrix<T> y, long m0, long n0, const E& epilogue) const {
    metile::store_rows<P, ROWS, BN>(memory, y, m0, n0, epilogue);
  }

 private:
  // Rows past the last repeat it: they are computed and not kept.
  void tile(const Staged& x, const PackedMatrix<T, F>& w, long n, float* to) const {
    const uchar* codes[tile_n];
    vfloat sums[tile_n][ROWS] = {};
    for (int i = 0; i < tile_n; ++i) {
      const long row = min_of(n + i, w.rows - 1);
      codes[i] = metile::code_row(w, row);
      scale_row(sums[i], x, w, row, scales + i * x.groups);
    }
    Rows::multiply(sums, x.memory, codes, scales, x.groups, w.columns);
    for (int i = 0; i < tile_n; ++i)
      for (int m = 0; m < ROWS; ++m) to[m * BN + i] = metile::reduce_add(sums[i][m]);
  }

  // Scales of a row as they will be multiplied, and what biases and offsets give.
  void scale_row(vfloat (&sums)[ROWS], const Staged& x, const PackedMatrix<T, F>& w, long n, float* to) const {
    const long groups = w.columns / F::group;
    for (long g = 0; g < groups; g += metile::lanes) {
      const vfloat scale = metile::scale_values(F(), w.scales.row(n) + g, groups - g) * Rows::unit;
      metile::store(to + g, scale);
      vfloat bias = scale * -Rows::offset;
      if (F::is_biased) bias += metile::load(w.biases.row(n) + g, groups - g);
      if (F::is_biased || Rows::offset != 0)
        for (int m = 0; m < ROWS; ++m) sums[m] += bias * metile::load(x.totals + m * x.groups + g);
    }
  }
};
