// Geometric functions.
namespace metal {
template <class A, class B, class V = __common_t<A, B>>
METAL_FUNC __element_t<V> dot(A a, B b) {
  V p(a), q(b);
  __element_t<V> r = p.__e[0] * q.__e[0];
  __MSL_EACH(__parts<V>::size, if constexpr (i > 0) r += p.__e[i] * q.__e[i])
  return r;
}
template <class A, class V = __floating_vec_t<A>>
METAL_FUNC __element_t<V> length_squared(A a) {
  return dot(a, a);
}
template <class A, class V = __floating_vec_t<A>>
METAL_FUNC __element_t<V> length(A a) {
  return (__element_t<V>)sqrt(dot(a, a));
}
template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC __element_t<V> distance_squared(A a, B b) {
  return length_squared(V(a) - V(b));
}
template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC __element_t<V> distance(A a, B b) {
  return length(V(a) - V(b));
}
template <class A, class V = __floating_vec_t<A>>
METAL_FUNC V normalize(A a) {
  return V(a) * (__element_t<V>)rsqrt(dot(a, a));
}
template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC V cross(A a, B b) {
  static_assert(__parts<V>::size == 3, "cross is of three elements");
  V p(a), q(b);
  return V(p.y * q.z - p.z * q.y, p.z * q.x - p.x * q.z, p.x * q.y - p.y * q.x);
}
template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC V reflect(A incident, B normal) {
  V i(incident), n(normal);
  return i - n * ((__element_t<V>)2 * dot(i, n));
}
template <class A, class B, class T, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC V refract(A incident, B normal, T eta) {
  V i(incident), n(normal);
  float d = (float)dot(i, n), k = 1.0f - (float)eta * (float)eta * (1.0f - d * d);
  return k < 0.0f ? V((__element_t<V>)0) : i * eta - n * ((float)eta * d + __builtin_sqrtf(k));
}
template <class A, class B, class C, class V = __floating_vec_t<__common3_t<A, B, C>>>
METAL_FUNC V faceforward(A normal, B incident, C reference) {
  return dot(incident, reference) < (__element_t<V>)0 ? V(normal) : -V(normal);
}
}  // namespace metal
