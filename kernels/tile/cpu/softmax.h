// Online softmax and the product with the values, for a block of queries (queries in lanes) and for a few rows of
// scores (keys in lanes). A running maximum and sum a query; outputs are scaled anew when the maximum moves.
#pragma once

namespace metile {

constexpr float masked_score = -1e30f;  // exp of anything minus the running maximum is 0

// `rows` x `columns` of values as floats.
template <typename T>
inline const float* float_rows(float* to, Matrix<const T> from, long first, long rows, long* stride) {
  *stride = from.columns;
  for (long k = 0; k < rows; ++k)
    for (long d = 0; d < from.columns; d += lanes)
      store(to + k * from.columns + d, load(from.row(first + k) + d, from.columns - d), from.columns - d);
  return to;
}
inline const float* float_rows(float*, Matrix<const float> from, long first, long, long* stride) {
  *stride = from.stride;
  return from.row(first);
}

}  // namespace metile

// Simdgroups of the scores, by rows and by columns.
constexpr int score_wm(int queries) { return queries / METILE_LANES; }
constexpr int score_wn(int keys) { return keys / (METILE_LANES >= 16 ? 16 : 8); }
constexpr int row_wn(int keys, int rows) { return keys / (rows >= 8 ? 1 : rows >= 4 ? 2 : 4); }

// BQ queries in lanes: scores [BK][BQ], outputs [D][BQ].
template <typename T, int BQ, int BK, int D>
struct QueryBlock {
  static constexpr int panels = BQ / metile::lanes;
  static constexpr int tile_d = 8;
  static_assert(D % tile_d == 0, "head_dim");
  static constexpr long bytes = 4L * (D * BQ + 3 * BQ + BK * D);
  float *outputs, *best, *sum, *factor, *values;

  QueryBlock(const Group& group, long offset) : outputs(group.memory<float>(offset)) {
    best = outputs + D * BQ, sum = best + BQ, factor = sum + BQ, values = factor + BQ;
    for (int i = 0; i < D * BQ; i += metile::lanes) store(outputs + i, vfloat(0));
    for (int m = 0; m < BQ; m += metile::lanes) {
      store(best + m, vfloat(metile::masked_score));
      store(sum + m, vfloat(0));
    }
  }

  // Scores of keys n0.. become weights in place. Query m sees keys up to and including `last + m`, below `keys`.
  template <typename S>
  void softmax(const S& block, float scale, long n0, long keys, long last) const {
    float* scores = block.memory;
    const long count = min_of(BK, keys - n0);
    for (int m = 0; m < BQ; m += metile::lanes) {
      vint query;
      for (int i = 0; i < metile::lanes; ++i) query[i] = int(min_of(last + m + i - n0, 1 << 30));
      const vfloat before = load(best + m);
      vfloat now = before;
      for (long n = 0; n < count; ++n) {
        const vfloat score = load(scores + n * BQ + m) * scale;
        const vfloat seen = query >= vint(int(n)) ? score : vfloat(metile::masked_score);
        store(scores + n * BQ + m, seen);
        now = maximum(now, seen);
      }
      vfloat total = vfloat(0);
      for (long n = 0; n < count; ++n) {
        const vfloat seen = load(scores + n * BQ + m);
        const vfloat weight = seen <= vfloat(metile::masked_score) ? vfloat(0) : exponential(seen - now);
        store(scores + n * BQ + m, weight);
        total += weight;
      }
      const vfloat scaled = exponential(before - now);
      store(factor + m, scaled);
      store(sum + m, load(sum + m) * scaled + total);
      store(best + m, now);
    }
  }

  // outputs = outputs * factor + weights . v
  template <typename S>
  void accumulate(const S& block, Matrix<const T> v, long n0) const {
    const float* weights = block.memory;
    const long count = min_of(BK, v.rows - n0);
    long stride;
    const float* rows = metile::float_rows(values, v, n0, count, &stride);
    for (int d = 0; d < D; d += tile_d)
      for (int m = 0; m < BQ; m += metile::lanes) {
        vfloat sums[tile_d];
        for (int i = 0; i < tile_d; ++i) sums[i] = load(outputs + (d + i) * BQ + m) * load(factor + m);
        for (long n = 0; n < count; ++n) {
          const vfloat weight = load(weights + n * BQ + m);
#pragma clang loop unroll(full)
          for (int i = 0; i < tile_d; ++i) sums[i] += weight * vfloat(rows[n * stride + d + i]);
        }
        for (int i = 0; i < tile_d; ++i) store(outputs + (d + i) * BQ + m, sums[i]);
      }
  }

