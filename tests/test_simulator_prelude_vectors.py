"""Vectors: construction, swizzles, operators and address spaces, against numpy."""

import itertools

import numpy as np
import pytest
from simulator_run import TYPES, as_type, evaluate, of_type, run

from metile.targets.compiler import CompileError

SETS = ("xyzw", "rgba")
INTEGERS = [kind for kind in TYPES if kind not in ("bool", "half", "float", "bfloat")]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def compositions(n: int) -> list[tuple[int, ...]]:
    if n == 0:
        return [()]
    return [(part, *rest) for part in range(1, min(n, 4) + 1) for rest in compositions(n - part)]


@pytest.mark.parametrize("kind", TYPES)
def test_constructors_take_every_combination(kind):
    lines, expected = [], []
    for n in (2, 3, 4):
        for parts in compositions(n):
            values, arguments, next_value = [], [], 1
            for size in parts:
                own = [int(kind == "bool") or next_value + i for i in range(size)]
                next_value += size
                values += own
                arguments.append(str(own[0]) if size == 1 else f"{kind}{size}({', '.join(map(str, own))})")
            text = f"{kind}{n}({', '.join(arguments)})"
            lines += [f"{text}.{c}" for c in "xyzw"[:n]]
            expected += values
        lines += [f"{kind}{n}(1).{c}" for c in "rgba"[:n]]
        expected += [1] * n
    got = evaluate(lines, "float")
    np.testing.assert_array_equal(got[:, 0], expected)


@pytest.mark.parametrize("kind", TYPES)
def test_conversions_between_element_types(kind):
    others = [other for other in TYPES if other != kind]
    lines = [f"{kind}3({other}3(1, 0, 1)).{c}" for other in others for c in "xyz"]
    lines += [f"{kind}2({other}3(1, 0, 1).zy).{c}" for other in others for c in "xy"]
    got = evaluate(lines, "float")[:, 0]
    np.testing.assert_array_equal(got, [1, 0, 1] * len(others) + [1, 0] * len(others))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("space", ["thread", "device", "threadgroup", "constant"])
def test_swizzles_read(n, space):
    before = {"thread": f"float{n} v = *p;", "threadgroup": f"threadgroup float{n} v; v = *p;"}.get(space, "")
    v = "v" if before else "(*p)"
    lines, expected = [], []
    for count in (2, 3, 4):
        for at in itertools.product(range(n), repeat=count):
            letters = SETS[len(lines) % 2]
            lines.append(
                f"{{ float{count} s = {v}.{''.join(letters[i] for i in at)}; "
                f"y[{len(lines)}] = float4(s{', 0' * (4 - count)}); }}"
            )
            expected.append([i + 1 for i in at] + [0] * (4 - count))
    pointer = space if space in ("device", "constant") else "device"
    source = f"kernel void k(device float4* y, {pointer} float{n}* p) {{ {before}\n" + "\n".join(lines) + "\n}"
    got = run(source, [np.zeros((len(lines), 4), np.float32), np.arange(1, 5, dtype=np.float32)])[0]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("space", ["thread", "device", "threadgroup"])
def test_swizzles_write(n, space):
    lines, expected = [], []
    for count in range(2, n + 1):
        for at in itertools.permutations(range(n), count):
            name = "".join(SETS[len(lines) % 2][i] for i in at)
            new = ", ".join(str(10 + i) for i in range(count))
            held = {
                "thread": f"float{n} v",
                "threadgroup": f"threadgroup float{n} v",
                "device": f"device float{n}& v = *p",
            }[space]
            lines.append(
                f"{{ {held}; v = float{n}(0); v.{name} = float{count}({new}); v.{name} += 1; "
                f"for (int i = 0; i < {n}; i++) y[{len(lines) * 4} + i] = v[i]; }}"
            )
            row = [0.0] * 4
            for place, i in enumerate(at):
                row[i] = 11 + place
            expected.append(row)
    source = f"kernel void k(device float* y, device float{n}* p) {{\n" + "\n".join(lines) + "\n}"
    got = run(source, [np.zeros((len(lines), 4), np.float32), np.zeros(4, np.float32)])[0]
    np.testing.assert_array_equal(got, expected)


