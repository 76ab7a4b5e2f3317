"""simd_* and quad_* functions against a model of 32 lanes: whole, partial and divergent simdgroups, every type."""

import functools

import numpy as np
import pytest
from simulator_run import TYPES, as_type, of_type, run

from metile.simulator.program import Options

KINDS = [kind for kind in TYPES if kind != "bool"]
INTEGERS = [kind for kind in KINDS if kind not in ("half", "float", "bfloat")]
LANES = np.arange(32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def collect(lines, kind, values, threads=64, before="", options=None):
    """Return what each line gives each thread; `x` is the thread's value, `i` its index, `l` its lane."""
    body = "".join(f"y[{n} * {threads} + i] = {line};\n" for n, line in enumerate(lines))
    source = f"""kernel void k(device {kind}* y, device {kind}* p, uint i [[thread_position_in_threadgroup]],
      ushort l [[thread_index_in_simdgroup]]) {{ {kind} x = p[i]; {before}\n{body}}}"""
    out = np.full((len(lines), threads), 77, values.dtype)
    return run(source, [out, values[:threads]], threads, threads, options)[0]


def by_simdgroup(values, function):
    return np.concatenate([function(values[start : start + 32]) for start in range(0, len(values), 32)])


@pytest.mark.parametrize("kind", KINDS)
def test_shuffles(kind, rng):
    values = as_type(rng.integers(0, 100, 64), kind)
    lanes = {
        "simd_shuffle(x, ushort(31 - l))": 31 - LANES,
        "simd_broadcast(x, 5)": np.full(32, 5),
        "simd_broadcast_first(x)": np.zeros(32, int),
        "simd_shuffle_xor(x, 9)": LANES ^ 9,
        "simd_shuffle_down(x, 3)": np.where(LANES + 3 < 32, LANES + 3, LANES),
        "simd_shuffle_up(x, 7)": np.where(LANES >= 7, LANES - 7, LANES),
        "simd_shuffle_rotate_down(x, 30)": (LANES + 30) % 32,
        "simd_shuffle_rotate_up(x, 30)": (LANES - 30) % 32,
        "quad_shuffle(x, ushort(3 - (l & 3)))": LANES // 4 * 4 + 3 - LANES % 4,
        "quad_broadcast(x, 2)": LANES // 4 * 4 + 2,
        "quad_broadcast_first(x)": LANES // 4 * 4,
        "quad_shuffle_xor(x, 3)": LANES ^ 3,
        "quad_shuffle_down(x, 1)": np.where(LANES % 4 < 3, LANES + 1, LANES),
        "quad_shuffle_up(x, 2)": np.where(LANES % 4 >= 2, LANES - 2, LANES),
        "quad_shuffle_rotate_down(x, 3)": LANES // 4 * 4 + (LANES + 3) % 4,
        "quad_shuffle_rotate_up(x, 3)": LANES // 4 * 4 + (LANES - 3) % 4,
    }
    got = collect(list(lanes), kind, values)
    for (line, at), y in zip(lanes.items(), got, strict=True):
        np.testing.assert_array_equal(y, by_simdgroup(values, lambda v, at=at: v[at]), err_msg=line)


@pytest.mark.parametrize("kind", ["half", "bfloat", "uint", "long"])
def test_shuffle_and_fill(kind, rng):
    values = as_type(rng.integers(0, 50, 64), kind)
    fill = as_type(np.arange(50, 82), kind)
    lines, expected = [], []
    for width in (32, 16, 8):
        for delta in (1, 5, width - 1):
            start = LANES // width * width
            at = LANES % width
            down = at + delta
            lines.append(f"simd_shuffle_and_fill_down(x, {kind}(50 + l), {delta}, {width})")
            expected.append((down < width, start + down % width))
            lines.append(f"simd_shuffle_and_fill_up(x, {kind}(50 + l), {delta}, {width})")
            expected.append((at >= delta, start + (at - delta) % width))
    lines += [f"simd_shuffle_and_fill_down(x, {kind}(50 + l), 4)", f"quad_shuffle_and_fill_up(x, {kind}(50 + l), 1)"]
    expected += [(LANES + 4 < 32, (LANES + 4) % 32), (LANES % 4 >= 1, LANES // 4 * 4 + (LANES - 1) % 4)]
    got = collect(lines, kind, values)
    for line, (inside, at), y in zip(lines, expected, got, strict=True):
        model = by_simdgroup(values, lambda v, inside=inside, at=at: np.where(inside, v[at], fill[at]))
        np.testing.assert_array_equal(y, model, err_msg=line)


def reduced(values, function):
    return functools.reduce(function, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [64, 40])
def test_reductions(kind, threads, rng):
    """40 threads: the second simdgroup has 8 lanes."""
    small = rng.integers(0, 3, 64)
    values = as_type(np.where(rng.random(64) < 0.9, 1, small), kind)[:threads]
    operations = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
    if kind in INTEGERS:
        operations |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    lines = [f"{group}_{name}(x)" for name in operations for group in ("simd", "quad")]
    got = of_type(collect(lines, kind, values, threads), kind)
    exact = of_type(values, kind).astype(np.float64 if kind in ("half", "float", "bfloat") else np.int64)
    for n, (name, function) in enumerate(operations.items()):
        for place, width in ((2 * n, 32), (2 * n + 1, 4)):
            for start in range(0, threads, width):
                expected = reduced(exact[start : start + width], function)
                part = got[place, start : start + width]
                np.testing.assert_array_equal(part, np.full(part.shape, expected).astype(part.dtype), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_scans(kind, rng):
    values = as_type(np.where(rng.random(64) < 0.9, 1, 2), kind)
    lines = [
        f"{g}_prefix_{way}_{name}(x)"
        for g in ("simd", "quad")
        for way in ("inclusive", "exclusive")
        for name in ("sum", "product")
    ]
    got = of_type(collect(lines, kind, values), kind)
    exact = of_type(values, kind).astype(np.float64)
    for line, y in zip(lines, got, strict=True):
        width, function = (32 if "simd" in line else 4), (np.cumsum if "sum" in line else np.cumprod)
        for start in range(0, 64, width):
            inclusive = function(exact[start : start + width])
            first = 0.0 if "sum" in line else 1.0
            expected = inclusive if "inclusive" in line else np.append(first, inclusive[:-1])
            np.testing.assert_array_equal(y[start : start + width], expected.astype(y.dtype), err_msg=line)


@pytest.mark.parametrize("check", [False, True])
def test_divergent_lanes_meet_their_own(check, rng):
    """Lanes of the two sides of a branch, and of a loop that ends sooner for some, combine among themselves."""
    values = rng.integers(0, 100, 64).astype(np.int32)
    before = """int a = 0, b = 0, c = 0; if (l % 3 == 0) { a = simd_sum(x); } else { a = simd_max(x);
      b = simd_broadcast_first(x); }
      for (int n = 0; n < l / 8 + 1; n++) c += simd_sum(x);"""
    got = collect(["a", "b", "c"], "int", values, before=before, options=Options(check=check))
    thirds = LANES % 3 == 0

    def model(v):
        a = np.where(thirds, v[thirds].sum(), v[~thirds].max())
        b = np.where(thirds, 0, v[1])
        c = sum(np.where(n <= LANES // 8, v[n <= LANES // 8].sum(), 0) for n in range(4))
        return np.stack([a, b, c])

    expected = np.concatenate([model(values[:32]), model(values[32:])], 1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("threads", [64, 41])
def test_votes(threads):
    values = np.arange(64, dtype=np.uint64)
    lines = [
        "ulong(simd_ballot(x % 3 == 0))",
        "simd_any(x == 35)",
        "simd_all(x < 40)",
        "ulong(simd_active_threads_mask())",
    ]
    lines += ["simd_is_first()", "quad_any(x % 8 == 1)", "quad_all(x % 4 < 4 && x < 41)", "ulong(quad_ballot(x & 1))"]
    lines += ["quad_is_first()", "simd_ballot(x < 40).all()", "simd_ballot(x == 35).any()"]
    got = collect(lines, "ulong", values, threads)
    for start in range(0, threads, 32):
        x = values[start : min(start + 32, threads)]
        active = (1 << len(x)) - 1
        ballot = sum(1 << i for i, v in enumerate(x.tolist()) if v % 3 == 0)
        quads = [x[q : q + 4] for q in range(0, len(x), 4)]
        expected = {0: ballot, 1: int((x == 35).any()), 2: int((x < 40).all()), 3: active}
        expected |= {9: int(len(x) == 32 and (x < 40).all()), 10: int((x == 35).any())}
        for n, value in expected.items():
            np.testing.assert_array_equal(got[n, start : start + len(x)], np.uint64(value), err_msg=lines[n])
        np.testing.assert_array_equal(got[4, start : start + len(x)], x == start)
        for q, quad in enumerate(quads):
            part = slice(start + 4 * q, start + 4 * q + len(quad))
            np.testing.assert_array_equal(got[5, part], np.uint64((quad % 8 == 1).any()))
            np.testing.assert_array_equal(got[6, part], np.uint64((quad < 41).all()))
            np.testing.assert_array_equal(
                got[7, part], np.uint64(sum(1 << i for i, v in enumerate(quad.tolist()) if v & 1))
            )
            np.testing.assert_array_equal(got[8, part], quad == quad[0])


def test_vectors_and_structs(rng):
    values = rng.integers(0, 9, (32, 4)).astype(np.float32)
    source = """struct Pair { float4 a; int2 b; };
      kernel void k(device float4* y, device float4* p, uint i [[thread_position_in_grid]]) {
      float4 v = p[i]; y[i] = simd_sum(v); y[32 + i] = simd_shuffle_xor(v, 1);
      y[64 + i] = float4(simd_max(v.xy), simd_min(v.zw));
      Pair q; q.a = v; q.b = int2(i, 2 * i); Pair r = simd_shuffle(q, 3); y[96 + i] = r.a + float(r.b.y);
      y[128 + i].xy = simd_broadcast(v.zx, 4); }"""
    got = run(source, [np.zeros((5, 32, 4), np.float32), values], 32)[0]
    np.testing.assert_array_equal(got[0], np.broadcast_to(values.sum(0), (32, 4)))
    np.testing.assert_array_equal(got[1], values[LANES ^ 1])
    np.testing.assert_array_equal(got[2, 0], [*values[:, :2].max(0), *values[:, 2:].min(0)])
    np.testing.assert_array_equal(got[3], np.broadcast_to(values[3] + 6, (32, 4)))
    np.testing.assert_array_equal(got[4, 7, :2], values[4, [2, 0]])


def test_barriers_order_threadgroup_memory():
    source = """kernel void k(device int* y, uint i [[thread_position_in_threadgroup]]) { threadgroup int t[128];
      t[i] = i * i;
      threadgroup_barrier(mem_flags::mem_threadgroup); int a = t[127 - i];
      threadgroup_barrier(mem_flags::mem_threadgroup); t[i] = a;
      simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[i ^ 1];
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); }"""
    got = run(source, [np.zeros(128, np.int32)], 128)[0]
    at = np.arange(128) ^ 1
    np.testing.assert_array_equal(got, (127 - at) ** 2)
