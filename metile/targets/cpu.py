"""The CPU target: kernels compiled by clang to shared libraries, called on the memory of MLX arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from metile.errors import MetileError, mismatch
from metile.files import data_root
from metile.targets.base import Kernel, KernelSource, Limits, Output
from metile.targets.compiler import CompileError, compile_library, sources_digest
from metile.targets.isa import Isa, current_isa, supported_isas

_SPIN_NANOSECONDS = 200_000  # a worker waits this long for the next launch before it sleeps
MAX_DIMS = 8
_HUGE_BYTES = 256 << 10  # weights below this are not worth a huge page
_LAYOUT = 1000  # status of metile_launch for an input that does not fold to a matrix, plus its index
_CACHE_BYTES = 2 << 20  # of threadgroup memory: what stays in a core's second-level cache
_DLPACK_TYPES = {mx.float32: (2, 32), mx.float16: (2, 16), mx.bfloat16: (4, 16), mx.uint32: (1, 32)}


class OutputSpec(ctypes.Structure):
    """Shape and DLPack dtype of one output."""

    _fields_ = (
        ("ndim", ctypes.c_int64),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("code", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    """Everything of one launch but the arrays, as ``host/cpu_pool.cpp`` reads it."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("poison", ctypes.c_int64),
        ("input_count", ctypes.c_int64),
        ("output_count", ctypes.c_int64),
        ("strided_inputs", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * 16),
        ("outputs", OutputSpec * 4),
    )


@dataclass(frozen=True)
class Launched:
    """A launch that was run, and the arrays it was run on."""

    kernel: CpuKernel
    launch: Launch
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]


class _Recording(threading.local):
    """Where this thread's launches are noted, while they are."""

    launches: list[Launched] | None = None


_recording = _Recording()


@contextmanager
def recorded() -> Iterator[list[Launched]]:
    """Note the launches that this thread runs within a ``with`` block; one around it notes them when this one ends."""
    before, launches = _recording.launches, list[Launched]()
    _recording.launches = launches
    try:
        yield launches
    finally:
        _recording.launches = before
        if before is not None:
            before += launches


def _gone() -> None:
    """Stand for a reference to nothing."""


class Capsule:
    """A DLPack capsule in the form that `mx.from_dlpack` takes."""

    __slots__ = ("capsule",)

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def thread_count() -> int:
    """Return the number of threads of the pool: the CPUs this process may use, or ``METILE_THREADS``."""
    asked = os.environ.get("METILE_THREADS")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise mismatch("METILE_THREADS", "a positive integer", repr(asked))
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def host() -> Any:
    """Load the host library, which owns the thread pool."""
    text = (data_root("kernels") / "host" / "cpu_pool.cpp").read_text()
    library = ctypes.PyDLL(str(compile_library(text, (), "host")))
    library.metile_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    library.metile_configure.argtypes = (ctypes.c_int, ctypes.c_int64)
    library.metile_configure.restype = None
    library.metile_huge_pages.argtypes = (ctypes.py_object,)
    library.metile_huge_pages.restype = ctypes.c_int64
    library.metile_expect.argtypes = (ctypes.py_object,)
    library.metile_describe.argtypes = (ctypes.py_object, ctypes.c_void_p)
    library.metile_tape_run.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p)
    library.metile_unchanged.argtypes = (ctypes.py_object,) * 4
    library.metile_configure(thread_count(), _SPIN_NANOSECONDS)
    return library


def _translation_unit(source: KernelSource, isa: Isa) -> str:
    """Return the C++ text of a kernel: the vocabulary, the program, and the two functions the host calls."""
    names = (*source.inputs, *source.outputs)
    arrays = "\n".join(f"  const metile::Array& {name} = arrays[{i}];" for i, name in enumerate(names))
    numbers = "\n".join(f"  const long {name} = numbers[{i}];" for i, name in enumerate(source.numbers))
    silence = " ".join(f"(void){name};" for name in source.numbers)
    return f"""#define METILE_ISA_{isa.macro} 1
#define METILE_LANES {isa.lanes}
#include "tile/cpu.h"
#include "{source.program}"
extern "C" long metile_scratch(const long* numbers) {{
{numbers}
  {silence}
  return {source.scratch};
}}
extern "C" void metile_entry(
    const metile::Array* arrays, const long* numbers, uint index, metile::Scratch* scratch) {{
{arrays}
{numbers}
  {silence}
  const Group group = {{index, scratch}};
  metile::begin_task();
  {source.body}
  metile::end_task();
}}
"""


