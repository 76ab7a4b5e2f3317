// One query of ROWS heads against the keys that they share: scores, online softmax and the product with the values. A
// key is held by a few lanes of a warp, 16 bytes each, so a warp takes several keys at once; each such team goes its
// own way over its part of the keys, without a barrier. Their outputs are joined at the end, first those of a warp,
// then those of the warps, and, where several threadgroups shared the keys, at last those.
#pragma once

// How a row of D elements is held.
template <typename T, int D>
struct HeadLayout {
  static constexpr int held = Held<T>::count, chunks = D / held;
  static constexpr int team = chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : 4;  // lanes that hold a row
  static constexpr int runs = (chunks + team - 1) / team;                                  // 16 bytes of a lane
  static constexpr int teams = simd_lanes / team, floats = runs * held;
  static_assert(D % held == 0, "a row is whole 16 bytes");
};

// Scores: WN warps of BN / WN keys each. Key i * teams + t of a warp's part is that of team t.
template <typename T, int P, int ROWS, int BN, int WN, int KU, int DEPTH>
struct RowAccumulator {
  typedef HeadLayout<T, DEPTH> Head;
  static constexpr int tile_n = BN / WN, keys = (tile_n + Head::teams - 1) / Head::teams;  // of a team
  static constexpr Index bytes = 0;
  static_assert(P == 1, "queries meet one matrix of keys");
  Group group;
  float sums[keys][ROWS];  // in all lanes of a team, once multiplied

  inline RowAccumulator(Group of, Index) : group(of) {}

  // The row of key i of this lane's team, counted from the block's first; none if it is not below tile_n.
  static inline int key(Group group, int i) { return i * Head::teams + group.lane / Head::team; }
  static inline Index first(Group group, Index n0) { return n0 + group.simdgroup * tile_n; }

  // = x . w[n0 : n0+BN, :]^T
  inline void multiply(const RowStage<T, ROWS>& x, const Matrix<const T> (&w)[1], Index n0) {
    const bool whole = w[0].is_aligned(), whole_x = x.x.is_aligned();
    const int column = group.lane % Head::team * Head::held;
    Words of_keys[keys][Head::runs];
#pragma unroll
    for (int i = 0; i < keys; ++i)
#pragma unroll
      for (int r = 0; r < Head::runs; ++r) {
        const Index k = column + r * Head::team * Head::held;
        const Index n = min_of(first(group, n0) + key(group, i), w[0].rows - 1);
        of_keys[i][r] = load_words<true>(w[0].at(n, k), DEPTH - k, w[0].step, whole);
      }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
#pragma unroll
      for (int i = 0; i < keys; ++i) sums[i][m] = 0.0f;
#pragma unroll
      for (int r = 0; r < Head::runs; ++r) {
        const Index k = column + r * Head::team * Head::held;
        float query[Head::held], of_key[Head::held];
        unpack(T(), query, load_words<false>(x.row(m) + k * x.x.step, DEPTH - k, x.x.step, whole_x));
#pragma unroll
        for (int i = 0; i < keys; ++i) {
          unpack(T(), of_key, of_keys[i][r]);
#pragma unroll
          for (int e = 0; e < Head::held; ++e) sums[i][m] += query[e] * of_key[e];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < keys; ++i)
#pragma unroll
      for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int mask = Head::team / 2; mask; mask /= 2) sums[i][m] += shuffle_xor(sums[i][m], mask);
  }
};

template <typename T, int ROWS, int BK, int D>
struct QueryRows {
  typedef HeadLayout<T, D> Head;
  typedef RowAccumulator<T, 1, ROWS, BK, group_simdgroups, 1, D> Scores;
  static constexpr int row_floats = D + 2;  // of a joined row: outputs, maximum, sum
  static constexpr int fit = 32768 / (4 * group_simdgroups * row_floats);
  static constexpr int at_once = fit < 1 ? 1 : fit < ROWS ? fit : ROWS;  // rows that are joined between two barriers
  static constexpr Index bytes = 4 * at_once * group_simdgroups * row_floats;
  Group group;
  float* memory;
  float best[ROWS], total[ROWS], outputs[ROWS][Head::floats];

