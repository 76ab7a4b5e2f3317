// The accumulator of a threadgroup at the matrix end: BM rows of x against BN rows of P weight matrices, fp32, in the
// registers of WM x WN warps.
#pragma once

// Weights come in slices of DEPTH through a ring in shared memory, together with those of x; or from where they lie if
// DEPTH is 0, KU turns of k at a time: a turn is a piece of a row (weights.h) in each of four lanes, 8 of k and two
// fragments where weights are dense. That is a permutation of k, the same in x and in the weights. With KU = 4 and a
// DEPTH of 64, warpgroups multiply a whole slice while they fetch another: see warpgroup.h. Where BM has fewer than 8
// rows for each of the WM warps, the warps that are too many share k, and the sums are added at the end; all of them do
// where each would unpack the same weights.
template <typename E, int P, int BM, int BN, int WM, int WN, int KU, int DEPTH>
struct Accumulator {
  typedef ElementOf<E> T;
  typedef WeightsOf<E> Weights;
  typedef WeightRow<E> Row;
  typedef typename Row::Piece Piece;
  static constexpr bool exact = is_float(T());
  static constexpr int split = DEPTH == 0 && Row::is_packed ? WM : BM < 8 * WM ? 8 * WM / BM : 1, warps_m = WM / split;
  static constexpr int tile_m = BM / warps_m, tile_n = BN / WN;
  static constexpr int TM = tile_m / 8, TN = tile_n / 16;
  static constexpr int held = Held<T>::count;
  static constexpr int turn = exact ? Row::count : 4 * Row::count;  // of k
  static constexpr int stride = staged_stride<T, DEPTH>();
  static constexpr int slice_bytes = DEPTH ? P * BN * stride : 0;
  static constexpr bool grouped = has_warpgroups && KU == 4 && DEPTH == 64 && !exact;
  static constexpr bool takes_all = true;
  static constexpr int lane_sums = P * TN * TM * 4;
  static_assert(BM % 8 == 0 && WM % split == 0 && tile_m % 8 == 0 && tile_n % 16 == 0, "a tile is whole fragments");
  static_assert(DEPTH % 16 == 0, "a slice is whole fragments");
  static_assert(WM * WN == group_simdgroups, "every warp has a tile");
  static_assert(!grouped || (TN == 1 && WN % 4 == 0 && split == 1 && group_stages > 2), "a warpgroup has 64 rows");
  Group group;
  int m, n, part;  // of this warp's tile in the block, and of its share of k
  int place;       // of the next slice in the ring
  char* memory;
  float sums[P][TN][TM][4];  // rows 2g, 2g, 2g+1, 2g+1 of weights, rows 2t, 2t+1, 2t, 2t+1 of x

  static inline constexpr Index bytes(Index) {
    return max_of(group_stages * slice_bytes, (split - 1) * warps_m * WN * simd_lanes * lane_sums * 4);
  }

  inline Accumulator(Group of, Index offset)
      : group(of), m(of.simdgroup / WN % warps_m * tile_m), n(of.simdgroup % WN * tile_n),
        part(of.simdgroup / WN / warps_m), place(0), memory(of.memory<char>(offset)) {}

  // += x[:, k0 : k0+depth] . w[n0 : n0+BN, k0 : k0+depth]^T, or = where this is the first slice of k; from where the
  // weights lie.
  template <int D>
  inline void multiply_accumulate(Stage<T, BM, D>& x, const Weights (&w)[P], Index n0, Index k0, Index depth,
                                  bool first) {
    if constexpr (DEPTH == 0) {  // slices of a ring come all together: see store
      if (first) clear();
      x.bring(group);
      if (is_idle(x, w, n0)) return;
      if (are_aligned(x.x, w)) direct<true>(x, w, n0, k0, k0 + depth);
      else direct<false>(x, w, n0, k0, k0 + depth);
    }
  }

