// The accumulator of a threadgroup at the matrix end: BM rows of x against BN rows of P weight matrices, fp32.
#pragma once

namespace metile {

// Epilogue and store of the first `count` columns of one row's fragment at (m, n): `values` of the P operands.
template <typename T, typename E, int P>
inline void finish(const E& epilogue, Matrix<T> y, const vfloat (&values)[P], long m, long n, long count) {
  if (count > 0) store(y.row(m) + n, epilogue.apply(values, m, n, count), count);
}

// The weight rows of one simdgroup over a slice of k, as the multiply takes them: where they lie, or packed.
template <typename T, int P, int TN>
struct Weights {
  typedef typename Unit<T>::type unit;
  static constexpr int width = Unit<T>::width;
  static constexpr int depth_step = width * lanes;
  const unit* rows[P];
  long stride;  // units from row to row

  static constexpr long bytes(long depth) { return P * TN * round_up(depth, depth_step) / width * long(sizeof(unit)); }

  Weights(unit* packed, const Matrix<const T> (&w)[P], long n, long k, long depth) {
    const long left = w[0].rows - n;
    const bool in_place = sizeof(unit) == sizeof(T) * width && left >= TN && depth % width == 0 && w[0].stride % width == 0;
    stride = in_place ? w[0].stride / width : round_up(depth, depth_step) / width;
    for (int p = 0; p < P; ++p) {
      rows[p] = in_place ? reinterpret_cast<const unit*>(w[p].row(n) + k) : packed + p * TN * stride;
      if (!in_place) convert_weights<TN>(packed + p * TN * stride, stride, w[p].row(n) + k, w[p].stride, left, depth);
    }
  }
};

// Quantized ones are always packed, as values.
template <typename T, typename F, int P, int TN>
struct Weights<Packed<T, F>, P, TN> {
  typedef typename Unit<T>::type unit;
  const unit* rows[P];
  long stride;

  static constexpr long bytes(long depth) { return Weights<T, P, TN>::bytes(depth); }

  Weights(unit* packed, const PackedMatrix<T, F> (&w)[P], long n, long k, long depth) {
    stride = round_up(depth, Weights<T, P, TN>::depth_step) / Unit<T>::width;
    for (int p = 0; p < P; ++p) {
      rows[p] = packed + p * TN * stride;
      unpack_weights<TN>(packed + p * TN * stride, stride, w[p], n, k, depth);
    }
  }
};

// Memory that is wanted next, asked for a little at a time while something else is computed.
struct Ahead {
  const char *at, *end;

  template <typename T>
  static Ahead rows(Matrix<const T> w, long first, long count) {
    const long last = min_of(first + count, w.rows);
    if (first >= last) return Ahead{nullptr, nullptr};
    return Ahead{reinterpret_cast<const char*>(w.row(first)), reinterpret_cast<const char*>(w.row(last))};
  }
  template <typename T, typename F>
  static Ahead rows(const PackedMatrix<T, F>& w, long first, long count) { return rows(w.codes, first, count); }
  void fetch(int lines) {
    for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

#if METILE_ISA_AMX
// For the matrix unit: groups of 16 rows, 32 elements of k a step. At a ragged edge they are packed, zero-filled, a step
// of a group as one dense tile. Packing all of them for their reuse was tried: it costs as much as it saves, since the
// loads it does are the ones that wait for memory.
template <int P, int TN>
struct Weights<bfloat, P, TN> {
  static constexpr int groups = TN / 16, G = P * groups;
  const char* tiles[G];
  long stride, step;  // bytes from row to row, and from step to step

  static constexpr long bytes(long depth) { return G * ceil_div(depth, 32) * 1024; }

  Weights(uint* packed, const Matrix<const bfloat> (&w)[P], long n, long k, long depth) {
    const bool in_place = n + TN <= w[0].rows && depth % 32 == 0;
    stride = in_place ? w[0].stride * 2 : 64;
    step = in_place ? 64 : 1024;
    for (int g = 0; g < G; ++g) {
      const long row = n + g % groups * 16;
      const bfloat* from = w[g / groups].row(min_of(row, w[0].rows - 1)) + k;
      uint* to = packed + g * ceil_div(depth, 32) * 256;
      tiles[g] = reinterpret_cast<const char*>(in_place ? reinterpret_cast<const uint*>(from) : to);
      if (!in_place) pack(to, from, w[0].stride, w[0].rows - row, depth);
    }
  }

 private:
  static void pack(uint* to, const bfloat* from, long row_stride, long rows, long depth) {
    for (long k = 0; k < depth; k += 32, to += 256)
      convert_weights<16>(to, 16, from + k, row_stride, rows, min_of(32, depth - k));
  }
};

template <typename F, int P, int TN>
struct Weights<Packed<bfloat, F>, P, TN> {
  static constexpr int groups = TN / 16, G = P * groups;
  static constexpr long stride = 64, step = 1024;
  const char* tiles[G];

  static constexpr long bytes(long depth) { return Weights<bfloat, P, TN>::bytes(depth); }

  Weights(uint* packed, const PackedMatrix<bfloat, F> (&w)[P], long n, long k, long depth) {
    for (int g = 0; g < G; ++g) {
      uint* to = packed + g * ceil_div(depth, 32) * 256;
      tiles[g] = reinterpret_cast<const char*>(to);
      for (long s = 0; s < depth; s += 32, to += 256)
        unpack_weights<16>(to, 16, w[g / groups], n + g % groups * 16, k + s, min_of(32, depth - s));
    }
  }
};
#endif

}  // namespace metile

// WM x WN simdgroups of BM/WM x BN/WN elements each; the compiler unrolls k, whatever KU says.
template <typename Element, int P, int BM, int BN, int WM, int WN, int KU, int DEPTH>
struct Accumulator {
  typedef ElementOf<Element> T;
  static constexpr int tile_m = BM / WM, tile_n = BN / WN;
  static constexpr int panels = tile_m / metile::lanes;
  static constexpr bool takes_all = false;
  static constexpr long block_bytes = long(P) * BN * BM * 4;
  typedef metile::Weights<Element, P, tile_n> Weights;
  typedef typename metile::Unit<T>::type unit;
  float* memory;  // [P][BN][BM], the block transposed
  metile::Ahead ahead[P] = {};

