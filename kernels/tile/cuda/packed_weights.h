// Where an accumulator at the matrix end takes quantized weights from: see weights.h. Values are of the dtype of x.
#pragma once

template <typename T, typename F>
inline bool is_whole(const PackedMatrix<T, F>& w) { return w.codes.is_aligned(); }

// 32 codes are a piece: a word for each bit of a code, whatever the format.
template <typename T, typename F>
struct WeightRow<Packed<T, F>> {
  typedef Chunk<T, F, 32> Piece;
  static constexpr bool is_packed = true;
  static constexpr int count = 32;
  uint word, group;  // the first

  WeightRow() = default;
  inline WeightRow(const PackedMatrix<T, F>& w, Index n)
      : word(uint(n) * code_words<F>(w.columns)), group(uint(n) * (uint(w.columns) / F::group)) {}

  template <bool WHOLE, bool ONCE>
  inline Piece load(const PackedMatrix<T, F>& w, Index k, int ahead, Index end) const {
    Piece piece;
    piece.template load<WHOLE, ONCE>(w, word, group, k, ahead, end);
    return piece;
  }
};

// A thread brings the same codes of every slice, `ahead` slices before they are needed, in registers. Their values lie
// in the ring as dense weights would.
template <typename T, typename F, int P, int BN, int DEPTH, bool WHOLE>
struct WeightSlices<Packed<T, F>, P, BN, DEPTH, WHOLE> {
  typedef WeightRow<Packed<T, F>> Row;
  typedef typename Row::Piece Piece;
  static constexpr int per_row = DEPTH / Row::count, pieces = BN * per_row;
  static constexpr int turns = (pieces + group_threads - 1) / group_threads;
  static constexpr int fitting = 16 / (P * turns * Piece::words_held);
  static constexpr int ahead = fitting < 1 ? 1 : fitting > 3 ? 3 : fitting;
  static_assert(DEPTH % Row::count == 0, "a slice is whole pieces");
  Group group;
  Row rows[P][turns];
  Piece next[ahead][P][turns];

  inline WeightSlices(Group of, const PackedMatrix<T, F> (&w)[P], Index n0) : group(of) {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < turns; ++i) rows[p][i] = Row(w[p], min_of(n0 + source_row(i), w[p].rows - 1));
#pragma unroll
    for (int a = 0; a < ahead; ++a) load(next[a], w, a * DEPTH);
  }

  inline void fetch(char*, const PackedMatrix<T, F> (&)[P], Index) const {}

  inline void convert(char* to, const PackedMatrix<T, F> (&w)[P], Index k) {
    if (k >= w[0].columns) return;
    Piece fresh[P][turns];
    load(fresh, w, k + ahead * DEPTH);
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < turns; ++i) {
        if (is_mine(i)) put(to, p, i);
#pragma unroll
        for (int a = 0; a + 1 < ahead; ++a) next[a][p][i] = next[a + 1][p][i];
        next[ahead - 1][p][i] = fresh[p][i];
      }
  }

 private:
  inline int piece(int i) const { return group.thread_index + i * group_threads; }
  inline bool is_mine(int i) const { return pieces % group_threads == 0 || piece(i) < pieces; }
  // A row of weights by its place in the slice: see paired_row.
  inline int source_row(int i) const {
    const int row = piece(i) / per_row;
    return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
  }

  inline void load(Piece (&to)[P][turns], const PackedMatrix<T, F> (&w)[P], Index k) const {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < turns; ++i)
        to[p][i] = rows[p][i].template load<WHOLE, false>(w[p], k + piece(i) % per_row * Row::count, 0, w[p].columns);
  }

  inline void put(char* to, int p, int i) const {
    constexpr int steps = Row::count / Held<T>::count;
    const int row = p * BN + piece(i) / per_row, first = piece(i) % per_row * steps;
#pragma unroll
    for (int s = 0; s < steps; ++s) *(Words*)(to + staged_place<T, DEPTH>(row, first + s)) = next[0][p][i].words(s);
  }
};