  // All of k and the epilogue, on the sums in their registers.
  template <typename Epilogue>
  inline void store(Stage<T, BM, DEPTH>& x, const Weights (&w)[P], Matrix<T> y, Index m0, Index n0, Index k0,
                    bool first, const Epilogue& epilogue) {
    if constexpr (DEPTH == 0) {
      multiply_accumulate(x, w, n0, k0, w[0].columns - k0, first);
    } else {
      clear();
      if (are_aligned(x.x, w)) slices<true>(x, w, n0);
      else slices<false>(x, w, n0);
    }
    if (split > 1) join();
    if (part) return;
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Index row = m0 + m + i * 8 + 2 * group.pair() + e, column = n0 + n + j * 16 + 2 * group.four();
          Floats<2> values[P];
#pragma unroll
          for (int p = 0; p < P; ++p) values[p].at[0] = sums[p][j][i][e], values[p].at[1] = sums[p][j][i][2 + e];
          if (row < y.rows && column < y.columns)
            ::store(y.row(row) + column, epilogue.apply(values, row, column, y.columns - column), y.columns - column);
        }
  }

 private:
  inline void clear() {
#pragma unroll
    for (int e = 0; e < lane_sums; ++e) sums[e / (TN * TM * 4)][e / (TM * 4) % TN][e / 4 % TM][e % 4] = 0.0f;
  }

  // A tile beyond the edge.
  template <int D>
  inline bool is_idle(const Stage<T, BM, D>& x, const Weights (&w)[P], Index n0) const {
    return x.first + m >= x.x.rows || n0 + n >= w[0].rows;
  }

  // All slices of k, through the ring.
  template <bool WHOLE>
  inline void slices(const Stage<T, BM, DEPTH>& x, const Weights (&w)[P], Index n0) {
    WeightSlices<E, P, BN, DEPTH, WHOLE> of_w(group, w, n0);
    const auto convert = [&](int to, Index k) { of_w.convert(slice(to), w, k); };
    if constexpr (WHOLE) {
      const Column<false, BM, DEPTH, T> of_x(group, x.x, x.first);
      const T* from_x = of_x.source(x.x, x.first);
      const auto fetch = [&](int to, Index k) {
        of_x.fetch(x.slice(to), from_x, k, x.x.columns);
        of_w.fetch(slice(to), w, k);
      };
      walk<grouped>(x, w, n0, fetch, convert);
    } else {
      const auto fetch = [&](int to, Index k) {
        fetch_rows<false, false, BM, DEPTH>(group, x.slice(to), x.x, x.first, k);
        of_w.fetch(slice(to), w, k);
      };
      walk<false>(x, w, n0, fetch, convert);
    }
  }

  template <bool GROUPED, typename Fetch, typename Convert>
  inline void walk(const Stage<T, BM, DEPTH>& x, const Weights (&w)[P], Index n0, const Fetch& fetch,
                   const Convert& convert) {
    constexpr bool overlapped = GROUPED && P * BM * BN >= 1 << 15;  // products of a slice go on while the next begins
    constexpr int ahead = group_stages - (overlapped ? 2 : 1);      // slices on their way
#pragma unroll 1
    for (int s = 0; s < ahead; ++s) {
      if (s * DEPTH < w[0].columns) fetch(s, s * DEPTH);
      copy_commit();  // a slice past the end is a group with nothing in it
    }
    convert(0, 0);
#pragma unroll 1
    for (Index k = 0; k < w[0].columns; k += DEPTH) {
      copy_wait<ahead - 1>();
      if constexpr (GROUPED) publish_to_groups();
      settle();  // all have this slice, and none is at work on the one that is fetched over
      if constexpr (overlapped) grouped_slice(x);
      const int free = place + ahead < group_stages ? place + ahead : place + ahead - group_stages;
      if (k + ahead * DEPTH < w[0].columns) fetch(free, k + ahead * DEPTH);
      copy_commit();
      const int next = place + 1 == group_stages ? 0 : place + 1;
      if constexpr (GROUPED && !overlapped) grouped_slice(x);
      convert(next, k + DEPTH);
      if constexpr (GROUPED) group_wait<overlapped ? 1 : 0>();
      else if (!is_idle(x, w, n0)) staged_slice(x);
      place = next;
    }
    if constexpr (GROUPED) group_wait<0>();
  }

  inline char* slice(int to) const { return memory + to * slice_bytes; }

  // 16 bytes of a row of the weights' slice.
  inline const char* weights(int p, int row, int chunk) const {
    return memory + place * slice_bytes + staged_place<T, DEPTH>(p * BN + row, chunk);
  }

  // A slice by its warpgroup. Products are done in order, and are waited for later.
  inline void grouped_slice(const Stage<T, BM, DEPTH>& x) {
    group_begin();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16)
