// The accumulator of a threadgroup at the matrix end: BM rows of x against BN rows of P weight matrices, fp32.
#pragma once

namespace metile {

// Epilogue and store of the first `count` columns of one row's fragment at (m, n): `values` of the P operands.
template <typename T, typename E, int P>
inline void finish(const E& epilogue, Matrix<T> y, const vfloat (&values)[P], long m, long n, long count) {
  if (count > 0) store(y.row(m) + n, epilogue.apply(values, m, n, count), count);
}

}  // namespace metile

// WM x WN simdgroups of BM/WM x BN/WN elements each. Weights that must be converted are, 256 deep.
template <typename T, int P, int BM, int BN, int WM, int WN>
struct Accumulator {
  static constexpr int tile_m = BM / WM, tile_n = BN / WN;
  static constexpr int panels = tile_m / metile::lanes;
  static constexpr long convert_depth = 256;
  static constexpr long block_bytes = long(P) * BN * BM * 4;
  static constexpr long bytes = block_bytes + P * tile_n * convert_depth * 4;
  float* memory;  // [P][BN][BM], the block transposed

  explicit Accumulator(const Group& group, long offset) : memory(group.memory<float>(offset)) {}

  // += x[:, k0 : k0+depth] . w[n0 : n0+BN, k0 : k0+depth]^T, or = where this is the first slice of k.
  void multiply_accumulate(const Stage<T, BM>& x, const Matrix<const T> (&w)[P], long n0, long k0, long depth, bool first) {
    for (long n = 0; n < BN && n0 + n < w[0].rows; n += tile_n)
      for (long m = 0; m < BM; m += tile_m) tile(x, w, m, n0, n, k0, depth, first);
  }

  // The last slice and the epilogue, a simdgroup at a time: its sums are still in the nearest cache.
  template <typename E>
  void store(const Stage<T, BM>& x, const Matrix<const T> (&w)[P], Matrix<T> y, long m0, long n0, long k0, bool first,
             const E& epilogue) {
    for (long n = 0; n < BN && n0 + n < y.columns; n += tile_n)
      for (long m = 0; m < BM && m0 + m < y.rows; m += tile_m) {
        tile(x, w, m, n0, n, k0, w[0].columns - k0, first);
        store_tile(y, m0, n0, m, n, epilogue);
      }
  }

 private:
  template <typename E>
  void store_tile(Matrix<T> y, long m0, long n0, long m, long n, const E& epilogue) const {
    for (long i = m; i < m + tile_m; i += metile::lanes)
      for (long j = n; j < n + tile_n; j += metile::lanes) {
        vfloat squares[P][metile::lanes];
        for (int p = 0; p < P; ++p) {
          for (int r = 0; r < metile::lanes; ++r)
            squares[p][r] = j + r < n + tile_n ? metile::load(at(p, j + r, i)) : vfloat(0);
          metile::transpose(squares[p]);
        }
        const long columns = min_of(n + tile_n - j, y.columns - n0 - j);
        for (int r = 0; r < metile::lanes && m0 + i + r < y.rows; ++r) {
          vfloat values[P];
          for (int p = 0; p < P; ++p) values[p] = squares[p][r];
          metile::finish(epilogue, y, values, m0 + i + r, n0 + j, columns);
        }
      }
  }

  float* at(int p, long n, long m) const { return memory + (p * BN + n) * BM + m; }

#if METILE_ISA_AMX
  void tile(const Stage<bfloat, BM>& x, const Matrix<const bfloat> (&w)[P], long m, long n0, long n, long k0, long depth, bool first) {
    constexpr int groups = tile_n / 16, G = P * groups;
    typedef metile::TileAccumulator<G, panels> Tiles;
    const bfloat* weights[G];
    float* to[G];
    const long stride = w[0].stride * 2;
    bool whole = true;
    for (int g = 0; g < G; ++g) {
      const long row = n + g % groups * 16;
      to[g] = at(g / groups, row, m);
      whole = whole && n0 + row + 16 <= w[0].rows;
      weights[g] = w[g / groups].row(min_of(n0 + row, w[0].rows - 1)) + k0;
    }
    const uint* panel = x.panel(m / 16);
    const long panel_stride = x.units * 16;
    first ? Tiles::clear() : Tiles::load(to, BM);
    long k = 0;
    // While the last panels are multiplied, the weights of the next simdgroup come into the cache.
    const bool ahead = m + tile_m == BM && n0 + n + 2 * tile_n <= w[0].rows;
    for (; whole && k + 32 <= depth; k += 32) {
      const void* rows[G];
      if (ahead)
        for (int g = 0; g < G; ++g)
          for (int i = 0; i < 16; ++i)
            __builtin_prefetch(weights[g] + (tile_n + i) * w[0].stride + k, 0, 2);
      for (int g = 0; g < G; ++g) rows[g] = weights[g] + k;
      Tiles::multiply(panel + k / 2 * 16, panel_stride, rows, stride);
    }
    for (; k < depth; k += 32) {  // the ragged edge: 16 x 32 weights at a time, zero-filled
      alignas(64) uint edge[G][16 * 16];
      const void* rows[G];
      for (int g = 0; g < G; ++g) {
        const long left = w[0].rows - n0 - n - g % groups * 16;
        metile::convert_weights<16>(edge[g], 16, weights[g] + k, w[0].stride, left, min_of(32, depth - k));
        rows[g] = edge[g];
      }
      Tiles::multiply(panel + k / 2 * 16, panel_stride, rows, 64);
    }
    Tiles::store(to, BM);
  }
#endif

  template <typename S>
  void tile(const Stage<S, BM>& x, const Matrix<const S> (&w)[P], long m, long n0, long n, long k0, long depth, bool first) {
    typedef typename metile::Unit<S>::type U;
    constexpr int width = metile::Unit<S>::width;
    vfloat sums[P][tile_n][panels];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int h = 0; h < panels; ++h) sums[p][i][h] = first ? vfloat(0) : metile::load(at(p, n + i, m) + h * metile::lanes);
    const U* panel = x.panel(m / metile::lanes);
    const long panel_stride = x.units * metile::lanes, rows = w[0].rows - n0 - n;
    const U* weights[P];
    if (sizeof(U) == sizeof(S) * width && rows >= tile_n && depth % width == 0 && w[0].stride % width == 0) {  // as they lie in memory
      for (int p = 0; p < P; ++p) weights[p] = reinterpret_cast<const U*>(w[p].row(n0 + n) + k0);
      metile::outer_product(sums, panel, panel_stride, weights, w[0].stride / width, depth / width);
    } else {
      U* converted = reinterpret_cast<U*>(memory + block_bytes / 4);
      for (long k = 0; k < depth; k += convert_depth) {
        const long part = min_of(convert_depth, depth - k);
        for (int p = 0; p < P; ++p) {
          weights[p] = converted + p * tile_n * convert_depth;
          metile::convert_weights<tile_n>(converted + p * tile_n * convert_depth, convert_depth, w[p].row(n0 + n) + k0 + k, w[p].stride, rows, part);
        }
        metile::outer_product(sums, panel + k / width * metile::lanes, panel_stride, weights, convert_depth, ceil_div(part, width));
      }
    }
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int h = 0; h < panels; ++h) metile::store(at(p, n + i, m) + h * metile::lanes, sums[p][i][h]);
  }
};
