"""Metal's standard library for clang's C++ for OpenCL: the text to precompile, and headers for the preprocessor.

What templates express stands in ``prelude/text/*.h``. This module adds what would be unreadable as macros: ``vec``
with all its swizzles, and the lists of types and functions that repeat a pattern.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

_FOLDER = Path(__file__).with_name("prelude")
_TYPES = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "bfloat")
_SPACES = ("thread", "device", "threadgroup")
_SETS = ("xyzw", "rgba")
# Swizzles that are vectors in place, as (first component, how many) by the size of the whole.
_PARTS = {3: ((0, 2),), 4: ((0, 2), (2, 2), (0, 3))}

_MATH1 = """exp exp2 exp10 log log2 log10 sin cos tan sinpi cospi tanpi asin acos atan sinh cosh tanh asinh acosh atanh
    sqrt rsqrt floor ceil trunc round rint fabs fract"""
_MATH2 = "pow powr fmod atan2 fmin fmax copysign nextafter divide fdim"
_MATH3 = "fma fmin3 fmax3 fmedian3"
# In metal::fast and metal::precise too.
_BOTH = f"""{_MATH1} {_MATH2} {_MATH3} abs sign saturate min max min3 max3 median3 clamp mix step smoothstep
    ldexp ilogb frexp modf sincos dot length length_squared distance distance_squared normalize
    isnan isinf isfinite isnormal signbit select"""
_SIMD = """simd_broadcast simd_shuffle simd_shuffle_and_fill_down simd_shuffle_and_fill_up simd_shuffle_down
    simd_shuffle_up simd_shuffle_rotate_down simd_shuffle_rotate_up simd_shuffle_xor simd_max simd_min simd_sum
    simd_product simd_and simd_or simd_xor simd_prefix_inclusive_sum simd_prefix_exclusive_sum
    simd_prefix_inclusive_product simd_prefix_exclusive_product"""


def _swizzles(kind: str, n: int) -> list[str]:
    """Return the members of a vector of ``n`` elements that name two to four of its components."""
    lines = []
    parts = _PARTS.get(n, ()) if kind == "vec" else ()
    for first, count in parts:
        for letters in _SETS:
            name = letters[first : first + count]
            skip = f"T __before_{name}[{first}]; " if first else ""
            lines.append(f"    struct {{ {skip}vec<T, {count}> {name}; }};")
    for count in (2, 3, 4):
        for at in itertools.product(range(n), repeat=count):
            if at in [tuple(range(first, first + size)) for first, size in parts]:
                continue
            code = sum(index << 4 * place for place, index in enumerate(at))
            names = ", ".join("".join(letters[index] for index in at) for letters in _SETS)
            kind_of = "__swizzle" if len(set(at)) == count else "__repeat"
            lines.append(f"    {kind_of}<vec<T, {count}>, T, {n}, {code:#x}> {names};")
    return lines


def _vector(kind: str, n: int) -> list[str]:
    """Return the class ``vec`` or ``packed_vec`` of ``n`` elements."""
    align = "sizeof(T)" if kind == "packed_vec" else f"{4 if n == 3 else n} * sizeof(T)"
    names = _SETS[0][:n]
    own = f"{kind}<T, {n}>"
    head = f"A, class = enable_if_t<__count<A>::value == {n} && !is_same<A, {own}>::value"
    lines = [f"template <class T>\nstruct alignas({align}) {own} {{\n  union {{\n    T __e[{n}];"]
    lines += [f"    struct {{ T {', '.join(letters[:n])}; }};" for letters in _SETS]
    lines += [*_swizzles(kind, n), "  };", f"  {kind}() = default;", f"  {kind}(const {kind}&) = default;"]

    def constructor(declaration: str, values: str) -> str:
        return f"  {declaration} : {', '.join(f'{c}({values.format(c=c, i=i)})' for i, c in enumerate(names))} {{}}"

    # A number, or an object that converts to one.
    implicit = (
        "enable_if_t<is_convertible_v<S, T> && (__count<S>::value == 1 || (__is_class(S) && __count<S>::value == 100))>"
    )
    explicit = "enable_if_t<is_arithmetic_v<S> && !is_convertible_v<S, T>>, class = void"
    lines += [
        constructor(f"template <class S, class = {implicit}>\n  METAL_FUNC constexpr {kind}(S s)", "__cast<T>(s)"),
        constructor(
            f"template <class S, class = {explicit}>\n  METAL_FUNC constexpr explicit {kind}(S s)", "__cast<T>(s)"
        ),
        constructor(f"METAL_FUNC constexpr {kind}({', '.join(f'T {c}_' for c in names)})", "{c}_"),
        constructor(
            "template <class A, class B, class... C,\n            class = enable_if_t<__count<A>::value + "
            f"__count<B>::value + (0 + ... + __count<C>::value) == {n}>>\n"
            f"  METAL_FUNC constexpr {kind}(A a, B b, C... c)",
            "__flat<T>({i}, a, b, c...)",
        ),
        constructor(
            f"template <class E, class = enable_if_t<is_same<E, typename __ext<T, {n}>::type>::value>, class = void,\n"
            f"            class = void, class = void, class = void>\n  METAL_FUNC {kind}(E e)",
            "e.{c}",
        ),
        constructor(
            f"template <class A, class = enable_if_t<is_same<A, {own}>::value>, class = void>\n"
            f"  METAL_FUNC constexpr {kind}(const __constant A& a)",
            "a.{c}",
        ),
    ]
    if kind == "vec":  # packed and swizzled vectors of the same element type convert by themselves
        same = "is_same<typename __parts<__vec_of_t<A>>::element, T>::value"
    else:
        same = f"is_same<__vec_of_t<A>, vec<T, {n}>>::value"
    lines += [
        constructor(
            f"template <class {head} && {same}>, class = void, class = void>\n  METAL_FUNC {kind}(A a)",
            "__component<T>(a, {i})",
        ),
        constructor(
            f"template <class {head} && !{same}>, class = void, class = void, class = void>\n"
            f"  METAL_FUNC explicit {kind}(A a)",
            "__component<T>(a, {i})",
        ),
    ]
    assign = " ".join(f"{c} = v.{c};" for c in names)
    lines += [
        f"  METAL_FUNC {kind}& operator=(const {kind}& v) {{ {assign} return *this; }}",
        f"  template <class A, class = enable_if_t<is_same<A, {own}>::value>>\n"
        f"  METAL_FUNC {kind}& operator=(const __constant A& v) {{ {assign} return *this; }}",
    ]
    lines += [
        f"  METAL_FUNC operator typename __ext<T, {n}>::type() const{space} {{\n"
        f"    typename __ext<T, {n}>::type e;\n    {' '.join(f'e.{c} = {c};' for c in names)}\n    return e;\n  }}"
        for space in ("", " __constant")
    ]
    components = "".join(f"i == {i} ? {c} : " for i, c in enumerate(names[:-1])) + names[-1]
    lines += [f"  METAL_FUNC constexpr T __at(int i) const {{ return {components}; }}"]
    index = "template <class I, class = enable_if_t<is_integral_v<I> || __is_enum(I)>>\n  METAL_FUNC"
    spaces = [f"{const}{space} " for space in _SPACES for const in ("", "const ")]
    lines += [
        f"  {index} {space}T& operator[](I i) {space}& {{ return __e[i]; }}" for space in [*spaces, "const __constant "]
    ]
    lines += [f"  {index} T operator[](I i) && {{ return __e[i]; }}", "};"]
    return lines


def _vectors() -> str:
    lines = ["namespace metal {", "template <class T, int N>\nstruct __ext {"]
    lines += ["  typedef T type __attribute__((ext_vector_type(N)));\n};"]
    lines += ["template <int N>\nstruct __ext<bool, N> {\n  struct type {\n    bool x, y, z, w;\n  };\n};"]
    lines += [line for kind in ("vec", "packed_vec") for n in (2, 3, 4) for line in _vector(kind, n)]
    lines += ["}  // namespace metal"]
    names = [
        (f"{prefix}{kind}{n}", prefix, kind, n) for prefix in ("", "packed_") for kind in _TYPES for n in (2, 3, 4)
    ]
    lines += [f"typedef metal::{prefix}vec<{kind}, {n}> {name};" for name, prefix, kind, n in names]
    lines += ["namespace metal {", *(f"using ::{name};" for name, *_ in names), "}  // namespace metal"]
    lines += ["// Laid out once, in the precompiled text: the common ones, as each takes its space there."]
    lines += [f'static_assert(sizeof({kind}{n}) > 0, "");' for kind in ("float", "half", "uint") for n in (2, 3, 4)]
    return "\n".join(lines) + "\n"


def _matrices() -> str:
    names = [(f"{kind}{c}x{r}", kind, c, r) for kind in ("float", "half") for c in (2, 3, 4) for r in (2, 3, 4)]
    lines = [f"typedef metal::matrix<{kind}, {c}, {r}> {name};" for name, kind, c, r in names]
    lines += ["namespace metal {", *(f"using ::{name};" for name, *_ in names), "}  // namespace metal"]
    return "\n".join(lines) + "\n"


def _namespaces() -> str:
    lines = []
    for space in ("fast", "precise"):
        lines += [
            f"namespace metal {{\nnamespace {space} {{",
            *(f"using metal::{name};" for name in _BOTH.split()),
            "}\n}",
        ]
    lists = {"1": _MATH1, "2": _MATH2, "3": _MATH3, "_SIMD": _SIMD}
    lines += [
        f"#define __MSL_INTERNAL{key}_LIST(X) {' '.join(f'X({n})' for n in names.split())}"
        for key, names in lists.items()
    ]
    return "\n".join(lines) + "\n"


def _file(name: str) -> str:
    return (_FOLDER / "text" / f"{name}.h").read_text(encoding="utf-8")


@functools.cache
def prelude_text() -> str:
    """Return the whole prelude. ``METILE_ONCE_PER_SIMDGROUP``, defined or not, chooses a form of simdgroup_matrix."""
    abi = (_FOLDER.parent / "abi.h").read_text(encoding="utf-8").replace("#pragma once\n", "")
    parts = ["#pragma once\n", _file("address_spaces"), abi]
    parts += [_file(name) for name in ("traits", "limits", "vectors")]
    parts += [_vectors(), *(_file(name) for name in ("vector_operators", "common", "barrier", "math", "integer"))]
    parts += [_file("geometric"), _file("matrix"), _matrices(), _file("simdgroup"), _namespaces(), _file("internals")]
    parts += ["#ifdef METILE_ONCE_PER_SIMDGROUP\n", _file("simdgroup_matrix_once"), "#else\n"]
    parts += [_file("simdgroup_matrix_lane"), "#endif\n", _file("simdgroup_matrix")]
    parts += [_file(name) for name in ("atomic", "logging")]
    return "".join(parts)


def include_folder() -> Path:
    """Return the folder of headers by Metal's names, there only so that ``#include <metal_stdlib>`` is found."""
    return _FOLDER
