// Who works on a row together: the lanes of a warp, an element each, or all threads, four elements each.
#pragma once

inline float simd_sum(float value) {
#pragma unroll
  for (int mask = simd_lanes / 2; mask; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

struct Lanes {
  typedef float Fragment;
  static constexpr Index width = simd_lanes, simdgroups = group_simdgroups;
  int simdgroup, lane;

  // Elements k .. k+width of row m; past `count`, reads are zero and nothing is written.
  template <typename T>
  inline Fragment load(Matrix<const T> x, Index m, Index k, Index count) const {
    return ::load<float>(x.at(m, k + lane), count - lane, x.step);
  }
  template <typename T>
  inline void store(Matrix<T> y, Index m, Index k, Fragment value, Index count) const {
    ::store(y.at(m, k + lane), value, count - lane, y.step);
  }
};

struct Threads {
  typedef Floats<4> Fragment;
  static constexpr Index width = 4 * group_threads;
  static constexpr Index bytes = 4 * group_simdgroups;  // of threadgroup memory that reduce_add takes, at offset 0
  Group group;

  // Elements k .. k+width of row m, as far as the row goes. Each thread stores what it loads.
  template <typename T>
  inline Fragment load(Matrix<T> x, Index m, Index k) const {
    const Index first = k + 4 * group.thread_index;
    return ::load<Fragment>(x.at(m, first), x.columns - first, x.step);
  }
  template <typename T>
  inline void store(Matrix<T> y, Index m, Index k, Fragment value) const {
    const Index first = k + 4 * group.thread_index;
    ::store(y.at(m, first), value, y.columns - first, y.step);
  }

  // The sum over all threads, in all threads.
  inline float reduce_add(Fragment value) const {
    float sum = simd_sum((value.at[0] + value.at[1]) + (value.at[2] + value.at[3]));
    if (group_simdgroups == 1) return sum;
    float* sums = group.memory<float>(0);
    settle();  // the last sum has been read
    if (group.lane == 0) sums[group.simdgroup] = sum;
    settle();
    return simd_sum(group.lane < group_simdgroups ? sums[group.lane] : 0.0f);
  }
};

inline Lanes Group::lanes() const { return Lanes{simdgroup, lane}; }
inline Threads Group::threads() const { return Threads{*this}; }
