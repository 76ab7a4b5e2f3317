// What vec, packed_vec and the parts of them that swizzles name have in common; vec itself is generated.
namespace metal {
template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;
template <class V, class T, int N, int code>
struct __swizzle;
template <class V, class T, int N, int code>
struct __repeat;

// The vector that a type stands for: its own, or the one that a swizzle reads.
template <class A>
struct __vec_of {};
template <class T, int N>
struct __vec_of<vec<T, N>> {
  typedef vec<T, N> type;
};
template <class T, int N>
struct __vec_of<packed_vec<T, N>> {
  typedef vec<T, N> type;
};
template <class V, class T, int N, int code>
struct __vec_of<__swizzle<V, T, N, code>> {
  typedef V type;
};
template <class V, class T, int N, int code>
struct __vec_of<__repeat<V, T, N, code>> {
  typedef V type;
};
template <class A>
using __vec_of_t = typename __vec_of<A>::type;

template <class V>
struct __parts;
template <class T, int N>
struct __parts<vec<T, N>> {
  typedef T element;
  static constexpr __constant int size = N;
};
template <class V>
using __element_t = typename __parts<V>::element;

// How many elements an argument of a vector's constructor brings; more than any vector has for other types.
template <class A, class = void>
struct __count {
  static constexpr __constant int value = 100;
};
template <class A>
struct __count<A, enable_if_t<is_arithmetic_v<A> || __is_enum(A)>> {
  static constexpr __constant int value = 1;
};
template <class T, int N>
struct __count<vec<T, N>> {
  static constexpr __constant int value = N;
};
template <class T, int N>
struct __count<packed_vec<T, N>> {
  static constexpr __constant int value = N;
};
template <class V, class T, int N, int code>
struct __count<__swizzle<V, T, N, code>> {
  static constexpr __constant int value = __parts<V>::size;
};
template <class V, class T, int N, int code>
struct __count<__repeat<V, T, N, code>> {
  static constexpr __constant int value = __parts<V>::size;
};

// The vector in which a binary operation is done: an integer vector takes no floating scalar.
template <class A, class B, class = void>
struct __common {};
template <class A, class B>
struct __common<A, B, enable_if_t<is_same<__vec_of_t<A>, __vec_of_t<B>>::value>> {
  typedef __vec_of_t<A> type;
};
template <class V, class S>
struct __common_scalar
    : enable_if<is_arithmetic_v<S> && (is_floating_point_v<__element_t<V>> || !is_floating_point_v<S>), V> {};
template <class A, class B>
struct __common<A, B, enable_if_t<is_arithmetic_v<B> && __count<A>::value != 100 && __count<A>::value != 1>>
    : __common_scalar<__vec_of_t<A>, B> {};
template <class A, class B>
struct __common<A, B, enable_if_t<is_arithmetic_v<A> && __count<B>::value != 100 && __count<B>::value != 1>>
    : __common_scalar<__vec_of_t<B>, A> {};
template <class A, class B>
using __common_t = typename __common<A, B>::type;
template <class A, class B, class C>
using __first_vec_t = conditional_t<(__count<A>::value > 1), A, conditional_t<(__count<B>::value > 1), B, C>>;
template <class A, class B, class C>
using __common3_t = __common_t<__common_t<__common_t<__vec_of_t<__first_vec_t<A, B, C>>, A>, B>, C>;

// A cast that also goes between half and bfloat.
template <class T, class U>
METAL_FUNC constexpr T __cast(U x) {
  if constexpr (is_floating_point_v<U> && is_floating_point_v<T> && sizeof(U) == 2 && sizeof(T) == 2) {
    return (T)(float)x;
  } else {
    return (T)x;
  }
}

// Component i of an argument that is a scalar or a vector.
template <class T, class V, int N>
METAL_FUNC constexpr T __component(vec<V, N> a, int i) {
  return __cast<T>(a.__at(i));
}
template <class T, class V, int N>
METAL_FUNC constexpr T __component(packed_vec<V, N> a, int i) {
  return __cast<T>(a.__at(i));
}
template <class T, class A, class = enable_if_t<__count<A>::value == 1>>
METAL_FUNC constexpr T __component(A a, int) {
  return __cast<T>(a);
}
template <class T, class A, class V = __vec_of_t<A>, class = void>
METAL_FUNC T __component(A a, int i) {
  return __cast<T>(a.operator V().__at(i));
}
template <class T, class A, class... B>
METAL_FUNC constexpr T __flat(int i, A a, B... b) {
  if constexpr (sizeof...(B) == 0) {
    return __component<T>(a, i);
  } else {
    return i < __count<A>::value ? __component<T>(a, i) : __flat<T>(i - __count<A>::value, b...);
  }
}

#define __MSL_EACH(N, ...)        \
  {                               \
    {                             \
      constexpr int i = 0;        \
      __VA_ARGS__;                \
    }                             \
    {                             \
      constexpr int i = 1;        \
      __VA_ARGS__;                \
    }                             \
    if constexpr ((N) > 2) {      \
      constexpr int i = 2;        \
      __VA_ARGS__;                \
    }                             \
    if constexpr ((N) > 3) {      \
      constexpr int i = 3;        \
      __VA_ARGS__;                \
    }                             \
  }

// v.zyx and the like share the vector's storage. `code` has four bits for each component named. As there are hundreds
// of them, they hold no more than they must: compiling is slow in proportion.
#define __MSL_READ(code)                                                          \
  METAL_FUNC operator V() const {                                                 \
    V v;                                                                          \
    __MSL_EACH(__parts<V>::size, v.__e[i] = __e[(code) >> 4 * i & 15])            \
    return v;                                                                     \
  }                                                                               \
  METAL_FUNC operator V() const __constant {                                      \
    V v;                                                                          \
    __MSL_EACH(__parts<V>::size, v.__e[i] = __e[(code) >> 4 * i & 15])            \
    return v;                                                                     \
  }
// One that names a component more than once is only read.
template <class V, class T, int N, int code>
struct __repeat {
  T __e[N];
  __repeat& operator=(const __repeat&) = delete;
  __MSL_READ(code)
};
template <class V, class T, int N, int code>
struct __swizzle {
  T __e[N];
  __MSL_READ(code)
  METAL_FUNC __swizzle& operator=(V v) {
    __MSL_EACH(__parts<V>::size, __e[code >> 4 * i & 15] = v.__e[i])
    return *this;
  }
  METAL_FUNC __swizzle& operator=(const __swizzle& s) { return *this = (V)s; }
};
#undef __MSL_READ
}  // namespace metal
