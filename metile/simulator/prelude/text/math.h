// Floating-point functions: float through the C library, half computed in float and rounded once, vectors by element.
namespace metal {
template <class A, class V = __vec_of_t<A>>
using __floating_vec_t = enable_if_t<is_floating_point_v<__element_t<V>>, V>;

METAL_FUNC float __turns(float x) { return x - 2.0f * __builtin_rintf(x * 0.5f); }  // the angle x*pi, in [-1, 1]
METAL_FUNC float __sinpi(float x) {
  float t = __turns(x), q = __builtin_rintf(t * 2.0f), r = (t - q * 0.5f) * M_PI_F;
  int n = (int)q & 3;
  float v = n & 1 ? __builtin_cosf(r) : __builtin_sinf(r);
  return n & 2 ? -v : v;
}
METAL_FUNC float __cospi(float x) {
  float t = __turns(x), q = __builtin_rintf(t * 2.0f), r = (t - q * 0.5f) * M_PI_F;
  int n = (int)q & 3;
  float v = n & 1 ? __builtin_sinf(r) : __builtin_cosf(r);
  return n == 1 || n == 2 ? -v : v;
}
METAL_FUNC float __smooth(float a, float b, float x) {
  float t = __builtin_fminf(__builtin_fmaxf((x - a) / (b - a), 0.0f), 1.0f);
  return t * t * (3.0f - 2.0f * t);
}

#define __MSL_MATH1(name, expression)                                                   \
  METAL_FUNC float name(float x) { return expression; }                                 \
  METAL_FUNC half name(half h) {                                                        \
    float x = h;                                                                        \
    return (half)(expression);                                                          \
  }                                                                                     \
  template <class A, class V = __floating_vec_t<A>>                                     \
  METAL_FUNC V name(A a) {                                                              \
    V p(a), r;                                                                          \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)name(p.__e[i]))             \
    return r;                                                                           \
  }
#define __MSL_MATH2(name, expression)                                                   \
  METAL_FUNC float name(float x, float y) { return expression; }                        \
  METAL_FUNC half name(half h, half k) {                                                \
    float x = h, y = k;                                                                 \
    return (half)(expression);                                                          \
  }                                                                                     \
  template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>             \
  METAL_FUNC V name(A a, B b) {                                                         \
    V p(a), q(b), r;                                                                    \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)name(p.__e[i], q.__e[i]))   \
    return r;                                                                           \
  }
#define __MSL_MATH3(name, expression)                                                   \
  METAL_FUNC float name(float x, float y, float z) { return expression; }               \
  METAL_FUNC half name(half h, half k, half l) {                                        \
    float x = h, y = k, z = l;                                                          \
    return (half)(expression);                                                          \
  }                                                                                     \
  template <class A, class B, class C, class V = __floating_vec_t<__common3_t<A, B, C>>> \
  METAL_FUNC V name(A a, B b, C c) {                                                    \
    V p(a), q(b), s(c), r;                                                              \
    __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)name(p.__e[i], q.__e[i], s.__e[i])) \
    return r;                                                                           \
  }

