"""Floating-point functions against numpy in float64, and what they return for half, bfloat and vectors."""

import math

import numpy as np
import pytest
from simulator_run import TYPES, as_type, evaluate, of_type, run

RNG = np.random.default_rng(1)
ANY = RNG.uniform(-4, 4, 64)
POSITIVE = RNG.uniform(0.01, 20, 64)
UNIT = RNG.uniform(-0.99, 0.99, 64)
WIDE = RNG.uniform(-30, 30, 64)
# Relative to the larger of the result and 1: some units in the last place of float, half a unit of half.
TOLERANCE = {"float": 2e-6, "half": 1e-3}

ONE = {
    "exp": (np.exp, ANY),
    "exp2": (np.exp2, ANY),
    "exp10": (lambda x: 10.0**x, UNIT),
    "log": (np.log, POSITIVE),
    "log2": (np.log2, POSITIVE),
    "log10": (np.log10, POSITIVE),
    "sin": (np.sin, WIDE),
    "cos": (np.cos, WIDE),
    "tan": (np.tan, UNIT),
    "sinpi": (lambda x: np.sin(np.pi * x), WIDE),
    "cospi": (lambda x: np.cos(np.pi * x), WIDE),
    "tanpi": (lambda x: np.tan(np.pi * x), UNIT / 3),
    "asin": (np.arcsin, UNIT),
    "acos": (np.arccos, UNIT),
    "atan": (np.arctan, ANY),
    "sinh": (np.sinh, ANY),
    "cosh": (np.cosh, ANY),
    "tanh": (np.tanh, ANY),
    "asinh": (np.arcsinh, ANY),
    "acosh": (np.arccosh, POSITIVE + 1),
    "atanh": (np.arctanh, UNIT),
    "sqrt": (np.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / np.sqrt(x), POSITIVE),
    "floor": (np.floor, WIDE),
    "ceil": (np.ceil, WIDE),
    "trunc": (np.trunc, WIDE),
    "round": (lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), np.append(WIDE, [0.5, 1.5, -2.5])),
    "rint": (np.rint, np.append(WIDE, [0.5, 1.5, -2.5])),
    "fabs": (np.abs, ANY),
    "abs": (np.abs, ANY),
    "fract": (lambda x: x - np.floor(x), WIDE),
    "sign": (np.sign, np.append(ANY, 0)),
    "saturate": (lambda x: np.clip(x, 0, 1), ANY),
}
TWO = {
    "pow": (np.power, POSITIVE[:32], UNIT[:32]),
    "powr": (np.power, POSITIVE[:32], UNIT[:32]),
    "fmod": (np.fmod, WIDE[:32], POSITIVE[:32] + 1),
    "atan2": (np.arctan2, ANY[:32], ANY[32:]),
    "fmin": (np.minimum, ANY[:32], ANY[32:]),
    "fmax": (np.maximum, ANY[:32], ANY[32:]),
    "min": (np.minimum, ANY[:32], ANY[32:]),
    "max": (np.maximum, ANY[:32], ANY[32:]),
    "copysign": (np.copysign, ANY[:32], ANY[32:]),
    "divide": (np.divide, ANY[:32], POSITIVE[:32] + 1),
    "fdim": (lambda x, y: np.maximum(x - y, 0), ANY[:32], ANY[32:]),
    "step": (lambda edge, x: np.where(x < edge, 0.0, 1.0), ANY[:32], ANY[32:]),
}
THREE = {
    "fma": lambda x, y, z: x * y + z,
    "mix": lambda x, y, z: x + (y - x) * z,
    "clamp": lambda x, y, z: np.minimum(np.maximum(x, y), z),
    "fmin3": lambda x, y, z: np.minimum(x, np.minimum(y, z)),
    "fmax3": lambda x, y, z: np.maximum(x, np.maximum(y, z)),
    "min3": lambda x, y, z: np.minimum(x, np.minimum(y, z)),
    "max3": lambda x, y, z: np.maximum(x, np.maximum(y, z)),
    "fmedian3": lambda x, y, z: np.median(np.stack([x, y, z]), 0),
    "median3": lambda x, y, z: np.median(np.stack([x, y, z]), 0),
}


