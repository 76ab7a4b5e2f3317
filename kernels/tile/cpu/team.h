// Who works on a row together. Here a threadgroup is one thread of one simdgroup, so both are the lanes of a register.
#pragma once

struct Lanes {
  typedef vfloat Fragment;  // what they hold of a row, side by side: `width` elements
  static constexpr Index width = metile::lanes, simdgroups = 1, simdgroup = 0;

  // Elements k .. k+width of row m; past `count`, reads are zero and nothing is written.
  template <typename T>
  Fragment load(Matrix<T> x, Index m, Index k, Index count) const { return metile::load(x.row(m) + k, count); }
  template <typename T>
  void store(Matrix<T> y, Index m, Index k, Fragment value, Index count) const { metile::store(y.row(m) + k, value, count); }
};

struct Threads {
  typedef vfloat Fragment;
  static constexpr Index width = metile::lanes;
  static constexpr Index bytes = 0;  // of threadgroup memory that reduce_add takes, at offset 0

  // Elements k .. k+width of row m, as far as the row goes.
  template <typename T>
  Fragment load(Matrix<T> x, Index m, Index k) const { return metile::load(x.row(m) + k, x.columns - k); }
  template <typename T>
  void store(Matrix<T> y, Index m, Index k, Fragment value) const { metile::store(y.row(m) + k, value, y.columns - k); }
  float reduce_add(Fragment value) const { return metile::reduce_add(value); }
};

inline Lanes Group::lanes() const { return Lanes(); }
inline Threads Group::threads() const { return Threads(); }