  static constexpr long bytes(long depth) { return round_up(block_bytes + Weights::bytes(depth), 64); }

  explicit Accumulator(const Group& group, long offset) : memory(group.memory<float>(offset)) {}

  // += x[:, k0 : k0+depth] . w[n0 : n0+BN, k0 : k0+depth]^T, or = where this is the first slice of k.
  template <int D>
  void multiply_accumulate(const Stage<T, BM, D>& x, const WeightsOf<Element> (&w)[P], long n0, long k0, long depth,
                           bool first) {
    for (long n = 0; n < BN && n0 + n < w[0].rows; n += tile_n) {
      const Weights weights(packed(), w, n0 + n, k0, depth);
      for (long m = 0; m < BM; m += tile_m) tile(x, weights, m, n, depth, first);
    }
  }

  // The last slice and the epilogue, a simdgroup at a time: its sums are still in the nearest cache. Where
  // several simdgroups share weights, those of the next row of simdgroups come in meanwhile.
  template <typename E>
  void store(const Stage<T, BM, DEPTH>& x, const WeightsOf<Element> (&w)[P], Matrix<T> y, long m0, long n0, long k0,
             bool first, const E& epilogue) {
    const long depth = w[0].columns - k0;
    for (long n = 0; n < BN && n0 + n < y.columns; n += tile_n) {
      const Weights weights(packed(), w, n0 + n, k0, depth);
      for (int p = 0; p < P; ++p) ahead[p] = metile::Ahead::rows(w[p], n0 + n + tile_n, WM > 1 && n + tile_n < BN ? tile_n : 0);
      for (long m = 0; m < BM && m0 + m < y.rows; m += tile_m) {
        tile(x, weights, m, n, depth, first);
        store_tile(y, m0, n0, m, n, epilogue);
      }
    }
  }

 private:
  float* at(int p, long n, long m) const { return memory + (p * BN + n) * BM + m; }
  unit* packed() const { return reinterpret_cast<unit*>(memory + block_bytes / 4); }

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

#if METILE_ISA_AMX
  template <int D>
  void tile(const Stage<bfloat, BM, D>& x, const Weights& w, long m, long n, long depth, bool first) {
    constexpr int G = Weights::G;
    typedef metile::TileAccumulator<G, panels> Tiles;
    float* to[G];
    for (int g = 0; g < G; ++g) to[g] = at(g / Weights::groups, n + g % Weights::groups * 16, m);
    const uint* panel = x.panel(m / 16);
    first ? Tiles::clear() : Tiles::load(to, BM);
    for (long s = 0; s < ceil_div(depth, 32); ++s) {
      const void* rows[G];
      for (int g = 0; g < G; ++g) rows[g] = w.tiles[g] + s * w.step;
      for (int p = 0; p < P; ++p) ahead[p].fetch(ceil_div(tile_n, WM));
      Tiles::multiply(panel + s * 256, x.units * 16, rows, w.stride);
    }
    Tiles::store(to, BM);
  }
#endif

  template <typename S, int D>
  void tile(const Stage<S, BM, D>& x, const Weights& w, long m, long n, long depth, bool first) const {
    vfloat sums[P][tile_n][panels];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int h = 0; h < panels; ++h) sums[p][i][h] = first ? vfloat(0) : metile::load(at(p, n + i, m) + h * metile::lanes);
    metile::outer_product(sums, x.panel(m / metile::lanes), x.units * metile::lanes, w.rows, w.stride,
                          ceil_div(depth, metile::Unit<S>::width));
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < tile_n; ++i)
        for (int h = 0; h < panels; ++h) metile::store(at(p, n + i, m) + h * metile::lanes, sums[p][i][h]);
  }
};
