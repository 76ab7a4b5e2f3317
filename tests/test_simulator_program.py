"""Compiling Metal source: entries, what the language needs, messages, and the cache of libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metile.errors import MetileError
from metile.simulator import clang
from metile.simulator.parameters import ATTRIBUTES
from metile.simulator.program import Options, Parameter, Program, compile_program
from metile.simulator.runtime import Buffer, launch
from metile.targets.compiler import CompileError

pytest.importorskip("ziglang")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(
    built: Program, entry: str, grid: tuple[int, int, int] = (1, 1, 1), group: int = 32, **inputs: object
) -> np.ndarray:
    """Run a kernel whose buffer 0 takes 64 floats; b1=..., b2=... are its other buffers."""
    out = np.zeros(64, np.float32)
    buffers = {0: Buffer("y", out.view(np.uint8), output=True)}
    for name, value in inputs.items():
        buffers[int(name[1:])] = Buffer(name, np.ascontiguousarray(value).view(np.uint8).reshape(-1))
    launch(built, entry, buffers, grid, (group, 1, 1))
    return out


def value(text: str, options: Options | None = None, **inputs: object) -> float:
    return float(run(compile_program(HEAD + text, options=options), "k", **inputs)[0])


def test_entries_of_the_text() -> None:
    text = """kernel void plain(device float* y) { y[0] = 1; }
template <typename T> [[kernel]] void f(device T* y, constant T& x) { y[0] = x; }
template [[host_name("f_float")]] [[kernel]] decltype(f<float>) f<float>;
template [[host_name("f_int")]] [[kernel]] void f<int>(device int* y [[buffer(0)]], constant int& x [[buffer(1)]]);
"""
    built = compile_program(HEAD + text)
    assert sorted(built.entries) == ["f_float", "f_int", "plain"]
    assert built.entries["f_float"].parameters == (
        Parameter("buffer", 0, "y", access="device"),
        Parameter("buffer", 1, "x", access="constant"),
    )
    assert run(built, "plain")[0] == 1
    assert run(built, "f_float", b1=np.float32(2.5))[0] == 2.5
    assert run(built, "f_int", b1=np.int32(3)).view(np.int32)[0] == 3


def test_entries_asked_for() -> None:
    text = """namespace n { template <typename T, int N> [[kernel]] void f(device T* y) { y[0] = N; } }
