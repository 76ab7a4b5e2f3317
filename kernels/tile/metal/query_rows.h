// Online softmax and the product with the values for one query of ROWS heads. Each simdgroup goes its own way over its
// part of the keys of every block, without a barrier, and the simdgroups' outputs are joined at the end.
#pragma once

template <typename T, int ROWS, int BK, int D>
struct QueryRows {
  static constexpr constant int tile_n = BK / group_simdgroups;
  static constexpr constant int run = (D + simd_lanes - 1) / simd_lanes;  // of a row's outputs that a lane holds
  static constexpr constant int row_floats = simd_lanes * run;
  static constexpr constant Index bytes = 4 * group_simdgroups * (row_floats + 2);  // one row of every simdgroup
  Group group;
  threadgroup float* memory;
  float best[ROWS], total[ROWS], outputs[ROWS][run];

  QueryRows(Group of, Index offset) : group(of), memory(of.memory<float>(offset)) {
    for (int m = 0; m < ROWS; ++m) {
      best[m] = masked_score, total[m] = 0.0f;
      for (int e = 0; e < run; ++e) outputs[m][e] = 0.0f;
    }
  }

  // Values n0.. will be accumulated next: other simdgroups hide the wait for them.
  void expect(Matrix<const device T>, Index) const {}

  // Scores of keys n0.. become weights in place.
  template <typename S>
  void softmax(thread S& scores, float scale, Index n0, Index keys) {
    const Index visible = keys - n0 - group.simdgroup * tile_n;
    for (int m = 0; m < ROWS; ++m) {
      const float before = best[m];
      for (int i = 0; i < tile_n; ++i)
        best[m] = i < visible ? max(best[m], scores.sums[0][i][m] * scale) : best[m];
      const float factor = exponential(before - best[m]);
      total[m] *= factor;
      for (int e = 0; e < run; ++e) outputs[m][e] *= factor;
      for (int i = 0; i < tile_n; ++i) {
        const float weight = i < visible ? exponential(scores.sums[0][i][m] * scale - best[m]) : 0.0f;
        scores.sums[0][i][m] = weight;
        total[m] += weight;
      }
    }
  }

  // outputs += weights . v
  template <typename S>
  void accumulate(thread const S& weights, Matrix<const device T> v, Index n0) {
    const Index first = n0 + group.simdgroup * tile_n, column = group.lane * run;
    for (int i = 0; i < tile_n; ++i) {
      if (first + i >= v.rows) return;
      float value[run];
      load_run(value, v.at(first + i, column), D - column, v.step);
      for (int m = 0; m < ROWS; ++m)
        for (int e = 0; e < run; ++e) outputs[m][e] += weights.sums[0][i][m] * value[e];
    }
  }

  void store(Matrix<device T> y) {
    for (int m = 0; m < ROWS; ++m) {
      settle();  // the row before has been joined
      publish(m);
      settle();
      join(y, m);
    }
  }

 private:
  threadgroup float* row(int simdgroup) const { return memory + simdgroup * (row_floats + 2); }

  void publish(int m) const {
    threadgroup float* own = row(group.simdgroup);
    for (int e = 0; e < run; ++e) own[group.lane * run + e] = outputs[m][e];
    if (group.lane == 0) own[row_floats] = best[m], own[row_floats + 1] = total[m];
  }

  // The outputs of all simdgroups, each scaled to the largest maximum.
  void join(Matrix<device T> y, int m) const {
    float most = masked_score, sum = 0.0f;
    for (int s = 0; s < group_simdgroups; ++s) most = max(most, row(s)[row_floats]);
    for (int s = 0; s < group_simdgroups; ++s) sum += row(s)[row_floats + 1] * exponential(row(s)[row_floats] - most);
    for (Index d = group.thread_index; d < D; d += group_threads) {
      float value = 0.0f;
      for (int s = 0; s < group_simdgroups; ++s) value += row(s)[d] * exponential(row(s)[row_floats] - most);
      y.row(m)[d] = T(value / sum);
    }
  }
};
