"""The text of a CUDA kernel, in the two ways in which MLX launches one.

Without views, the whole function is written here and compiled by `metile.targets.nvrtc`: pointers to inputs, to
outputs, then the integers of ``sizes`` one by one. With views, `mx.fast.cuda_kernel` writes the signature, which is the
only way to learn an array's strides, and ``sizes`` is an array; see `metile.targets.gpu_text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metile.targets.base import KernelSource
from metile.targets.gpu_text import (
    array_place,
    count_of,
    fixed_numbers,
    number_lines,
    scratch_function,
    written_out,
)

SCRATCH = "metile_scratch"  # the function of the bytes of threadgroup memory
OPTIONS = ("--device-as-default-execution-space",)
_LANES = 32


@dataclass(frozen=True)
class ViewText:
    """A kernel as `mx.fast.cuda_kernel` takes it.

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


def kernel_text(source: KernelSource, fixed: Sequence[int], name: str) -> str:
    """Return the text of a kernel without views.

    Args:
        source: what it computes.
        fixed: values of the numbers it is compiled for, in the order of ``source.fixed``.
        name: of its function.
    """
    known = fixed_numbers(source, fixed)
    sizes = [f"sizes{place}" for place in range(count_of(source))]
    # The dtype of an array is said where a program takes it, so that one binary does not wait for arrays to be known.
    pointers = [f"const void* {array}_data" for array in source.inputs]
    pointers += [f"void* {array}_data" for array in source.outputs]
    parameters = ", ".join([*pointers, *(f"int {size}" for size in sizes)])
    body = "\n  ".join([f"const int sizes[] = {{{', '.join(sizes)}}};", *_statements(source, known, ())])
    return (
        f"{_head(source, known, ())}"
        f'extern "C" __global__ void __launch_bounds__({_LANES * source.simdgroups}) {name}({parameters}) {{\n'
        f"  {body}\n}}\n"
    )


def view_text(source: KernelSource, fixed: Sequence[int]) -> ViewText:
    """Return the text of a kernel that reads the strides of ``source.strided``."""
    known = fixed_numbers(source, fixed)
    # The signature that MLX writes says no number of threads, without which registers may not suffice for them.
    bounds = f"__attribute__((global)) __launch_bounds__({_LANES * source.simdgroups})"
    header = f"{_bare(_head(source, known, source.strided))}#undef __global__\n#define __global__ {bounds}\n"
    body = "\n  ".join(_statements(source, known, source.strided))
    return ViewText(
        header,
        f"  {body}\n",
        ("sizes", *[f"{name}_data" for name in source.inputs]),
        tuple(f"{name}_data" for name in source.outputs),
    )


def _bare(text: str) -> str:
    """Return a text without its comments and indents: MLX copies it at every launch."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


# What MLX's own signature looks like to a compiler that has none of its headers.
_SIGNATURE = """struct Strides {{
  long long at[8];
  inline long long operator[](int axis) const {{ return at[axis]; }}
}};
__global__ void {name}({parameters}) {{
{body}}}
"""


def checked_view_text(source: KernelSource, fixed: Sequence[int], name: str) -> str:
    """Return a text like the one that MLX will compile, to find its errors, and its threadgroup memory, before."""
    text = view_text(source, fixed)
    parameters = ["const int* sizes"]
    for array in source.inputs:
        parameters.append(f"const void* {array}_data")
        if array in source.strided:
            parameters.append(f"const __grid_constant__ Strides {array}_data_strides")
    parameters += [f"void* {array}" for array in text.outputs]
    return text.header + _SIGNATURE.format(name=name, parameters=", ".join(parameters), body=text.body)


def _head(source: KernelSource, known: dict[str, int], views: Sequence[str]) -> str:
    words = [f"#define METILE_SIMDGROUPS {source.simdgroups}", f"#define METILE_STAGES {source.stages}"]
    words += ["#define METILE_VIEWS"] if views else []
    scratch = scratch_function(source, known, "inline constexpr")
    parts = [*words, written_out("tile/cuda.h"), written_out(source.program), scratch]
    return "\n".join(parts) + "\n"


def _statements(source: KernelSource, known: dict[str, int], views: Sequence[str]) -> list[str]:
    arrays = []
    for index, name in enumerate((*source.inputs, *source.outputs)):
        pointer = f"(const void*){name}_data" if name in source.inputs else f"(void*){name}_data"
        place = f"sizes + {array_place(source, index)}"
        make = f"strided_array({pointer}, {place}, {name}_data_strides)" if name in views else ""
        arrays.append(f"const auto {name} = {make or f'contiguous_array({pointer}, {place})'};")
    return [_PROLOGUE, *number_lines(source, known), *arrays, source.body]


_PROLOGUE = """if (int(blockIdx.x) >= sizes[0]) return;
  extern __shared__ __attribute__((aligned(1024))) char memory[];
  const Group group = {Index(blockIdx.x), int(threadIdx.x), int(threadIdx.x / 32), int(threadIdx.x % 32),
                       memory};"""
