"""The text of a kernel for `mx.fast.metal_kernel`: vocabulary and program as its header, one call as its body.

The numbers of a launch, and what a kernel must know of its arrays, come in one array of int32; see
`metile.targets.gpu_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metile.targets import gpu_text
from metile.targets.base import KernelSource
from metile.targets.gpu_text import MAX_DIMS, fixed_numbers, fold, number_lines, scratch_function, written_out

__all__ = ["LEAST_ELEMENTS", "MAX_DIMS", "MetalText", "fold", "metal_text", "sizes_of", "written_out"]

LEAST_ELEMENTS = 8  # MLX passes a smaller array in the constant address space, which programs do not take


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


def sizes_of(groups: int, numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the contents of ``sizes``, an array that is not too small; shapes have four axes at most."""
    values = gpu_text.sizes_of(groups, numbers, shapes)
    return values + [0] * (LEAST_ELEMENTS - len(values))


def metal_text(source: KernelSource, fixed: Sequence[int], views: Sequence[str]) -> MetalText:
    """Return the text of a kernel.

    Args:
        source: what it computes.
        fixed: values of the numbers it is compiled for, in the order of ``source.fixed``.
        views: names of inputs whose strides are read at run time; all others are contiguous.
    """
    known = fixed_numbers(source, fixed)
    vocabulary, program = written_out("tile/metal.h"), written_out(source.program)
    header = (
        f"#define METILE_SIMDGROUPS {source.simdgroups}\n{vocabulary}\n{program}\n{scratch_function(source, known)}\n"
    )
    names = (*source.inputs, *source.outputs)
    inputs = ("sizes", *[f"{name}_data" for name in source.inputs])
    arrays = [_array(name, gpu_text.array_place(source, index), name in views) for index, name in enumerate(names)]
    body = "\n  ".join([_PROLOGUE, *number_lines(source, known), *arrays, source.body])
    return MetalText(header, f"  {body}\n", inputs, tuple(f"{name}_data" for name in source.outputs))


_PROLOGUE = """if (int(threadgroup_position_in_grid.x) >= sizes[0]) return;
  threadgroup float4 memory[metile_scratch() / 16 + 1];
  const Group group = {Index(threadgroup_position_in_grid.x), short(thread_index_in_threadgroup),
                       short(simdgroup_index_in_threadgroup), short(thread_index_in_simdgroup),
                       (threadgroup char*)memory};"""


def _array(name: str, offset: int, is_view: bool) -> str:
    if is_view:
        return f"const auto {name} = strided_array({name}_data, sizes + {offset}, {name}_data_strides);"
    return f"const auto {name} = contiguous_array({name}_data, sizes + {offset});"