__MSL_MATH1(exp, __builtin_expf(x))
__MSL_MATH1(exp2, __builtin_exp2f(x))
__MSL_MATH1(exp10, __builtin_powf(10.0f, x))
__MSL_MATH1(log, __builtin_logf(x))
__MSL_MATH1(log2, __builtin_log2f(x))
__MSL_MATH1(log10, __builtin_log10f(x))
__MSL_MATH1(sin, __builtin_sinf(x))
__MSL_MATH1(cos, __builtin_cosf(x))
__MSL_MATH1(tan, __builtin_tanf(x))
__MSL_MATH1(sinpi, metal::__sinpi(x))
__MSL_MATH1(cospi, metal::__cospi(x))
__MSL_MATH1(tanpi, metal::__sinpi(x) / metal::__cospi(x))
__MSL_MATH1(asin, __builtin_asinf(x))
__MSL_MATH1(acos, __builtin_acosf(x))
__MSL_MATH1(atan, __builtin_atanf(x))
__MSL_MATH1(sinh, __builtin_sinhf(x))
__MSL_MATH1(cosh, __builtin_coshf(x))
__MSL_MATH1(tanh, __builtin_tanhf(x))
__MSL_MATH1(asinh, __builtin_asinhf(x))
__MSL_MATH1(acosh, __builtin_acoshf(x))
__MSL_MATH1(atanh, __builtin_atanhf(x))
__MSL_MATH1(sqrt, __builtin_sqrtf(x))
__MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))
__MSL_MATH1(floor, __builtin_floorf(x))
__MSL_MATH1(ceil, __builtin_ceilf(x))
__MSL_MATH1(trunc, __builtin_truncf(x))
__MSL_MATH1(round, __builtin_roundf(x))
__MSL_MATH1(rint, __builtin_rintf(x))
__MSL_MATH1(fabs, __builtin_fabsf(x))
__MSL_MATH1(abs, __builtin_fabsf(x))
__MSL_MATH1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f)
__MSL_MATH1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
METAL_FUNC float fract(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
METAL_FUNC half fract(half x) { return (half)__builtin_fminf((float)x - __builtin_floorf((float)x), 0x1.ffcp-1f); }
template <class A, class V = __floating_vec_t<A>>
METAL_FUNC V fract(A a) {
  V p(a), r;
  __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)fract(p.__e[i]))
  return r;
}
__MSL_MATH2(pow, __builtin_powf(x, y))
__MSL_MATH2(powr, __builtin_powf(x, y))
__MSL_MATH2(fmod, __builtin_fmodf(x, y))
__MSL_MATH2(atan2, __builtin_atan2f(x, y))
__MSL_MATH2(fmin, __builtin_fminf(x, y))
__MSL_MATH2(fmax, __builtin_fmaxf(x, y))
__MSL_MATH2(min, __builtin_fminf(x, y))
__MSL_MATH2(max, __builtin_fmaxf(x, y))
__MSL_MATH2(copysign, __builtin_copysignf(x, y))
__MSL_MATH2(divide, x / y)
__MSL_MATH2(fdim, x > y ? x - y : x <= y ? 0.0f : x + y)
__MSL_MATH2(step, y < x ? 0.0f : 1.0f)
__MSL_MATH3(fma, __builtin_fmaf(x, y, z))
__MSL_MATH3(mix, x + (y - x) * z)
__MSL_MATH3(smoothstep, metal::__smooth(x, y, z))
__MSL_MATH3(clamp, __builtin_fminf(__builtin_fmaxf(x, y), z))
__MSL_MATH3(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))
__MSL_MATH3(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
__MSL_MATH3(min3, __builtin_fminf(x, __builtin_fminf(y, z)))
__MSL_MATH3(max3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
#define __MSL_MEDIAN __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z))
__MSL_MATH3(fmedian3, __MSL_MEDIAN)
__MSL_MATH3(median3, __MSL_MEDIAN)
#undef __MSL_MEDIAN

// The neighbour of x towards y, in x's own format.
template <class T, class U>
METAL_FUNC T __neighbour(T x, T y) {
  if (isnan(x) || isnan(y)) return numeric_limits<T>::quiet_NaN();
  if (x == y) return y;
  U bits = as_type<U>(x), sign = (U)((U)1 << (sizeof(U) * 8 - 1));
  if (x == (T)0.0f) return as_type<T>((U)((y < x ? sign : (U)0) | 1));
  return as_type<T>((U)((x < y) == (x > (T)0.0f) ? bits + 1 : bits - 1));
}
METAL_FUNC float nextafter(float x, float y) { return __neighbour<float, uint>(x, y); }
METAL_FUNC half nextafter(half x, half y) { return __neighbour<half, ushort>(x, y); }
template <class A, class B, class V = __floating_vec_t<__common_t<A, B>>>
METAL_FUNC V nextafter(A a, B b) {
  V p(a), q(b), r;
  __MSL_EACH(__parts<V>::size, r.__e[i] = (__element_t<V>)nextafter(p.__e[i], q.__e[i]))
  return r;
}

// bfloat goes to float where an overload for integers would be as near.
#define __MSL_BFLOAT2(name)                                              \
  template <class T, class = enable_if_t<is_same_v<T, bfloat>>, class = void, class = void> \
  METAL_FUNC float name(T x, T y) {                                      \
    return metal::name((float)x, (float)y);                              \
  }
#define __MSL_BFLOAT3(name)                                              \
  template <class T, class = enable_if_t<is_same_v<T, bfloat>>, class = void, class = void> \
  METAL_FUNC float name(T x, T y, T z) {                                 \
    return metal::name((float)x, (float)y, (float)z);                    \
  }
template <class T, class = enable_if_t<is_same_v<T, bfloat>>, class = void>
METAL_FUNC float abs(T x) {
  return __builtin_fabsf((float)x);
}
__MSL_BFLOAT2(min)
__MSL_BFLOAT2(max)
__MSL_BFLOAT3(clamp)
__MSL_BFLOAT3(min3)
__MSL_BFLOAT3(max3)
__MSL_BFLOAT3(median3)
#undef __MSL_BFLOAT2
#undef __MSL_BFLOAT3
#undef __MSL_MATH1
#undef __MSL_MATH2
#undef __MSL_MATH3

// Functions with an integer or a second result.
METAL_FUNC float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
METAL_FUNC half ldexp(half x, int k) { return (half)__builtin_ldexpf((float)x, k); }
METAL_FUNC int ilogb(float x) { return __builtin_ilogbf(x); }
METAL_FUNC int ilogb(half x) { return __builtin_ilogbf((float)x); }
METAL_FUNC float frexp(float x, thread int& exponent) {
  int e = 0;
  float m = __builtin_frexpf(x, &e);
  exponent = e;
  return m;
}
METAL_FUNC half frexp(half x, thread int& exponent) { return (half)frexp((float)x, exponent); }
METAL_FUNC float modf(float x, thread float& whole) {
  whole = __builtin_truncf(x);
  return __builtin_isinf(x) ? __builtin_copysignf(0.0f, x) : __builtin_copysignf(x - whole, x);
}
METAL_FUNC half modf(half x, thread half& whole) {
  float w, f = modf((float)x, w);
  whole = (half)w;
  return (half)f;
}
METAL_FUNC float sincos(float x, thread float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
METAL_FUNC half sincos(half x, thread half& cosine) {
  cosine = (half)__builtin_cosf((float)x);
  return (half)__builtin_sinf((float)x);
}
template <class T, int N>
METAL_FUNC vec<T, N> ldexp(vec<T, N> x, vec<int, N> k) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = ldexp(x.__e[i], k.__e[i]))
  return r;
}
template <class T, int N>
METAL_FUNC vec<int, N> ilogb(vec<T, N> x) {
  vec<int, N> r;
  __MSL_EACH(N, r.__e[i] = ilogb(x.__e[i]))
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> frexp(vec<T, N> x, thread vec<int, N>& exponent) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = frexp(x.__e[i], exponent.__e[i]))
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> modf(vec<T, N> x, thread vec<T, N>& whole) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = modf(x.__e[i], whole.__e[i]))
  return r;
}
template <class T, int N>
METAL_FUNC vec<T, N> sincos(vec<T, N> x, thread vec<T, N>& cosine) {
  vec<T, N> r;
  __MSL_EACH(N, r.__e[i] = sincos(x.__e[i], cosine.__e[i]))
  return r;
}
}  // namespace metal
