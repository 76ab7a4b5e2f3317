// norm: y = round(x / rms(x)) * weight over the rows of x [M, hidden], as mx.fast.rms_norm rounds it.
// add_rms_norm first adds a residual and gives the sum as a second output.
#pragma once

// The fragment of lane position k: x, or the rounded sum of x and the residual, which is then stored.
template <typename T, bool ADD>
inline Fragment norm_input(const device T* x, const device T* residual, device T* sum, long k, long count) {
  const Fragment value = load(x + k, count);
  if (!ADD) return value;
  const Fragment total = round_to<T>(value + load(residual + k, count));
  store(sum + k, total, count);
  return total;
}

template <typename T, bool ADD, int ROWS>
inline void rms_norm(Matrix<const device T> x, Matrix<const device T> residual, const device T* weight,
                     Matrix<device T> sum, Matrix<device T> y, float eps, Group group) {
  const long hidden = x.columns, first = long(group.index) * ROWS;
  for (long m = first; m < min_of(first + ROWS, x.rows); ++m) {
    Fragment squares = Fragment(0);
    for (long k = 0; k < hidden; k += fragment_width) {
      const Fragment value = norm_input<T, ADD>(x.row(m), residual.row(m), sum.row(m), k, hidden - k);
      squares += value * value;
    }
    const float scale = reciprocal_root(reduce_add(squares) / float(hidden) + eps);
    const device T* from = ADD ? sum.row(m) : x.row(m);
    for (long k = 0; k < hidden; k += fragment_width) {
      const long count = hidden - k;
      store(y.row(m) + k, round_to<T>(load(from + k, count) * scale) * load(weight + k, count), count);
    }
  }
}