def close(got: np.ndarray, expected: np.ndarray, kind: str, name: str) -> None:
    error = np.abs(got.astype(np.float64) - expected) / np.maximum(np.abs(expected), 1)
    assert error.max() <= TOLERANCE[kind], f"{name}: {error.max()} at {error.argmax()}"


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize("namespace", ["metal", "fast", "precise"])
def test_functions_of_one(kind, namespace):
    for size in {values.size for _, values in ONE.values()}:
        names = [name for name, (_, values) in ONE.items() if values.size == size]
        inputs = [as_type(ONE[name][1], kind) for name in names]
        lines = "".join(f"y[{n}][i] = {namespace}::{name}(p[{n}][i]);\n" for n, name in enumerate(names))
        source = (
            f"kernel void k(device {kind} (*y)[{size}], device {kind} (*p)[{size}], uint i [[thread_position_in_grid]])"
        )
        got = run(f"{source} {{\n{lines}}}", [np.zeros((len(names), size), TYPES[kind]), np.stack(inputs)], size)[0]
        for name, x, y in zip(names, inputs, got, strict=True):
            close(y, ONE[name][0](x.astype(np.float64)), kind, name)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_functions_of_two_and_three(kind):
    for name, (function, x, y) in TWO.items():
        a, b = as_type(x, kind), as_type(y, kind)
        close(
            evaluate([f"{name}(a, b)"], kind, a, b)[0], function(a.astype(np.float64), b.astype(np.float64)), kind, name
        )
    a, b, c = as_type(ANY[:32], kind), as_type(-POSITIVE[:32], kind), as_type(POSITIVE[32:], kind)
    got = evaluate([f"{name}(a, b, c)" for name in THREE], kind, a, b, c)
    for (name, function), y in zip(THREE.items(), got, strict=True):
        expected = function(*(x.astype(np.float64) for x in (a, b, c)))
        close(y / 20, expected / 20, kind, name)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_vectors_go_element_by_element(kind):
    names = [name for name, (_, values) in ONE.items() if values.size == 64]
    inputs = as_type(np.stack([ONE[name][1] for name in names]), kind)
    size = len(names)
    lines = "".join(
        f"y[{n}][4*i] = {name}(p[{n}][4*i]); y[{n}][4*i+1] = {name}(p[{n}][4*i+1]); "
        f"v = {name}({kind}4({kind}2(0.5), p[{n}][4*i+2], p[{n}][4*i+3])); y[{n}][4*i+2] = v.z; y[{n}][4*i+3] = v.w;\n"
        for n, name in enumerate(names)
    )
    source = f"kernel void k(device {kind} (*y)[64], device {kind} (*p)[64], uint i [[thread_position_in_grid]])"
    got = run(f"{source} {{ {kind}4 v;\n{lines}}}", [np.zeros((size, 64), TYPES[kind]), inputs], 16)[0]
    for name, x, y in zip(names, inputs, got, strict=True):
        if name != "acosh":  # of one half: no number, but of the others
            close(y, ONE[name][0](x.astype(np.float64)), kind, name)
    two = [f"{name}({kind}2(a, b), {kind}2(b, a)).y" for name in TWO]
    two += [f"max({kind}3(a, b, 1), {kind}(0)).{c}" for c in "xy"] + [f"clamp({kind}2(a, b), {kind}(0), {kind}(1)).y"]
    a, b = as_type(POSITIVE[:32], kind), as_type(POSITIVE[32:] + 1, kind)
    x, z = a.astype(np.float64), b.astype(np.float64)
    cases = [*(function(z, x) for function, *_ in TWO.values()), np.maximum(x, 0), np.maximum(z, 0), np.clip(z, 0, 1)]
    for line, y, expected in zip(two, evaluate(two, kind, a, b), cases, strict=True):
        if "pow" not in line:
            close(y, expected, kind, line)


def test_half_is_rounded_once():
    x = np.arange(1, 2048, dtype=np.uint16).view(np.float16)
    got = evaluate(["sqrt(a)", "rsqrt(a)", "divide(half(1), a)", "fma(a, a, half(1))"], "half", x)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = [np.sqrt(exact), 1 / np.sqrt(exact), 1 / exact, exact * exact + 1]
        for y, z in zip(got, expected, strict=True):
            np.testing.assert_array_equal(y, z.astype(np.float16))


