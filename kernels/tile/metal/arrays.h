// Arrays as the host describes them, and the matrices that programs see in them.
#pragma once

constant constexpr int max_dims = 4;

template <typename T>
struct Array {  // strides in elements
  T* data;
  int ndim, shape[max_dims];
  long strides[max_dims];
};

// An array whose elements lie side by side; `shape` begins with the number of axes.
template <typename T>
inline Array<T> contiguous_array(T* data, const device int* shape) {
  Array<T> array;
  array.data = data;
  array.ndim = shape[0];
  long stride = 1;
  for (int d = array.ndim - 1; d >= 0; --d) {
    array.shape[d] = shape[1 + d];
    array.strides[d] = stride;
    stride *= array.shape[d];
  }
  return array;
}

template <typename T, typename Strides>
inline Array<T> strided_array(T* data, const device int* shape, Strides strides) {
  Array<T> array;
  array.data = data;
  array.ndim = shape[0];
  for (int d = 0; d < array.ndim; ++d) {
    array.shape[d] = shape[1 + d];
    array.strides[d] = strides[d];
  }
  return array;
}

// A matrix in device memory: `stride` elements from row to row, `step` from column to column.
template <typename T>
struct Matrix {
  T* data;
  Index rows, columns;
  long stride, step;

  T* row(Index m) const { return data + m * stride; }
  T* at(Index m, Index k) const { return data + (m * stride + k * step); }
};

// An array [batch, heads, rows, columns] with any strides.
template <typename T>
struct Heads {
  T* data;
  long batch_stride, head_stride, stride, step;
  Index heads, rows, columns;

  Matrix<T> head(Index batch, Index head) const {
    return Matrix<T>{data + (batch * batch_stride + head * head_stride), rows, columns, stride, step};
  }
  // The first row of each of `count` heads.
  Matrix<T> across(Index batch, Index head, Index count) const {
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
  return Heads<T>{a.data, a.strides[0], a.strides[1], a.strides[2], a.strides[3], a.shape[1], a.shape[2], a.shape[3]};
}

// The same of an array [batch, rows, count * columns], a row of which holds the rows of all heads.
template <typename T, typename A>
inline Heads<T> heads_inside(A a, Index count) {
  const Index columns = a.shape[2] / count;
  return Heads<T>{a.data, a.strides[0], columns * a.strides[2], a.strides[1], a.strides[2], count, a.shape[1], columns};
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
  const Index columns = array.ndim ? array.shape[array.ndim - 1] : 1;
  Index rows = 1;
  for (int d = array.ndim - 2; d >= 0; --d) rows *= array.shape[d];
  return Matrix<T>{array.data, rows, columns, columns, 1};
}
