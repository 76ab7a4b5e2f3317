// Staging: slices of rows in shared memory, brought there ahead of their use, and handed out in fragments.
#pragma once

// Rows of 128 bytes lie side by side, the 16 bytes of each exchanged by the row: the order that warpgroups multiply in.
// Other rows stand 16 bytes further apart than they are long. Either way the 8 rows that an instruction reads at once
// lie in 8 different groups of banks.
template <typename T, int DEPTH>
inline constexpr bool is_exchanged() { return DEPTH * int(sizeof(T)) == 128; }
template <typename T, int DEPTH>
inline constexpr int staged_stride() { return DEPTH * int(sizeof(T)) + (is_exchanged<T, DEPTH>() ? 0 : 16); }

// Where in a slice the 16 bytes `chunk` of a row stand.
template <typename T, int DEPTH>
inline constexpr int staged_place(int row, int chunk) {
  return row * staged_stride<T, DEPTH>() + (is_exchanged<T, DEPTH>() ? chunk ^ row % 8 : chunk) * 16;
}

// The 16 rows of weights of a fragment are taken in the order 0 2 4 .. 14 1 3 .. 15: the sums of two neighbours, side
// by side in y, then meet in one lane.
inline constexpr int paired_row(int row) { return row / 16 * 16 + row % 2 * 8 + row % 16 / 2; }

// Where the i-th 16 bytes of a slice stand.
template <bool PAIRED, int DEPTH, typename T>
inline Words* place_of(Matrix<const T>, char* slice, int i) {
  constexpr int chunks = DEPTH / Held<T>::count;
  const int row = i / chunks;
  return (Words*)(slice + staged_place<T, DEPTH>(PAIRED ? paired_row(row) : row, i % chunks));
}

// Begin to bring ROWS x DEPTH of a matrix to shared memory, zero beyond its edges; all threads take part. WHOLE if 16
// bytes of it can be moved at once.
template <bool PAIRED, bool WHOLE, int ROWS, int DEPTH, typename T>
inline void fetch_rows(Group group, char* to, Matrix<const T> from, Index first_row, Index first_column) {
  constexpr int held = Held<T>::count, chunks = DEPTH / held;
  static_assert(DEPTH % held == 0, "a slice is whole 16 bytes");
  if constexpr (WHOLE && group_threads % chunks == 0) {  // a thread stays in its column
    constexpr int apart = group_threads / chunks, turns = (ROWS + apart - 1) / apart;
    const int own = group.thread_index / chunks;
    const Index k = first_column + group.thread_index % chunks * held;
    const T* source = from.row(first_row + own) + k;
    const Index left = k < from.columns ? from.rows - first_row - own : 0;
#pragma unroll
    for (int i = 0; i < turns; ++i, source += apart * from.stride) {
      const bool inside = i * apart < left;
      if (ROWS % apart == 0 || own + i * apart < ROWS)
        copy_async(place_of<PAIRED, DEPTH>(from, to, group.thread_index + i * group_threads),
                   inside ? source : from.data, inside ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = group.thread_index; i < ROWS * chunks; i += group_threads) {
      const Index m = first_row + i / chunks, k = first_column + i % chunks * held;
      const Index count = m < from.rows ? from.columns - k : 0;
      Words* place = place_of<PAIRED, DEPTH>(from, to, i);
      if (WHOLE) copy_async(place, count > 0 ? from.at(m, k) : from.data, count > 0 ? 16 : 0);
      else *place = load_words<true>(from.at(m, k), count, from.step, false);
    }
  }
}

// What a thread brings of every slice of ROWS rows: 16 bytes of several of them, in one column. Rows past the last of the
// matrix repeat it: nothing that comes of them is stored.
template <bool PAIRED, int ROWS, int DEPTH, typename T>
struct Column {
  static constexpr int held = Held<T>::count, chunks = DEPTH / held;
  static constexpr int apart = group_threads / chunks, turns = (ROWS + apart - 1) / apart;
  static_assert(group_threads % chunks == 0, "a thread stays in its column");
  int row, chunk;
  uint offsets[turns];  // in elements, from the first of the rows

  inline Column(Group group, Matrix<const T> of, Index first)
      : row(group.thread_index / chunks), chunk(group.thread_index % chunks) {
#pragma unroll
    for (int i = 0; i < turns; ++i)
      offsets[i] = uint(max_of(min_of(row + i * apart, of.rows - 1 - first), 0)) * uint(of.stride);
  }

  // Where the thread's column begins.
  inline const T* source(Matrix<const T> of, Index first) const {
    return of.row(min_of(first, of.rows - 1)) + chunk * held;
  }

  // Begin to bring those of the slice at column k0 to `slice`, zero past the last column.
  inline void fetch(char* slice, const T* source, Index k0, Index columns) const {
    const int bytes = k0 + chunk * held < columns ? 16 : 0;
    constexpr bool even = apart % (PAIRED ? 16 : 8) == 0;  // the order of rows repeats from turn to turn
    char* first = slice + staged_place<T, DEPTH>(PAIRED ? paired_row(row) : row, chunk);
#pragma unroll
    for (int i = 0; i < turns; ++i) {
      const int own = row + i * apart;
      char* place = even ? first + i * apart * staged_stride<T, DEPTH>()
                         : slice + staged_place<T, DEPTH>(PAIRED ? paired_row(own) : own, chunk);
      if (ROWS % apart == 0 || own < ROWS) copy_async(place, source + k0 + offsets[i], bytes);
    }
  }
};

// x[m0 : m0+BM, k0 : k0+DEPTH] and the slices after it, in a ring in shared memory at `offset`; or x where it lies, if
// DEPTH is 0. A stage that does not feed a ring of its own DEPTH, as queries do, is brought once.
template <typename T, int BM, int DEPTH>
struct Stage {
  static constexpr int slice_bytes = DEPTH ? BM * staged_stride<T, DEPTH>() : 0;
  Matrix<const T> x;
  Index first, from, end;  // of rows and columns
  char* memory;
  bool settled;

  static inline constexpr Index bytes(Index) { return group_stages * slice_bytes; }

  inline void load(Group group, Index offset, Matrix<const T> matrix, Index m0, Index k0, Index depth) {
    x = matrix, first = m0, from = k0, end = k0 + depth;
    memory = group.memory<char>(offset);
    settled = false;
  }

  // A place of the ring.
  inline char* slice(int place) const { return memory + place * slice_bytes; }

  // The slice as it was loaded, once, without a ring.
  inline void bring(Group group) {
    if constexpr (DEPTH > 0) {
      if (settled) return;
      settle();  // what was there has been read
      if (x.is_aligned()) fetch_rows<false, true, BM, DEPTH>(group, memory, x, first, from);
      else fetch_rows<false, false, BM, DEPTH>(group, memory, x, first, from);
      copy_commit();
      copy_wait<0>();
      settle();
      settled = true;
    }
  }

  // 16 bytes of row m, of a place of the ring.
  inline const char* at(int place, int m, int chunk) const {
    return slice(place) + staged_place<T, DEPTH>(m, chunk);
  }

  // A lane's 16 bytes of row m, k elements into the slice.
  inline Words words(int m, Index k, bool whole) const {
    if constexpr (DEPTH > 0) {
      return k < end - from ? *(const Words*)at(0, m, k / Held<T>::count) : Words{{0, 0, 0, 0}};
    } else {
      return load_words<false>(x.at(min_of(first + m, x.rows - 1), from + k), end - from - k, x.step, whole);
    }
  }
};