  inline QueryRows(Group of, Index offset) : group(of), memory(of.memory<float>(offset)) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      best[m] = masked_score, total[m] = 0.0f;
#pragma unroll
      for (int e = 0; e < Head::floats; ++e) outputs[m][e] = 0.0f;
    }
  }

  // Scores of keys n0.. become weights in place.
  inline void softmax(Scores& scores, float scale, Index n0, Index keys) {
    bool seen[Scores::keys];
#pragma unroll
    for (int i = 0; i < Scores::keys; ++i) seen[i] = is_seen(i, n0, keys);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      const float before = best[m];
#pragma unroll
      for (int i = 0; i < Scores::keys; ++i)
        best[m] = seen[i] ? fmaxf(best[m], scores.sums[i][m] * scale) : best[m];
      const float factor = exponential(before - best[m]);
      total[m] *= factor;
#pragma unroll
      for (int e = 0; e < Head::floats; ++e) outputs[m][e] *= factor;
#pragma unroll
      for (int i = 0; i < Scores::keys; ++i) {
        const float weight = seen[i] ? exponential(scores.sums[i][m] * scale - best[m]) : 0.0f;
        scores.sums[i][m] = weight;
        total[m] += weight;
      }
    }
  }

  // outputs += weights . v
  inline void accumulate(const Scores& weights, Matrix<const T> v, Index n0) {
    const bool whole = v.is_aligned();
    const int column = group.lane % Head::team * Head::held;
    Words of_values[Scores::keys][Head::runs];
#pragma unroll
    for (int i = 0; i < Scores::keys; ++i)
#pragma unroll
      for (int r = 0; r < Head::runs; ++r) {
        const Index k = column + r * Head::team * Head::held;
        const Index n = Scores::first(group, n0) + Scores::key(group, i);
        const Index count = is_seen(i, n0, v.rows) ? D - k : 0;
        of_values[i][r] = load_words<true>(v.at(min_of(n, v.rows - 1), k), count, v.step, whole);
      }
#pragma unroll
    for (int i = 0; i < Scores::keys; ++i)
#pragma unroll
      for (int r = 0; r < Head::runs; ++r) {
        float value[Head::held];
        unpack(T(), value, of_values[i][r]);
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
          for (int e = 0; e < Head::held; ++e) outputs[m][r * Head::held + e] += weights.sums[i][m] * value[e];
      }
  }

  inline void store(Matrix<T> y) {
    join_teams();
#pragma unroll
    for (int first = 0; first < ROWS; first += at_once) {
      share(first);
      for (int own = group.thread_index; own < at_once * D; own += group_threads) {
        const int m = own / D, d = own % D;
        const Joined joined = join_warps(m, d);
        if (first + m < ROWS) *y.at(first + m, d) = T(joined.value / joined.total);
      }
    }
  }

  // The same where `parts` threadgroups shared the keys of this query: each writes what it has to its part of
  // `partials` [parts][ROWS][D + 2], and the last of them to do so, told by `counter`, joins them all. The counter is
  // 0 before and after.
  inline void store_part(Matrix<T> y, float* partials, uint* counter, Index part, Index parts) {
    join_teams();
#pragma unroll
    for (int first = 0; first < ROWS; first += at_once) {
      share(first);
      for (int own = group.thread_index; own < at_once * D; own += group_threads) {
        const int m = own / D, d = own % D;
        const Joined joined = join_warps(m, d);
        if (first + m >= ROWS) continue;
        float* to = partials + (part * ROWS + first + m) * row_floats;
        to[d] = joined.value;
        if (d == 0) to[D] = joined.best, to[D + 1] = joined.total;
      }
    }
    publish();
    settle();
    const bool is_last = any_thread(group.thread_index == 0 && count_up(counter, uint(parts) - 1) == uint(parts) - 1);
    if (!is_last) return;
    publish();
    for (int own = group.thread_index; own < ROWS * D; own += group_threads) {
      const int m = own / D, d = own % D;
      float most = masked_score, value = 0.0f, sum = 0.0f;
      for (Index s = 0; s < parts; ++s) most = fmaxf(most, load_published(partials + (s * ROWS + m) * row_floats + D));
      for (Index s = 0; s < parts; ++s) {
        const float* row = partials + (s * ROWS + m) * row_floats;
        const float factor = exponential(load_published(row + D) - most);
        value += load_published(row + d) * factor, sum += load_published(row + D + 1) * factor;
      }
      *y.at(m, d) = T(value / sum);
    }
  }

 private:
  struct Joined {
    float value, best, total;
  };

  // Whether key i of the team is one of the warp's and below `keys`.
  inline bool is_seen(int i, Index n0, Index keys) const {
    const int key = Scores::key(group, i);
    return key < Scores::tile_n && Scores::first(group, n0) + key < keys;
  }

  // The teams of a warp, in all of its lanes.
  inline void join_teams() {
#pragma unroll
    for (int mask = Head::team; mask < simd_lanes; mask *= 2)
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        const float other = shuffle_xor(best[m], mask), most = fmaxf(best[m], other);
        const float factor = exponential(best[m] - most), factor_other = exponential(other - most);
        total[m] = total[m] * factor + shuffle_xor(total[m], mask) * factor_other;
#pragma unroll
        for (int e = 0; e < Head::floats; ++e)
          outputs[m][e] = outputs[m][e] * factor + shuffle_xor(outputs[m][e], mask) * factor_other;
        best[m] = most;
      }
  }

  // Rows first .. first + at_once of every warp to shared memory: [row][warp][row_floats].
  inline void share(int first) const {
    settle();  // the rows before have been joined
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      if (m < first || m >= first + at_once) continue;
      float* to = memory + ((m - first) * group_simdgroups + group.simdgroup) * row_floats;
      if (group.lane < Head::team) {
#pragma unroll
        for (int e = 0; e < Head::floats; ++e) {
          const int d = (group.lane + e / Head::held * Head::team) * Head::held + e % Head::held;
          if (d < D) to[d] = outputs[m][e];
        }
      }
      if (group.lane == 0) to[D] = best[m], to[D + 1] = total[m];
    }
    settle();
  }

  // Column d of a shared row over all warps, each scaled to the largest maximum.
  inline Joined join_warps(int m, int d) const {
    const float* rows = memory + m * group_simdgroups * row_floats;
    Joined joined = {0.0f, masked_score, 0.0f};
#pragma unroll
    for (int s = 0; s < group_simdgroups; ++s) joined.best = fmaxf(joined.best, rows[s * row_floats + D]);
#pragma unroll
    for (int s = 0; s < group_simdgroups; ++s) {
      const float factor = exponential(rows[s * row_floats + D] - joined.best);
      joined.value += rows[s * row_floats + d] * factor, joined.total += rows[s * row_floats + D + 1] * factor;
    }
    return joined;
  }
};
