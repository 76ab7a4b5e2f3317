// Online softmax and the product with the values for a block of queries, in registers. A simdgroup owns BQ / WM whole
// rows of scores; a running maximum and sum a row, outputs scaled anew when the maximum moves.
#pragma once

constant constexpr float masked_score = -1e30f;  // exp of anything minus the running maximum is 0

// Simdgroups of the scores, by rows and by columns.
constexpr int score_wm(int) { return group_simdgroups; }
constexpr int score_wn(int) { return 1; }
constexpr int row_wn(int, int) { return group_simdgroups; }

// Over the four lanes that hold a row of a fragment.
inline float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, 1));
  return max(value, simd_shuffle_xor(value, 8));
}
inline float row_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 8);
}

template <typename T, int BQ, int BK, int D>
struct QueryBlock {
  static constexpr constant int tile_m = BQ / group_simdgroups;
  static constexpr constant int TM = tile_m / fragment_size, TN = BK / fragment_size, TD = D / fragment_size;
  static constexpr constant Index bytes = 0;
  Group group;
  float best[TM], total[TM];
  Fragment<float> outputs[TM][TD];

  QueryBlock(Group of, Index) : group(of) {
    for (int i = 0; i < TM; ++i) {
      best[i] = masked_score, total[i] = 0.0f;
      for (int d = 0; d < TD; ++d)
        outputs[i][d] = make_filled_simdgroup_matrix<float, fragment_size, fragment_size>(0.0f);
    }
  }

  // Scores of keys n0.. become weights in place. Query m sees keys up to and including `last + m`, below `keys`.
  template <typename S>
  void softmax(thread S& scores, float scale, Index n0, Index keys, Index last) {
    for (int i = 0; i < TM; ++i) {
      const Index seen = last + scores.m + i * fragment_size + group.place().row - n0;
      const float before = best[i];
      best[i] = max(before, mask_row(scores, i, scale, min_of(seen + 1, keys - n0)));
      const float factor = exponential(before - best[i]);
      total[i] = total[i] * factor + weigh_row(scores, i);
      for (int d = 0; d < TD; ++d)
        for (int e = 0; e < 2; ++e) outputs[i][d].thread_elements()[e] *= factor;
    }
  }

  // outputs += weights . v
  template <typename S>
  void accumulate(thread S& weights, Matrix<const device T> v, Index n0) {
    for (int d = 0; d < TD; ++d)
      for (int j = 0; j < TN; ++j) {
        Fragment<T> values;
        load_fragment<false>(values, group, v, n0 + j * fragment_size, d * fragment_size, D);
        for (int i = 0; i < TM; ++i)
          simdgroup_multiply_accumulate(outputs[i][d], weights.sums[0][i][j], values, outputs[i][d]);
      }
  }

  void store(Matrix<device T> y, Index first) {
    const Place place = group.place();
    for (int i = 0; i < TM; ++i) {
      const Index row = first + group.simdgroup * tile_m + i * fragment_size + place.row;
      for (int d = 0; d < TD; ++d) {
        const float2 value = float2(outputs[i][d].thread_elements()[0], outputs[i][d].thread_elements()[1]) / total[i];
        if (row < y.rows) ::store(y.row(row) + d * fragment_size + place.column, value, 2);
      }
    }
  }

 private:
  // Scale the scores of a row, mask those from `visible` on, and return the largest.
  template <typename S>
  float mask_row(thread S& scores, int i, float scale, Index visible) const {
    float most = masked_score;
    for (int j = 0; j < TN; ++j)
      for (int e = 0; e < 2; ++e) {
        const Index n = j * fragment_size + group.place().column + e;
        const float score = scores.sums[0][i][j].thread_elements()[e] * scale;
        const float shown = n < visible ? score : masked_score;
        scores.sums[0][i][j].thread_elements()[e] = shown;
        most = max(most, shown);
      }
    return row_max(most);
  }

  // Turn the scores of a row into weights and return their sum.
  template <typename S>
  float weigh_row(thread S& scores, int i) const {
    float sum = 0.0f;
    for (int j = 0; j < TN; ++j)
      for (int e = 0; e < 2; ++e) {
        const float score = scores.sums[0][i][j].thread_elements()[e];
        const float weight = score <= masked_score ? 0.0f : exponential(score - best[i]);
        scores.sums[0][i][j].thread_elements()[e] = weight;
        sum += weight;
      }
    return row_sum(sum);
  }
};
