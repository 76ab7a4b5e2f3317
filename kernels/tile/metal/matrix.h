// The accumulator of a threadgroup at the matrix end: BM rows of x against BN rows of P weight matrices, fp32, in the
// registers of WM x WN simdgroups.
#pragma once

// Weights come in slices of at most DEPTH through threadgroup memory, or from where they lie if DEPTH is 0; KU
// fragments of k are loaded before they are multiplied.
template <typename T, int P, int BM, int BN, int WM, int WN, int KU, int DEPTH>
struct Accumulator {
  static constexpr constant int tile_m = BM / WM, tile_n = BN / WN;
  static constexpr constant int TM = tile_m / fragment_size, TN = tile_n / fragment_size;
  static constexpr constant bool takes_all = false;
  static constexpr constant int step = KU * fragment_size;
  static constexpr constant int stride = staged_stride<T, DEPTH>();
  Group group;
  short m, n;  // of this simdgroup's tile in the block
  threadgroup T* memory;  // [P][BN][stride]
  Fragment<float> sums[P][TM][TN];

  static constexpr Index bytes(Index) { return DEPTH ? P * BN * stride * Index(sizeof(T)) : 0; }

  Accumulator(Group of, Index offset) : group(of), m(of.simdgroup / WN * tile_m), n(of.simdgroup % WN * tile_n),
                                        memory(of.memory<T>(offset)) {}

  // += x[:, k0 : k0+depth] . w[n0 : n0+BN, k0 : k0+depth]^T, or = where this is the first slice of k.
  template <int D>
  void multiply_accumulate(thread Stage<T, BM, D>& x, thread const Matrix<const device T> (&w)[P], Index n0, Index k0,
                           Index depth, bool first) {
    if (first) clear();
    if (DEPTH) {
      for (int p = 0; p < P; ++p) copy_slice<BN, DEPTH == 0 ? 1 : DEPTH>(group, memory + p * BN * stride, w[p], n0, k0, depth);
    }
    x.wait();
    if (x.first + m >= x.x.rows || n0 + n >= w[0].rows) return;  // a tile beyond the edge
    for (Index k = 0; k < (DEPTH ? DEPTH : depth); k += step) turn(x, w, n0, k0, k, k0 + depth);
  }

  // The last slice and the epilogue, on the sums in their registers.
  template <typename E>
  void store(thread Stage<T, BM, DEPTH>& x, thread const Matrix<const device T> (&w)[P], Matrix<device T> y, Index m0,
             Index n0, Index k0, bool first, thread const E& epilogue) {
    multiply_accumulate(x, w, n0, k0, w[0].columns - k0, first);
    const Place place = group.place();
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        const Index row = m0 + m + i * fragment_size + place.row, column = n0 + n + j * fragment_size + place.column;
        float2 values[P];
        for (int p = 0; p < P; ++p) values[p] = pair(sums[p][i][j]);
        if (row < y.rows && column < y.columns)
          ::store(y.row(row) + column, epilogue.apply(values, row, column, y.columns - column), y.columns - column);
      }
  }

  void clear() {
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) sums[p][i][j] = make_filled_simdgroup_matrix<float, fragment_size, fragment_size>(0.0f);
  }

  static float2 pair(thread Fragment<float>& sum) { return float2(sum.thread_elements()[0], sum.thread_elements()[1]); }

 private:
  // KU fragments of k from k on: all loads, then all products.
  template <int D>
  void turn(thread const Stage<T, BM, D>& x, thread const Matrix<const device T> (&w)[P], Index n0, Index k0, Index k,
            Index end) {
    Fragment<T> rows[KU][TM], columns[KU][P][TN];
#pragma unroll
    for (int u = 0; u < KU; ++u) {
      const Index at = k + u * fragment_size;
      for (int i = 0; i < TM; ++i) x.fragment(rows[u][i], group, m + i * fragment_size, at);
      for (int p = 0; p < P; ++p)
        for (int j = 0; j < TN; ++j) weights(columns[u][p][j], w[p], p, n0, n + j * fragment_size, k0, at, end);
    }
#pragma unroll
    for (int u = 0; u < KU; ++u)
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < TM; ++i)
          for (int j = 0; j < TN; ++j)
            simdgroup_multiply_accumulate(sums[p][i][j], rows[u][i], columns[u][p][j], sums[p][i][j]);
  }

  void weights(thread Fragment<T>& to, Matrix<const device T> w, int p, Index n0, Index row, Index k0, Index k,
               Index end) const {
    if (DEPTH) simdgroup_load(to, memory + (p * BN + row) * stride + k, stride, ulong2(0, 0), true);
    else load_fragment<true>(to, group, w, n0 + row, k0 + k, end);
  }
};
