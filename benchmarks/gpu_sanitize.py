"""Run small launches of every kernel under compute-sanitizer: ``python benchmarks/gpu_sanitize.py``.

Kernels are launched through NVIDIA's driver, not through MLX, so that each array is an allocation of just its size: a
read one byte beyond it is found. Results are compared with plain MLX on the CPU. ``--child`` runs them without the
sanitizer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_record
import mlx.core as mx
import numpy as np

from metile.check import fault, make_case
from metile.errors import MetileError, mismatch
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.projections import ProjectionsKey
from metile.targets.base import KernelSource, Output
from metile.targets.cuda import knows_numbers
from metile.targets.cuda_device import Driver, this_device
from metile.targets.cuda_text import OPTIONS, SCRATCH, checked_view_text, kernel_text
from metile.targets.gpu_text import sizes_of
from metile.targets.nvrtc import Program, compile_all, compile_program

TOOLS = ("memcheck", "racecheck")
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")  # where it lies if not on PATH
AXES = 8  # of the strides in the signature of a kernel with views
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TRIED = "kernels tried"

KEYS: tuple[Any, ...] = (
    *(LinearKey("swiglu", rows, 72, 200, "bfloat16") for rows in (1, 9, 64)),
    LinearKey("bias", 16, 72, 203, "float16"),
    LinearKey("residual", 64, 72, 200, "float32"),
    ProjectionsKey(9, (72, 24, 24), 200, True, "bfloat16"),
    *(LinearKey("swiglu", rows, 72, 192, "bfloat16", "affine4g64") for rows in (1, 9, 64)),
    LinearKey("bias", 16, 72, 224, "float16", "affine3g32"),
    LinearKey("store", 64, 72, 96, "float32", "mxfp8"),
    LinearKey("residual", 64, 72, 208, "bfloat16", "nvfp4"),
    NormKey(False, 3, 577, 1e-5, "bfloat16"),
    NormKey(True, 3, 520, 1e-5, "float16"),
    AttentionKey(1, 100, 6, 2, 64, "bfloat16"),
    AttentionKey(1, 100, 12, 2, 128, "float16"),
    AttentionKey(33, 100, 2, 1, 64, "bfloat16"),
)


class Gpu:
    """The driver's library, with a context."""

    def __init__(self) -> None:
        Driver()  # raises where there is none
        self.library = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, function: str, *arguments: Any) -> None:
        """Call the driver; raise where it fails."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise mismatch("cuda", f"{function} to succeed", f"error {status}")

    def filled(self, data: bytes) -> ctypes.c_uint64:
        """Return an allocation of just these bytes."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(len(data), 1)))
        self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))
        return pointer

    def taken(self, pointer: ctypes.c_uint64, size: int) -> bytes:
        """Return what an allocation holds."""
        buffer = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", buffer, pointer, ctypes.c_size_t(size))
        return buffer.raw


def program_of(source: KernelSource, fixed: Sequence[int]) -> Program:
    """Return the program of a kernel, with views under a signature of its own."""
    if source.strided:
        return Program(source.name, checked_view_text(source, fixed, "metile_small").replace("__global__ void",
                       'extern "C" __global__ void'), (SCRATCH,))  # fmt: skip
    return Program(source.name, kernel_text(source, fixed, "metile_small"), (SCRATCH,), OPTIONS)


class SmallKernel:
    """A kernel that the driver launches."""

    def __init__(self, gpu: Gpu, source: KernelSource, architecture: str) -> None:
        self.source, self._gpu, self._architecture = source, gpu, architecture

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Launch, and wait; see `metile.targets.base.Kernel`. Outputs begin as NaN."""
        del poison
        source, gpu = self.source, self._gpu
        known = dict(zip(source.numbers, numbers, strict=True))
        fixed = [known[name] if knows_numbers(source) else 0 for name in source.fixed]
        binary = compile_program(program_of(source, fixed), self._architecture)
        module, function, shared = ctypes.c_void_p(), ctypes.c_void_p(), binary.constants[0]
        gpu.call("cuModuleLoadData", ctypes.byref(module), binary.cubin)
        gpu.call("cuModuleGetFunction", ctypes.byref(function), module, b"metile_small")
        gpu.call("cuFuncSetAttribute", function, _SHARED_BYTES, shared)
        sizes = sizes_of(groups, numbers, [a.shape for a in inputs] + [o.shape for o in outputs])
        filled = [gpu.filled(bytes_of(array)) for array in inputs]
        counts = [math.prod(output.shape) * output.dtype.size for output in outputs]
        results = [gpu.filled(b"\xff" * count) for count in counts]
        own = self.parameters(inputs, filled, results, sizes)
        pointers = (ctypes.c_void_p * len(own))(*[ctypes.addressof(value) for value in own])
        threads = 32 * source.simdgroups
        gpu.call("cuLaunchKernel", function, groups, 1, 1, threads, 1, 1, shared, None, pointers, None)
        gpu.call("cuCtxSynchronize")
        data = [gpu.taken(pointer, count) for pointer, count in zip(results, counts, strict=True)]
        for pointer in (*filled, *results, *(own[:1] if source.strided else [])):
            gpu.call("cuMemFree_v2", pointer)
        gpu.call("cuModuleUnload", module)
        return [array_of(raw, output) for raw, output in zip(data, outputs, strict=True)]

    def parameters(
        self, inputs: Sequence[mx.array], filled: Sequence[Any], results: Sequence[Any], sizes: Sequence[int]
    ) -> list[Any]:
        """Return the kernel's parameters, as its text lists them."""
        if not self.source.strided:
            return [*filled, *results, *map(ctypes.c_int, sizes)]
        own: list[Any] = [self._gpu.filled(np.array(sizes, np.int32).tobytes())]
        for name, array, pointer in zip(self.source.inputs, inputs, filled, strict=True):
            own += [pointer, *([strides_of(array.shape)] if name in self.source.strided else [])]
        return [*own, *results]

    def bind(self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()) -> Any:
        """Return the launch with everything fixed but the arrays."""
        return lambda inputs: self(inputs, outputs, groups=groups, numbers=numbers)