class CpuKernel:
    """A kernel in a loaded shared library."""

    def __init__(self, source: KernelSource, library: Path) -> None:
        self.source = source
        self._library = ctypes.CDLL(str(library))
        self._scratch = self._library.metile_scratch
        self._scratch.restype = ctypes.c_int64
        self._scratch.argtypes = (ctypes.c_void_p,)
        self._run = host().metile_launch
        self._inputs: Any = ctypes.py_object * len(source.inputs)
        self._launches: dict[tuple[object, ...], Launch] = {}

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Run over `groups` threadgroups; see `metile.targets.base.Kernel`."""
        key = (groups, poison, *numbers, *[(output.shape, output.dtype) for output in outputs])
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._describe(outputs, groups, numbers, poison)
        if len(inputs) != len(self.source.inputs):
            raise mismatch(self.source.name, f"inputs {self.source.inputs}", f"{len(inputs)} arrays")
        held = self._inputs(*inputs)
        capsules: list[object] = [None] * len(outputs)
        status = self._run(ctypes.addressof(launch), ctypes.addressof(held), id(capsules))
        if status >= _LAYOUT:
            copies = list(inputs)
            copies[status - _LAYOUT] = self._contiguous(status - _LAYOUT, copies[status - _LAYOUT])
            return self(copies, outputs, groups=groups, numbers=numbers, poison=poison)
        if status < 0:
            raise MemoryError(f"[{self.source.name}] expected memory for the outputs but got none")
        return self._received(launch, inputs, capsules)

    def bind(
        self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        """Return a launch with everything fixed but the arrays; see `metile.targets.base.Kernel`."""
        launch, count = self._describe(outputs, groups, numbers, False), len(outputs)
        address, run, held_type = ctypes.addressof(launch), self._run, self._inputs

        def call(inputs: Sequence[mx.array], launch: Launch = launch) -> list[mx.array]:
            held = held_type(*inputs)
            capsules: list[object] = [None] * count
            if run(address, ctypes.addressof(held), id(capsules)):
                return self(inputs, outputs, groups=groups, numbers=numbers)  # an array that needs a copy first
            return self._received(launch, inputs, capsules)

        return call

    def scratch_function(self) -> int:
        """Return the address of the function that gives a launch's threadgroup memory by its numbers."""
        return ctypes.cast(self._scratch, ctypes.c_void_p).value or 0

    def _received(self, launch: Launch, inputs: Sequence[mx.array], capsules: list[object]) -> list[mx.array]:
        """Return the outputs of a launch, noted where launches are."""
        outputs = [mx.from_dlpack(Capsule(capsule)) for capsule in capsules]
        if _recording.launches is not None:
            _recording.launches.append(Launched(self, launch, tuple(inputs), tuple(outputs)))
        return outputs

    def _contiguous(self, index: int, array: mx.array) -> mx.array:
        if array.ndim > MAX_DIMS:
            expected = f"{self.source.inputs[index]} of at most {MAX_DIMS} axes"
            raise mismatch(self.source.name, expected, f"shape {array.shape}")
        return mx.contiguous(array)

    def _describe(self, outputs: Sequence[Output], groups: int, numbers: Sequence[int], poison: bool) -> Launch:
        source = self.source
        if len(numbers) != len(source.numbers):
            raise mismatch(source.name, f"numbers {source.numbers}", tuple(numbers))
        if len(outputs) != len(source.outputs) or any(len(output.shape) > MAX_DIMS for output in outputs):
            expected = f"outputs {source.outputs} of at most {MAX_DIMS} axes"
            raise mismatch(source.name, expected, [output.shape for output in outputs])
        launch = Launch()
        launch.entry = ctypes.cast(self._library.metile_entry, ctypes.c_void_p).value
        launch.groups = groups
        launch.numbers[: len(numbers)] = list(numbers)
        launch.scratch_bytes = self._scratch(ctypes.addressof(launch) + Launch.numbers.offset)
        launch.poison = int(poison)
        launch.input_count, launch.output_count = len(source.inputs), len(outputs)
        launch.strided_inputs = sum(1 << i for i, name in enumerate(source.inputs) if name in source.strided)
        for spec, output in zip(launch.outputs[: len(outputs)], outputs, strict=True):
            spec.ndim = len(output.shape)
            spec.shape[: spec.ndim] = list(output.shape)
            spec.code, spec.bits = _DLPACK_TYPES[output.dtype]
        return launch


