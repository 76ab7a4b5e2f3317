// What a task knows of its launch: its index, its thread's scratch, and the arrays as the host describes them.
#pragma once

namespace metile {

constexpr int max_dims = 8;

struct Array {  // strides in bytes; mirrors host/cpu_pool.cpp
  void* data;
  long ndim, shape[max_dims], strides[max_dims];
};

struct Scratch {
  char* memory;
  long bytes;
  unsigned long tag[4];
};

}  // namespace metile

struct Lanes;
struct Threads;

struct Group {
  uint index;
  metile::Scratch* scratch;

  // What works on a row together: the lanes of a simdgroup, or all threads of the threadgroup.
  inline Lanes lanes() const;
  inline Threads threads() const;

  // `bytes` of threadgroup memory at a fixed offset.
  template <typename U>
  U* memory(long offset) const { return reinterpret_cast<U*>(scratch->memory + offset); }
};

constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }
constexpr long round_up(long a, long b) { return ceil_div(a, b) * b; }
constexpr long min_of(long a, long b) { return a < b ? a : b; }

// A row-major matrix in device memory: `stride` elements from row to row.
template <typename T>
struct Matrix {
  T* data;
  long rows, columns, stride;

  T* row(long m) const { return data + m * stride; }
};

// An array [batch, heads, rows, columns] whose rows lie whole in memory; the other strides are free.
template <typename T>
struct Heads {
  T* data;
  long batch_stride, head_stride, stride, heads, rows, columns;

  Matrix<T> head(long batch, long head) const {
    return Matrix<T>{data + batch * batch_stride + head * head_stride, rows, columns, stride};
  }
  // The first row of each of `count` heads.
  Matrix<T> across(long batch, long head, long count) const {
    return Matrix<T>{data + batch * batch_stride + head * head_stride, count, columns, head_stride};
  }
};

// The first `count` rows of every head; all of them for 0.
template <typename T>
inline Heads<T> upto(Heads<T> a, long count) {
  return Heads<T>{a.data, a.batch_stride, a.head_stride, a.stride, a.heads, count ? count : a.rows, a.columns};
}

template <typename T>
inline Heads<T> heads(const metile::Array& a) {
  const long size = sizeof(T);
  return Heads<T>{static_cast<T*>(a.data), a.strides[0] / size, a.strides[1] / size, a.strides[2] / size,
                  a.shape[1], a.shape[2], a.shape[3]};
}

// The same of an array [batch, rows, count * columns], a row of which holds the rows of all heads.
template <typename T>
inline Heads<T> heads_inside(const metile::Array& a, long count) {
  const long size = sizeof(T), columns = a.shape[2] / count;
  return Heads<T>{static_cast<T*>(a.data), a.strides[0] / size, columns, a.strides[1] / size, count, a.shape[1], columns};
}

// Queries in either layout: [batch, heads, rows, columns] or [batch, rows, count * columns].
template <typename T>
inline Heads<T> queries(const metile::Array& a, long count) {
  return a.ndim == 3 ? heads_inside<T>(a, count) : heads<T>(a);
}

// All leading axes of an array folded into the rows of a matrix; the host has seen that they fold.
template <typename T>
inline Matrix<T> matrix_of(const metile::Array& array) {
  Matrix<T> result = {static_cast<T*>(array.data), 1, array.ndim ? array.shape[array.ndim - 1] : 1, 0};
  for (long d = array.ndim - 2; d >= 0; --d) {
    if (result.stride == 0 && array.shape[d] != 1) result.stride = array.strides[d] / long(sizeof(T));
    result.rows *= array.shape[d];
  }
  return result;
}

namespace metile {

// Before and after every task: the matrix unit wants to know its tile shapes, and to be let go.
inline void begin_task();
inline void end_task();

}  // namespace metile
