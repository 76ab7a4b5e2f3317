"""simdgroup_matrix: where its elements are, loads, stores and products, by lane and once a simdgroup."""

import numpy as np
import pytest
from simulator_run import TYPES, as_type, of_type, run

from metile.simulator.program import Options

KINDS = ["float", "half", "bfloat"]
BOTH = pytest.mark.parametrize("once", [False, True])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def options(once: bool) -> Options:
    return Options(once_per_simdgroup=once)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_each_lane_holds_two_neighbours(kind, once):
    source = f"""kernel void k(device {kind}* y, device {kind}* p, device {kind}* z,
      uint l [[thread_index_in_simdgroup]]) {{
      simdgroup_matrix<{kind}, 8, 8> m; simdgroup_load(m, p, 8); y[2 * l] = m.thread_elements()[0];
      y[2 * l + 1] = m.thread_elements()[1];
      m.thread_elements()[0] = {kind}(float(l)); m.thread_elements()[1] = {kind}(float(l + 32));
      simdgroup_store(m, z, 8); }}"""
    p = as_type(np.arange(64), kind)
    got, _, stored = run(
        source, [np.zeros((32, 2), TYPES[kind]), p, np.zeros((8, 8), TYPES[kind])], 32, None, options(once)
    )
    lane = np.arange(32)
    q = lane // 4
    row, column = (q & 4) + (lane // 2) % 4, (q & 2) * 2 + (lane % 2) * 2
    np.testing.assert_array_equal(of_type(got, kind), np.stack([row * 8 + column, row * 8 + column + 1], 1))
    expected = np.zeros((8, 8))
    expected[row, column], expected[row, column + 1] = lane, lane + 32
    np.testing.assert_array_equal(of_type(stored, kind), expected)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_loads_and_stores(kind, space, once, rng):
    copy = f"""threadgroup {kind} s[512], d[512]; for (uint i = l; i < 512; i += 32) {{ s[i] = p[i]; d[i] = y[i]; }}
      threadgroup_barrier(mem_flags::mem_threadgroup);"""
    back = "threadgroup_barrier(mem_flags::mem_threadgroup); for (uint i = l; i < 512; i += 32) y[i] = d[i];"
    if space == "device":
        copy, back = f"const device {kind}* s = p; device {kind}* d = y;", ""
    source = f"""kernel void k(device {kind}* y, device {kind}* p, uint l [[thread_index_in_simdgroup]]) {{ {copy}
      simdgroup_matrix<{kind}, 8, 8> m; simdgroup_load(m, s, 20); simdgroup_store(m, d, 11);
      simdgroup_load(m, s, 20, ulong2(3, 2)); simdgroup_store(m, d + 100, 8, ulong2(0, 1));
      simdgroup_load(m, s, 20, ulong2(1, 4), true); simdgroup_store(m, d + 200);
      simdgroup_load(m, s + 5, 20, 0); simdgroup_store(m, d + 300, 9, ulong2(0), true); {back} }}"""
    p = as_type(rng.integers(-99, 99, 512), kind)
    got = of_type(run(source, [np.zeros(512, TYPES[kind]), p], 32, None, options(once))[0], kind)
    values = of_type(p, kind)

    def tile(start, stride, x=0, y=0):
        return np.stack([values[start + (y + r) * stride + x :][:8] for r in range(8)])

    expected = np.zeros(512, np.float32)
    for start, stride, matrix in (
        (0, 11, tile(0, 20)),
        (108, 8, tile(0, 20, 3, 2)),
        (200, 8, tile(0, 20, 1, 4).T),
        (300, 9, tile(5, 20).T),
    ):
        for r in range(8):
            expected[start + r * stride : start + r * stride + 8] = matrix[r]
    np.testing.assert_array_equal(got, expected)


@BOTH
def test_diagonal_filled_and_copied(once):
    source = """kernel void k(device float* y) { simdgroup_float8x8 d(3.0f),
      f = make_filled_simdgroup_matrix<float, 8, 8>(2.0f), c = d, e;
      e = f; f = simdgroup_float8x8(0.0f); simdgroup_store(d, y); simdgroup_store(c, y + 64);
      simdgroup_store(e, y + 128); simdgroup_store(f, y + 192);
      simdgroup_matrix<float, 8, 8> all[2] = {simdgroup_float8x8(1), make_filled_simdgroup_matrix<float, 8>(5.0f)};
      for (int i = 0; i < 2; i++) simdgroup_store(all[i], y + 256 + 64 * i); }"""
    got = run(source, [np.zeros((6, 8, 8), np.float32)], 32, None, options(once))[0]
    eye = np.eye(8)
    np.testing.assert_array_equal(
        got, np.stack([3 * eye, 3 * eye, np.full((8, 8), 2), 0 * eye, eye, np.full((8, 8), 5)])
    )


@BOTH
@pytest.mark.parametrize(
    "kinds",
    [
        ("float", "float", "float"),
        ("float", "half", "half"),
        ("float", "bfloat", "bfloat"),
        ("half", "half", "half"),
        ("bfloat", "bfloat", "bfloat"),
        ("float", "float", "half"),
        ("float", "bfloat", "float"),
    ],
)
def test_products(kinds, once, rng):
    result, left, right = kinds
    source = f"""kernel void k(device {result}* y, device {left}* p, device {right}* q, device {result}* r) {{
      simdgroup_matrix<{left}, 8, 8> a; simdgroup_matrix<{right}, 8, 8> b; simdgroup_matrix<{result}, 8, 8> c, d;
      simdgroup_load(a, p); simdgroup_load(b, q); simdgroup_load(c, r); simdgroup_multiply(d, a, b);
      simdgroup_store(d, y);
      simdgroup_multiply_accumulate(d, a, b, c); simdgroup_store(d, y + 64);
      simdgroup_multiply_accumulate(c, a, b, c); simdgroup_multiply_accumulate(c, a, b, c);
      simdgroup_store(c, y + 128); }}"""
    p, q, r = (as_type(rng.integers(-4, 5, (8, 8)), kind) for kind in (left, right, result))
    got = of_type(run(source, [np.zeros((3, 8, 8), TYPES[result]), p, q, r], 32, None, options(once))[0], result)
    a, b, c = (of_type(x, kind).astype(np.float32) for x, kind in ((p, left), (q, right), (r, result)))
    first = of_type(as_type(a @ b + c, result), result).astype(np.float32)
    expected = [of_type(as_type(x, result), result) for x in (a @ b, a @ b + c, a @ b + first)]
    np.testing.assert_array_equal(got, np.stack(expected))


@BOTH
def test_operator_and_several_simdgroups(once, rng):
    source = """kernel void k(device float* y, device float* p, uint s [[simdgroup_index_in_threadgroup]]) {
      simdgroup_float8x8 a, b; simdgroup_load(a, p + 128 * s); simdgroup_load(b, p + 128 * s + 64);
      simdgroup_store(a * b, y + 64 * s); }"""
    p = rng.integers(-4, 5, (4, 2, 8, 8)).astype(np.float32)
    got = run(source, [np.zeros((4, 8, 8), np.float32), p], 128, None, options(once))[0]
    np.testing.assert_array_equal(got, p[:, 0] @ p[:, 1])


@BOTH
def test_a_tiled_product(once, rng):
    """Two simdgroups, 16 x 16 tiles each, operands through threadgroup memory, the loop over K."""
    source = """kernel void k(device float* y, device half* p, device half* q,
      uint s [[simdgroup_index_in_threadgroup]],
        uint i [[thread_position_in_threadgroup]]) {
      threadgroup half a[16 * 24], b[16 * 40]; simdgroup_matrix<float, 8, 8> c[2][2];
      for (int m = 0; m < 2; m++) for (int n = 0; n < 2; n++) c[m][n] = simdgroup_matrix<float, 8, 8>(0);
      for (int k = 0; k < 48; k += 16) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int e = i; e < 256; e += 64) a[e / 16 * 24 + e % 16] = p[e / 16 * 48 + k + e % 16];
        for (int e = i; e < 512; e += 64) b[e / 32 * 40 + e % 32] = q[(k + e / 32) * 32 + e % 32];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int kk = 0; kk < 16; kk += 8) {
          simdgroup_matrix<half, 8, 8> x[2], z[2];
          for (int m = 0; m < 2; m++) simdgroup_load(x[m], a + m * 8 * 24 + kk, 24);
          for (int n = 0; n < 2; n++) simdgroup_load(z[n], b + kk * 40 + s * 16 + n * 8, 40);
          for (int m = 0; m < 2; m++) for (int n = 0; n < 2;
      n++) simdgroup_multiply_accumulate(c[m][n], x[m], z[n], c[m][n]);
        }
      }
      for (int m = 0; m < 2; m++) for (int n = 0; n < 2;
      n++) simdgroup_store(c[m][n], y + m * 8 * 32 + s * 16 + n * 8, 32); }"""
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((16, 48), (48, 32)))
    got = run(source, [np.zeros((16, 32), np.float32), a, b], 64, None, options(once))[0]
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))
