// Online softmax and the product with the values for a block of queries, in registers. A warp owns BQ / warps whole
// rows of queries; a running maximum and sum a query, outputs scaled anew when the maximum moves.
#pragma once

constexpr float masked_score = -1e30f;  // exp of anything minus the running maximum is 0

// Warps of the scores, by rows and by columns.
inline constexpr int score_wm(int) { return group_simdgroups; }
inline constexpr int score_wn(int) { return 1; }
inline constexpr int row_wn(int, int) { return group_simdgroups; }

// Over the eight lanes that hold the keys of a query.
inline float over_keys_max(float value) {
#pragma unroll
  for (int mask = 4; mask < simd_lanes; mask *= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}
inline float over_keys_sum(float value) {
#pragma unroll
  for (int mask = 4; mask < simd_lanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

// Outputs stand turned as the scores do: a fragment is 16 columns of the head by 8 queries.
template <typename T, int BQ, int BK, int D>
struct QueryBlock {
  static constexpr bool exact = is_float(T());
  static constexpr int tile_m = BQ / group_simdgroups;
  static constexpr int TM = tile_m / 8, TN = BK / 16, TD = D / 16;
  static constexpr Index bytes = exact ? 0 : BK * staged_stride<T, D>();  // a block of values
  static_assert(tile_m % 8 == 0 && BK % 16 == 0 && D % 16 == 0, "a tile is whole fragments");
  Group group;
  char* memory;
  float best[TM][2], total[TM][2], outputs[TM][TD][4];

  inline QueryBlock(Group of, Index offset) : group(of), memory(of.memory<char>(offset)) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      best[i][0] = best[i][1] = masked_score, total[i][0] = total[i][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < TD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) outputs[i][d][e] = 0.0f;
    }
  }

  // Scores of keys n0.. become weights in place. Query m sees keys up to and including `last + m`, below `keys`.
  template <typename S>
  inline void softmax(S& scores, float scale, Index n0, Index keys, Index last) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const Index seen = last + scores.m + i * 8 + 2 * group.pair() + q - n0;
        const float before = best[i][q];
        best[i][q] = fmaxf(before, mask(scores, i, q, scale, min_of(seen + 1, keys - n0)));
        const float factor = exponential(before - best[i][q]);
        total[i][q] = total[i][q] * factor + weigh(scores, i, q);
#pragma unroll
        for (int d = 0; d < TD; ++d) outputs[i][d][q] *= factor, outputs[i][d][2 + q] *= factor;
      }
  }

  // outputs += weights . v
  template <typename S>
  inline void accumulate(const S& weights, Matrix<const T> v, Index n0) {
    if constexpr (exact) {
      add_exact(weights, v, n0);
    } else {
      settle();  // the block before has been read
      if (v.is_aligned()) fetch_rows<true, true, BK, D>(group, memory, v, n0, 0);
      else fetch_rows<true, false, BK, D>(group, memory, v, n0, 0);
      copy_commit();
      copy_wait<0>();
      settle();
      const int lane = group.lane;
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        uint b[TM][2];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            b[i][e] = turned(packed(T(), weights.sums[0][j][i][2 * e], weights.sums[0][j][i][2 * e + 1]));
#pragma unroll
        for (int d = 0; d < TD; ++d) {
          uint a[4];
          load_turned(a, memory + staged_place<T, D>(j * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
#pragma unroll
          for (int i = 0; i < TM; ++i) multiply_fragments(T(), outputs[i][d], a, b[i][0], b[i][1]);
        }
      }
    }
  }

  inline void store(Matrix<T> y, Index first) {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Index row = first + group.simdgroup * tile_m + i * 8 + 2 * group.pair() + e % 2;
        if (row >= y.rows) continue;
#pragma unroll
        for (int d = 0; d < TD; ++d)
          *y.at(row, d * 16 + e / 2 * 8 + group.four()) = T(outputs[i][d][e] / total[i][e % 2]);
      }
  }

 private:
  // Scale the scores of a query, mask those from `visible` on, and return the largest.
  template <typename S>
  inline float mask(S& scores, int i, int q, float scale, Index visible) const {
    float most = masked_score;
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores.sums[0][j][i][2 * e + q];
        score = j * 16 + 2 * group.four() + e < visible ? score * scale : masked_score;
        most = fmaxf(most, score);
      }
    return over_keys_max(most);
  }

  // Turn the scores of a query into weights and return their sum.
  template <typename S>
  inline float weigh(S& scores, int i, int q) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores.sums[0][j][i][2 * e + q];
        score = score <= masked_score ? 0.0f : exponential(score - best[i][q]);
        sum += score;
      }
    return over_keys_sum(sum);
  }

  // float32: each lane asks the others for their weights, and reads values where they lie.
  template <typename S>
  inline void add_exact(const S& weights, Matrix<const T> v, Index n0) {
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll 1
      for (int four = 0; four < 8; ++four)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Index key = n0 + j * 16 + 2 * four + e;
          float weight[TM][2];
#pragma unroll
          for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int q = 0; q < 2; ++q)
              weight[i][q] = shuffle(weights.sums[0][j][i][2 * e + q], four * 4 + group.pair());
          if (key >= v.rows) continue;
#pragma unroll
          for (int d = 0; d < TD; ++d)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float value = float(*v.at(key, d * 16 + h * 8 + group.four()));
#pragma unroll
              for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int q = 0; q < 2; ++q) outputs[i][d][2 * h + q] += weight[i][q] * value;
            }
        }
  }
};