template [[host_name("three")]] [[kernel]] decltype(n::f<float, 3>) n::f<float, 3>;
"""
    asked = {"a": "n::f<float, 1>", "b": "f<float, 2>", "c": "three"}
    built = compile_program(HEAD + text, asked)
    assert [run(built, name)[0] for name in asked] == [1, 2, 3]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nope", r"expected a kernel of the source \(f, plain\) but got 'nope'"),
        ("f", "expected template arguments for kernel 'f' but got 'f'"),
        ("helper", "expected a kernel of the source"),
    ],
)
def test_entries_that_are_none(function: str, message: str) -> None:
    text = "kernel void plain(device float* y) {}\ntemplate <class T> kernel void f(device T* y) {}\nvoid helper() {}\n"
    with pytest.raises(MetileError, match=message):
        compile_program(text, {"a": function})


def test_max_threads() -> None:
    built = compile_program("[[kernel, max_total_threads_per_threadgroup(64)]] void k(device float* y) {}")
    assert built.entries["k"].max_threads == 64


VECTORS = ATTRIBUTES[: ATTRIBUTES.index("thread_index_in_simdgroup")]
ATTRIBUTE_TYPES = [(one, kind) for one in ATTRIBUTES for kind in ("uint", "ushort")]
ATTRIBUTE_TYPES += [(one, kind) for one in VECTORS for kind in ("uint2", "ushort3")]


@pytest.mark.parametrize(("attribute", "kind"), ATTRIBUTE_TYPES)
def test_attributes(attribute: str, kind: str) -> None:
    """The last thread of a 5 x 3 x 2 grid in threadgroups of 2 x 2 x 2, partial at the end."""
    parts = "p" if not kind[-1].isdigit() else "p.x + 100 * p.y" + (" + 10000 * p.z" if kind[-1] == "3" else "")
    text = f"""{HEAD}[[kernel]] void k(device float* y [[buffer(0)]], {kind} p [[{attribute}]],
      uint3 at [[thread_position_in_grid]]) {{ if (at.x == 4 && at.y == 2 && at.z == 1) y[0] = {parts}; }}"""
    out = np.zeros(64, np.float32)
    built = compile_program(text)
    launch(built, "k", {0: Buffer("y", out.view(np.uint8), output=True)}, (5, 3, 2), (2, 2, 2))
    expected = {
        "thread_position_in_grid": (4, 2, 1),
        "thread_position_in_threadgroup": (0, 0, 1),
        "threadgroup_position_in_grid": (2, 1, 0),
        "threads_per_grid": (5, 3, 2),
        "grid_size": (5, 3, 2),
        "threadgroups_per_grid": (3, 2, 1),
        "threads_per_threadgroup": (1, 1, 2),
        "dispatch_threads_per_threadgroup": (2, 2, 2),
        "grid_origin": (0, 0, 0),
        "thread_index_in_simdgroup": 1,
        "thread_index_in_threadgroup": 1,
        "thread_index_in_quadgroup": 1,
        "threads_per_simdgroup": 32,
        "thread_execution_width": 32,
        "simdgroups_per_threadgroup": 1,
        "dispatch_simdgroups_per_threadgroup": 1,
        "quadgroups_per_threadgroup": 8,
        "dispatch_quadgroups_per_threadgroup": 2,
    }.get(attribute, 0)
    if isinstance(expected, tuple):
        count = int(kind[-1]) if kind[-1].isdigit() else 1
        expected = sum(part * 100**place for place, part in enumerate(expected[:count]))
    assert out[0] == expected


def test_function_constants() -> None:
    text = """constant bool a [[function_constant(0)]];
constant int b [[function_constant(1)]];
constant float c [[function_constant(2)]];
constant int d = is_function_constant_defined(b) ? b : 7;
[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = (a ? 100 : 200) + d + c; }
"""
    assert value(text, Options(constants={0: True, 1: 3, 2: 0.5})) == 103.5
    assert value(text, Options(constants={0: False, 2: 0.25})) == 207.25
    with pytest.raises(CompileError, match=r"expected a value for function constant 2 \('c'\) but got none"):
        compile_program(HEAD + text, options=Options(constants={0: True, 1: 3}))


def test_array_of_buffers() -> None:
    text = (
        HEAD
        + """template <int N>
[[kernel]] void k(device float* y [[buffer(0)]], const array<const device float*, N> xs [[buffer(2)]]) {
  for (int i = 0; i < N; i++) y[0] += xs[i][1];
}
template [[host_name("k")]] [[kernel]] decltype(k<3>) k<3>;
"""
    )
    built = compile_program(text)
    assert [(one.name, one.index) for one in built.entries["k"].parameters] == [
        ("y", 0),
        ("xs[0]", 2),
        ("xs[1]", 3),
        ("xs[2]", 4),
    ]
    inputs = {f"b{2 + i}": np.array([0, 10.0**i], np.float32) for i in range(3)}
    assert run(built, "k", **inputs)[0] == 111


# What clang's own rules have no answer for: each is compared with what it must compute.
LANGUAGE = {
    "struct copies out of constant memory": (
        """struct P { float a; float b[2]; };
