"""Integer functions, bit casts and type traits."""

import numpy as np
import pytest
from simulator_run import TYPES, evaluate, run

INTEGERS = [kind for kind in TYPES if kind not in ("bool", "half", "float", "bfloat")]
RNG = np.random.default_rng(2)


def values(kind: str) -> np.ndarray:
    info = np.iinfo(TYPES[kind])
    edges = [info.min, info.min + 1, 0, 1, 2, info.max - 1, info.max]
    return np.array([*edges, *RNG.integers(info.min, info.max, 25, TYPES[kind], endpoint=True).tolist()], TYPES[kind])


def wrap(x: int, kind: str) -> int:
    bits = TYPES[kind]().itemsize * 8
    x &= (1 << bits) - 1
    return x - (1 << bits) if np.iinfo(TYPES[kind]).min < 0 and x >> (bits - 1) else x


def saturate(x: int, kind: str) -> int:
    info = np.iinfo(TYPES[kind])
    return min(max(x, int(info.min)), int(info.max))


def unsigned(x: int, bits: int) -> int:
    return x & ((1 << bits) - 1)


def rotate(x: int, n: int, bits: int) -> int:
    n, x = n % bits, unsigned(x, bits)
    return (x << n) | (x >> (bits - n))


@pytest.mark.parametrize("kind", INTEGERS)
def test_functions(kind):
    a = values(kind)
    b, c = np.roll(a, 5), np.roll(a, 11)
    bits = a.dtype.itemsize * 8
    functions = {
        "min(a, b)": lambda x, y, z: min(x, y),
        "max(a, b)": lambda x, y, z: max(x, y),
        "clamp(a, min(b, c), max(b, c))": lambda x, y, z: min(max(x, min(y, z)), max(y, z)),
        "min3(a, b, c)": lambda x, y, z: min(x, y, z),
        "max3(a, b, c)": lambda x, y, z: max(x, y, z),
        "median3(a, b, c)": lambda x, y, z: sorted((x, y, z))[1],
        "abs(a)": lambda x, y, z: abs(x),
        "absdiff(a, b)": lambda x, y, z: abs(x - y),
        "addsat(a, b)": lambda x, y, z: saturate(x + y, kind),
        "subsat(a, b)": lambda x, y, z: saturate(x - y, kind),
        "hadd(a, b)": lambda x, y, z: (x + y) >> 1,
        "rhadd(a, b)": lambda x, y, z: (x + y + 1) >> 1,
        "mulhi(a, b)": lambda x, y, z: (x * y) >> bits,
        "madhi(a, b, c)": lambda x, y, z: ((x * y) >> bits) + z,
        "madsat(a, b, c)": lambda x, y, z: saturate(x * y + z, kind),
        "popcount(a)": lambda x, y, z: unsigned(x, bits).bit_count(),
        "clz(a)": lambda x, y, z: bits - unsigned(x, bits).bit_length(),
        "ctz(a)": lambda x, y, z: bits if x == 0 else (x & -x).bit_length() - 1,
        "reverse_bits(a)": lambda x, y, z: int(f"{unsigned(x, bits):0{bits}b}"[::-1], 2),
        "rotate(a, b)": lambda x, y, z: rotate(x, y, bits),
        "extract_bits(a, 2, 3)": lambda x, y, z: extracted(x, 2, 3, kind),
        "extract_bits(a, 1, 0)": lambda x, y, z: 0,
        "insert_bits(a, b, 3, 4)": lambda x, y, z: (x & ~(15 << 3)) | ((y & 15) << 3),
        "insert_bits(a, b, 0, " + str(bits) + ")": lambda x, y, z: y,
    }
    got = evaluate(list(functions), kind, a, b, c)
    for (text, function), y in zip(functions.items(), got, strict=True):
        expected = [wrap(function(*map(int, row)), kind) for row in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(y, np.array(expected, TYPES[kind]), err_msg=text)


def extracted(x: int, offset: int, bits: int, kind: str) -> int:
    part = (x >> offset) & ((1 << bits) - 1)
    signed = np.iinfo(TYPES[kind]).min < 0
    return part - (1 << bits) if signed and part >> (bits - 1) else part


@pytest.mark.parametrize("kind", ["char", "uint", "long"])
def test_vectors_go_element_by_element(kind):
    a = values(kind)
    b = np.roll(a, 5)
    functions = [
        "min({a}, {b})",
        "max({a}, {b})",
        "absdiff({a}, {b})",
        "addsat({a}, {b})",
        "mulhi({a}, {b})",
        "clz({a})",
    ]
    functions += ["popcount({a})", "abs({a})", "rotate({a}, {b})", "median3({a}, {b}, {a})", "clamp({a}, {b}, {b})"]
    functions += ["reverse_bits({a})", "extract_bits({a}, 1, 3)", "insert_bits({a}, {b}, 1, 3)"]
    scalar = evaluate([text.format(a="a", b="b") for text in functions], kind, a, b)
    inside = [text.format(a=f"{kind}3(b, b, a)", b=f"{kind}3(a, a, b)") for text in functions]
    vectors = evaluate([f"{text}.z" for text in inside], kind, a, b)
    np.testing.assert_array_equal(vectors, scalar)


def test_24_bits():
    a = RNG.integers(-(2**23), 2**23, 32).astype(np.int32)
    b = np.roll(a, 1)
    product = a.astype(np.int64) * b
    got = evaluate(["mul24(a, b)", "mad24(a, b, 7)", "int(mul24(uint(a) & 0xffffffu, 3u))"], "int", a, b)
    cases = [product, product + 7, (a.astype(np.int64) & 0xFFFFFF) * 3]
    for y, expected in zip(got, cases, strict=True):
        np.testing.assert_array_equal(y, expected.astype(np.int32))


def test_mixed_types_are_ambiguous_as_in_metal():
    from metile.targets.compiler import CompileError

    for wrong in ("max(1, 2u)", "min(1.0f, 2)", "clamp(1u, 0, 2)"):
        with pytest.raises(CompileError, match="ambiguous"):
            evaluate([wrong], "float")


def test_as_type_keeps_bits():
    a = RNG.integers(0, 2**32, 16, dtype=np.uint64).astype(np.uint32)
    lines = [
        "as_type<uint>(as_type<float>(a))",
        "as_type<uint>(as_type<half2>(a))",
        "as_type<uint>(as_type<uchar4>(a).xyzw)",
    ]
    lines += ["as_type<uint2>(ulong(a)).x", "uint(as_type<ushort2>(a).y)", "metal::as_type<uint>(as_type<int>(a))"]
    got = evaluate(lines, "uint", a)
    for y, expected in zip(got, [a, a, a, a, a >> 16, a], strict=True):
        np.testing.assert_array_equal(y, expected)


TRAITS = """
template <class T> struct Holder {};
struct Plain { int a; };
enum Colour { red };
static_assert(is_same_v<int, int> && !is_same_v<int, uint> && is_same<half, half>::value, "");
static_assert(is_same_v<uint32_t, uint> && is_same_v<ushort, uint16_t> && sizeof(size_t) == 8 && sizeof(long) == 8, "");
static_assert(is_integral_v<bool> && is_integral_v<char> && is_integral_v<ulong> && !is_integral_v<half>, "");
static_assert(is_floating_point_v<float> && is_floating_point_v<half> && is_floating_point_v<bfloat>, "");
static_assert(!is_floating_point_v<int> && !is_floating_point_v<float2> && is_arithmetic_v<bfloat>, "");
static_assert(is_integral_v<const device int> && is_floating_point_v<const float>, "");
static_assert(is_unsigned_v<uchar> && !is_unsigned_v<int> && is_signed_v<int> && is_signed_v<half> &&
      !is_signed_v<ulong>, "");
static_assert(is_convertible_v<int, float> && is_convertible_v<bfloat, float> && !is_convertible_v<Plain, float>, "");
static_assert(!is_convertible_v<float, bfloat> && !is_convertible_v<half, bfloat>, "");
static_assert(is_pointer_v<device int*> && !is_pointer_v<int> && is_enum_v<Colour> && is_class_v<Plain>, "");
static_assert(is_same_v<conditional_t<true, int, float>, int> &&
      is_same_v<conditional_t<false, int, float>, float>, "");
static_assert(is_same_v<enable_if_t<true, half>, half> && is_same_v<remove_const_t<const int>, int>, "");
static_assert(is_same_v<remove_cv_t<const volatile int>, int> &&
      is_same_v<remove_reference_t<device int&>, device int>, "");
static_assert(is_same_v<remove_addrspace_t<device int>, int> &&
      is_same_v<remove_addrspace_t<threadgroup float>, float>, "");
static_assert(is_same_v<remove_pointer_t<thread int*>, thread int> && is_same_v<remove_extent_t<int[3]>, int>, "");
static_assert(is_same_v<decay_t<const device int&>, int>, "");
static_assert(is_same_v<make_unsigned_t<int>, uint> && is_same_v<make_signed_t<ulong>, long>, "");
static_assert(is_same_v<make_unsigned_t<char>, uchar> && is_same_v<make_unsigned_t<short>, ushort>, "");
static_assert(true_type::value && !false_type::value && bool_constant<true>{} &&
      integral_constant<int, 3>::value == 3, "");
static_assert(disjunction<false_type, true_type>::value && !conjunction<false_type, true_type>::value, "");
static_assert(_disjunction<is_same<int, float>, is_same<int, int>>::value && negation<false_type>::value, "");
static_assert(numeric_limits<int>::max() == 2147483647 && numeric_limits<char>::min() == -128, "");
static_assert(numeric_limits<uint>::max() == 4294967295u && numeric_limits<long>::min() == LONG_MIN, "");
static_assert(numeric_limits<float>::digits == 24 && numeric_limits<half>::digits == 11 &&
      numeric_limits<bfloat>::digits == 8, "");
static_assert(numeric_limits<half>::max() == 65504.0h && numeric_limits<float>::lowest() == -FLT_MAX, "");
static_assert(numeric_limits<uchar>::is_integer && numeric_limits<float>::has_infinity &&
      !numeric_limits<Plain>::is_specialized, "");
static_assert(numeric_limits<float>::epsilon() == FLT_EPSILON && numeric_limits<float>::infinity() > FLT_MAX, "");
static_assert(sizeof(half4) == 8 && sizeof(float3) == 16 && sizeof(uchar3) == 4 && sizeof(bfloat2) == 4 &&
      sizeof(bool4) == 4, "");
static_assert(sizeof(packed_half3) == 6 && alignof(float4) == 16 && alignof(packed_float4) == 4, "");
static_assert(is_same_v<decltype(half(1) * 2.0f), float> && is_same_v<decltype(half(1) * half(1)), half>, "");
static_assert(is_same_v<decltype(bfloat(1.0f) * bfloat(1.0f)), bfloat> &&
      is_same_v<decltype(bfloat(1.0f) * 1.0f), float>, "");
static_assert(is_same_v<decltype(half2(1) * 2.0f), half2> && is_same_v<decltype(float3(1) < 2), bool3>, "");
static_assert(is_same_v<vec<float, 4>, float4> && is_same_v<decltype(float4(1).x), float>, "");
kernel void k(device int* y) { array<int, 3> a = {{1, 2, 3}}; uniform<int> u = make_uniform(4);
      thread array<int, 3>& r = a; r[1] += u;
  y[0] = a[0] + a[1] + a[2] + int(a.size()); y[1] = Colour::red; }
"""


def test_traits():
    got = run(TRAITS, [np.zeros(2, np.int32)])[0]
    np.testing.assert_array_equal(got, [13, 0])