#pragma unroll
      for (int p = 0; p < P; ++p)
        multiply_groups(T(), sums[p][0], group_operand(weights(p, n / 64 * 64, 0), k),
                        group_operand(x.at(place, m, 0), k));
    group_commit();
  }

  inline void staged_slice(const Stage<T, BM, DEPTH>& x) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16)
      if (split == 1 || k / 16 % split == part) staged_turn(x, k);
  }

  // 16 of k, k elements into the slice.
  inline void staged_turn(const Stage<T, BM, DEPTH>& x, int k) {
    if constexpr (exact) {
#pragma unroll
      for (int s = 0; s < 16; s += held) {
        Words rows[TM][2], columns[P][TN][2];
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            rows[i][e] = *(const Words*)x.at(place, m + i * 8 + 2 * group.pair() + e, (k + s) / held);
#pragma unroll
        for (int p = 0; p < P; ++p)
#pragma unroll
          for (int j = 0; j < TN; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              columns[p][j][e] = *(const Words*)weights(p, n + j * 16 + e * 8 + group.four(), (k + s) / held);
        multiply_words(rows, columns);
      }
    } else {
      const int lane = group.lane;
      uint b[TM][2];
      if constexpr (TM % 2 == 0) {
#pragma unroll
        for (int i = 0; i < TM; i += 2) {
          uint two[4];
          load_matrices(two, x.at(place, m + i * 8 + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
          b[i][0] = two[0], b[i][1] = two[1], b[i + 1][0] = two[2], b[i + 1][1] = two[3];
        }
      } else {
#pragma unroll
        for (int i = 0; i < TM; ++i)
          load_matrices(b[i], x.at(place, m + i * 8 + lane % 8, k / 8 + lane / 8 % 2));
      }
#pragma unroll
      for (int p = 0; p < P; ++p)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
          uint a[4];
          load_matrices(a, weights(p, n + j * 16 + lane % 16, k / 8 + lane / 16));
#pragma unroll
          for (int i = 0; i < TM; ++i) multiply_fragments(T(), sums[p][j][i], a, b[i][0], b[i][1]);
        }
    }
  }

  // All of k0 .. end from where the weights lie. The next KU turns of weights are under way while these are multiplied.
  template <bool WHOLE, int D>
  inline void direct(const Stage<T, BM, D>& x, const Weights (&w)[P], Index n0, Index k0, Index end) {
    const int lane_k = exact ? 0 : group.pair() * Row::count;
    Row rows[P][TN][2];
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          rows[p][j][e] = Row(w[p], min_of(n0 + n + j * 16 + 2 * group.four() + e, w[p].rows - 1));
    constexpr int advance = KU * turn * split;
    Piece next[KU][P][TN][2];
    Index k = k0 + part * KU * turn;
    weights_at<WHOLE>(next, rows, w, k + lane_k, end);
    for (; k < end; k += advance) {
      Piece now[KU][P][TN][2];
#pragma unroll
      for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int p = 0; p < P; ++p)
#pragma unroll
          for (int j = 0; j < TN; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) now[u][p][j][e] = next[u][p][j][e];
      weights_at<WHOLE>(next, rows, w, k + advance + lane_k, end);
#pragma unroll
      for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int s = 0; s < Row::count; s += held)
          direct_step<WHOLE>(x, now[u], k - k0 + u * turn + lane_k + s, s / held);
    }
  }

  // The products of one of the 16 bytes of each piece, with x from `k` on.
  template <bool WHOLE, int D>
  inline void direct_step(const Stage<T, BM, D>& x, const Piece (&pieces)[P][TN][2], Index k, int step) {
    constexpr int each = exact ? 2 : 1;
    Words part_of_x[TM][each], columns[P][TN][2];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int e = 0; e < each; ++e)
        part_of_x[i][e] = x.words(m + i * 8 + (exact ? 2 * group.pair() + e : group.four()), k, WHOLE);
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) columns[p][j][e] = pieces[p][j][e].words(step);
    multiply_words(part_of_x, columns);
  }

  template <bool WHOLE>
  inline void weights_at(Piece (&to)[KU][P][TN][2], const Row (&rows)[P][TN][2], const Weights (&w)[P], Index k,
                         Index end) const {
#pragma unroll
    for (int u = 0; u < KU; ++u)
#pragma unroll
      for (int p = 0; p < P; ++p)
#pragma unroll
        for (int j = 0; j < TN; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            to[u][p][j][e] = rows[p][j][e].template load<WHOLE, warps_m == 1>(w[p], k, u * turn, end);
  }

  static inline bool are_aligned(const Matrix<const T>& x, const Weights (&w)[P]) {
    bool all = x.is_aligned();
    for (int p = 0; p < P; ++p) all = all && is_whole(w[p]);
    return all;
  }

  // The products of one turn, from 16 bytes a row.
  template <int EACH>
  inline void multiply_words(const Words (&rows)[TM][EACH], const Words (&columns)[P][TN][2]) {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int i = 0; i < TM; ++i) {
          const Words &first = columns[p][j][0], &second = columns[p][j][1];
          if constexpr (exact) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
              for (int s = 0; s < held; ++s)
                sums[p][j][i][e] += float_of_bits(int((e < 2 ? first : second).at[s])) *
                                    float_of_bits(int(rows[i][e % 2].at[s]));
          } else {
#pragma unroll
            for (int s = 0; s < 4; s += 2) {
              const uint a[4] = {first.at[s], second.at[s], first.at[s + 1], second.at[s + 1]};
              multiply_fragments(T(), sums[p][j][i], a, rows[i][0].at[s], rows[i][0].at[s + 1]);
            }
          }
        }
  }

  // Add the sums of the warps that shared k, in those of the first part.
  inline void join() {
    constexpr int apart = simd_lanes * lane_sums;  // sums of a warp
    settle();  // the last slice has been read
    float* shared = (float*)memory + group.simdgroup % (warps_m * WN) * apart + group.lane;
    constexpr int all = warps_m * WN * apart;
    if (part) {
#pragma unroll
      for (int e = 0; e < lane_sums; ++e)
        shared[(part - 1) * all + e * simd_lanes] = sums[e / (TN * TM * 4)][e / (TM * 4) % TN][e / 4 % TM][e % 4];
    }
    settle();
    if (part) return;
#pragma unroll
    for (int s = 0; s < split - 1; ++s)
#pragma unroll
      for (int e = 0; e < lane_sums; ++e)
        sums[e / (TN * TM * 4)][e / (TM * 4) % TN][e / 4 % TM][e % 4] += shared[s * all + e * simd_lanes];
  }
};