constant P table[2] = {{1, {2, 3}}, {4, {5, 6}}};
P pick(constant P& p) { return p; }
float sum(P p) { return p.a + p.b[0] + p.b[1]; }
template <typename T> T load(constant T* p) { T t = p[0]; return t; }
[[kernel]] void k(device float* y [[buffer(0)]], constant P& p [[buffer(1)]]) {
  P a = p, b{p}, c(p), d = load(&p); auto e = table[1]; P f; f = table[0];
  P g = y[0] > 1 ? f : P(p);
  y[0] = sum(a) + sum(b) + sum(c) + sum(d) + sum(e) + sum(f) + sum(g) + sum(p) + sum(pick(p));
}""",
        {"b1": np.array([1, 10, 100], np.float32)},
        7 * 111 + 15 + 6,
    ),
    "methods of temporaries": (
        """struct Q { float a; Q(float v) thread : a(v) {} float get() const thread { return a; } };
template <typename T> float twice(T v) { return T(v).get() * 2; }
[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = Q(2).get() + twice(Q(3)); }""",
        {},
        8,
    ),
    "members by pointer and reference": (
        """struct T { float v[4];
  T(float a) { fill(a); thread float* p = v; p[1] = 10; thread float& q = v[2]; q = 20; }
  void fill(float a) { for (int i = 0; i < 4; i++) v[i] = a; }
  thread float& at(int i) { return v[i]; }
  float sum() const { const thread float* p = v; return p[0] + p[1] + p[2] + p[3]; } };
[[kernel]] void k(device float* y [[buffer(0)]]) { T t(1); t.at(3) = 100; y[0] = t.sum(); }""",
        {},
        131,
    ),
    "half and bfloat": (
        """template <typename T, typename U> T cast(U u) { return static_cast<T>(u); }
[[kernel]] void k(device float* y [[buffer(0)]]) {
  half h = 1.5h; bfloat b = cast<bfloat>(h); bfloat c = bfloat(h); half d = (half)b; y[0] = b + c + d;
}""",
        {},
        4.5,
    ),
    "methods defined outside": (
        """struct A { float a; A(float v) thread; float get(int i) const thread; thread A& set(float v) thread; };
A::A(float v) thread : a(v) {}
float A::get(int i) const thread { return a + i; }
thread A& A::set(float v) thread { a = v; return *this; }
template <class T> struct B { T t; T f(); };
template <class T> T B<T>::f() { return t; }
[[kernel]] void k(device float* y [[buffer(0)]]) {
  A a(3); B<float> b{2}; y[0] = a.get(1) + a.set(7).get(2) + b.f(); }""",
        {},
        15,
    ),
    "constant tables": (
        """constant float t[2][2] = {{1, 2}, {3, 4}};
static constant float u[2] = {10, 20};
constant constexpr int n = 2;
constexpr constant float f = 100;
template <int N> struct M { static constexpr constant int twice = N * 2; };
namespace q { constant int z = n * 500; }
[[kernel]] void k(device float* y [[buffer(0)]]) {
  float a[n]; a[1] = t[1][1] + u[1] + f; y[0] = a[1] + q::z + M<n>::twice; }""",
        {},
        1128,
    ),
    "threadgroup variables": (
        """struct S { float a; float b[3]; };
[[kernel]] void k(device float* y [[buffer(0)]]) {
  threadgroup union { float f; uint u; } un, many[2];
  threadgroup alignas(64) half h[3];
  threadgroup float a[2][3], *p = a[1];
  un.f = 1; many[1].u = as_type<uint>(2.0f); h[2] = 3; p[2] = 4;
  y[0] = as_type<float>(un.u) + many[1].f + h[2] + a[1][2] + (((ulong)&h[0]) % 64);
}""",
        {},
        10,
    ),
    "names that OpenCL takes": (
        "[[kernel]] void k(device float* y [[buffer(0)]]) { int local = 1, global = 2, generic = 3, pipe = 4;"
        " y[0] = local + global * generic + pipe; }",
        {},
        11,
    ),
    "constant implies const": (
        """int f(constant int& a, constant char* s) { return a + (s[0] == 'x'); }
