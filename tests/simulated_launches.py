"""Launches of small Metal kernels, for the tests of the simulator's runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metile.simulator.findings import Finding
from metile.simulator.program import Options, compile_program
from metile.simulator.runtime import Buffer, Launch, launch

HEAD = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
HEAD_LINES = HEAD.count("\n")
TG = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass
class Ran:
    """A launch and the arrays it left."""

    launch: Launch
    arrays: list[np.ndarray]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.launch.findings

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.launch.findings]


def run(
    text: str,
    arrays: Sequence[Any],
    grid: int | Sequence[int],
    threadgroup: int | Sequence[int],
    *,
    outputs: Sequence[int] = (),
    updated: Sequence[int] = (),
    check: bool = False,
    entry: str = "k",
    function: str | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Ran:
    """Compile and run a kernel over buffers named b0, b1, ...; `outputs`, by index, start without contents."""
    program = compile_program(
        HEAD + text, {entry: function or entry}, Options(check=check, **(options or {})), file="kernel.metal"
    )
    held = [np.ascontiguousarray(array).copy() for array in arrays]
    buffers = {
        i: Buffer(
            f"b{i}", array.reshape(-1).view(np.uint8), output=i in (*outputs, *updated), initialised=i not in outputs
        )
        for i, array in enumerate(held)
    }
    sizes = [(size,) if isinstance(size, int) else tuple(size) for size in (grid, threadgroup)]
    return Ran(launch(program, entry, buffers, *sizes, **arguments), held)


def body(statements: str) -> str:
    """A kernel `k` over float* y (b0, output) and, for more, float* x (b1), with the usual thread numbers."""
    return (
        "[[kernel]] void k(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],\n"
        "    constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]],\n"
        "    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],\n"
        "    uint sg [[simdgroup_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {\n"
        f"{statements}\n}}\n"
    )


BODY_LINE = HEAD_LINES + 5  # the line of a body's first statement