def test_half_arithmetic_rounds_each_step():
    a, b = (RNG.uniform(-2, 2, 64).astype(np.float16) for _ in range(2))
    # In one expression the compiler may fuse the two operations.
    before = "half steps(half a, half b) { half t = a * b; return t + a; }"
    got = evaluate(["steps(a, b)", "a + b - a", "(a * b) * 2.0f"], "half", a, b, before=before)
    wide = ((a * b).astype(np.float32) * 2).astype(np.float16)
    for y, expected in zip(got, [a * b + a, a + b - a, wide], strict=True):
        np.testing.assert_array_equal(y, expected)


def test_bfloat_arithmetic_rounds_each_step():
    kind = "bfloat"
    a, b = (as_type(RNG.uniform(-2, 2, 64), kind) for _ in range(2))
    lines = [
        "y[i] = a * b;",
        "bfloat t = a * b; y[64 + i] = t + a;",
        "y[128 + i] = bfloat(float(a) * float(b) + float(a));",
    ]
    lines += [
        "y[192 + i] = bfloat(exp(a));",
        "y[256 + i] = bfloat(max(a, b));",
        "y[320 + i] = -a;",
        "y[384 + i] = bfloat(half(float(a)));",
    ]
    source = "kernel void k(device bfloat* y, device bfloat* p, device bfloat* q, uint i [[thread_position_in_grid]])"
    got = run(f"{source} {{ bfloat a = p[i], b = q[i]; {' '.join(lines)} }}", [np.zeros((7, 64), np.uint16), a, b], 64)[
        0
    ]
    x, z = of_type(a, kind), of_type(b, kind)
    product = of_type(as_type(x * z, kind), kind)
    cases = [x * z, product + x, x * z + x, np.exp(x), np.maximum(x, z), -x, x.astype(np.float16)]
    for y, expected in zip(got, cases, strict=True):
        assert np.abs(y.astype(int) - as_type(expected, kind).astype(int)).max() <= (1 if expected is cases[3] else 0)


def test_special_values():
    infinity = float("inf")
    a = np.array([0, -0.0, 1, infinity, -infinity, np.nan, 1e-40, -1e38], np.float32)
    lines = [f"{name}(a)" for name in ("isnan", "isinf", "isfinite", "isnormal", "signbit")]
    got = evaluate(lines, "bool", a)
    finite = np.isfinite(a)
    normal = finite & (np.abs(a) >= np.finfo(np.float32).tiny)
    cases = [np.isnan(a), np.isinf(a), finite, normal, np.signbit(a)]
    for line, y, expected in zip(lines, got, cases, strict=True):
        np.testing.assert_array_equal(y, expected, err_msg=line)
    halves = evaluate([line.replace("a)", "half(a))") for line in lines[:3]], "bool", a)
    with np.errstate(over="ignore"):
        wide = a.astype(np.float16)
    for y, expected in zip(halves, [np.isnan(wide), np.isinf(wide), np.isfinite(wide)], strict=True):
        np.testing.assert_array_equal(y, expected)
    lines = ["isnan(float4(a, 0, 1, NAN)).w", "isinf(float2(a)).y", "isunordered(a, 1.0f)", "isordered(a, 1.0f)"]
    got = evaluate([*lines, "fmax(a, 1.0f) == 1.0f", "max(NAN, 2.0f) == 2.0f", "log(-abs(a) - 1) == 0"], "bool", a)
    cases = [np.ones(8), np.isinf(a), np.isnan(a), ~np.isnan(a), ~(a > 1), np.ones(8), np.zeros(8)]
    for y, expected in zip(got, cases, strict=True):
        np.testing.assert_array_equal(y, expected)


