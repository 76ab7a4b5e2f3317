// The accumulator of a threadgroup at the decode end: a few rows of x against BN rows of weights, each weight read once,
// k split over the lanes of a simdgroup.
#pragma once

// x[m0 : m0+ROWS, :], read where it lies: it is small and stays in the cache.
template <typename T, int ROWS>
struct RowStage {
  Matrix<const device T> x;
  Index first;

  static constexpr Index bytes(Index) { return 0; }

  void load(Group, Index, Matrix<const device T> matrix, Index m0) { x = matrix, first = m0; }

  // Row m, the last one repeated past the edge.
  const device T* row(Index m) const { return x.row(min_of(first + m, x.rows - 1)); }
};

// RUN elements of a row side by side, zero past `count`.
template <int RUN, typename T>
inline void load_run(thread float (&to)[RUN], const device T* from, Index count, long step) {
  if (count >= RUN && step == 1) {
#pragma unroll
    for (int i = 0; i < RUN; ++i) to[i] = float(from[i]);
  } else {
    for (int i = 0; i < RUN; ++i) to[i] = i < count ? float(from[i * step]) : 0.0f;
  }
}

// WN simdgroups of BN / WN rows of weights. A lane takes `run` elements of k side by side, KU such runs a turn. DEPTH
// is the depth of k if it is known when the kernel is compiled: a lane then takes its whole part at once.
template <typename T, int P, int ROWS, int BN, int WN, int KU, int DEPTH>
struct RowAccumulator {
  static constexpr constant int tile_n = BN / WN;
  static constexpr constant int run = DEPTH ? (DEPTH + simd_lanes - 1) / simd_lanes : 4;
  static constexpr constant Index bytes = 0;
  Group group;
  float sums[P][tile_n][ROWS];  // in all lanes, once multiplied

  RowAccumulator(Group of, Index) : group(of) {}

  // = x . w[n0 : n0+BN, :]^T
  void multiply(RowStage<T, ROWS> x, thread const Matrix<const device T> (&w)[P], Index n0) {
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int m = 0; m < ROWS; ++m) sums[p][i][m] = 0.0f;
    const Index depth = w[0].columns, first = n0 + group.simdgroup * tile_n;
    constexpr int turn = simd_lanes * run;
    Index k = group.lane * run;
    for (; k + (KU - 1) * turn + run <= depth; k += KU * turn) {
#pragma unroll
      for (int u = 0; u < KU; ++u) step(x, w, first, k + u * turn, run);
    }
    for (; k < depth; k += turn) step(x, w, first, k, depth - k);
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int m = 0; m < ROWS; ++m) sums[p][i][m] = simd_sum(sums[p][i][m]);
  }

  // A sum to a lane, 32 at a time: each runs the epilogue on its own.
  template <typename E>
  void store(Matrix<device T> y, Index m0, Index n0, thread const E& epilogue) const {
    constexpr int count = tile_n * ROWS;
    for (int base = 0; base < count; base += simd_lanes) {
      const int own = base + group.lane;
      float values[P];
      for (int p = 0; p < P; ++p) {
        values[p] = 0.0f;
        for (int i = 0; i < tile_n; ++i)
          for (int m = 0; m < ROWS; ++m) values[p] = own == i * ROWS + m ? sums[p][i][m] : values[p];
      }
      const Index n = n0 + group.simdgroup * tile_n + own / ROWS, m = m0 + own % ROWS;
      if (own < count && m < y.rows && n < y.columns) ::store(y.row(m) + n, epilogue.apply(values, m, n, 1), 1);
    }
  }

 private:
  void step(RowStage<T, ROWS> x, thread const Matrix<const device T> (&w)[P], Index first, Index k, Index count) {
    float part[ROWS][run];
    for (int m = 0; m < ROWS; ++m) load_run(part[m], x.row(m) + k * x.x.step, count, x.x.step);
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i) {
        float weight[run];
        load_run(weight, w[p].at(min_of(first + i, w[p].rows - 1), k), count, w[p].step);
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
          for (int e = 0; e < run; ++e) sums[p][i][m] += part[m][e] * weight[e];
      }
  }
};
