"""The text of a kernel for `mx.fast.metal_kernel`: vocabulary and program as its header, one call as its body.

MLX compiles a kernel from one string, so includes are written out. What a kernel must know of its arrays, and its
numbers, come in one array of int32, ``sizes``:

    [threadgroups, numbers..., for each array: axes, shape padded to four]
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from metile.errors import mismatch
from metile.files import data_root
from metile.targets.base import KernelSource

MAX_DIMS = 4
LEAST_ELEMENTS = 8  # MLX passes a smaller array in the constant address space, which programs do not take

_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#pragma once[^\n]*\n", re.MULTILINE)


@dataclass(frozen=True)
class MetalText:
    """A kernel as `mx.fast.metal_kernel` takes it.

    Attributes:
        header: what stands before the kernel.
        body: the kernel's statements.
        inputs: names of its input arrays, ``sizes`` first.
        outputs: names of its output arrays.
    """

    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@functools.cache
def written_out(name: str) -> str:
    """Return a file below ``kernels/`` with its quoted includes in place, each file once."""
    return _written_out(name, set())


def _written_out(name: str, seen: set[str]) -> str:
    root = data_root("kernels")
    path = (root / name).resolve()

    def include(match: re.Match[str]) -> str:
        inner = (path.parent / match[1]).resolve().relative_to(root.resolve()).as_posix()
        return "" if inner in seen else _written_out(inner, seen)

    seen.add(name)
    return _INCLUDE.sub(include, _ONCE.sub("", path.read_text()))


def fold(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a contiguous array's shape with its first axes folded until four are left."""
    extra = max(len(shape) - MAX_DIMS, 0)
    first = 1
    for length in shape[: extra + 1]:
        first *= length
    return (first, *shape[extra + 1 :]) if extra else tuple(shape)


def sizes_of(groups: int, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the contents of ``sizes``; shapes have four axes at most."""
    values = [groups, *numbers]
    for shape in shapes:
        values += [len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
    return values + [0] * (LEAST_ELEMENTS - len(values))


def metal_text(source: KernelSource, fixed: Sequence[int], views: Sequence[str]) -> MetalText:
    """Return the text of a kernel.

    Args:
        source: what it computes.
        fixed: values of the numbers it is compiled for, in the order of ``source.fixed``.
        views: names of inputs whose strides are read at run time; all others are contiguous.
    """
    if len(fixed) != len(source.fixed):
        raise mismatch(source.name, f"values of {source.fixed}", tuple(fixed))
    known = dict(zip(source.fixed, fixed, strict=True))
    vocabulary, program = written_out("tile/metal.h"), written_out(source.program)
    header = (
        f"#define METILE_SIMDGROUPS {source.simdgroups}\n{vocabulary}\n{program}\n{_scratch_function(source, known)}\n"
    )
    names = (*source.inputs, *source.outputs)
    inputs = ("sizes", *[f"{name}_data" for name in source.inputs])
    arrays = [
        _array(name, 1 + len(source.numbers) + place * (1 + MAX_DIMS), name in views)
        for place, name in enumerate(names)
    ]
    body = "\n  ".join([_PROLOGUE, *_numbers(source, known), *arrays, source.body])
    return MetalText(header, f"  {body}\n", inputs, tuple(f"{name}_data" for name in source.outputs))


_PROLOGUE = """if (int(threadgroup_position_in_grid.x) >= sizes[0]) return;
  threadgroup float4 memory[metile_scratch() / 16 + 1];
  const Group group = {Index(threadgroup_position_in_grid.x), short(thread_index_in_threadgroup),
                       short(simdgroup_index_in_threadgroup), short(thread_index_in_simdgroup),
                       (threadgroup char*)memory};"""


def _scratch_function(source: KernelSource, known: dict[str, int]) -> str:
    """Return the function of the threadgroup bytes, which no number but the fixed ones may decide."""
    lines = [f"  constexpr Index {name} = {known.get(name, 0)};" for name in source.numbers]
    lines += [f"  (void){name};" for name in source.numbers]
    return "\n".join(["constexpr Index metile_scratch() {", *lines, f"  return {source.scratch};", "}"])


def _numbers(source: KernelSource, known: dict[str, int]) -> list[str]:
    lines = []
    for place, name in enumerate(source.numbers):
        if name in known:
            lines.append(f"constexpr Index {name} = {known[name]};")
        else:
            lines.append(f"const Index {name} = sizes[{1 + place}];")
        lines.append(f"(void){name};")
    return lines


def _array(name: str, offset: int, is_view: bool) -> str:
    if is_view:
        return f"const auto {name} = strided_array({name}_data, sizes + {offset}, {name}_data_strides);"
    return f"const auto {name} = contiguous_array({name}_data, sizes + {offset});"
