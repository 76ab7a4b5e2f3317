// The accumulator at the decode end where weights are quantized: levels are multiplied, and a lane's sum of a group is
// scaled; what all levels lie above zero is multiplied by the sum of x.
#pragma once

template <typename T, typename F, int ROWS>
struct RowStage<Packed<T, F>, ROWS> : RowStage<T, ROWS> {};

template <typename T, typename F, int P, int ROWS, int BN, int WN, int KU>
struct RowAccumulator<Packed<T, F>, P, ROWS, BN, WN, KU, 0> {
  typedef RowStage<Packed<T, F>, ROWS> Staged;
  static constexpr int tile_n = BN / WN, held = Held<T>::count;
  static constexpr int count = F::bits % 2 ? 32 : 16;  // codes that a lane takes at once: whole words, of one group
  typedef Chunk<T, F, count> Piece;
  static constexpr Index bytes = 0;
  Group group;
  float sums[P][tile_n][ROWS];  // in all lanes, once multiplied

  inline RowAccumulator(Group of, Index) : group(of) {}

  // = x . w[n0 : n0+BN, :]^T
  inline void multiply(const Staged& x, const PackedMatrix<T, F> (&w)[P], Index n0) {
    const Index first = n0 + group.simdgroup * tile_n;
    bool whole = x.x.is_aligned();
#pragma unroll
    for (int p = 0; p < P; ++p) {
      whole = whole && is_whole(w[p]);
#pragma unroll
      for (int i = 0; i < tile_n; ++i)
#pragma unroll
        for (int m = 0; m < ROWS; ++m) sums[p][i][m] = 0.0f;
    }
    if (first >= w[0].rows) return;
    if (whole) walk<true>(x, w, first);
    else walk<false>(x, w, first);
    add_lanes(sums);
  }

  template <typename E>
  inline void store(Matrix<T> y, Index m0, Index n0, const E& epilogue) const {
    store_sums(group, y, m0, n0 + group.simdgroup * tile_n, sums, epilogue);
  }

 private:
  template <bool WHOLE>
  inline void walk(const Staged& x, const PackedMatrix<T, F> (&w)[P], Index first) {
    constexpr int turn = simd_lanes * count;
    const Index depth = w[0].columns;
    const uint row_words = code_words<F>(depth), row_groups = uint(depth) / F::group;
    for (Index k = group.lane * count; k < depth; k += KU * turn) {
      Piece pieces[KU][P][tile_n];
#pragma unroll
      for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int p = 0; p < P; ++p)
#pragma unroll
          for (int i = 0; i < tile_n; ++i) {
            const uint row = uint(min_of(first + i, w[p].rows - 1));  // past the edge, the last again
            pieces[u][p][i].template load<WHOLE, true>(w[p], row * row_words, row * row_groups, k, u * turn, depth);
          }
#pragma unroll
      for (int u = 0; u < KU; ++u) add<WHOLE>(x, pieces[u], k + u * turn, depth);
    }
  }

  template <bool WHOLE>
  inline void add(const Staged& x, const Piece (&pieces)[P][tile_n], Index k, Index depth) {
    float part[P][tile_n][ROWS] = {}, total[ROWS] = {};
#pragma unroll
    for (int s = 0; s < count; s += 8) {
      float of_x[ROWS][8 / held][held];
#pragma unroll
      for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int h = 0; h < 8 / held; ++h) {
          const Index at = k + s + h * held;
          unpack(T(), of_x[m][h], load_words<false>(x.row(m) + at * x.x.step, depth - at, x.x.step, WHOLE));
#pragma unroll
          for (int e = 0; e < held; ++e)
            if (F::is_integer) total[m] += of_x[m][h][e];
        }
#pragma unroll
      for (int p = 0; p < P; ++p)
#pragma unroll
        for (int i = 0; i < tile_n; ++i) {
          float levels[8];
          pieces[p][i].levels(levels, s);
#pragma unroll
          for (int e = 0; e < 8; ++e)
#pragma unroll
            for (int m = 0; m < ROWS; ++m) part[p][i][m] += of_x[m][e / held][e % held] * levels[e];
        }
    }
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < tile_n; ++i) {
        const float scale = pieces[p][i].scale(0), shift = pieces[p][i].bias(0) - level_above<F>() * scale;
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
          sums[p][i][m] += part[p][i][m] * scale;
          if (F::is_integer) sums[p][i][m] += total[m] * shift;
        }
      }
  }
};
