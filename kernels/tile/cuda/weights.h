// Where an accumulator at the matrix end takes dense weights from; quantized ones have packed_weights.h.
#pragma once

template <typename T>
inline bool is_whole(const Matrix<const T>& w) { return w.is_aligned(); }

// A row of weights where it lies. A lane takes a piece of `count` elements at once, `words` of 16 bytes once unpacked.
template <typename T>
struct WeightRow {
  struct Piece {
    Words all;
    inline Words words(int) const { return all; }
  };
  static constexpr bool is_packed = false;
  static constexpr int count = Held<T>::count;
  const T* data;

  WeightRow() = default;
  inline WeightRow(const Matrix<const T>& w, Index n) : data(w.row(n)) {}

  // The piece `ahead` of k, zero from `end` on; WHOLE if it can be moved at once, ONCE if no other warp reads it.
  template <bool WHOLE, bool ONCE>
  inline Piece load(const Matrix<const T>& w, Index k, int ahead, Index end) const {
    const Index at = k + ahead;
    return Piece{load_words<ONCE>(data + at * w.step, end - at, w.step, WHOLE)};
  }
};

// Slices of DEPTH of BN rows of P matrices from row n0 on, for a ring in shared memory. WHOLE if 16 bytes of a row can
// be moved at once.
template <typename T, int P, int BN, int DEPTH, bool WHOLE>
struct WeightSlices {
  static constexpr int matrix_bytes = BN * staged_stride<T, DEPTH>();
  const Group group;
  const Index first;
  const Column<true, BN, DEPTH, T> column;
  const T* from[P];

  inline WeightSlices(Group of, const Matrix<const T> (&w)[P], Index n0) : group(of), first(n0), column(of, w[0], n0) {
#pragma unroll
    for (int p = 0; p < P; ++p) from[p] = column.source(w[p], n0);
  }

  // Begin to bring the slice at k to a place of the ring, as copies or by way of registers.
  inline void fetch(char* to, const Matrix<const T> (&w)[P], Index k) const {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if constexpr (WHOLE) column.fetch(to + p * matrix_bytes, from[p], k, w[0].columns);
      else fetch_rows<true, false, BN, DEPTH>(group, to + p * matrix_bytes, w[p], first, k);
    }
  }

  // What registers hold of the slice at k is put in its place; to be seen after the next barrier.
  inline void convert(char*, const Matrix<const T> (&)[P], Index) {}
};
