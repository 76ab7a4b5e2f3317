// norm: y = round(x / rms(x)) * weight over the rows of x [M, hidden], as mx.fast.rms_norm rounds it.
// add_rms_norm first adds a residual and gives the sum as a second output.
#pragma once

// The fragment at (m, k): x, or the rounded sum of x and the residual, which is then stored.
template <typename T, bool ADD>
inline Threads::Fragment norm_input(Threads threads, Matrix<const device T> x, Matrix<const device T> residual,
                                    Matrix<device T> sum, Index m, Index k) {
  const Threads::Fragment value = threads.load(x, m, k);
  if (!ADD) return value;
  const Threads::Fragment total = round_to<T>(value + threads.load(residual, m, k));
  threads.store(sum, m, k, total);
  return total;
}

template <typename T, bool ADD, int ROWS>
inline void rms_norm(Matrix<const device T> x, Matrix<const device T> residual, Matrix<const device T> weight,
                     Matrix<device T> sum, Matrix<device T> y, float eps, Group group) {
  const Threads threads = group.threads();
  const Index hidden = x.columns, first = group.index * ROWS;
  for (Index m = first; m < min_of(first + ROWS, x.rows); ++m) {
    Threads::Fragment squares = Threads::Fragment(0);
    for (Index k = 0; k < hidden; k += Threads::width) {
      const Threads::Fragment value = norm_input<T, ADD>(threads, x, residual, sum, m, k);
      squares += value * value;
    }
    const float scale = reciprocal_root(threads.reduce_add(squares) / float(hidden) + eps);
    for (Index k = 0; k < hidden; k += Threads::width) {
      const Threads::Fragment value = ADD ? threads.load(sum, m, k) : threads.load(x, m, k);
      threads.store(y, m, k, round_to<T>(value * scale) * threads.load(weight, 0, k));
    }
  }
}
