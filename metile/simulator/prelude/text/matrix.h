// floatCxR and halfCxR: C columns of R elements.
namespace metal {
template <class T, int C, int R>
struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  METAL_FUNC explicit matrix(T diagonal) {
    for (int c = 0; c < C; c++) {
      columns[c] = vec<T, R>((T)0);
      if (c < R) columns[c].__e[c] = diagonal;
    }
  }
  template <class... V, class = enable_if_t<sizeof...(V) == C && (... && (__count<V>::value == R))>>
  METAL_FUNC matrix(V... c) : columns{(vec<T, R>)c...} {}
  template <class... S, class = enable_if_t<sizeof...(S) == C * R && (... && is_arithmetic_v<S>)>, class = void>
  METAL_FUNC matrix(S... s) {
    T all[C * R] = {(T)s...};
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c].__e[r] = all[c * R + r];
  }
  template <class M, class = enable_if_t<is_same_v<M, matrix>>>
  METAL_FUNC matrix(const __constant M& m) {
    for (int c = 0; c < C; c++) columns[c] = m.columns[c];
  }
#define __MSL_COLUMN_IN(space)                                                              \
  METAL_FUNC space vec<T, R>& operator[](int c) space { return columns[c]; }                \
  METAL_FUNC const space vec<T, R>& operator[](int c) const space { return columns[c]; }
  __MSL_SPACES(__MSL_COLUMN_IN)
#undef __MSL_COLUMN_IN
  METAL_FUNC const __constant vec<T, R>& operator[](int c) const __constant { return columns[c]; }
};
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++) a.columns[c] = a.columns[c] + b.columns[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++) a.columns[c] = a.columns[c] - b.columns[c];
  return a;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, C, R> operator-(matrix<T, C, R> a) {
  for (int c = 0; c < C; c++) a.columns[c] = -a.columns[c];
  return a;
}
template <class T, int C, int R, class S, class = enable_if_t<is_arithmetic_v<S>>>
METAL_FUNC matrix<T, C, R> operator*(matrix<T, C, R> a, S s) {
  for (int c = 0; c < C; c++) a.columns[c] = a.columns[c] * (T)s;
  return a;
}
template <class T, int C, int R, class S, class = enable_if_t<is_arithmetic_v<S>>>
METAL_FUNC matrix<T, C, R> operator*(S s, matrix<T, C, R> a) {
  return a * s;
}
template <class T, int C, int R, class A, class = enable_if_t<is_same_v<__vec_of_t<A>, vec<T, C>>>, class = void>
METAL_FUNC vec<T, R> operator*(matrix<T, C, R> a, A b) {
  vec<T, C> v(b);
  vec<T, R> r = a.columns[0] * v.__e[0];
  for (int c = 1; c < C; c++) r = r + a.columns[c] * v.__e[c];
  return r;
}
template <class T, int C, int R, class A, class = enable_if_t<is_same_v<__vec_of_t<A>, vec<T, R>>>, class = void>
METAL_FUNC vec<T, C> operator*(A a, matrix<T, C, R> b) {
  vec<T, C> r;
  for (int c = 0; c < C; c++) r.__e[c] = dot(a, b.columns[c]);
  return r;
}
template <class T, int C, int K, int R>
METAL_FUNC matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> r;
  for (int c = 0; c < C; c++) r.columns[c] = a * b.columns[c];
  return r;
}
template <class T, int C, int R>
METAL_FUNC bool operator==(matrix<T, C, R> a, matrix<T, C, R> b) {
  for (int c = 0; c < C; c++)
    if (!all(a.columns[c] == b.columns[c])) return false;
  return true;
}
template <class T, int C, int R>
METAL_FUNC matrix<T, R, C> transpose(matrix<T, C, R> a) {
  matrix<T, R, C> t;
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) t.columns[r].__e[c] = a.columns[c].__e[r];
  return t;
}
template <class T>
METAL_FUNC T determinant(matrix<T, 2, 2> a) {
  return a.columns[0].x * a.columns[1].y - a.columns[0].y * a.columns[1].x;
}
template <class T>
METAL_FUNC T determinant(matrix<T, 3, 3> a) {
  return dot(a.columns[0], cross(a.columns[1], a.columns[2]));
}
template <class T>
METAL_FUNC T determinant(matrix<T, 4, 4> a) {
  T sum = 0;
  for (int c = 0; c < 4; c++) {
    matrix<T, 3, 3> m;
    for (int k = 0, j = 0; k < 4; k++)
      if (k != c) m.columns[j++] = vec<T, 3>(a.columns[k].y, a.columns[k].z, a.columns[k].w);
    sum += (c & 1 ? -a.columns[c].x : a.columns[c].x) * determinant(m);
  }
  return sum;
}
}  // namespace metal
