// The accumulator of a threadgroup at the decode end: a few rows of x against BN rows of weights, each weight read
// once, k split over the lanes of a warp.
#pragma once

// x[m0 : m0+ROWS, :], read where it lies: it is small and stays in the cache.
template <typename T, int ROWS>
struct RowStage {
  Matrix<const T> x;
  Index first;

  static inline constexpr Index bytes(Index) { return 0; }

  inline void load(Group, Index, Matrix<const T> matrix, Index m0) { x = matrix, first = m0; }

  // Row m, the last one repeated past the edge.
  inline const T* row(Index m) const { return x.row(min_of(first + m, x.rows - 1)); }
};

// Each sum of all lanes, in all lanes.
template <int P, int TILE, int ROWS>
inline void add_lanes(float (&sums)[P][TILE][ROWS]) {
#pragma unroll
  for (int p = 0; p < P; ++p)
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
      for (int m = 0; m < ROWS; ++m) sums[p][i][m] = simd_sum(sums[p][i][m]);
}

// Sums that all lanes have, of TILE rows of weights from n0 on, each to a lane, 32 at a time: each runs the epilogue on
// its own.
template <typename T, typename E, int P, int TILE, int ROWS>
inline void store_sums(Group group, Matrix<T> y, Index m0, Index n0, const float (&sums)[P][TILE][ROWS],
                       const E& epilogue) {
  constexpr int count = TILE * ROWS;
#pragma unroll
  for (int base = 0; base < count; base += simd_lanes) {
    const int own = base + group.lane;
    float values[P];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      values[p] = 0.0f;
#pragma unroll
      for (int i = base; i < count && i < base + simd_lanes; ++i)
        values[p] = own == i ? sums[p][i / ROWS][i % ROWS] : values[p];
    }
    const Index n = n0 + own / ROWS, m = m0 + own % ROWS;
    if (own < count && m < y.rows && n < y.columns) ::store(y.row(m) + n, epilogue.apply(values, m, n, 1), 1);
  }
}

// A depth of k that is known when the kernel is compiled is that of a head: query_rows.h.
template <typename T, int P, int ROWS, int BN, int WN, int KU, int DEPTH>
struct RowAccumulator;

// WN warps of BN / WN rows of weights. A lane takes 16 bytes of a row at once, KU times a turn, all of them under way
// before the first is used.
template <typename T, int P, int ROWS, int BN, int WN, int KU>
struct RowAccumulator<T, P, ROWS, BN, WN, KU, 0> {
  static constexpr int tile_n = BN / WN, held = Held<T>::count;
  static constexpr int together = ROWS < 4 ? ROWS : 4;  // rows of x that are unpacked at once
  static constexpr Index bytes = 0;
  Group group;
  float sums[P][tile_n][ROWS];  // in all lanes, once multiplied

  inline RowAccumulator(Group of, Index) : group(of) {}

  // = x . w[n0 : n0+BN, :]^T
  inline void multiply(const RowStage<T, ROWS>& x, const Matrix<const T> (&w)[P], Index n0) {
    const Index depth = w[0].columns, first = n0 + group.simdgroup * tile_n;
    bool whole = x.x.is_aligned();
    const T* rows[P][tile_n];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      whole = whole && w[p].is_aligned();
#pragma unroll
      for (int i = 0; i < tile_n; ++i) {
        rows[p][i] = w[p].row(min_of(first + i, w[p].rows - 1));
#pragma unroll
        for (int m = 0; m < ROWS; ++m) sums[p][i][m] = 0.0f;
      }
    }
    if (first >= w[0].rows) return;
    // Rows past the edge of x, or of the weights, repeat the last: nothing they give is stored.
    if (whole) walk<true>(x, w, rows, depth);
    else walk<false>(x, w, rows, depth);
    add_lanes(sums);
  }

  template <typename E>
  inline void store(Matrix<T> y, Index m0, Index n0, const E& epilogue) const {
    store_sums(group, y, m0, n0 + group.simdgroup * tile_n, sums, epilogue);
  }

 private:
  template <bool WHOLE>
  inline void walk(const RowStage<T, ROWS>& x, const Matrix<const T> (&w)[P], const T* const (&rows)[P][tile_n],
                   Index depth) {
    constexpr int turn = simd_lanes * held;
    for (Index k = group.lane * held; k < depth; k += KU * turn) {
      Words weights[KU][P][tile_n];
#pragma unroll
      for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int p = 0; p < P; ++p)
#pragma unroll
          for (int i = 0; i < tile_n; ++i) {
            const Index at = k + u * turn;
            weights[u][p][i] = load_words<true>(rows[p][i] + at * w[p].step, depth - at, w[p].step, WHOLE);
          }
#pragma unroll
      for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int m = 0; m < ROWS; m += together) {
          float part[together][held];
          const Index at = k + u * turn;
#pragma unroll
          for (int r = 0; r < together; ++r)
            unpack(T(), part[r],
                   load_words<false>(x.row(min_of(m + r, ROWS - 1)) + at * x.x.step, depth - at, x.x.step, WHOLE));
          add(part, weights[u], m);
        }
    }
  }

  inline void add(const float (&part)[together][held], const Words (&weights)[P][tile_n], int m) {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < tile_n; ++i) {
        float weight[held];
        unpack(T(), weight, weights[p][i]);
#pragma unroll
        for (int r = 0; r < together; ++r)
#pragma unroll
          for (int e = 0; e < held; ++e)
            if (m + r < ROWS) sums[p][i][m + r] += part[r][e] * weight[e];
      }
  }
};
