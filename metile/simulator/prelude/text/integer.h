// Integer functions. min, max, clamp and abs are overloads for each type: a call that mixes types is ambiguous.
namespace metal {
#define __MSL_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define __MSL_ORDER(T)                                                        \
  METAL_FUNC constexpr T min(T x, T y) { return y < x ? y : x; }              \
  METAL_FUNC constexpr T max(T x, T y) { return x < y ? y : x; }              \
  METAL_FUNC constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC constexpr T min3(T x, T y, T z) { return min(x, min(y, z)); }    \
  METAL_FUNC constexpr T max3(T x, T y, T z) { return max(x, max(y, z)); }    \
  METAL_FUNC constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); } \
  METAL_FUNC constexpr T abs(T x) {                                           \
    if constexpr (is_signed_v<T>) return x < 0 ? (T)(0 - (make_unsigned_t<T>)x) : x; \
    return x;                                                                 \
  }
__MSL_INTEGERS(__MSL_ORDER)
#undef __MSL_ORDER
#undef __MSL_INTEGERS

template <class A, class V = __vec_of_t<A>>
using __integer_vec_t = enable_if_t<is_integral_v<__element_t<V>>, V>;
template <class T, class = enable_if_t<is_integral_v<T>>>
using __bits_t = make_unsigned_t<T>;
template <class T>
static constexpr __constant int __width = (int)sizeof(T) * 8;

#define __MSL_INTEGER1(name)                                                  \
  template <class A, class V = __integer_vec_t<A>, class = void, class = void> \
  METAL_FUNC V name(A a) {                                                    \
    V p(a), r;                                                                \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)name(p.__e[i]))   \
    return r;                                                                 \
  }
#define __MSL_INTEGER2(name)                                                  \
  template <class A, class B, class V = __integer_vec_t<__common_t<A, B>>, class = void, class = void> \
  METAL_FUNC auto name(A a, B b) {                                            \
    V p(a), q(b);                                                             \
    vec<decltype(name(p.__e[0], q.__e[0])), __parts<V>::size> r;              \
    __MSL_EACH(__parts<V>::size, r.__e[i] = name(p.__e[i], q.__e[i]))         \
    return r;                                                                 \
  }
#define __MSL_INTEGER3(name)                                                  \
  template <class A, class B, class C, class V = __integer_vec_t<__common3_t<A, B, C>>, class = void, class = void> \
  METAL_FUNC V name(A a, B b, C c) {                                          \
    V p(a), q(b), s(c), r;                                                    \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)name(p.__e[i], q.__e[i], s.__e[i])) \
    return r;                                                                 \
  }

template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T popcount(T x) {
  return (T)__builtin_popcountl((ulong)(U)x);
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T clz(T x) {
  return (T)((U)x ? __builtin_clzl((ulong)(U)x) - (64 - __width<T>) : __width<T>);
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T ctz(T x) {
  return (T)((U)x ? __builtin_ctzl((ulong)(U)x) : __width<T>);
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T reverse_bits(T x) {
  return (T)(__builtin_bitreverse64((ulong)(U)x) >> (64 - __width<T>));
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T rotate(T x, T n) {
  U k = (U)n & (U)(__width<T> - 1);
  return k ? (T)(U)((U)((U)x << k) | (U)((U)x >> (__width<T> - k))) : x;
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr U absdiff(T x, T y) {
  return x > y ? (U)((U)x - (U)y) : (U)((U)y - (U)x);
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T addsat(T x, T y) {
  T r = 0;
  if (!__builtin_add_overflow(x, y, &r)) return r;
  return is_signed_v<T> && x < 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T subsat(T x, T y) {
  T r = 0;
  if (!__builtin_sub_overflow(x, y, &r)) return r;
  return !is_signed_v<T> || x < 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T hadd(T x, T y) {
  return (T)((x >> 1) + (y >> 1) + (x & y & 1));
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T rhadd(T x, T y) {
  return (T)((x >> 1) + (y >> 1) + ((x | y) & 1));
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T mulhi(T x, T y) {
  if constexpr (sizeof(T) == 8) {
    typedef conditional_t<is_signed_v<T>, __int128, unsigned __int128> wide;
    return (T)(((wide)x * y) >> 64);
  } else {
    typedef conditional_t<is_signed_v<T>, long, ulong> wide;
    return (T)(((wide)x * y) >> __width<T>);
  }
}
METAL_FUNC constexpr int mul24(int x, int y) { return (int)((uint)(x << 8 >> 8) * (uint)(y << 8 >> 8)); }
METAL_FUNC constexpr uint mul24(uint x, uint y) { return (x & 0xffffffu) * (y & 0xffffffu); }
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T madhi(T x, T y, T z) {
  return (T)((U)mulhi(x, y) + (U)z);
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T madsat(T x, T y, T z) {
  typedef conditional_t<is_signed_v<T>, __int128, unsigned __int128> wide;
  wide r = (wide)x * y + z;
  if (r < (wide)numeric_limits<T>::min()) return numeric_limits<T>::min();
  return r > (wide)numeric_limits<T>::max() ? numeric_limits<T>::max() : (T)r;
}
METAL_FUNC constexpr int mad24(int x, int y, int z) { return (int)((uint)mul24(x, y) + (uint)z); }
METAL_FUNC constexpr uint mad24(uint x, uint y, uint z) { return mul24(x, y) + z; }
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  return bits == 0 ? (T)0 : (T)((T)(U)((U)x << (__width<T> - offset - bits)) >> (__width<T> - bits));
}
template <class T, class U = __bits_t<T>>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  U mask = bits == 0 ? (U)0 : (U)((U)((U)~(U)0 >> (__width<T> - bits)) << offset);
  return (T)(U)(((U)base & (U)~mask) | ((U)((U)insert << offset) & mask));
}
template <class T, int N, class = enable_if_t<is_integral_v<T>>>
METAL_FUNC vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = extract_bits(x.__e[i], offset, bits))
  return r;
}
template <class T, int N, class = enable_if_t<is_integral_v<T>>>
METAL_FUNC vec<T, N> insert_bits(vec<T, N> base, vec<T, N> insert, uint offset, uint bits) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = insert_bits(base.__e[i], insert.__e[i], offset, bits))
  return r;
}
__MSL_INTEGER1(abs)
__MSL_INTEGER1(popcount)
__MSL_INTEGER1(clz)
__MSL_INTEGER1(ctz)
__MSL_INTEGER1(reverse_bits)
__MSL_INTEGER2(min)
__MSL_INTEGER2(max)
__MSL_INTEGER2(rotate)
__MSL_INTEGER2(absdiff)
__MSL_INTEGER2(addsat)
__MSL_INTEGER2(subsat)
__MSL_INTEGER2(hadd)
__MSL_INTEGER2(rhadd)
__MSL_INTEGER2(mulhi)
__MSL_INTEGER2(mul24)
__MSL_INTEGER3(clamp)
__MSL_INTEGER3(min3)
__MSL_INTEGER3(max3)
__MSL_INTEGER3(median3)
__MSL_INTEGER3(madhi)
__MSL_INTEGER3(madsat)
__MSL_INTEGER3(mad24)
#undef __MSL_INTEGER1
#undef __MSL_INTEGER2
#undef __MSL_INTEGER3
}  // namespace metal
