// One query of ROWS heads against the keys that they share: scores, online softmax and the product with the values. A
// key is held by a few lanes of a warp, 16 bytes each, so a warp takes several keys at once; each such team goes its
// own way over its part of the keys, without a barrier. Their outputs are joined at the end, first those of a warp,
// then those of the warps, and, where several threadgroups shared the keys, at last those.
#pragma once

template <typename T, int ROWS, int BK, int D>
struct QueryRows {
  typedef HeadLayout<T, D> Head;
  typedef RowAccumulator<T, 1, ROWS, BK, group_simdgroups, 1, D> Scores;
  static constexpr int row_floats = D + 2;  // of a joined row: outputs, maximum, sum
  static constexpr int fit = 32768 / (4 * group_simdgroups * row_floats);
  static constexpr int at_once = fit < 1 ? 1 : fit < ROWS ? fit : ROWS;  // rows that are joined between two barriers
  static constexpr int most_parts = 64;  // threadgroups that may share the keys
  static constexpr Index shared_floats = at_once * group_simdgroups * row_floats;
  static constexpr Index factor_floats = (most_parts + 1) * ROWS;  // a factor of each part, and a sum
  static constexpr Index bytes = 4 * (shared_floats > factor_floats ? shared_floats : factor_floats);
  // Whether a block's values are asked for before its scores are computed: where registers suffice.
  static constexpr bool early = Scores::keys * Head::runs <= 4;
  Group group;
  float* memory;
  float best[ROWS], total[ROWS], outputs[ROWS][Head::floats];
  Words values[Scores::keys][Head::runs];

