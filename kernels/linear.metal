// linear: y = epilogue(x . w^T), x [M, K], each weight matrix w [N, K] as MLX keeps it, y [M, N]; fp32 accumulation.
//
// Two programs. linear_matrix is the matrix end: a threadgroup owns a BM x BN block of y and walks k in slices.
// linear_rows is the decode end: a few rows of x, every weight read once, k split over the lanes.
// projections_matrix and projections_rows are the same for three products of one x, in one grid.
#pragma once

struct Store {
  static constexpr constant int operands = 1;
  template <typename F>
  F apply(thread const F (&values)[1], Index, Index, Index) const { return values[0]; }
};

template <typename T>
struct Bias {
  static constexpr constant int operands = 1;
  const device T* bias;  // [N]
  template <typename F>
  F apply(thread const F (&values)[1], Index, Index n, Index count) const { return values[0] + load<F>(bias + n, count); }
};

template <typename T>
struct Residual {
  static constexpr constant int operands = 1;
  Matrix<const device T> residual;  // [M, N]
  template <typename F>
  F apply(thread const F (&values)[1], Index m, Index n, Index count) const {
    return values[0] + load<F>(residual.row(m) + n, count);
  }
};

struct SwiGLU {  // silu(gate) * up
  static constexpr constant int operands = 2;
  template <typename F>
  F apply(thread const F (&values)[2], Index, Index, Index) const {
    return values[0] / (1.0f + exponential(-values[0])) * values[1];
  }
};

// x and the weights of a block come in slices of k of the given depth. DEPTH is that depth where a target stages them
// in memory it must know the size of, 0 otherwise. An accumulator that takes all of k cuts it into slices by itself.
template <typename T, typename Epilogue, int BM, int BN, int WM, int WN, int KU, int DEPTH>
inline void linear_matrix(Matrix<const device T> x, thread const Matrix<const device T> (&w)[Epilogue::operands],
                          Matrix<device T> y, thread const Epilogue& epilogue, Index slice, Schedule schedule, Group group) {
  typedef Accumulator<T, Epilogue::operands, BM, BN, WM, WN, KU, DEPTH> Sums;
  const Block block = schedule_block(schedule, group.index, ceil_div(y.rows, BM), ceil_div(y.columns, BN));
  const Index m0 = block.m * BM, n0 = block.n * BN;
  Stage<T, BM, DEPTH> staged;
  Sums sums(group, 0);
  Index k = 0;
  if (!Sums::takes_all)
    for (; k + slice < x.columns; k += slice) {
      staged.load(group, Sums::bytes(slice), x, m0, k, slice);
      sums.multiply_accumulate(staged, w, n0, k, slice, k == 0);
    }
  staged.load(group, Sums::bytes(slice), x, m0, k, x.columns - k);
  sums.store(staged, w, y, m0, n0, k, k == 0, epilogue);
}

template <typename T, typename Epilogue, int ROWS, int BN, int WN, int KU>
inline void linear_rows(Matrix<const device T> x, thread const Matrix<const device T> (&w)[Epilogue::operands],
                        Matrix<device T> y, thread const Epilogue& epilogue, Group group) {
  typedef RowAccumulator<T, Epilogue::operands, ROWS, BN, WN, KU, 0> Sums;
  const Index tiles_n = ceil_div(y.columns, BN);
  const Index m0 = group.index / tiles_n * ROWS, n0 = group.index % tiles_n * BN;
  RowStage<T, ROWS> staged;
  Sums sums(group, 0);
  staged.load(group, Sums::bytes, x, m0);
  sums.multiply(staged, w, n0);
  sums.store(y, m0, n0, epilogue);
}

// One of several products of the same x.
template <typename T, typename Epilogue>
struct Projection {
  Matrix<const device T> w;  // [N, K]
  Matrix<device T> y;        // [M, N]
  Epilogue epilogue;

  template <int BM, int BN>
  inline Index blocks() const { return ceil_div(y.rows, BM) * ceil_div(y.columns, BN); }
};

// The projection that a threadgroup belongs to, where their blocks follow each other on one grid; the group's index
// becomes that within it. Chosen by value, field by field: a choice among places would keep all three in memory.
template <typename T, typename Epilogue, int BM, int BN>
inline Projection<T, Epilogue> projection_of(Projection<T, Epilogue> q, Projection<T, Epilogue> k,
                                             Projection<T, Epilogue> v, Matrix<const device T> x,
                                             thread Group& group) {
  Projection<T, Epilogue> own = q;
  Index index = group.index;
  const Index before_k = q.template blocks<BM, BN>(), before_v = before_k + k.template blocks<BM, BN>();
  if (index >= before_v) {
    own = v;
    index -= before_v;
  } else if (index >= before_k) {
    own = k;
    index -= before_k;
  }
  group.index = index;
  own.w.columns = x.columns;  // what all three share is no choice, and takes no registers for one
  own.y.rows = x.rows;
  own.y.stride = own.y.columns;
  return own;
}

template <typename T, typename Epilogue, int BM, int BN, int WM, int WN, int KU, int DEPTH>
inline void projections_matrix(Matrix<const device T> x, Projection<T, Epilogue> q, Projection<T, Epilogue> k,
                               Projection<T, Epilogue> v, Index slice, Schedule schedule, Group group) {
  const Projection<T, Epilogue> own = projection_of<T, Epilogue, BM, BN>(q, k, v, x, group);
  const Matrix<const device T> w[] = {own.w};
  linear_matrix<T, Epilogue, BM, BN, WM, WN, KU, DEPTH>(x, w, own.y, own.epilogue, slice, schedule, group);
}

template <typename T, typename Epilogue, int ROWS, int BN, int WN, int KU>
inline void projections_rows(Matrix<const device T> x, Projection<T, Epilogue> q, Projection<T, Epilogue> k,
                             Projection<T, Epilogue> v, Group group) {
  const Projection<T, Epilogue> own = projection_of<T, Epilogue, ROWS, BN>(q, k, v, x, group);
  const Matrix<const device T> w[] = {own.w};
  linear_rows<T, Epilogue, ROWS, BN, WN, KU>(x, w, own.y, own.epilogue, group);
}
