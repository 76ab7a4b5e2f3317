// Macros of <climits> and <cfloat> as Metal has them, constants of <metal_math>, numeric_limits.
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 0x7fffffffffffffffL
#define LONG_MIN (-0x7fffffffffffffffL - 1)
#define ULONG_MAX 0xffffffffffffffffUL
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define HUGE_VALH ((half)__builtin_inff())
#define MAXFLOAT 3.402823466e+38f
#define MAXHALF 65504.0h
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define FLT_MAX_10_EXP 38
#define FLT_MIN_10_EXP (-37)
#define FLT_RADIX 2
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX_EXP 16
#define HALF_MIN_EXP (-13)
#define HALF_MAX 65504.0h
#define HALF_MIN 6.103515625e-05h
#define HALF_EPSILON 9.765625e-04h
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E_H 2.71828182845904523536h
#define M_LOG2E_H 1.44269504088896340736h
#define M_LOG10E_H 0.43429448190325182765h
#define M_LN2_H 0.69314718055994530942h
#define M_LN10_H 2.30258509299404568402h
#define M_PI_H 3.14159265358979323846h
#define M_PI_2_H 1.57079632679489661923h
#define M_PI_4_H 0.78539816339744830962h
#define M_1_PI_H 0.31830988618379067154h
#define M_2_PI_H 0.63661977236758134308h
#define M_2_SQRTPI_H 1.12837916709551257390h
#define M_SQRT2_H 1.41421356237309504880h
#define M_SQRT1_2_H 0.70710678118654752440h

namespace metal {
template <class T>
struct numeric_limits {
  static constexpr __constant bool is_specialized = false;
};
#define __MSL_LIMITS_FLAGS(T, integer, digit_count, decimal)                     \
  static constexpr __constant bool is_specialized = true;                        \
  static constexpr __constant bool is_integer = integer, is_exact = integer;     \
  static constexpr __constant bool is_signed = metal::is_signed_v<T>;            \
  static constexpr __constant bool is_bounded = true, has_infinity = !integer;   \
  static constexpr __constant bool has_quiet_NaN = !integer;                     \
  static constexpr __constant bool is_iec559 = !integer;                         \
  static constexpr __constant int radix = 2, digits = digit_count, digits10 = decimal;
#define __MSL_INTEGER_LIMITS(T, lowest_value, highest, digit_count)              \
  template <>                                                                    \
  struct numeric_limits<T> {                                                     \
    __MSL_LIMITS_FLAGS(T, true, digit_count, (digit_count) * 3 / 10)             \
    static constexpr T min() { return (T)(lowest_value); }                       \
    static constexpr T lowest() { return (T)(lowest_value); }                    \
    static constexpr T max() { return (T)(highest); }                            \
    static constexpr T epsilon() { return 0; }                                   \
    static constexpr T infinity() { return 0; }                                  \
    static constexpr T quiet_NaN() { return 0; }                                 \
  };
#define __MSL_FLOATING_LIMITS(T, smallest, highest, eps, denormal, digit_count, decimal) \
  template <>                                                                    \
  struct numeric_limits<T> {                                                     \
    __MSL_LIMITS_FLAGS(T, false, digit_count, decimal)                           \
    static constexpr T min() { return (T)(smallest); }                           \
    static constexpr T lowest() { return (T)(-(highest)); }                      \
    static constexpr T max() { return (T)(highest); }                            \
    static constexpr T epsilon() { return (T)(eps); }                            \
    static constexpr T denorm_min() { return (T)(denormal); }                    \
    static constexpr T round_error() { return (T)0.5f; }                         \
    static constexpr T infinity() { return (T)__builtin_inff(); }                \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }             \
    static constexpr T signaling_NaN() { return (T)__builtin_nanf(""); }         \
  };
__MSL_INTEGER_LIMITS(bool, false, true, 1)
__MSL_INTEGER_LIMITS(char, -128, 127, 7)
__MSL_INTEGER_LIMITS(signed char, -128, 127, 7)
__MSL_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX, 15)
__MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX, 31)
__MSL_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX, 63)
__MSL_INTEGER_LIMITS(uchar, 0, 255, 8)
__MSL_INTEGER_LIMITS(ushort, 0, 65535, 16)
__MSL_INTEGER_LIMITS(uint, 0, UINT_MAX, 32)
__MSL_INTEGER_LIMITS(ulong, 0, ULONG_MAX, 64)
__MSL_FLOATING_LIMITS(float, FLT_MIN, FLT_MAX, FLT_EPSILON, 0x1p-149f, 24, 6)
__MSL_FLOATING_LIMITS(half, 0x1p-14f, 65504.0f, 0x1p-10f, 0x1p-24f, 11, 3)
__MSL_FLOATING_LIMITS(bfloat, 0x1p-126f, 0x1.fep127f, 0x1p-7f, 0x1p-133f, 8, 2)
#undef __MSL_LIMITS_FLAGS
#undef __MSL_INTEGER_LIMITS
#undef __MSL_FLOATING_LIMITS
}  // namespace metal
