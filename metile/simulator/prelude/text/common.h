// as_type, uniform, array, select and the relational functions.
namespace metal {
// The value of an argument of any type: what a swizzle reads, and anything else as it is.
template <class A, class = void>
struct __value {
  typedef A type;
};
template <class V, class T, int N, int code>
struct __value<__swizzle<V, T, N, code>> {
  typedef V type;
};
template <class V, class T, int N, int code>
struct __value<__repeat<V, T, N, code>> {
  typedef V type;
};
template <class A>
using __value_t = typename __value<A>::type;

template <class T, class A>
METAL_FUNC T as_type(A a) {
  __value_t<A> from = a;
  T to;
  static_assert(sizeof(T) == sizeof(from), "as_type between types of different size");
  __builtin_memcpy((void*)&to, &from, sizeof(T));
  return to;
}

template <class T>
using uniform = T;
template <class T>
METAL_FUNC constexpr T make_uniform(T x) {
  return x;
}

#define __MSL_SPACES(X) X(thread) X(device) X(threadgroup)
template <class T, size_t N>
struct array {
  T __a[N];
#define __MSL_ARRAY_IN(space)                                                  \
  METAL_FUNC constexpr space T& operator[](size_t i) space { return __a[i]; }  \
  METAL_FUNC constexpr const space T& operator[](size_t i) const space { return __a[i]; } \
  METAL_FUNC constexpr space T* data() space { return __a; }                   \
  METAL_FUNC constexpr const space T* data() const space { return __a; }       \
  METAL_FUNC constexpr space T* begin() space { return __a; }                  \
  METAL_FUNC constexpr const space T* begin() const space { return __a; }      \
  METAL_FUNC constexpr space T* end() space { return __a + N; }                \
  METAL_FUNC constexpr const space T* end() const space { return __a + N; }
  __MSL_SPACES(__MSL_ARRAY_IN)
#undef __MSL_ARRAY_IN
  METAL_FUNC constexpr const __constant T& operator[](size_t i) const __constant { return __a[i]; }
  METAL_FUNC constexpr const __constant T* data() const __constant { return __a; }
  static constexpr size_t size() { return N; }
  static constexpr bool empty() { return N == 0; }
};

// NaN and infinity by their bits: no option of the compiler takes these away.
template <class T>
METAL_FUNC uint __high_bits(T x) {
  if constexpr (sizeof(T) == 4) {
    return as_type<uint>(x);
  } else if constexpr (is_same_v<T, half>) {
    return as_type<uint>((float)x);
  } else {
    return (uint)as_type<ushort>(x) << 16;
  }
}
#define __MSL_RELATIONAL(name, expression)                                \
  template <class T, class = enable_if_t<is_floating_point_v<T>>>         \
  METAL_FUNC bool name(T x) {                                             \
    uint b = metal::__high_bits(x), m = b & 0x7fffffffu;                  \
    (void)m;                                                              \
    return expression;                                                    \
  }                                                                       \
  template <class A, class V = __vec_of_t<A>, class = void>               \
  METAL_FUNC vec<bool, __parts<V>::size> name(A a) {                      \
    V p(a);                                                               \
    vec<bool, __parts<V>::size> r;                                        \
    __MSL_EACH(__parts<V>::size, r.__e[i] = name(p.__e[i]))               \
    return r;                                                             \
  }
__MSL_RELATIONAL(isnan, m > 0x7f800000u)
__MSL_RELATIONAL(isinf, m == 0x7f800000u)
__MSL_RELATIONAL(isfinite, m < 0x7f800000u)
__MSL_RELATIONAL(signbit, b >> 31)
#undef __MSL_RELATIONAL
template <class T, class = enable_if_t<is_floating_point_v<T>>>
METAL_FUNC bool isnormal(T x) {
  float f = x < (T)0 ? -(float)x : (float)x;
  return isfinite(x) && f >= (float)numeric_limits<T>::min();
}
template <class A, class V = __vec_of_t<A>, class = void>
METAL_FUNC vec<bool, __parts<V>::size> isnormal(A a) {
  V p(a);
  vec<bool, __parts<V>::size> r;
  __MSL_EACH(__parts<V>::size, r.__e[i] = isnormal(p.__e[i]))
  return r;
}
template <class A, class B>
METAL_FUNC auto isordered(A a, B b) {
  return !isnan(a) && !isnan(b);
}
template <class A, class B>
METAL_FUNC auto isunordered(A a, B b) {
  return isnan(a) || isnan(b);
}

METAL_FUNC bool all(bool x) { return x; }
METAL_FUNC bool any(bool x) { return x; }
template <class A, class V = __vec_of_t<A>>
METAL_FUNC bool all(A a) {
  V p(a);
  bool r = true;
  __MSL_EACH(__parts<V>::size, r = r && p.__e[i])
  return r;
}
template <class A, class V = __vec_of_t<A>>
METAL_FUNC bool any(A a) {
  V p(a);
  bool r = false;
  __MSL_EACH(__parts<V>::size, r = r || p.__e[i])
  return r;
}
template <class T, class = enable_if_t<__count<T>::value == 1>>
METAL_FUNC constexpr T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class A, class B, class C, class V = __common_t<A, B>, class W = __vec_of_t<C>>
METAL_FUNC V select(A a, B b, C c) {
  V p(a), q(b), r;
  W w(c);
  __MSL_EACH(__parts<V>::size, {
    if constexpr (is_same_v<__element_t<W>, bool>) {
      r.__e[i] = w.__e[i] ? q.__e[i] : p.__e[i];
    } else {
      r.__e[i] = (w.__e[i] >> (sizeof(w.__e[i]) * 8 - 1)) & 1 ? q.__e[i] : p.__e[i];
    }
  })
  return r;
}
}  // namespace metal
using metal::as_type;