  inline QueryRows(Group of, Index offset) : group(of), memory(of.memory<float>(offset)) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      best[m] = masked_score, total[m] = 0.0f;
#pragma unroll
      for (int e = 0; e < Head::floats; ++e) outputs[m][e] = 0.0f;
    }
  }

  // Values n0.. will be accumulated next.
  inline void expect(Matrix<const T> v, Index n0) {
    if (early) load_values(v, n0);
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

  // outputs += weights . v, which are those that were expected
  inline void accumulate(const Scores& weights, Matrix<const T> v, Index n0) {
    if (!early) load_values(v, n0);
#pragma unroll
    for (int i = 0; i < Scores::keys; ++i)
#pragma unroll
      for (int r = 0; r < Head::runs; ++r) {
        float value[Head::held];
        unpack(T(), value, values[i][r]);
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
      for (int own = group.thread_index; own < at_once * D / 2; own += group_threads) {
        const int m = own / (D / 2), d = own % (D / 2) * 2;
        const Joined joined = join_warps(m, d);
        if (first + m < ROWS) store_pair(y.at(first + m, d), joined.value, joined.total, y.step);
      }
    }
  }

  // The same where `parts` threadgroups, at most `most_parts`, shared the keys of this query: each writes what it has
  // to its part of `partials` [parts][ROWS][D + 2], and the last of them to do so, told by `counter`, joins them all.
  // The counter is 0 before and after.
  inline void store_part(Matrix<T> y, float* partials, uint* counter, Index part, Index parts) {
    join_teams();
#pragma unroll
    for (int first = 0; first < ROWS; first += at_once) {
      share(first);
      for (int own = group.thread_index; own < at_once * D / 2; own += group_threads) {
        const int m = own / (D / 2), d = own % (D / 2) * 2;
        const Joined joined = join_warps(m, d);
        if (first + m >= ROWS) continue;
        Pair* to = (Pair*)(partials + (part * ROWS + first + m) * row_floats);
        to[d / 2] = {{joined.value.at[0], joined.value.at[1]}};
        if (d == 0) to[D / 2] = {{joined.best, joined.total}};
      }
    }
    // A barrier, then one thread's fence: what it publishes are the writes of all that it has met there.
    settle();
    bool is_last = false;
    if (group.thread_index == 0) {
      publish();
      is_last = count_up(counter, uint(parts) - 1) == uint(parts) - 1;
      publish();
    }
    if (!any_thread(is_last)) return;
    join_parts(y, partials, parts);
  }

 private:
  typedef Run<float, 2> Pair;
  struct Joined {
    Floats<2> value;
    float best, total;
  };

  // Outputs of all parts, two to a thread: `columns` such pairs at a time, over `parts_at_once` parts.
  static constexpr int pairs = ROWS * D / 2, own_pairs = (pairs + group_threads - 1) / group_threads;
  static constexpr int columns = own_pairs < 4 ? own_pairs : 4, parts_at_once = columns < 3 ? 8 * (3 - columns) : 4;

  inline void load_values(Matrix<const T> v, Index n0) {
    const auto row = [&](int i) {
      const Index n = min_of(Scores::first(group, n0) + Scores::key(group, i), v.rows - 1);
      return typename Head::Row{v.row(n), is_seen(i, n0, v.rows) ? D : 0};
    };
    Head::template load<true>(values, row, v.step, v.is_aligned(), group.lane);
  }

  static inline void store_pair(T* to, Floats<2> value, float total, long long step) {
    value.at[0] = value.at[0] / total, value.at[1] = value.at[1] / total;
    ::store(to, value, 2, step);
  }

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

  // Columns d and d + 1 of a shared row over all warps, each scaled to the largest maximum.
  inline Joined join_warps(int m, int d) const {
    const float* rows = memory + m * group_simdgroups * row_floats;
    Joined joined = {Floats<2>(0.0f), masked_score, 0.0f};
#pragma unroll
    for (int s = 0; s < group_simdgroups; ++s) joined.best = fmaxf(joined.best, rows[s * row_floats + D]);
#pragma unroll
    for (int s = 0; s < group_simdgroups; ++s) {
      const Pair value = *(const Pair*)(rows + s * row_floats + d), last = *(const Pair*)(rows + s * row_floats + D);
      const float factor = exponential(last.at[0] - joined.best);
      joined.value.at[0] += value.at[0] * factor, joined.value.at[1] += value.at[1] * factor;
      joined.total += last.at[1] * factor;
    }
    return joined;
  }

  // The first outputs are asked for together with what they are weighed by: one wait, not two.
  inline void join_parts(Matrix<T> y, const float* partials, Index parts) const {
    float* factors = memory;
    for (int base = group.thread_index; base < columns * group_threads * ceil_div(own_pairs, columns);
         base += columns * group_threads) {
      float next[parts_at_once][columns][2];
      load_parts(next, partials, base, 0, parts);
      if (base < columns * group_threads) {
        weigh_parts(factors, partials, parts);
        settle();
      }
      Floats<2> sums[columns];
#pragma unroll
      for (int c = 0; c < columns; ++c) sums[c] = Floats<2>(0.0f);
      for (Index s = 0; s < parts; s += parts_at_once) {
        if (s > 0) load_parts(next, partials, base, s, parts);
#pragma unroll
        for (int u = 0; u < parts_at_once; ++u)
#pragma unroll
          for (int c = 0; c < columns; ++c) {
            const int m = min_of(base + c * group_threads, pairs - 1) / (D / 2);
            const float factor = s + u < parts ? factors[(s + u) * ROWS + m] : 0.0f;
            sums[c].at[0] += next[u][c][0] * factor, sums[c].at[1] += next[u][c][1] * factor;
          }
      }
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const int own = base + c * group_threads, m = own / (D / 2), d = own % (D / 2) * 2;
        if (own < pairs) store_pair(y.at(m, d), sums[c], factors[most_parts * ROWS + m], y.step);
      }
    }
  }

  // Pairs base, base + threads .. of parts s .., zero past the last.
  inline void load_parts(float (&to)[parts_at_once][columns][2], const float* partials, int base, Index s,
                         Index parts) const {
#pragma unroll
    for (int u = 0; u < parts_at_once; ++u)
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const int own = base + c * group_threads, m = own / (D / 2), d = own % (D / 2) * 2;
        to[u][c][0] = to[u][c][1] = 0.0f;
        if (s + u < parts && own < pairs) load_published(to[u][c], partials + ((s + u) * ROWS + m) * row_floats + d);
      }
  }

  // A warp to a row: the factor of each part and, after those of all, the sum over them.
  inline void weigh_parts(float* factors, const float* partials, Index parts) const {
    constexpr int each = most_parts / simd_lanes;
    for (int m = group.simdgroup; m < ROWS; m += group_simdgroups) {
      float ends[each][2], most = masked_score, sum = 0.0f;
#pragma unroll
      for (int h = 0; h < each; ++h) {
        const Index s = group.lane + h * simd_lanes;
        ends[h][0] = masked_score, ends[h][1] = 0.0f;
        if (s < parts) load_published(ends[h], partials + (s * ROWS + m) * row_floats + D);
      }
#pragma unroll
      for (int h = 0; h < each; ++h) most = fmaxf(most, ends[h][0]);
#pragma unroll
      for (int mask = 1; mask < simd_lanes; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
#pragma unroll
      for (int h = 0; h < each; ++h) {
        const Index s = group.lane + h * simd_lanes;
        const float factor = exponential(ends[h][0] - most);
        sum += ends[h][1] * factor;
        if (s < parts) factors[s * ROWS + m] = factor;
      }
#pragma unroll
      for (int mask = 1; mask < simd_lanes; mask *= 2) sum += shuffle_xor(sum, mask);
      if (group.lane == 0) factors[most_parts * ROWS + m] = sum;
    }
  }
};