def test_second_results():
    a = np.array([3.75, -3.75, 0.1, 100, -0.5, 0], np.float32)
    before = """float part(float x) { float w; float f = modf(x, w); return f + 1000 * w; }
      float mantissa(float x) { int e; return frexp(x, e) + 1000 * e; }
      float both(float x) { float c; float s = sincos(x, c); return s + 1000 * c; }
      float third(float x) { int3 e; return frexp(float3(1, 2, x), e).z + 1000 * e.z; }"""
    got = evaluate(
        ["part(a)", "mantissa(a)", "both(a)", "ldexp(a, 3)", "ilogb(a + 200)", "third(a)"], "float", a, before=before
    )
    fraction, whole = np.modf(a)
    mantissa, exponent = np.frexp(a)
    frexp = mantissa + 1000 * exponent
    cases = [fraction + 1000 * whole, frexp, np.sin(a) + 1000 * np.cos(a), a * 8, np.floor(np.log2(a + 200)), frexp]
    for y, expected in zip(got, cases, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_nextafter():
    a = np.array([1, -1, 0, 3e38, 1e-45], np.float32)
    got = evaluate(["nextafter(a, INFINITY)", "nextafter(a, -2.0f)"], "float", a)
    np.testing.assert_array_equal(got[0], np.nextafter(a, np.float32(np.inf)))
    np.testing.assert_array_equal(got[1], np.nextafter(a, np.float32(-2)))
    half = np.array([1, -1, 0, 60000], np.float16)
    got = evaluate(["nextafter(a, half(INFINITY))"], "half", half)
    np.testing.assert_array_equal(got[0], np.nextafter(half, np.float16(np.inf)))


def test_geometry():
    a, b = RNG.uniform(-2, 2, (2, 8, 3)).astype(np.float32)
    lines = [
        f"y[i * 16 + {n}] = {text};"
        for n, text in enumerate(
            [
                "dot(v, w)",
                "length(v)",
                "length_squared(v)",
                "distance(v, w)",
                "dot(v.xy, w.yz)",
                "cross(v, w).x",
                "cross(v, w).y",
                "cross(v, w).z",
                "normalize(v).y",
                "reflect(v, w).z",
                "smoothstep(-1.0f, 1.0f, v.x)",
                "faceforward(v, w, v).x",
                "refract(v, w, 0.5f).x",
                "dot(half2(1, 2), half2(3, 4))",
                "dot(int3(1, 2, 3), int3(4))",
                "fast::length(v.xz)",
            ]
        )
    ]
    source = "kernel void k(device float* y, device packed_float3* p, device packed_float3* q,"
    source += " uint i [[thread_position_in_grid]]"
    got = run(
        f"{source}) {{ float3 v = p[i], w = q[i]; {' '.join(lines)} }}", [np.zeros((8, 16), np.float32), a, b], 8
    )[0]
    x, z = a.astype(np.float64), b.astype(np.float64)
    dot = (x * z).sum(1)
    t = np.clip((x[:, 0] + 1) / 2, 0, 1)
    k = 1 - 0.25 * (1 - dot**2)
    refracted = np.where(k < 0, 0, 0.5 * x[:, 0] - (0.5 * dot + np.sqrt(np.maximum(k, 0))) * z[:, 0])
    cases = [
        dot,
        np.linalg.norm(x, axis=1),
        (x * x).sum(1),
        np.linalg.norm(x - z, axis=1),
        (x[:, :2] * z[:, 1:]).sum(1),
    ]
    cases += [*np.cross(x, z).T, x[:, 1] / np.linalg.norm(x, axis=1), x[:, 2] - 2 * dot * z[:, 2], t * t * (3 - 2 * t)]
    cases += [
        np.where(dot < 0, x[:, 0], -x[:, 0]),
        refracted,
        np.full(8, 11),
        np.full(8, 24),
        np.hypot(x[:, 0], x[:, 2]),
    ]
    np.testing.assert_allclose(got, np.stack(cases, 1), rtol=1e-4, atol=1e-5)


def test_constants():
    lines = [
        "M_PI_F",
        "M_E_F",
        "M_LN2_F",
        "M_SQRT2_F",
        "INFINITY",
        "FLT_MAX",
        "float(HALF_MAX)",
        "MAXFLOAT",
        "M_2_SQRTPI_F",
    ]
    got = evaluate(lines, "float")[:, 0]
    largest = np.finfo(np.float32).max
    expected = [math.pi, math.e, math.log(2), math.sqrt(2), math.inf, largest, 65504, largest, 2 / math.sqrt(math.pi)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
