"""Parameters of kernel functions, and the entry points through which the runtime calls them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from metile.simulator.tokens import Token, phrase
from metile.targets.compiler import CompileError

Kind = Literal["buffer", "threadgroup", "attribute"]

# Attribute of a parameter -> what computes it from `a` (the thread) and `s` (its threadgroup): three numbers, or one.
_VECTORS = {
    "thread_position_in_grid": "a->position_in_grid",
    "thread_position_in_threadgroup": "a->position_in_threadgroup",
    "threadgroup_position_in_grid": "s->threadgroup_position",
    "threads_per_grid": "s->threads_per_grid",
    "grid_size": "s->threads_per_grid",
    "threadgroups_per_grid": "s->threadgroups_per_grid",
    "threads_per_threadgroup": "s->threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "s->dispatch_threads_per_threadgroup",
    "grid_origin": "__msl_glue::origin()",
}
_SCALARS = {
    "thread_index_in_simdgroup": "a->lane",
    "simdgroup_index_in_threadgroup": "a->simdgroup",
    "simdgroups_per_threadgroup": "s->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "(__msl_glue::dispatched(s) + 31) / 32",
    "thread_index_in_threadgroup": "a->index",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "quadgroup_index_in_threadgroup": "a->index / 4",
    "thread_index_in_quadgroup": "a->index % 4",
    "quadgroups_per_threadgroup": "s->simdgroups * 8",
    "dispatch_quadgroups_per_threadgroup": "(__msl_glue::dispatched(s) + 3) / 4",
}
ATTRIBUTES = (*_VECTORS, *_SCALARS)

_INDEX = re.compile(r"\b(buffer|threadgroup|texture|sampler)\s*\(\s*(\d+)[uU]?\s*\)")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel function.

    Attributes:
        kind: where its value comes from.
        index: of a buffer or a threadgroup argument.
        name: as the source has it.
        attribute: of an ``attribute`` parameter, such as ``thread_position_in_grid``.
        access: of a buffer: ``device``, ``const device`` or ``constant``.
        optional: whether a function constant says if it is there.
    """

    kind: Kind
    index: int
    name: str
    attribute: str = ""
    access: str = ""
    optional: bool = False


@dataclass(frozen=True)
class RawParameter:
    """A parameter as the source has it; `array` tells that it takes as many buffers as its type says."""

    parameter: Parameter
    array: bool = False


def read_parameters(parameters: Sequence[Sequence[Token]]) -> tuple[RawParameter, ...]:
    """Read the parameters of a kernel function; buffers without an index are numbered in order.

    Raises:
        CompileError: a parameter that a compute kernel on this simulator cannot take.
    """
    read: list[RawParameter] = []
    next_index = {"buffer": 0, "threadgroup": 0}
    for tokens in parameters:
        text = phrase(list(tokens))
        attributes = " ".join(re.findall(r"\[\s*\[(.*?)\]\s*\]", text))
        declaration = re.sub(r"\[\s*\[.*?\]\s*\]", " ", text).partition("=")[0]
        if declaration.strip() not in ("", "void"):
            read.append(_read(attributes, declaration, _name(declaration), next_index))
    return tuple(read)


def _name(declaration: str) -> str:
    """Return the name that is declared: in ``(&name)[4]``, ``(*name)(int)``, ``name[4]``, ``name``."""
    if inner := re.search(r"\(\s*[*&]\s*(\w+)\s*\)", declaration):
        return inner.group(1)
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[[^]]*\]", "", declaration))
    return names[-1] if names else ""