[[kernel]] void k(device float* y [[buffer(0)]], const constant int& a [[buffer(1)]]) { y[0] = f(a, "x"); }""",
        {"b1": np.int32(4)},
        5,
    ),
    "functions as template arguments": (
        """template <typename T> using F = T (*)(thread T*, T);
typedef float (*G)(float);
template <typename T> T add(thread T* a, T b) { return *a + b; }
float twice(float a) { return 2 * a; }
template <typename T, F<T> f, int n> T call(T a) { return f(&a, n); }
template <G g, float (*h)(float)> float both(float a) { return g(h(a)); }
[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = call<float, add<float>, 3>(4) + both<twice, twice>(10); }""",
        {},
        47,
    ),
    "literals in templates": (
        """template <typename T> int size(T a) { return sizeof(0.5 * a); }
[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = 10 * size(1.0) + sizeof(1.0bf) + 0x1p-1; }""",
        {},
        42.5,
    ),
    "coherent": (
        "[[kernel]] void k(volatile coherent(device) device float* y [[buffer(0)]]) { y[0] = 3; }",
        {},
        3,
    ),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_language(name: str) -> None:
    text, inputs, expected = LANGUAGE[name]
    assert value(text, **inputs) == expected


K = "kernel void k(device float* y) {\n"
ERRORS = {
    "a name": (K + "  y[0] = nope;\n}\n", "f.metal:2: use of undeclared identifier 'nope'\n    y[0] = nope;"),
    "in a macro": (f"#define X(a) y[a] = a\n{K}\n  X(zz);\n}}\n", "f.metal:4: use of undeclared identifier 'zz'"),
    "a missing header": ('\n#include "nope.h"\n', "f.metal:2: 'nope.h' file not found"),
    "a line that the text gives": (K + '#line 7 "mine.source"\n  y[0] = nope;\n}\n', "mine.source:7: use of"),
    "in a template": (
        f"template <typename T> void f(T a) {{\n  a.nope();\n}}\n{K}  f(y[0]);\n}}\n",
        "f.metal:2: member reference base type 'thread float' is not a structure",
    ),
    "in Metal's words": (
        K + "  threadgroup float* p = y;\n}\n",
        "f.metal:2: cannot initialize a variable of type 'threadgroup float *thread' with an lvalue of type 'device",
    ),
    "in the library": (
        f"#include <metal_stdlib>\n{K}  y[0] = metal::as_type<float>(metal::half(1));\n}}\n",
        "f.metal:3: ",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, tmp_path: Path) -> None:
    text, message = ERRORS[name]
    with pytest.raises(CompileError) as raised:
        compile_program(text, file="f.metal")
    assert message in str(raised.value)
    assert str(raised.value).startswith("[compile] ")
    assert "/tmp" not in str(raised.value)
    assert str(clang.folder()) not in str(raised.value)


def test_errors_in_a_header_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "mine.h").write_text("inline void f() {\n  nope();\n}\n")
    with pytest.raises(CompileError, match=r"^\[compile\] inner/mine.h:2: use of undeclared identifier 'nope'$"):
        compile_program('#include "inner/mine.h"\n', options=Options(include=(tmp_path,)))


def test_only_the_first_errors_are_shown() -> None:
    body = "\n".join(f"  y[0] = nope{i};" for i in range(9))
    with pytest.raises(CompileError) as raised:
        compile_program(f"kernel void k(device float* y) {{\n{body}\n}}\n")
    assert str(raised.value).count("undeclared") == 5
    assert str(raised.value).endswith("(4 more)")


def test_checked_programs_are_instrumented() -> None:
    text = HEAD + "[[kernel]] void k(device float* y [[buffer(0)]]) { y[0] = 1; }"
    plain, checked = compile_program(text), compile_program(text, options=Options(check=True))
    assert (plain.check, checked.check) == (False, True)
    assert plain.path != checked.path
    assert b"__tsan_write4" not in plain.path.read_bytes()
    assert b"__tsan_write4" in checked.path.read_bytes()
    assert b".debug_line" in checked.path.read_bytes()