def test_swizzles_exchange_components():
    source = """kernel void k(device float4* y, device float4* p) {
      float4 v = p[0]; v.xy = v.yx; y[0] = v; v = p[0]; v.wzyx = v; y[1] = v; v = p[0]; v.xz = v.zx; y[2] = v;
      v = p[0]; float4 w = p[0] * 2; v.zw = w.zw; y[3] = v; v.yw = w.yw; y[4] = v; p[0].xw = p[0].wx; y[5] = p[0];
      auto pair = w.xy; y[6] = float4(pair.x, pair.y, pair); v.xyz = w.zyx; y[7] = v; }"""
    got = run(source, [np.zeros((8, 4), np.float32), np.arange(1, 5, dtype=np.float32)])[0]
    expected = [
        [2, 1, 3, 4],
        [4, 3, 2, 1],
        [3, 2, 1, 4],
        [1, 2, 6, 8],
        [1, 4, 6, 8],
        [4, 2, 3, 1],
        [2, 4, 2, 4],
        [6, 4, 2, 8],
    ]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", [*INTEGERS, "half", "float", "bfloat"])
def test_arithmetic(kind, rng):
    a, b = (as_type(rng.integers(1, 12, (5, 4)), kind) for _ in range(2))
    operations = ["a + b", "a - b", "a * b", "a / b", "-a", "+a", "a + s", "s - a", "s * b", "a / s"]
    if kind in INTEGERS:
        operations += ["a % b", "a & b", "a | b", "a ^ b", "a << b", "a >> b", "~a", "a % s", "s | b", "a >> s"]
    lines = "".join(f"y[i * {len(operations)} + {n}] = {text};\n" for n, text in enumerate(operations))
    source = (
        f"kernel void k(device {kind}4* y, device {kind}4* p, device {kind}4* q, uint i [[thread_position_in_grid]]) {{"
    )
    source += f"{kind}4 a = p[i], b = q[i]; {kind} s = p[i].y;\n{lines}}}"
    got = run(source, [np.zeros((5, len(operations), 4), a.dtype), a, b], 5)[0]
    exact = np.int64 if kind in INTEGERS else np.float32
    x, z = of_type(a, kind).astype(exact), of_type(b, kind).astype(exact)
    s = x[:, 1:2]
    with np.errstate(over="ignore"):
        width = a.dtype.itemsize * 8
        cases = [x + z, x - z, x * z, x // z if kind in INTEGERS else x / z, -x, x, x + s, s - x, s * z]
        cases.append(x // s if kind in INTEGERS else x / s)
        if kind in INTEGERS:
            shifted = [
                np.where(z < width, x << np.minimum(z, width - 1), 0),
                np.where(z < width, x >> np.minimum(z, width - 1), 0),
            ]
            cases += [
                x % z,
                x & z,
                x | z,
                x ^ z,
                *shifted,
                ~x,
                x % s,
                s | z,
                np.where(s < width, x >> np.minimum(s, width - 1), 0),
            ]
    for n, case in enumerate(cases):
        valid = (
            (z < width) if "<< b" in operations[n] or ">> b" in operations[n] else np.broadcast_to(s < width, x.shape)
        )
        np.testing.assert_array_equal(got[:, n][valid], as_type(case, kind)[valid], err_msg=operations[n])


@pytest.mark.parametrize("kind", ["int", "uchar", "half", "float", "bfloat"])
def test_compound_assignment_in_every_space(kind):
    steps = ["v += w;", "v -= 1;", "v *= w;", "v /= 2;", "v++;", "--v;", "v.xy += w.zw;", "v[2] += w[1];"]
    expected = np.array([2, 4, 6, 8])
    w = np.array([2, 2, 2, 2])
    body = " ".join(steps)
    source = f"""kernel void k(device {kind}4* y, device {kind}4* p) {{ {kind}4 w = p[1]; threadgroup {kind}4 t;
      t = p[0];
      {{ {kind}4 v = p[0]; {body} y[0] = v; }} {{ threadgroup {kind}4& v = t; {body} y[1] = v; }}
      {{ device {kind}4& v = p[0]; {body} y[2] = v; }} }}"""
    inputs = as_type(np.stack([expected, w]), kind)
    got = of_type(run(source, [np.zeros((3, 4), inputs.dtype), inputs])[0], kind)
    value = (expected + w - 1) * w // 2 if kind in ("int", "uchar") else (expected + w - 1) * w / 2
    value = value + np.array([2, 2, 2, 0])
    np.testing.assert_array_equal(got, np.broadcast_to(value, (3, 4)))


def test_comparisons_and_logic(rng):
    a, b = (rng.integers(-2, 3, (16, 4)).astype(np.float32) for _ in range(2))
    signs = ["<", ">", "<=", ">=", "==", "!="]
    lines = "".join(f"y[i * 9 + {n}] = a {sign} b;\n" for n, sign in enumerate(signs))
    lines += "y[i * 9 + 6] = (a < 0) && (b < a); y[i * 9 + 7] = a > 1 || b == 2; y[i * 9 + 8] = !(a == b);"
    source = "kernel void k(device bool4* y, device float4* p, device float4* q, uint i [[thread_position_in_grid]]) {"
    got = run(f"{source} float4 a = p[i], b = q[i];\n{lines}}}", [np.zeros((16, 9, 4), np.bool_), a, b], 16)[0]
    cases = [a < b, a > b, a <= b, a >= b, a == b, a != b, (a < 0) & (b < a), (a > 1) | (b == 2), a != b]
    np.testing.assert_array_equal(got, np.stack(cases, 1))


def test_any_all_select():
    lines = [
        "any(bool3(0, 1, 0))",
        "any(bool2(0))",
        "all(bool4(1))",
        "all(bool3(1, 0, 1))",
        "any(float2(1) > float2(2, 0))",
    ]
    lines += [f"select(int3(1, 2, 3), int3(4, 5, 6), bool3(0, 1, 0)).{c}" for c in "xyz"]
    lines += [
        "select(2.0f, 3.0f, true)",
        "select(int2(1), int2(2), int2(-1, 1)).x",
        "select(int2(1), int2(2), int2(-1, 1)).y",
    ]
    got = evaluate(lines, "float")[:, 0]
    np.testing.assert_array_equal(got, [1, 0, 1, 0, 1, 1, 5, 3, 3, 2, 1])


def test_vectors_move_between_address_spaces():
    source = """struct Pair { float4 a; int2 b; };
    kernel void k(device float4* y, constant float4* c, device Pair* d) {
      threadgroup float4 t[2]; threadgroup Pair tp; float4 v = c[0]; t[0] = c[1]; t[1] = v; y[0] = t[0];
      y[1] = c[0]; v = t[1]; y[2] = v;
      Pair q = d[0]; tp = d[1]; d[0] = tp; tp = q; y[3] = tp.a + float4(tp.b, d[0].b); y[4] = float4(c[0].wz, t[1].xy);
      thread float& r = v.y; r = 7; thread float& s = v[3]; s = 8; y[5] = v; device float& u = y[6].z; u = 9;
      y[6].w = t[1].z;
      bool yes = v.y > 1; y[7] = yes ? c[0] : float4(1); y[8] = yes ? t[1] : y[0]; y[9] = !yes ? v : y[1]; }"""
    c = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    pairs = np.zeros((2, 8), np.float32)
    pairs[:, :4] = [[1, 1, 1, 1], [2, 2, 2, 2]]
    pairs.view(np.int32)[:, 4:6] = [[3, 4], [5, 6]]
    got = run(source, [np.zeros((10, 4), np.float32), c, pairs])[0]
    expected = [c[1], c[0], c[0], [4, 5, 6, 7], [4, 3, 1, 2], [1, 7, 3, 8], [0, 0, 9, 3], c[0], c[0], c[0]]
    np.testing.assert_array_equal(got, expected)


def test_braces_unions_and_bits():
    source = """union Bits { float4 f; uint u[4]; }; union Mask { bool4 b; uint i; };
    kernel void k(device uint4* y, device int* p) {
      int i = p[0]; uint4 v = {1, 2, 3, 4}; uint4 w = {uint(i), 2u, 3, 4}; uint2 n{5, 6}; y[0] = v; y[1] = w;
      y[2] = uint4(n, uint2{7, 8});
      Bits b; b.f = float4(1, 2, 3, 4); y[3] = {b.u[0], b.u[1], b.u[2], b.u[3]}; Bits c = b; y[4] = as_type<uint4>(c.f);
      Mask m; m.b = {true, true, true, true}; m.b[1] = false; y[5] = uint4(m.i);
      y[6] = uint4(as_type<uint2>(half4(1)), as_type<uint2>(5ul));
      y[7].x = as_type<uint>(short2(-1, 1)); y[7].yz = as_type<uint2>(ushort4(1, 2, 3, 4));
      y[7].w = as_type<uint>(b.f.y); }"""
    got = run(source, [np.zeros((8, 4), np.uint32), np.array([9], np.int32)])[0]
    floats = np.arange(1, 5, dtype=np.float32).view(np.uint32)
    halves = np.full(4, 1, np.float16).view(np.uint32)
    last = [0x0001FFFF, 0x00020001, 0x00040003, floats[1]]
    expected = [[1, 2, 3, 4], [9, 2, 3, 4], [5, 6, 7, 8], floats, floats, [0x01010001] * 4, [*halves, 5, 0], last]
    np.testing.assert_array_equal(got, np.array(expected, np.uint32))


@pytest.mark.parametrize("kind", ["char", "half", "float", "uint", "bfloat"])
def test_packed_vectors(kind):
    source = f"""kernel void k(device packed_{kind}3* y, device packed_{kind}3* p) {{
      static_assert(sizeof(packed_{kind}3) == 3 * sizeof({kind}) && alignof(packed_{kind}3) == sizeof({kind}), "");
      static_assert(sizeof({kind}3) == 4 * sizeof({kind}) && alignof({kind}3) == 4 * sizeof({kind}), "");
      {kind}3 v = p[0]; y[0] = v * 2; y[1] = p[0] + p[1]; y[2] = packed_{kind}3(1, 2, 3); y[2].y = p[1].z;
      y[3] = p[1]; y[3] += 1;
      y[4] = {kind}3(p[0].zyx); y[4][0] = 9; }}"""
    p = as_type(np.arange(1, 7).reshape(2, 3), kind)
    got = of_type(run(source, [np.zeros((5, 3), p.dtype), p])[0], kind)
    np.testing.assert_array_equal(got, [[2, 4, 6], [5, 7, 9], [1, 6, 3], [5, 6, 7], [9, 2, 1]])


@pytest.mark.parametrize(
    "wrong",
    [
        "float4 v = half4(1);",
        "float4 v = int4(1) + float4(1);",
        "int4 v = int4(1) * 1.5f;",
        "float3 v = float2(1);",
        "bfloat4 v = 1.0f;",
        "float4 v; v.xx = float2(1);",
        "float4 v, w; v.yy = w.yy;",
    ],
)
def test_what_metal_rejects(wrong):
    with pytest.raises(CompileError):
        run(f"kernel void k(device float* y) {{ {wrong} }}", [np.zeros(1, np.float32)])


def test_matrices(rng):
    source = """kernel void k(device float* y, device float* p) {
      float3x3 a, b; for (int c = 0; c < 3; c++) for (int r = 0; r < 3; r++) { a[c][r] = p[c * 3 + r];
      b[c][r] = p[9 + c * 3 + r]; }
      float3 v(p[0], p[1], p[2]); float3x3 m = a * b, t = transpose(a), s = a + b * 2.0f - a;
      float3 l = a * v, r = v * a;
      for (int c = 0; c < 3; c++) for (int i = 0; i < 3; i++) { y[c * 3 + i] = m[c][i]; y[9 + c * 3 + i] = t[c][i];
      y[18 + c * 3 + i] = s[c][i]; }
      for (int i = 0; i < 3; i++) { y[27 + i] = l[i]; y[30 + i] = r[i]; } y[33] = determinant(a); float2x3 n(v, v);
      y[34] = n[1].z;
      float2x2 d(2.0f); y[35] = d[0][0] + d[1][0]; }"""
    p = rng.integers(-3, 4, 18).astype(np.float32)
    got = run(source, [np.zeros(36, np.float32), p])[0]
    a, b, v = p[:9].reshape(3, 3).T, p[9:].reshape(3, 3).T, p[:3]
    matrices = [(a @ b).T, a, (2 * b).T]
    expected = np.concatenate([*(m.reshape(-1) for m in matrices), a @ v, v @ a, [np.linalg.det(a), v[2], 2]])
    np.testing.assert_allclose(got, expected, atol=1e-4)
