"""Strict mode: a table of what Apple's compiler rejects with the reason, and one of what real kernels do."""

from __future__ import annotations

import pytest

from metile.simulator import clang, strict
from metile.simulator.program import Options, compile_program
from metile.targets.compiler import CompileError

pytest.importorskip("ziglang")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
STRUCT = "struct P { float a; float b; float get() const { return a; } float at() const device { return b; } };\n"
SPACES = ("device", "threadgroup", "constant", "thread")
TABLE = "constant float table[4] = {1, 2, 3, 4};\n"
THREAD_GET = "struct Q { float a; Q(float v) thread : a(v) {} float get() const thread { return a; } };\n"
MATRIX = (
    "template <typename T> struct Matrix { T* data; int stride; T at(int i) const { return data[i * stride]; } };\n"
)


def kernel(body: str, before: str = "") -> str:
    return f"""{HEAD}{before}
[[kernel]] void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant float* c [[buffer(2)]], constant uint& n [[buffer(3)]],
                  uint i [[thread_position_in_grid]]) {{
  threadgroup float s[64];
  float loc[4] = {{0, 0, 0, 0}};
{body}
  y[i] = x[i] + s[0] + loc[0] + c[0] + n;
}}
"""


# Name: (body of the kernel, what stands before it, the reason).
ILLEGAL = {
    "device <- threadgroup": ("device float* p = s; p[0] = 1;", "", "cannot initialize a variable of type 'device"),
    "threadgroup <- device": ("threadgroup float* p = y; p[0] = 1;", "", "of type 'threadgroup float"),
    "thread <- device": ("thread float* p = y; p[0] = 1;", "", "of type 'thread float"),
    "thread <- threadgroup": ("thread float* p = s; p[0] = 1;", "", "of type 'thread float"),
    "thread <- constant": ("const thread float* p = c; y[0] = p[0];", "", "of type 'const thread float"),
    "device <- constant": ("const device float* p = c; y[0] = p[0];", "", "of type 'const device float"),
    "device reference to threadgroup": ("device float& r = s[0]; r = 1;", "", "changes address space"),
    "C cast, threadgroup to device": (
        "device float* p = (device float*)s; p[0] = 1;",
        "",
        "mismatching address spaces",
    ),
    "C cast, device to thread": ("thread float* p = (thread float*)y; p[0] = 1;", "", "mismatching address spaces"),
    "reinterpret_cast": ("auto p = reinterpret_cast<device int*>(s); p[0] = 1;", "", "not allowed"),
    "write to constant": ("c[0] = 1;", "", "read-only"),
    "write to a table": ("table[0] = 1;", TABLE, "cannot assign to variable 'table'"),
    "write to const device": ("x[0] = 1;", "", "read-only"),
    "drop const": ("device float* p = x; p[0] = 1;", "", "cannot initialize"),
    "local pointer, thread value": ("float* p = loc; p[0] = 1;", "", "without an address space: variable 'p'"),
    "local pointer, device value": ("float* p = y; p[0] = 1;", "", "without an address space: variable 'p'"),
    "local reference": ("float& r = loc[0]; r = 1;", "", "without an address space: variable 'r'"),
    "parameter": ("f(loc);", "void f(float* p) { p[0] = 1; }\n", "without an address space: parameter 'p'"),
    "reference parameter": ("f(loc[0]);", "void f(float& p) { p = 1; }\n", "without an address space: parameter 'p'"),
    "array reference parameter": ("f(loc);", "void f(float (&p)[4]) { p[0] = 1; }\n", "without an address space"),
    "member": ("H h; h.p = loc; h.p[0] = 1;", "struct H { float* p; };\n", "without an address space: member 'p'"),
    "returned pointer": ("", "float* f(device float* p);\n", "what function 'f' returns"),
    "template, never instantiated": (
        "",
        "template <typename T> T f(device T* p) { float* q = nullptr; return p[0]; }\n",
        "without an address space: variable 'q'",
    ),
    "template, instantiated": ("f<float>(loc);", "template <typename T> void f(T* p) { p[0] = 1; }\n", "parameter 'p'"),
    "cast without a space": ("y[1] = *(float*)loc;", "", "cast to a pointer or reference without"),
    "threadgroup for device parameter": ("f(s);", "void f(device float* p) { p[0] = 1; }\n", "no matching function"),
    "threadgroup for a template's device": (
        "f(s);",
        "template <typename T> void f(device T* p) { p[0] = 1; }\n",
        "no matching function",
    ),
    "method on device": ("y[1] = ((device P*)y)->get();", STRUCT, "object"),
    "method on threadgroup": ("threadgroup P p; y[1] = p.get();", STRUCT, "object"),
    "method on constant": ("y[1] = ((constant P*)c)->get();", STRUCT, "not marked constant"),
    "device method on thread": ("P p{1, 2}; y[1] = p.at();", STRUCT, "object"),
    "operator on device": (
        "*(device C*)y += 1;",
        "struct C { float a; thread C& operator+=(float b) { a += b; return *this; } };\n",
        "no viable overloaded '+='",
    ),
    "call operator on device": (
        "y[1] = (*(device C*)y)(1);",
        "struct C { float a; float operator()(float b) const { return a + b; } };\n",
        "has no 'device' qualifier",
    ),
    "double variable": ("double d = 1; y[1] = d;", "", "'double' is not supported"),
    "double parameter": ("", "float f(double d) { return d; }\n", "'double' is not supported"),
    "recursion": ("y[1] = f(3);", "int f(int a) { return a ? f(a - 1) : 0; }\n", "function 'f' is recursive"),
    "mutual recursion": (
        "y[1] = f(3);",
        "int g(int a);\nint f(int a) { return a ? g(a - 1) : 0; }\nint g(int a) { return f(a); }\n",
        "is recursive",
    ),
    "lambda": ("auto f = [](float a) { return a; }; y[1] = f(1);", "", "lambda expressions"),
    "lambda with a capture": ("auto f = [&] { return loc[0]; }; y[1] = f();", "", "lambda expressions"),
    "virtual function": ("", "struct V { virtual float f() const { return 1; } };\n", "virtual functions"),
    "throw": ("if (n > 3) throw 1;", "", "exceptions are not"),
    "try": ("try { y[1] = 1; } catch (int e) { }", "", "exceptions are not"),
    "new": ("auto p = new float[3];", "", "new"),
    "delete": ("delete loc;", "", "delete"),
    "dynamic_cast": ("y[1] = dynamic_cast<thread P*>(nullptr)->a;", STRUCT, "dynamic_cast"),
    "typeid": ("auto t = typeid(loc);", "", "typeid"),
    "goto": ("again: if (loc[0] > 3) goto again;", "", "'goto' is not supported"),
    "thread_local": ("thread_local int q = 1; y[1] = q;", "", "thread_local"),
    "static local": ("static int q = 1; y[1] = q;", "", "static local variable 'q' must be in the constant"),
    "program-scope variable": ("y[1] = g;", "float g = 1;\n", "program-scope variable 'g' must be in the constant"),
    "program-scope constexpr": ("y[1] = g;", "constexpr int g = 1;\n", "program-scope variable 'g' must be"),
    "static member": ("y[1] = M::g;", "struct M { static constexpr int g = 1; };\n", "variable 'g' must be"),
    "std": ("y[1] = std::max(1.0f, 2.0f);", "", "std"),
    "standard header": ("", "#include <cmath>\n", "file not found"),
    "assembly": ('asm("nop");', "", "assembly"),
    "runtime-size threadgroup array": ("threadgroup float q[n]; q[0] = 1;", "", "not a constant expression"),
    "variable length array": ("float q[n]; q[0] = 1; y[1] = q[0];", "", "not a constant expression"),
    "initialized threadgroup variable": ("threadgroup float q = 1; y[1] = q;", "", "no initializer for threadgroup"),
    "bfloat <- float": ("bfloat b = x[0]; y[1] = b;", "", "implicit conversion from 'float' to 'bfloat'"),
    "bfloat = float": ("bfloat b; b = loc[0]; y[1] = b;", "", "implicit conversion from 'float' to 'bfloat'"),
    "bfloat <- bfloat * float": (
        "bfloat a = bfloat(x[0]); bfloat b = a * 2.0f; y[1] = b;",
        "",
        "implicit conversion from 'float' to 'bfloat'",
    ),
    "bfloat returned from float": ("y[1] = f(1);", "bfloat f(float a) { return a; }\n", "to 'bfloat'"),
    "bfloat <- half": (
        "half h = 1; bfloat b = h; y[1] = b;",
        "",
        "cannot initialize a variable of type 'thread bfloat'",
    ),
    "OpenCL's words": ("__global float* p = y; p[0] = 1;", "", "is no word of Metal"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    body, before, reason = ILLEGAL[name]
    with pytest.raises(CompileError) as raised:
        compile_program(kernel(body, before), options=Options(strict=True))
    assert reason in str(raised.value)
    assert "__" not in str(raised.value).replace("__global float* p", "").replace("'__global'", "")


LEGAL = {
    "nothing": ("", ""),
    "copy of a device struct": ("P p = *(const device P*)x; y[1] = p.get();", STRUCT),
    "copy of a constant struct": ("P p = *(constant P*)c; y[1] = p.get(); p = *(constant P*)c; y[2] = p.b;", STRUCT),
    "struct to device and threadgroup": ("threadgroup P t; P p{1, 2}; t = p; *(device P*)y = t;", STRUCT),
    "struct from a table": ("P p = ps[1]; y[1] = p.get();", STRUCT + "constant P ps[2] = {{1, 2}, {3, 4}};\n"),
    "choice of vectors across spaces": (
        "float4 v = n > 1 ? *(const device float4*)x : float4(0); v = n > 2 ? *(constant float4*)c : v; y[1] = v.x;",
        "",
    ),
    "choice of structs across spaces": ("P p = n > 1 ? *(const device P*)x : P{1, 2}; y[1] = p.a;", STRUCT),
    "auto pointers": ("auto p = y; p[1] = 1; auto q = s + 1; q[0] = 2; auto r = c + 1; y[2] = r[0];", ""),
    "auto pointer to thread": ("auto p = loc; p[1] = 2; auto& r = loc[2]; r = 3;", ""),
    "thread reference": ("f(loc[0]);", "void f(thread float& p) { p = 1; }\n"),
    "thread pointer": ("f(loc);", "void f(thread float* p) { p[0] = 1; }\n"),
    "thread const reference of a temporary": (
        "y[1] = f(2.0f * x[0]);",
        "float f(thread const float& a) { return a; }\n",
    ),
    "reference to a thread array": ("y[1] = f(loc);", "float f(thread const float (&v)[4]) { return v[1]; }\n"),
    "local array of threadgroup pointers": ("threadgroup float* p[2] = {s, s + 1}; p[1][0] = 1;", ""),
    "address space in a type argument": (
        "Matrix<const device float> m{x, 2}; Matrix<threadgroup float> t{s, 1}; y[1] = m.at(1) + t.at(2);",
        MATRIX,
    ),
    "thread method on a temporary": ("y[1] = Q(2.0f).get();", THREAD_GET),
    "method on a thread object": ("P p{1, 2}; y[1] = p.get();", STRUCT),
    "device method": ("y[1] = ((device P*)y)->at();", STRUCT),
    "methods that hand out their own": (
        "T t; t.at(1) = 2; y[1] = t.at(1) + t.sum();",
        "struct T { float v[4]; thread float& at(int j) { return v[j]; }\n"
        "  float sum() const { const thread float* p = v; return p[0] + p[1]; } };\n",
    ),
    "constant tables": (
        "y[1] = table[i & 3] + N::w + size;",
        TABLE + "constant constexpr int size = 4;\nnamespace N { static constant float w = 2; }\n",
    ),
    "static constant local": ("static constant float w[2] = {1, 2}; y[1] = w[i & 1];", ""),
    "static constant member": (
        "float q[M<2>::n]; q[0] = 1; y[1] = q[0];",
        "template <int N> struct M { static constexpr constant int n = N * 2; };\n",
    ),
    "const members": ("C q{3, 4}; y[1] = q.a + q.b;", "struct C { const int a; const float b; };\n"),
    "literals without f": ("y[1] = x[0] * 0.5 + 1e-3; float h = 2.0; y[2] = h;", ""),
    "half <- float": ("half h = x[0]; y[1] = h; half4 v = half4(h); y[2] = v.x;", ""),
    "bfloat": ("bfloat b = bfloat(x[0]); bfloat d = static_cast<bfloat>(x[1]); bfloat e = b * d; y[1] = e;", ""),
    "bfloat to float": (
        "bfloat b = (bfloat)x[0]; float f = b; y[1] = f + b; device bfloat* p = (device bfloat*)y; p[0] = b;",
        "",
    ),
    "swizzles": ("float4 v = float4(x[0], 1, 2, 3); v.xy = v.zw; y[1] = dot(v.xyz, float3(1)) + float4(v.wzyx).x;", ""),
    "device float4": (
        "device float4* p = (device float4*)y; p[0].x += 1; p[0] *= 2.0f; float4 v = p[0] + 1; y[1] = v.y;",
        "",
    ),
    "as_type": ("y[1] = as_type<float>(as_type<uint>(x[0]) & 0x7fffffffu);", ""),
    "atomics": (
        "threadgroup atomic_uint a; atomic_store_explicit(&a, 0u, memory_order_relaxed);"
        " y[1] = atomic_load_explicit(&a, memory_order_relaxed);",
        "",
    ),
    "barrier and collectives": (
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[1] = simd_sum(x[0]) + simd_max(s[1]);",
        "",
    ),
    "template recursion": (
        "y[1] = F<3>::of(1.0f);",
        "template <int N> struct F { static float of(float a) { return a + F<N - 1>::of(a); } };\n"
        "template <> struct F<0> { static float of(float a) { return a; } };\n",
    ),
    "subscripts and attributes": ("uint q[2] = {0, 1}; y[q[1]] = loc[q[0]]; [[maybe_unused]] int u = 1;", ""),
    "default and delete": ("D d; d.a = 1; y[1] = d.a;", "struct D { float a; D() = default; D(int) = delete; };\n"),
    "reference to a device pointer": (
        "auto p = x; f(p); y[1] = p[0];",
        "template <typename T> void f(const device T*& p) { p += 1; }\n",
    ),
    "a long expression": ("y[1] = " + " + ".join(f"x[{place}]" for place in range(600)) + ";", ""),
    "overloads by address space": (
        "y[1] = f(x) + f(s) + f(c) + f(loc);",
        "".join(f"float f(const {space} float* p) {{ return p[0]; }}\n" for space in SPACES),
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    body, before = LEGAL[name]
    program = compile_program(kernel(body, before), options=Options(strict=True))
    assert list(program.entries) == ["k"]


def test_says_file_and_line_of_each_violation() -> None:
    text = kernel("  float* p = loc;\n  y[1] = p[0];\n  static int d = 1;")
    with pytest.raises(CompileError) as raised:
        compile_program(text, options=Options(strict=True), file="mine.metal")
    assert "mine.metal:9: pointer or reference without an address space: variable 'p'\n    float* p" in str(
        raised.value
    )
    assert "mine.metal:11: static local variable 'd' must be in the constant address space\n    static int d" in str(
        raised.value
    )


def test_what_is_strict_only_compiles_otherwise() -> None:
    assert "k" in compile_program(kernel("float* p = loc; p[0] = 1;")).entries


def test_kernel_returns_void() -> None:
    text = "[[kernel]] float k(device float* y) { return y[0]; }\n"
    with pytest.raises(CompileError, match="expected kernel 'k' to return void but got float"):
        compile_program(text, options=Options(strict=True))


def test_function_pointer_argument() -> None:
    with pytest.raises(CompileError, match="parameter 'f'"):
        compile_program("[[kernel]] void k(device float* y, float (*f)(float)) {}", options=Options(strict=True))


def test_verdict_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("METILE_CACHE_DIR", str(tmp_path))
    text = kernel("float* p = loc; p[0] = 1;")
    with pytest.raises(CompileError) as first:
        compile_program(text, options=Options(strict=True))
    assert len(list(clang.folder().glob("strict-*.json"))) == 1
    monkeypatch.setattr(strict, "compile_text", None)
    with pytest.raises(CompileError) as second:
        compile_program(text, options=Options(strict=True))
    assert str(first.value) == str(second.value)
