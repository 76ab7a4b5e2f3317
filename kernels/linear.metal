// linear: y = epilogue(x . w^T), x [M, K], each weight matrix w [N, K] as MLX keeps it, dense or quantized, y [M, N];
// fp32 accumulation. E is the element of the weights: T, or Packed<T, format> (tile/packed.h).
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
template <typename E, typename Epilogue, int BM, int BN, int WM, int WN, int KU, int DEPTH>
inline void linear_matrix(Matrix<const device ElementOf<E>> x, thread const WeightsOf<E> (&w)[Epilogue::operands],
                          Matrix<device ElementOf<E>> y, thread const Epilogue& epilogue, Index slice,
                          Schedule schedule, Group group) {
  typedef Accumulator<E, Epilogue::operands, BM, BN, WM, WN, KU, DEPTH> Sums;
  const Block block = schedule_block(schedule, group.index, ceil_div(y.rows, BM), ceil_div(y.columns, BN));
  const Index m0 = block.m * BM, n0 = block.n * BN;
  Stage<ElementOf<E>, BM, DEPTH> staged;
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

template <typename E, typename Epilogue, int ROWS, int BN, int WN, int KU>
inline void linear_rows(Matrix<const device ElementOf<E>> x, thread const WeightsOf<E> (&w)[Epilogue::operands],
                        Matrix<device ElementOf<E>> y, thread const Epilogue& epilogue, Group group) {
  typedef RowAccumulator<E, Epilogue::operands, ROWS, BN, WN, KU, 0> Sums;
  const Index tiles_n = ceil_div(y.columns, BN);
  const Index m0 = group.index / tiles_n * ROWS, n0 = group.index % tiles_n * BN;
  RowStage<E, ROWS> staged;
  Sums sums(group, 0);
  staged.load(group, Sums::bytes, x, m0);
  sums.multiply(staged, w, n0);
  sums.store(y, m0, n0, epilogue);
}

// One of several products of the same x.
template <typename E, typename Epilogue>
struct Projection {
  WeightsOf<E> w;                 // [N, K]
  Matrix<device ElementOf<E>> y;  // [M, N]
  Epilogue epilogue;

  template <int BM, int BN>
  inline Index blocks() const { return ceil_div(y.rows, BM) * ceil_div(y.columns, BN); }
};

// The projection that a threadgroup belongs to, where their blocks follow each other on one grid; the group's index
// becomes that within it. Chosen by value, field by field: a choice among places would keep all three in memory.
template <typename E, typename Epilogue, int BM, int BN>
inline Projection<E, Epilogue> projection_of(Projection<E, Epilogue> q, Projection<E, Epilogue> k,
                                             Projection<E, Epilogue> v, Matrix<const device ElementOf<E>> x,
                                             thread Group& group) {
  Projection<E, Epilogue> own = q;
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

template <typename E, typename Epilogue, int BM, int BN, int WM, int WN, int KU, int DEPTH>
inline void projections_matrix(Matrix<const device ElementOf<E>> x, Projection<E, Epilogue> q, Projection<E, Epilogue> k,
                               Projection<E, Epilogue> v, Index slice, Schedule schedule, Group group) {
  const Projection<E, Epilogue> own = projection_of<E, Epilogue, BM, BN>(q, k, v, x, group);
  const WeightsOf<E> w[] = {own.w};
  linear_matrix<E, Epilogue, BM, BN, WM, WN, KU, DEPTH>(x, w, own.y, own.epilogue, slice, schedule, group);
}

template <typename E, typename Epilogue, int ROWS, int BN, int WN, int KU>
inline void projections_rows(Matrix<const device ElementOf<E>> x, Projection<E, Epilogue> q, Projection<E, Epilogue> k,
                             Projection<E, Epilogue> v, Group group) {
  const Projection<E, Epilogue> own = projection_of<E, Epilogue, ROWS, BN>(q, k, v, x, group);
  const WeightsOf<E> w[] = {own.w};
  linear_rows<E, Epilogue, ROWS, BN, WN, KU>(x, w, own.y, own.epilogue, group);
}
