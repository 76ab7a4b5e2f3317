// Rows as deep as a head, 16 bytes to a lane: how they are held and read, and the products of two of them.
#pragma once

// How a row of D elements is held.
template <typename T, int D>
struct HeadLayout {
  static constexpr int held = Held<T>::count, chunks = D / held;
  static constexpr int team = chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : 4;  // lanes that hold a row
  static constexpr int runs = (chunks + team - 1) / team;                                  // 16 bytes of a lane
  static constexpr int teams = simd_lanes / team, floats = runs * held;
  static_assert(D % held == 0, "a row is whole 16 bytes");

  // A row, and how many of its elements there are: the others read zero.
  struct Row {
    const T* data;
    Index count;
  };

  // What lane `lane` holds of rows row(0) .. row(N - 1).
  template <bool ONCE, int N, typename R>
  static inline void load(Words (&to)[N][runs], const R& row, long long step, bool whole, int lane) {
    if (whole) {
#pragma unroll
      for (int i = 0; i < N; ++i) load_row<ONCE>(to[i], row(i), step, true, lane);
      return;
    }
    // One row at a time: element by element, all of them would take more registers than there are.
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      Words own[runs];
      load_row<ONCE>(own, row(i), step, false, lane);
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int r = 0; r < runs; ++r)
          if (i == j) to[j][r] = own[r];
    }
  }

 private:
  template <bool ONCE>
  static inline void load_row(Words (&to)[runs], Row row, long long step, bool whole, int lane) {
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      const Index k = (r * team + lane % team) * held;
      to[r] = whole ? load_words<ONCE>(row.data + k, row.count - k, 1, true)
                    : load_elements(row.data + k * step, row.count - k, step);
    }
  }

  // Two elements of 16 bits to a register, or one of 32. Each place comes from the one before: multiples of the step
  // would be kept in registers for as long as there are rows to load.
  static inline Words load_elements(const T* from, Index count, long long step) {
    constexpr int each = held / 4;
    Words to = {{0, 0, 0, 0}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint word = 0;
#pragma unroll
      for (int e = 0; e < each; ++e, from += step) {
        if (i * each + e >= count) break;
        if constexpr (each == 2) word |= uint(*(const ushort*)from) << (16 * e);
        else word = *(const uint*)from;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i == j) to.at[j] = word;
    }
    return to;
  }
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
    const bool whole = w[0].is_aligned() && x.x.is_aligned();
    Words of_keys[keys][Head::runs];
    const auto key_row = [&](int i) {
      return typename Head::Row{w[0].row(min_of(first(group, n0) + key(group, i), w[0].rows - 1)), DEPTH};
    };
    Head::template load<true>(of_keys, key_row, w[0].step, whole, group.lane);
#pragma unroll
    for (int m0 = 0; m0 < ROWS; m0 += together) {
      Words queries[together][Head::runs];
      const auto query_row = [&](int m) { return typename Head::Row{x.row(m0 + m), DEPTH}; };
      Head::template load<false>(queries, query_row, x.x.step, whole, group.lane);
#pragma unroll
      for (int m = 0; m < together && m0 + m < ROWS; ++m) multiply(queries[m], of_keys, m0 + m);
    }
#pragma unroll
    for (int i = 0; i < keys; ++i)
#pragma unroll
      for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int mask = Head::team / 2; mask; mask /= 2) sums[i][m] += shuffle_xor(sums[i][m], mask);
  }

 private:
  static constexpr int together = ROWS < 8 ? ROWS : 8;  // queries that are under way at once

  // This lane's part of the products of query m.
  inline void multiply(const Words (&words)[Head::runs], const Words (&of_keys)[keys][Head::runs], int m) {
#pragma unroll
    for (int i = 0; i < keys; ++i) sums[i][m] = 0.0f;
#pragma unroll
    for (int r = 0; r < Head::runs; ++r) {
      float query[Head::held], of_key[Head::held];
      unpack(T(), query, words[r]);
#pragma unroll
      for (int i = 0; i < keys; ++i) {
        unpack(T(), of_key, of_keys[i][r]);
#pragma unroll
        for (int e = 0; e < Head::held; ++e) sums[i][m] += query[e] * of_key[e];
      }
    }
  }
};