def _read(attributes: str, declaration: str, name: str, next_index: dict[str, int]) -> RawParameter:
    for attribute in ATTRIBUTES:
        if re.search(rf"\b{attribute}\b", attributes):
            return RawParameter(Parameter("attribute", 0, name, attribute))
    found = _INDEX.search(attributes)
    array = re.search(r"\barray(_ref)?\s*<", declaration) is not None
    said = found.group(1) if found else _space(declaration, array)
    kind: Literal["buffer", "threadgroup"] = "threadgroup" if said == "threadgroup" else "buffer"
    if said not in next_index:
        raise CompileError(
            f"[compile] expected a buffer, a threadgroup argument or an attribute for parameter '{name}'"
            f" but got {attributes or declaration.strip()}"
        )
    index = int(found.group(2)) if found else next_index[kind]
    next_index[kind] = index + 1
    if kind == "threadgroup":
        return RawParameter(Parameter(kind, index, name))
    optional = re.search(r"\bfunction_constant\b", attributes) is not None
    return RawParameter(Parameter("buffer", index, name, access=_access(declaration), optional=optional), array)


def _access(declaration: str) -> str:
    """Return the address space of what a buffer points to, and whether it is only read."""
    pointee = re.split(r"[*&]", declaration)[0]
    if re.search(r"\bconstant\b", pointee):
        return "constant"
    return "const device" if re.search(r"\bconst\b", pointee) else "device"


def _space(declaration: str, array: bool) -> str:
    if re.search(r"\b(device|constant)\b", declaration) or array:
        return "buffer"
    return "threadgroup" if re.search(r"\bthreadgroup\b", declaration) else ""


def entry_symbol(number: int) -> str:
    """Return the symbol of the entry point with this number."""
    return f"__msl_entry_{number}"


def counts_symbol(number: int) -> str:
    """Return the symbol of the table that says how many buffers each parameter of the entry takes."""
    return f"__msl_counts_{number}"


def entry_text(number: int, function: str, parameters: Sequence[RawParameter]) -> str:
    """Return the entry point, for clang, of the kernel function (with its template arguments) `function`."""
    kind = f"__msl_kind_{number}"
    arguments = ", ".join(_argument(kind, place, raw.parameter) for place, raw in enumerate(parameters))
    counts = ", ".join(
        f"__msl_glue::buffers<__msl_glue::parameter<{kind}, {place}>>::count" for place in range(len(parameters))
    )
    return (
        f"typedef decltype({function}) {kind};\n"
        f'extern "C" void {entry_symbol(number)}(const __msl_args* a) {{\n'
        f"  const __msl_shared* s = a->shared; (void)s;\n"
        f"  {function}({arguments});\n}}\n"
        f'extern "C" {{ device int {counts_symbol(number)}[] = {{{counts or 0}}}; }}\n'
    )


def _argument(kind: str, place: int, parameter: Parameter) -> str:
    if parameter.kind == "attribute":
        wide = parameter.attribute in _VECTORS
        value = _VECTORS[parameter.attribute] if wide else _SCALARS[parameter.attribute]
        function = "vector" if wide else "scalar"
        return f"__msl_glue::{function}<__msl_glue::parameter<{kind}, {place}>>({value})"
    table = "s->buffers" if parameter.kind == "buffer" else "s->threadgroup_arguments"
    return f"__msl_glue::buffers<__msl_glue::parameter<{kind}, {place}>>::get({table} + {parameter.index})"


def glue_text() -> str:
    """Return what entry points and threadgroup variables need, to stand after the prelude."""
    return _GLUE