class CpuTarget:
    """This machine's processor."""

    name = "cpu"
    timed = True

    def __init__(self, isa: Isa | None = None) -> None:
        self.isa = isa or current_isa()
        if self.isa not in supported_isas():
            names = ", ".join(isa.name for isa in supported_isas())
            raise mismatch("cpu", f"an instruction set of this machine ({names})", self.isa.name)
        self.limits = Limits(
            lanes=self.isa.lanes,
            registers=self.isa.registers,
            threadgroup_bytes=_CACHE_BYTES,
            tile_dtypes=("bfloat16",) if self.isa.has_tiles else (),
            tile_rows=16 if self.isa.has_tiles else 0,
        )
        self._kernels: dict[str, CpuKernel] = {}
        self._prepared: dict[int, weakref.ref[mx.array]] = {}

    def chip(self) -> str:
        """Return the processor's name, the instruction set in use, and the number of threads."""
        return f"{_processor()} ({self.isa.name}, {thread_count()} threads)"

    def compile(self, source: KernelSource) -> Kernel:
        """Compile a kernel, or find it compiled; see `metile.targets.base.Target`."""
        identity = source.identity(sources_digest())
        kernel = self._kernels.get(identity)
        if kernel is None:
            text = _translation_unit(source, self.isa)
            library = compile_library(text, self.isa.flags, f"{source.name}-{self.isa.name}")
            kernel = self._kernels.setdefault(identity, CpuKernel(source, library))
        return kernel

    def prepare(self, weights: Iterable[mx.array]) -> int:
        """Put huge pages under weights that will be streamed, where the system has them; return the bytes covered.

        The weights stay in place and no memory is added. What was prepared before is not prepared again. On one Xeon
        it made streaming about a fifth faster.
        """
        library = host()
        covered = 0
        for weight in weights:  # one at a time: no other is kept alive by this
            if weight.nbytes >= _HUGE_BYTES and self._prepared.get(id(weight), _gone)() is not weight:
                self._prepared[id(weight)] = weakref.ref(weight)
                covered += max(library.metile_huge_pages(weight), 0)
        return covered

    def expect(self, weights: Iterable[mx.array]) -> None:
        """Let idle workers fetch these weights while Python prepares the launch that will read them.

        For the weights of a model in use. Weights that a measurement wants cold must not be expected.
        """
        library = host()
        for weight in weights:
            library.metile_expect(weight)

    def compile_all(self, sources: Sequence[KernelSource]) -> list[Kernel | CompileError]:
        """Compile many kernels in parallel; a rejected one gives its error in place of the kernel."""

        def attempt(source: KernelSource) -> Kernel | CompileError:
            try:
                return self.compile(source)
            except CompileError as error:
                return error

        with ThreadPoolExecutor(thread_count()) as pool:
            return list(pool.map(attempt, sources))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def available() -> str | None:
    """Return why the CPU target cannot be used here, or None where it can."""
    try:
        host()
    except (MetileError, OSError) as error:
        return str(error)
    return None
