// Arrays as the host describes them, and the matrices that programs see in them.
#pragma once

constexpr int max_dims = 4;

template <typename T>
struct Array {  // strides in elements
  T* data;
  int ndim, shape[max_dims];
  long long strides[max_dims];
};

// An array whose elements lie side by side; `shape` begins with the number of axes. Every index is known when this is
// compiled, so that nothing leaves the registers.
template <typename T>
inline Array<T> contiguous_array(T* data, const int* shape) {
  Array<T> array;
  array.data = data;
  array.ndim = shape[0];
  long long stride = 1;
#pragma unroll
  for (int d = max_dims - 1; d >= 0; --d) {
    array.shape[d] = d < array.ndim ? shape[1 + d] : 1;
    array.strides[d] = stride;
    stride *= array.shape[d];
  }
  return array;
}

template <typename T, typename Strides>
inline Array<T> strided_array(T* data, const int* shape, const Strides& strides) {
  Array<T> array;
  array.data = data;
  array.ndim = shape[0];
#pragma unroll
  for (int d = 0; d < max_dims; ++d) {
    array.shape[d] = d < array.ndim ? shape[1 + d] : 1;
    array.strides[d] = d < array.ndim ? strides[d] : 0;
  }
  return array;
}

// A matrix in memory: `stride` elements from row to row, `step` from column to column.
template <typename T>
struct Matrix {
  T* data;
  Index rows, columns;
  long long stride, step;

  inline T* row(Index m) const { return data + m * stride; }
  inline T* at(Index m, Index k) const { return data + (m * stride + k * step); }
  // Whether 16 bytes from any multiple of 16 bytes of a row on can be moved at once.
  inline bool is_aligned() const {
    return step == 1 && columns * sizeof(T) % 16 == 0 && ((unsigned long long)data | stride * sizeof(T)) % 16 == 0;
  }
};

// An array [batch, heads, rows, columns] with any strides.
template <typename T>
struct Heads {
  T* data;
  long long batch_stride, head_stride, stride, step;
  Index heads, rows, columns;

  inline Matrix<T> head(Index batch, Index head) const {
    return Matrix<T>{data + (batch * batch_stride + head * head_stride), rows, columns, stride, step};
  }
  // The first row of each of `count` heads.
  inline Matrix<T> across(Index batch, Index head, Index count) const {
    return Matrix<T>{data + (batch * batch_stride + head * head_stride), count, columns, head_stride, step};
  }
};

// The first `count` rows of every head; all of them for 0.
template <typename T>
inline Heads<T> upto(Heads<T> a, Index count) {
  return Heads<T>{a.data, a.batch_stride, a.head_stride, a.stride, a.step, a.heads, count ? count : a.rows, a.columns};
}

template <typename T, typename A>
inline Heads<T> heads(A a) {
  return Heads<T>{(T*)a.data,  a.strides[0], a.strides[1], a.strides[2],
                  a.strides[3], a.shape[1],   a.shape[2],   a.shape[3]};
}

// The same of an array [batch, rows, count * columns], a row of which holds the rows of all heads.
template <typename T, typename A>
inline Heads<T> heads_inside(A a, Index count) {
  const Index columns = a.shape[2] / count;
  return Heads<T>{(T*)a.data,   a.strides[0], columns * a.strides[2], a.strides[1],
                  a.strides[2], count,        a.shape[1],             columns};
}

// Queries in either layout: [batch, heads, rows, columns] or [batch, rows, count * columns].
template <typename T, typename A>
inline Heads<T> queries(A a, Index count) {
  if (a.ndim == 3) return heads_inside<T>(a, count);
  return heads<T>(a);
}

// All leading axes of a contiguous array folded into the rows of a matrix.
template <typename T, typename A>
inline Matrix<T> matrix_of(A array) {
  // Every length is read first: a choice among places in memory would keep the array there.
  const Index a = array.shape[0], b = array.shape[1], c = array.shape[2], d = array.shape[3], axes = array.ndim;
  const Index columns = axes == 1 ? a : axes == 2 ? b : axes == 3 ? c : axes == 4 ? d : 1;
  const Index rows = (axes > 1 ? a : 1) * (axes > 2 ? b : 1) * (axes > 3 ? c : 1);
  return Matrix<T>{(T*)array.data, rows, columns, columns, 1};
}
