// What both kinds of simdgroup_matrix have in common.
namespace metal {
template <class A, class B>
METAL_FUNC auto operator*(const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<conditional_t<is_same_v<A, B>, A, float>, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal
