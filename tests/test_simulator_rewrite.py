"""Rewriting: kernels, attributes, constants, threadgroup variables, methods; and every line stays where it was."""

from __future__ import annotations

import pytest

from metile.simulator.parameters import Parameter
from metile.simulator.rewrite import Rewritten, rewrite
from metile.targets.compiler import CompileError

BODY = "template <typename T, int N>\n[[kernel]] void k(device T* y [[buffer(0)]]) {{\n  {}\n}}\n"


def words(text: str) -> str:
    return " ".join(text.split())


def read(text: str, **constants: int) -> Rewritten:
    return rewrite(text, {int(name[1:]): value for name, value in constants.items()})


def parameters(text: str) -> list[Parameter]:
    kernel = next(iter(read(f"[[kernel]] void k({text}) {{}}").kernels.values()))
    return [raw.parameter for raw in kernel.parameters]


def test_kernels() -> None:
    text = """
kernel void plain(device float* y) {}
[[kernel]] void attribute(device float* y) {}
namespace a { namespace b { template <class T> [[kernel, max_total_threads_per_threadgroup(64)]] void inner(device T* y) {} } }
[[max_total_threads_per_threadgroup(128)]] kernel void limited(device float* y);
kernel void limited(device float* y) {}
[[host_name("named")]] [[kernel]] void other(device float* y) {}
void helper(device float* y) {}
"""  # noqa: E501
    found = read(text)
    assert list(found.kernels) == ["plain", "attribute", "a::b::inner", "limited", "other"]
    assert [kernel.template for kernel in found.kernels.values()] == [False, False, True, False, False]
    assert [kernel.max_threads for kernel in found.kernels.values()] == [None, None, 64, None, None]
    assert found.instantiations == {"named": "other"}
    assert "kernel" not in found.text
    assert found.text.count("\n") == text.count("\n")


def test_instantiations_are_recorded_and_taken_out() -> None:
    text = """template <typename T, int N> [[kernel]] void f(device T* y) {}
template [[host_name("f_" "float")]] [[kernel]] decltype(f<float, 2>) f<float, 2>;
template [[host_name("f_half")]] [[kernel]] void f<half, 4>(device half* y [[buffer(0)]]);
template struct Other<int>;
"""
    found = read(text)
    assert found.instantiations == {"f_float": "f<float, 2>", "f_half": "f<half, 4>"}
    assert "decltype" not in found.text
    assert "f<half" not in found.text
    assert "template struct Other<int>;" in found.text
    assert found.text.count("\n") == 4


def test_attributes_go_and_subscripts_stay() -> None:
    found = read("void f(int a [[maybe_unused]]) {\n  [[unroll]]\n  for (;;) y[x[0]] = a[b[i[1]]];\n}\n")
    assert "[[" not in found.text
    assert "y[x[0]] = a[b[i[1]]];" in found.text
    assert found.text.count("\n") == 4


def test_parameters() -> None:
    read_ = parameters(
        "const device float* x [[buffer(3)]], device float (&y)[4], constant uint& n [[buffer(0)]],"
        " threadgroup float* s [[threadgroup(1)]], uint3 p [[thread_position_in_grid]],"
        " const device vec<float, 4>* v, ushort l [[ thread_index_in_simdgroup ]]"
    )
    assert read_ == [
        Parameter("buffer", 3, "x", access="const device"),
        Parameter("buffer", 4, "y", access="device"),
        Parameter("buffer", 0, "n", access="constant"),
        Parameter("threadgroup", 1, "s"),
        Parameter("attribute", 0, "p", "thread_position_in_grid"),
        Parameter("buffer", 1, "v", access="const device"),
        Parameter("attribute", 0, "l", "thread_index_in_simdgroup"),
    ]
    assert parameters("void") == []


@pytest.mark.parametrize("parameter", ["texture2d<float> t [[texture(0)]]", "sampler s [[sampler(1)]]", "float a"])
def test_parameters_that_a_compute_kernel_cannot_take(parameter: str) -> None:
    with pytest.raises(CompileError, match="expected a buffer, a threadgroup argument or an attribute"):
        parameters(parameter)


def test_function_constants() -> None:
    text = (
        "constant bool a [[function_constant(1)]];\nconstant float b [[function_constant(2)]];\n"
        "constant int c [[function_constant(3)]];\n"
        "constant int d = is_function_constant_defined(a) ? 1 : metal::is_function_constant_defined(c);\n"
    )
    found = rewrite(text, {1: True, 2: 0.5})
    assert "constant const bool a = true ;" in found.text
    assert "constant const float b = 0.5f ;" in found.text
    assert "extern constant const int c ;" in found.text
    assert words(found.text).endswith("constant const int d = true ? 1 : false;")
    assert found.undefined == {"c": 3}


# Declaration: parts of what it becomes; the rest is always the same.
VARIABLES = {
    "threadgroup float a[4];": ["typedef float __msl_type_a[4]"],
    "threadgroup float a[2][N + 1], b;": ["typedef float __msl_type_a[2][N + 1]", "typedef float __msl_type_b;"],
    "threadgroup typename X<T>::type a[X<T>::N * (N + 1)];": ["typedef typename X<T>::type __msl_type_a["],
    "threadgroup metal::conditional_t<(N > 4 && N < 9), float, half> a[2];": [", float, half> __msl_type_a[2]"],
    "threadgroup decltype(y[0] + 1.0f) a[4];": ["typedef decltype(y[0] + 1.0f) __msl_type_a[4]"],
    "threadgroup union { float f; uint u; } a;": ["typedef union { float f; uint u; } __msl_type_a;"],
    "threadgroup union { float f; uint u; } a, b[2];": ["typedef __msl_base_a __msl_type_b[2]"],
    "threadgroup alignas(16) half a[4];": ["struct alignas(16) __msl_aligned_a {};", "alignof(__msl_aligned_a)"],
    "alignas(float4) threadgroup half a[4];": ["struct alignas(float4) __msl_aligned_a {};"],
    "threadgroup unsigned int a[4];": ["typedef unsigned int __msl_type_a[4]"],
    "float threadgroup a[4];": ["typedef float __msl_type_a[4]"],
    "volatile threadgroup int a;": ["typedef volatile int __msl_type_a;"],
    "threadgroup float a, *p = &z, b[2];": ["threadgroup float *p = &z;", "typedef float __msl_type_b[2]"],
    "threadgroup Matrix<threadgroup float> a;": ["typedef Matrix<threadgroup float> __msl_type_a;"],
    "if (N > 2) { threadgroup T a[4]; }": ["typedef T __msl_type_a[4]"],
    "switch (N) { case 1: threadgroup T a; }": ["typedef T __msl_type_a;"],
    "if (N) y[0] = 1; else { threadgroup T a; }": ["typedef T __msl_type_a;"],
}


@pytest.mark.parametrize("declaration", VARIABLES)
def test_threadgroup_variables(declaration: str) -> None:
    text = read(BODY.format(declaration)).text
    for part in VARIABLES[declaration]:
        assert part in text
    assert "threadgroup __msl_type_a& a = __msl_glue::variable<__msl_type_a>(&__msl_key_a, " in text
    assert text.count("\n") == 4


UNTOUCHED = (
    "threadgroup float* p = base;",
    "const threadgroup float* p = base + 1;",
    "threadgroup float (&r)[64] = base;",
    "threadgroup auto& r = base[0];",
    "for (threadgroup float* p = base; p < base + 2; p++) y[0] += *p;",
    "y[0] = *((threadgroup float*)base);",
    "y[0] = *static_cast<threadgroup float*>(base);",
    "using P = threadgroup float*;",
    "typedef threadgroup float* P;",
    "Matrix<threadgroup float> m{base, 1};",
    "struct M { threadgroup float* p; int n; };",
    "f<int, threadgroup float>(base);",
)


@pytest.mark.parametrize("statement", UNTOUCHED)
def test_pointers_and_types_are_no_variables(statement: str) -> None:
    assert f"  {statement}\n" in read(BODY.format(statement)).text


@pytest.mark.parametrize("statement", ["threadgroup float a = 1;", "threadgroup float a[2] = {1, 2};"])
def test_threadgroup_variables_have_no_initializer(statement: str) -> None:
    with pytest.raises(CompileError, match="expected no initializer for threadgroup variable 'a'"):
        read(BODY.format(statement))


METHODS = {
    "A(float b) thread : a(b) {}": "A(float b) __msl_thread : a(b) {}",
    "constexpr A(float b) thread;": "constexpr A(float b) __msl_thread;",
    "template <typename T> METAL_FUNC A(T b) thread {}": "template <typename T> METAL_FUNC A(T b) __msl_thread {}",
    "operator float() const thread { return a; }": "operator float() const __msl_thread { return a; }",
    "float get() const thread;": "float get() const thread;",
    "float get() const { return a; }": "float get() thread const { return a; }",
    "void set(float b) { a = b; }": "void set(float b) thread { a = b; }",
    "float get() const device;": "float get() const device;",
    "static float of(int b) { return b; }": "static float of(int b) { return b; }",
    "friend float of(int b);": "friend float of(int b);",
    "thread A& operator+=(float b) { return *this; }": "thread A& operator+=(float b) thread { return *this; }",
    "float operator()(float b) const { return b; }": "float operator()(float b) const { return b; }",
    "A(const thread A& o) thread;": "A(const __msl_thread A& o) __msl_thread;",
    "thread vec<T, 2>& at(int i) { return v[i]; }": "thread vec<T, 2>& at(int i) thread { return v[i]; }",
}


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    assert read(f"struct A {{ float a;\n  {method}\n}};\n").text == f"struct A {{ float a;\n  {METHODS[method]}\n}};\n"


def test_methods_defined_outside() -> None:
    text = "struct A { float f(); static float g(); };\nfloat A::f() { return 1; }\nfloat A::g() { return 2; }\n"
    assert read(text + "float n::h() { return 3; }\n").text == (
        "struct A { float f() thread; static float g(); };\nfloat A::f() thread { return 1; }\n"
        "float A::g() { return 2; }\nfloat n::h() { return 3; }\n"
    )


def test_functions_are_no_methods() -> None:
    text = "float f(float a) { return g(a); }\nnamespace n { float h(); }\n"
    assert read(text).text == text


@pytest.mark.parametrize(
    ("parameter", "rewritten"),
    [
        ("thread const float& a", "const float a"),
        ("const thread X<T, 2>& a", "const X<T, 2> a"),
        ("thread const float&", "const float"),
        ("thread const float (&a)[4]", "thread const float (&a)[4]"),
        ("thread const float* a", "thread const float* a"),
        ("thread float& a", "thread float& a"),
    ],
)
def test_what_a_temporary_may_be_bound_to(parameter: str, rewritten: str) -> None:
    assert words(read(f"void f(int b, {parameter});").text) == f"void f(int b, {rewritten});"


def test_names_that_opencl_takes() -> None:
    found = read("int local = 1, global = local + generic; coherent device int* p; volatile coherent(system) int q;")
    assert words(found.text) == (
        "int __msl_local = 1, __msl_global = __msl_local + __msl_generic; device int* p; volatile int q;"
    )


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("constant int& a", "constant const int& a"),
        ("const constant int* a", "const constant int* a"),
        ("constant const int* a", "constant const int* a"),
        ("int f() constant;", "int f() constant;"),
        ("int f() const constant;", "int f() const constant;"),
    ],
)
def test_constant_implies_const(text: str, rewritten: str) -> None:
    assert read(text).text == rewritten


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("0.5 + 1. + .5 + 1e-3 + 0x1.8p-2", "0.5f + 1.f + .5f + 1e-3f + 0x1.8p-2f"),
        ("1.5f + 2.5F + 0.5h + 3 + 0xe + 1u + 10L", "1.5f + 2.5F + 0.5h + 3 + 0xe + 1u + 10L"),
        ("1.5bf", "((bfloat)1.5f)"),
        ('a.x1 + "0.5"', 'a.x1 + "0.5"'),
    ],
)
def test_literals_are_of_single_precision(text: str, rewritten: str) -> None:
    assert read(text).text == rewritten


def test_lines_stay() -> None:
    text = (
        '# 1 "a"\n[[kernel]]\nvoid k(\n  device float* y\n    [[buffer(0)]]\n) {\n'
        "  threadgroup\n    float s\n    [4];\n}\n"
    )
    found = read(text).text.splitlines()
    assert len(found) == len(text.splitlines())
    assert found[3] == "  device float* y"
    assert "variable<__msl_type_s>" in found[6]