_GLUE = r"""
#define __msl_thread
namespace __msl_glue {
template <class T>
METAL_FUNC threadgroup T& variable(const device char* key, ulong alignment, const __constant char* name) {
  ulong natural = alignof(T);
  return *(threadgroup T*)__msl_tg((const void*)(ulong)key, sizeof(T), alignment > natural ? alignment : natural,
                                   (const char*)(ulong)name);
}

// What is in constant memory, in a form that copy constructors take; anything else as it is.
template <class T> METAL_FUNC const device T& copied(constant T& x) { return *(const device T*)(ulong)&x; }
template <class T> METAL_FUNC T&& copied(T&& x) { return static_cast<T&&>(x); }

// A temporary, as an object of thread memory.
template <class T> METAL_FUNC thread T& held(T&& x) { return *(thread T*)(ulong)&x; }
template <class T> METAL_FUNC T& held(T& x) { return x; }

// Part of an object of thread memory, in a method that has no address space.
template <class T> METAL_FUNC thread T& mine(__generic T& x) { return *(thread T*)(ulong)&x; }
template <class T> METAL_FUNC thread T* mine(__generic T*&& x) { return (thread T*)(ulong)x; }
template <class T> METAL_FUNC thread T& mine(thread T& x) { return x; }

// What can be cast to half and to bfloat.
METAL_FUNC float widened(half x) { return x; }
METAL_FUNC float widened(bfloat x) { return x; }
template <class T> METAL_FUNC T&& widened(T&& x) { return static_cast<T&&>(x); }

// A copy.
template <class T> METAL_FUNC T valued(T x) { return x; }

// The type of a parameter.
template <class F, int N> struct parameter_of;
template <class P, class... Q> struct parameter_of<void(P, Q...), 0> { typedef P type; };
template <class P, class... Q, int N>
struct parameter_of<void(P, Q...), N> : parameter_of<void(Q...), N - 1> {};
template <class F, int N> using parameter = typename parameter_of<F, N>::type;

// A value of a parameter from three numbers, or from one.
template <class P> struct from_numbers { static METAL_FUNC P make(const uint* v) { return P(v[0]); } };
template <class T> struct from_numbers<metal::vec<T, 2>> {
  static METAL_FUNC metal::vec<T, 2> make(const uint* v) { return metal::vec<T, 2>((T)v[0], (T)v[1]); }
};
template <class T> struct from_numbers<metal::vec<T, 3>> {
  static METAL_FUNC metal::vec<T, 3> make(const uint* v) { return metal::vec<T, 3>((T)v[0], (T)v[1], (T)v[2]); }
};
template <class P> METAL_FUNC P vector(const uint* numbers) { return from_numbers<P>::make(numbers); }
template <class P> METAL_FUNC P scalar(uint number) { return P(number); }
static const __constant uint zeros[3] = {0, 0, 0};
METAL_FUNC const uint* origin() { return (const uint*)(ulong)zeros; }
METAL_FUNC uint dispatched(const __msl_shared* s) {
  const uint* n = s->dispatch_threads_per_threadgroup;
  return n[0] * n[1] * n[2];
}

// A pointer or reference from the addresses at `from`; `count` says how many it takes.
template <class P> struct buffers { static constexpr __constant int count = 1; };
template <class T> struct buffers<device T*> {
  static constexpr __constant int count = 1;
  static METAL_FUNC device T* get(const ulong* from) { return (device T*)*from; }
};
template <class T> struct buffers<device T&> {
  static constexpr __constant int count = 1;
  static METAL_FUNC device T& get(const ulong* from) { return *(device T*)*from; }
};
template <class T> struct buffers<constant T*> {
  static constexpr __constant int count = 1;
  static METAL_FUNC constant T* get(const ulong* from) { return (constant T*)*from; }
};
template <class T> struct buffers<constant T&> {
  static constexpr __constant int count = 1;
  static METAL_FUNC constant T& get(const ulong* from) { return *(constant T*)*from; }
};
template <class T> struct buffers<threadgroup T*> {
  static constexpr __constant int count = 1;
  static METAL_FUNC threadgroup T* get(const ulong* from) { return (threadgroup T*)*from; }
};
template <class T> struct buffers<threadgroup T&> {
  static constexpr __constant int count = 1;
  static METAL_FUNC threadgroup T& get(const ulong* from) { return *(threadgroup T*)*from; }
};
template <class T, auto N> struct buffers<metal::array<T, N>> {
  static constexpr __constant int count = N;
  static METAL_FUNC metal::array<T, N> get(const ulong* from) {
    metal::array<T, N> all;
    for (int i = 0; i < (int)N; i++) ((ulong*)&all)[i] = from[i];
    return all;
  }
};
}  // namespace __msl_glue
"""
