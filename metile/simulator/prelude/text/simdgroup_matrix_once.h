// simdgroup_matrix, once a simdgroup: a matrix is a tile of the runtime's, and one lane does an operation for all.
namespace metal {
template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "a simdgroup_matrix is 8 by 8");
  typedef T storage_type;
  void* __tile;
  METAL_FUNC simdgroup_matrix() : __tile(__msl_mnew()) {}
  METAL_FUNC ~simdgroup_matrix() { __msl_mdel(__tile); }
  METAL_FUNC simdgroup_matrix(const simdgroup_matrix& m) : __tile(__msl_mnew()) {
    __msl_mcopy(__tile, m.__tile, sizeof(T));
  }
  METAL_FUNC simdgroup_matrix& operator=(const simdgroup_matrix& m) {
    __msl_mcopy(__tile, m.__tile, sizeof(T));
    return *this;
  }
  METAL_FUNC explicit simdgroup_matrix(T diagonal) : __tile(__msl_mnew()) { __fill((T)0.0f, diagonal); }
  METAL_FUNC simdgroup_matrix(T off, T diagonal) : __tile(__msl_mnew()) { __fill(off, diagonal); }
  METAL_FUNC void __fill(T off, T diagonal) {
    T values[2] = {off, diagonal};
    __msl_mfill(__tile, values, sizeof(T));
  }
  METAL_FUNC thread vec<T, 2>& thread_elements() const {
    return *(thread vec<T, 2>*)__msl_mtouch(__tile, sizeof(T));
  }
};
template <class T, int Cols, int Rows = Cols>
METAL_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, Cols, Rows>(x, x);
}
#define __MSL_LOAD(space)                                                                                         \
  template <class T>                                                                                              \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const space T* src,                         \
                                 ulong elements_per_row = 8, ulong2 matrix_origin = ulong2(0),                    \
                                 bool transpose = false) {                                                        \
    src += matrix_origin.y * elements_per_row + matrix_origin.x;                                                  \
    __msl_mload(d.__tile, (const void*)(ulong)src, elements_per_row, transpose, sizeof(T));                       \
  }
__MSL_SPACES(__MSL_LOAD)
__MSL_LOAD(constant)
#undef __MSL_LOAD
#define __MSL_STORE(space)                                                                                        \
  template <class T>                                                                                              \
  METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, space T* dst, ulong elements_per_row = 8,   \
                                  ulong2 matrix_origin = ulong2(0), bool transpose = false) {                     \
    dst += matrix_origin.y * elements_per_row + matrix_origin.x;                                                  \
    __msl_mstore(a.__tile, (void*)(ulong)dst, elements_per_row, transpose, sizeof(T));                            \
  }
__MSL_SPACES(__MSL_STORE)
#undef __MSL_STORE
template <class T>
static constexpr __constant uint __msl_code = is_same_v<T, float> ? 0 : is_same_v<T, half> ? 1 : 2;
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  constexpr uint types = __msl_code<D> | __msl_code<A> << 2 | __msl_code<B> << 4 | __msl_code<C> << 6;
  __msl_mmma(d.__tile, a.__tile, b.__tile, c.__tile, types);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>((D)0.0f, (D)0.0f));
}
}  // namespace metal
