// Staging: a slice of rows in threadgroup memory, or where it lies, handed out in fragments of 8 x 8.
#pragma once

constant constexpr int fragment_size = 8;

template <typename T>
using Fragment = simdgroup_matrix<T, fragment_size, fragment_size>;

// Rows in threadgroup memory stand 16 bytes further apart than they are long, against bank conflicts.
template <typename T, int DEPTH>
constexpr int staged_stride() { return DEPTH + 16 / int(sizeof(T)); }

// ROWS x DEPTH of a matrix to threadgroup memory, zero beyond its edges and past `depth`; all threads take part.
template <int ROWS, int DEPTH, typename T>
inline void copy_slice(Group group, threadgroup T* to, Matrix<const device T> from, Index first_row, Index first_column,
                       Index depth) {
  constexpr int run = 8;  // elements that a thread copies at once
  const bool whole = first_row + ROWS <= from.rows && depth == DEPTH && from.step == 1;
  for (int i = group.thread_index * run; i < ROWS * DEPTH; i += group_threads * run) {
    const int row = i / DEPTH, column = i % DEPTH;
    threadgroup T* place = to + row * staged_stride<T, DEPTH>() + column;
    if (whole) {
      const device T* source = from.row(first_row + row) + first_column + column;
#pragma unroll
      for (int e = 0; e < run; ++e) place[e] = source[e];
    } else {
      for (int e = 0; e < run; ++e) {
        const bool inside = first_row + row < from.rows && column + e < depth;
        place[e] = inside ? *from.at(first_row + row, first_column + column + e) : T(0);
      }
    }
  }
}

// The fragment at (row, column) of a matrix in device memory, turned if TURN, zero beyond its rows and `columns`.
template <bool TURN, typename T>
inline void load_fragment(thread Fragment<T>& to, Group group, Matrix<const device T> from, Index row, Index column,
                          Index columns) {
  if (row + fragment_size <= from.rows && column + fragment_size <= columns && from.step == 1) {
    simdgroup_load(to, from.row(row) + column, from.stride, ulong2(0, 0), TURN);
    return;
  }
  const Place place = group.place();
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const Index i = row + (TURN ? place.column + e : place.row), j = column + (TURN ? place.row : place.column + e);
    to.thread_elements()[e] = i < from.rows && j < columns ? *from.at(i, j) : T(0);
  }
}

// x[m0 : m0+BM, k0 : k0+depth]: in threadgroup memory at `offset`, depth at most DEPTH, or where it lies if DEPTH is 0.
template <typename T, int BM, int DEPTH>
struct Stage {
  Matrix<const device T> x;
  Index first, from, end;  // of rows and columns
  threadgroup T* memory;
  bool settled;

  static constexpr Index bytes(Index) { return DEPTH ? BM * staged_stride<T, DEPTH>() * Index(sizeof(T)) : 0; }

  void load(Group group, Index offset, Matrix<const device T> matrix, Index m0, Index k0, Index depth) {
    x = matrix, first = m0, from = k0, end = k0 + depth;
    settled = DEPTH == 0;
    if (DEPTH == 0) return;
    memory = group.memory<T>(offset);
    settle();  // the slice before has been read
    copy_slice<BM, DEPTH == 0 ? 1 : DEPTH>(group, memory, matrix, m0, k0, depth);
  }

  // Make the slice visible to all threads, once.
  void wait() {
    if (!settled) settle();
    settled = true;
  }

  void fragment(thread Fragment<T>& to, Group group, Index m, Index k) const {
    if (DEPTH) simdgroup_load(to, memory + m * staged_stride<T, DEPTH>() + k, staged_stride<T, DEPTH>());
    else load_fragment<false>(to, group, x, first + m, from + k, end);
  }
};
