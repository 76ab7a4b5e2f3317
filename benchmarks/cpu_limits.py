"""The limits of a CPU, measured: bytes/s of a streaming read and flop/s of the multiply-accumulate unit.

Both are kernels of the CPU target (``cpu_limits.metal``), so they use the pool, the threads and the
instruction set of the kernels that are held against them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from pathlib import Path

import mlx.core as mx

from metile.files import data_root
from metile.measure import sample
from metile.targets.base import KernelSource, Output
from metile.targets.cpu import CpuTarget, thread_count
from metile.targets.isa import Isa

CHUNK_BYTES = 1 << 20  # that a thread reads before it takes the next; less where threads would get too few
CHUNKS_A_THREAD = 8
GROUPS_A_THREAD = 16  # of the peak kernel, so that a thread that was held up leaves work to the others
SAMPLE_SECONDS = 0.003
_PROGRAM = Path(__file__).resolve().parent / "cpu_limits.metal"
_TILE_FLOPS = 2 * 16 * 16 * 32


def step_flops(isa: Isa) -> int:
    """Return the flops of one step of the peak kernel, a multiply and an add being two."""
    if isa.has_tiles:
        return 6 * _TILE_FLOPS
    width = 2 * isa.lanes if isa.name == "avx512_bf16" else isa.lanes
    return 2 * width * _chains(isa)


def _chains(isa: Isa) -> int:
    """Return how many sums are kept at once: enough to hide latency, few enough to stay in registers."""
    return 12 if isa.registers < 32 else 20


def chunk_bytes(size: int, threads: int) -> int:
    """Return the bytes of a chunk of an array of `size` bytes, in whole pages."""
    fair = size // (CHUNKS_A_THREAD * threads) // 4096 * 4096
    return max(4096, min(CHUNK_BYTES, fair))


def _source(name: str, body: str, outputs: str, number: str) -> KernelSource:
    # Below kernels/ a change of text makes a new library; here the name has to say it.
    digest = hashlib.sha256(_PROGRAM.read_bytes()).hexdigest()[:12]
    program = Path(os.path.relpath(_PROGRAM, data_root("kernels"))).as_posix()
    return KernelSource(f"{name}_{digest}", program, body, ("x",), (outputs,), (number,))


class Meter:
    """Takes samples of both limits.

    Args:
        target: what the kernels under test run on.
    """

    def __init__(self, target: CpuTarget) -> None:
        words = "stream_read(matrix_of<const bfloat>(x), chunk, static_cast<uint*>(y.data), group);"
        self._stream = target.compile(_source("stream_read", words, "y", "chunk"))
        results = "static_cast<float*>(y.data) + group.index * peak_results"
        call = f"multiply_peak<{_chains(target.isa)}>(matrix_of<const bfloat>(x), steps, {results});"
        self._multiply = target.compile(_source("multiply_peak", call, "y", "steps"))
        self._flops = step_flops(target.isa)
        self._results = 6 * 256 if target.isa.has_tiles else target.isa.lanes
        self._groups = GROUPS_A_THREAD * thread_count()
        self._x = (mx.random.normal((2, 512), key=mx.random.key(0)) * 0.01).astype(mx.bfloat16)
        mx.eval(self._x)
        self._steps = self._calibrated()

    def _calibrated(self) -> int:
        """Return the steps that make a sample of the peak last long enough for the clock."""
        steps, seconds = 32, 0.0
        while seconds < SAMPLE_SECONDS / 4:
            steps *= 2
            seconds = sample(functools.partial(self.multiply, steps))
        return math.ceil(steps * SAMPLE_SECONDS / seconds)

    def read(self, data: mx.array) -> mx.array:
        """Read every byte of a bfloat16 array; return the exclusive or of the words of each chunk."""
        chunk = chunk_bytes(data.nbytes, thread_count())
        chunks = -(-data.nbytes // chunk)
        return self._stream([data], [Output((chunks,), mx.uint32)], groups=chunks, numbers=[chunk])[0]

    def multiply(self, steps: int) -> mx.array:
        """Run the multiply-accumulate unit; return the sums of every group."""
        outputs = [Output((self._groups, self._results), mx.float32)]
        return self._multiply([self._x], outputs, groups=self._groups, numbers=[steps])[0]

    def bandwidth(self, data: mx.array) -> float:
        """Return bytes/s of one read of `data`."""
        return data.nbytes / sample(lambda: self.read(data))

    def peak(self) -> float:
        """Return flop/s of one sample of the multiply-accumulate unit."""
        return self._flops * self._steps * self._groups / sample(lambda: self.multiply(self._steps))