def bytes_of(array: mx.array) -> bytes:
    """Return an array's elements, side by side."""
    return bytes(np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)))


def array_of(raw: bytes, output: Output) -> mx.array:
    """Return bytes as an array."""
    return mx.array(np.frombuffer(raw, np.uint8)).view(output.dtype).reshape(output.shape)


def strides_of(shape: Sequence[int]) -> Any:
    """Return the strides of a contiguous array as a kernel with views takes them."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return (ctypes.c_longlong * AXES)(*strides)


def chosen(count: int, limits: Any) -> Iterator[tuple[Any, Any]]:
    """Yield keys with candidates: the default of each, and some spread over its space."""
    for key in KEYS:
        space = key.space(limits)
        step = max(len(space) // count, 1)
        yield from ((key, candidate) for candidate in space[::step][:count])


def run_all(count: int, seconds: float) -> int:
    """Run the kernels; return how many failed."""
    mx.set_default_device(mx.cpu)
    device, gpu, end, failed, tried = this_device(), Gpu(), time.perf_counter() + seconds, 0, 0
    for key, candidate in chosen(count, device.limits):
        if time.perf_counter() > end:
            break
        source = key.source(candidate)
        kernel = SmallKernel(gpu, source, device.architecture)
        wrong = fault(key, candidate, kernel, make_case(key, key.rows, 1, time.perf_counter))
        tried += 1
        if wrong is not None:
            failed += 1
            print(f"{key.subject()} {candidate.label()}: {wrong}", flush=True)
    print(f"{tried} {_TRIED}, {failed} failed", flush=True)
    return failed


def compile_ahead(count: int) -> None:
    """Compile what will run, in parallel, so that the sanitizer does not wait for it."""
    device = this_device()
    programs = []
    for key, candidate in chosen(count, device.limits):
        source = key.source(candidate)
        depth = getattr(candidate, "outer_k", 0) if knows_numbers(source) else 0
        programs.append(program_of(source, (depth,) * len(source.fixed)))
    compile_all(programs, device.architecture)


def sanitize(tool: str, count: int, seconds: float) -> gpu_record.Sanitizer:
    """Run the kernels under a tool of compute-sanitizer and return what it says."""
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *TOOLKITS]))
    if program is None:
        return gpu_record.Sanitizer(tool=tool, kernels=0, summary="compute-sanitizer is not on this machine")
    script = [sys.executable, str(Path(__file__).resolve()), "--child", "--count", str(count)]
    command = [program, "--tool", tool, "--print-limit", "4", *script, "--seconds", str(seconds * 0.6)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return gpu_record.Sanitizer(tool=tool, kernels=0, summary=f"no end within {seconds:.0f} s")
    text = done.stdout + done.stderr
    tried = [line for line in text.splitlines() if _TRIED in line]
    result = gpu_record.sanitized(text, tool, int(tried[-1].split()[0]) if tried else 0)
    if not is_clean(result) or not tried or ", 0 failed" not in tried[-1]:
        print("\n".join(text.splitlines()[-30:]), flush=True)
    return result


def is_clean(result: gpu_record.Sanitizer) -> bool:
    """Return whether a tool ran to its end and found nothing."""
    return re.search(r"\b0 errors", result.summary) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu_sanitize.py", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("sanitizer.json"))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each tool (default: 60)")
    parser.add_argument("--count", type=int, default=3, help="candidates of each key (default: 3)")
    parser.add_argument("--child", action="store_true", help="run the kernels, without the sanitizer")
    options = parser.parse_args(arguments)
    try:
        if options.child:
            return 1 if run_all(options.count, options.seconds) else 0
        compile_ahead(options.count)
    except MetileError as error:
        print(error, file=sys.stderr)
        return 2
    results = []
    for tool in TOOLS:
        results.append(sanitize(tool, options.count, options.seconds))
        print(f"{tool}: {results[-1].kernels} kernels: {results[-1].summary}", flush=True)
        options.output.write_text(json.dumps([result.model_dump() for result in results]))
    return 0 if all(map(is_clean, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
