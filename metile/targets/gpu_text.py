"""What the texts of GPU kernels have in common, whoever compiles them.

A kernel is compiled from one string, so includes are written out. What it must know of its arrays, and its numbers,
come as int32, ``sizes``:

    [threadgroups, numbers..., for each array: axes, shape padded to four]
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from metile.errors import mismatch
from metile.files import data_root
from metile.targets.base import KernelSource

MAX_DIMS = 4

_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#pragma once[^\n]*\n", re.MULTILINE)


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
    return values


def count_of(source: KernelSource) -> int:
    """Return how many integers ``sizes`` holds."""
    return array_place(source, len(source.inputs) + len(source.outputs))


def array_place(source: KernelSource, index: int) -> int:
    """Return where in ``sizes`` an array's axes and shape stand; inputs are counted first, then outputs."""
    return 1 + len(source.numbers) + index * (1 + MAX_DIMS)


def fixed_numbers(source: KernelSource, fixed: Sequence[int]) -> dict[str, int]:
    """Return the numbers that a kernel is compiled for, by name.

    Raises:
        MetileError: there is not a value for each.
    """
    if len(fixed) != len(source.fixed):
        raise mismatch(source.name, f"values of {source.fixed}", tuple(fixed))
    return dict(zip(source.fixed, fixed, strict=True))


def scratch_function(source: KernelSource, known: dict[str, int], opening: str = "constexpr") -> str:
    """Return the function of the threadgroup bytes, which no number but the fixed ones may decide."""
    lines = [f"  constexpr Index {name} = {known.get(name, 0)};" for name in source.numbers]
    lines += [f"  (void){name};" for name in source.numbers]
    return "\n".join([f"{opening} Index metile_scratch() {{", *lines, f"  return {source.scratch};", "}"])


def number_lines(source: KernelSource, known: dict[str, int]) -> list[str]:
    """Return the statements that name a kernel's numbers."""
    lines = []
    for place, name in enumerate(source.numbers):
        if name in known:
            lines.append(f"constexpr Index {name} = {known[name]};")
        else:
            lines.append(f"const Index {name} = sizes[{1 + place}];")
        lines.append(f"(void){name};")
    return lines
