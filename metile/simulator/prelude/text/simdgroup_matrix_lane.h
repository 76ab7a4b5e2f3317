// simdgroup_matrix, a lane at a time: each lane holds two neighbouring elements of one row.
namespace metal {
template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "a simdgroup_matrix is 8 by 8");
  typedef T storage_type;
  vec<T, 2> __elements;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    uint row = __row(), column = __column();
    __elements = vec<T, 2>(row == column ? diagonal : (T)0, row == column + 1 ? diagonal : (T)0);
  }
  static METAL_FUNC uint __row() { return (__msl_lane() >> 2 & 4) + (__msl_lane() >> 1 & 3); }
  static METAL_FUNC uint __column() { return (__msl_lane() >> 1 & 4) + (__msl_lane() & 1) * 2; }
  METAL_FUNC thread vec<T, 2>& thread_elements() thread { return __elements; }
  METAL_FUNC const thread vec<T, 2>& thread_elements() const thread { return __elements; }
};
template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.__elements = vec<T, 2>(x);
  return m;
}
template <class T>
METAL_FUNC __msl_pair __msl_pair_of(simdgroup_matrix<T, 8, 8> m) {
  __msl_pair p;
  p.x = (float)m.__elements.x;
  p.y = (float)m.__elements.y;
  return p;
}
#define __MSL_LOAD(space)                                                                                         \
  template <class T>                                                                                              \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const space T* src,                         \
                                 ulong elements_per_row = 8, ulong2 matrix_origin = ulong2(0),                    \
                                 bool transpose = false) {                                                        \
    const ulong row = d.__row(), column = d.__column();                                                           \
    src += matrix_origin.y * elements_per_row + matrix_origin.x;                                                  \
    const ulong across = transpose ? elements_per_row : 1, down = transpose ? 1 : elements_per_row;               \
    d.__elements.x = src[row * down + column * across];                                                           \
    d.__elements.y = src[row * down + column * across + across];                                                  \
  }
__MSL_SPACES(__MSL_LOAD)
__MSL_LOAD(constant)
#undef __MSL_LOAD
#define __MSL_STORE(space)                                                                                        \
  template <class T>                                                                                              \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> a, space T* dst, ulong elements_per_row = 8,          \
                                  ulong2 matrix_origin = ulong2(0), bool transpose = false) {                     \
    const ulong row = a.__row(), column = a.__column();                                                           \
    dst += matrix_origin.y * elements_per_row + matrix_origin.x;                                                  \
    const ulong across = transpose ? elements_per_row : 1, down = transpose ? 1 : elements_per_row;               \
    dst[row * down + column * across] = a.__elements.x;                                                           \
    dst[row * down + column * across + across] = a.__elements.y;                                                  \
  }
__MSL_SPACES(__MSL_STORE)
#undef __MSL_STORE
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  __msl_pair r = *__msl_mma3(__msl_pair_of(a), __msl_pair_of(b), __msl_pair_of(c));
  d.__elements = vec<D, 2>((D)r.x, (D)r.y);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0.0f));
}
}  // namespace metal