  void store_rows(Matrix<T> y, long first, int m, int d) const {
    vfloat square[metile::lanes];
    const vfloat share = 1.0f / load(sum + m);
    for (int i = 0; i < metile::lanes; ++i) square[i] = load(outputs + (d + i) * BQ + m) * share;
    metile::transpose(square);
    for (int i = 0; i < metile::lanes && first + m + i < y.rows; ++i) metile::store(y.row(first + m + i) + d, square[i]);
  }

  void store(Matrix<T> y, long first) const {
    for (int m = 0; m < BQ && first + m < y.rows; m += metile::lanes)
      for (int d = 0; d < D; d += metile::lanes) store_rows(y, first, m, d);
  }

 private:
  static void store(float* to, vfloat value) { metile::store(to, value); }
};

// One query of ROWS heads, keys in lanes: scores [ROWS][BK], outputs [ROWS][D].
template <typename T, int ROWS, int BK, int D>
struct QueryRows {
  static constexpr int tile_rows = ROWS < 4 ? ROWS : 4;
  static constexpr int tile_d = D / metile::lanes < 4 ? D / metile::lanes : 4;  // registers of a row's outputs
  static_assert(D % metile::lanes == 0, "head_dim");
  static constexpr long bytes = 4L * (ROWS * D + 3 * ROWS);
  float *outputs, *best, *sum, *factor;

  QueryRows(const Group& group, long offset) : outputs(group.memory<float>(offset)) {
    best = outputs + ROWS * D, sum = best + ROWS, factor = sum + ROWS;
    for (int i = 0; i < ROWS * D; ++i) outputs[i] = 0;
    for (int m = 0; m < ROWS; ++m) best[m] = metile::masked_score, sum[m] = 0;
  }

  // Values n0.. will be accumulated next: nothing to do before.
  void expect(Matrix<const T>, long) const {}

  template <typename S>
  void softmax(const S& block, float scale, long n0, long keys) const {
    float* scores = block.memory;
    const long count = min_of(BK, keys - n0);
    for (int m = 0; m < ROWS; ++m) {
      float* row = scores + m * BK;
      for (long n = count; n < BK; ++n) row[n] = metile::masked_score;
      vfloat most = vfloat(metile::masked_score);
      for (long n = 0; n < count; n += metile::lanes) most = maximum(most, load(row + n));
      const float now = metile::larger(best[m], reduce_max(most) * scale);
      vfloat total = vfloat(0);
      for (long n = 0; n < BK; n += metile::lanes) {
        const vfloat score = load(row + n);
        const vfloat weight = score <= vfloat(metile::masked_score) ? vfloat(0) : exponential(score * scale - now);
        metile::store(row + n, weight);
        total += weight;
      }
      factor[m] = exponential(vfloat(best[m] - now))[0];
      sum[m] = sum[m] * factor[m] + reduce_add(total);
      best[m] = now;
    }
  }

  template <typename S>
  void accumulate(const S& block, Matrix<const T> v, long n0) const {
    const float* weights = block.memory;
    const long count = min_of(BK, v.rows - n0);
    for (int m = 0; m < ROWS; m += tile_rows)
      for (int d = 0; d < D; d += tile_d * metile::lanes) tile(weights, v, n0, count, m, d);
  }

  void store(Matrix<T> y) const {
    for (int m = 0; m < ROWS; ++m)
      for (int d = 0; d < D; d += metile::lanes) metile::store(y.row(m) + d, load(outputs + m * D + d) / sum[m]);
  }

 private:
  // Rows and columns past the edge of an uneven tile repeat the last: they are computed and not kept.
  void tile(const float* weights, Matrix<const T> v, long n0, long count, int m, int d) const {
    vfloat sums[tile_rows][tile_d];
    for (int r = 0; r < tile_rows; ++r)
      for (int i = 0; i < tile_d; ++i) sums[r][i] = load(outputs + row_of(m + r) * D + column_of(d, i)) * factor[row_of(m + r)];
    for (long n = 0; n < count; ++n) {
      vfloat value[tile_d];
      for (int i = 0; i < tile_d; ++i) value[i] = load(v.row(n0 + n) + column_of(d, i));
#pragma clang loop unroll(full)
      for (int r = 0; r < tile_rows; ++r)
#pragma clang loop unroll(full)
        for (int i = 0; i < tile_d; ++i) sums[r][i] += value[i] * weights[row_of(m + r) * BK + n];
    }
    for (int r = 0; r < tile_rows && m + r < ROWS; ++r)
      for (int i = 0; i < tile_d && d + i * metile::lanes < D; ++i)
        metile::store(outputs + (m + r) * D + d + i * metile::lanes, sums[r][i]);
  }

  static int row_of(int m) { return m < ROWS ? m : ROWS - 1; }
  static int column_of(int d, int i) { return d + i * metile::lanes < D ? d + i * metile::lanes : D - metile::lanes; }
};
