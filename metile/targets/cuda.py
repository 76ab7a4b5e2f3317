"""The CUDA target: kernels compiled here, or by MLX where they read strides, and launched as nodes of MLX's graph."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from metile.errors import mismatch
from metile.targets import cuda_modules
from metile.targets.base import Kernel, KernelSource, Output
from metile.targets.compiler import CompileError, sources_digest
from metile.targets.cuda_device import CudaDevice, this_device
from metile.targets.cuda_text import OPTIONS, SCRATCH, checked_view_text, kernel_text, view_text
from metile.targets.gpu_text import MAX_DIMS, count_of, fold, sizes_of
from metile.targets.nvrtc import Binary, Program, compile_program

_MOST_LAUNCHES = 256  # that a kernel keeps described; one that counts positions meets a new one at every token
WHOLE = "whole"  # the number that says whether all inputs are contiguous
_MOST_THREADS = 2**31 - 1  # of a grid, which MLX counts in an int
_LIKELY = (0, 16, 32, 64)  # depths of a slice that a search tries: compiled before it asks for them


def _mlx_precompiled(**launch: Any) -> list[mx.array]:
    return mx.fast.precompiled_cuda_kernel(**launch)


def _mlx_jit(**text: Any) -> Callable[..., list[mx.array]]:
    return mx.fast.cuda_kernel(**text)  # type: ignore[return-value]


@dataclass(frozen=True)
class Machine:
    """What a kernel stands on, each part of which a test may replace.

    Attributes:
        device: the GPU.
        precompiled: launches a binary, as `mx.fast.precompiled_cuda_kernel`.
        jit: makes a kernel from a text, as `mx.fast.cuda_kernel`.
        compile: compiles a program for an architecture, as `metile.targets.nvrtc.compile_program`.
    """

    device: CudaDevice
    precompiled: Callable[..., list[mx.array]] = _mlx_precompiled
    jit: Callable[..., Callable[..., list[mx.array]]] = _mlx_jit
    compile: Callable[[Program, str], Binary] = compile_program

    def binary(self, program: Program) -> Binary:
        """Compile a program that asks for no more threadgroup memory than there is.

        Raises:
            CompileError: NVRTC rejects it, or it asks for more.
        """
        binary = self.compile(program, self.device.architecture)
        most, wanted = self.device.threadgroup_bytes, binary.constants[0]
        if wanted > most:
            raise CompileError(f"[cuda] expected at most {most} bytes of threadgroup memory but got {wanted}")
        return binary


@dataclass(frozen=True)
class Shape:
    """All of a launch but its arrays."""

    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    sizes: tuple[int, ...]
    threads: int
    groups: int
    poison: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """What both of MLX's launches take."""
        return {
            "output_shapes": self.outputs,
            "output_dtypes": self.dtypes,
            "grid": (self.groups * self.threads, 1, 1),
            "threadgroup": (self.threads, 1, 1),
            **({"init_value": math.nan} if self.poison else {}),
        }


Call = Callable[[Sequence[mx.array]], list[mx.array]]


class Form(Protocol):
    """A kernel compiled for the numbers that it must know."""

    def launch(self, shape: Shape) -> Call:
        """Return the launch of a shape."""


class PlainForm:
    """A form without views: a binary that MLX loads."""

    def __init__(self, source: KernelSource, fixed: Sequence[int], name: str, machine: Machine) -> None:
        self._source, self._machine = source, machine
        self._name = f"{name}_{machine.device.architecture}"
        program = Program(source.name, kernel_text(source, fixed, self._name), (SCRATCH,), OPTIONS)
        self._binary = machine.binary(program)
        self._handed: bytes | None = None  # to MLX at every launch, once it is known to work

    def launch(self, shape: Shape) -> Call:
        """Return the launch of a shape."""
        if self._handed is None:
            self._handed = self._load(shape.threads)
        return self._call(shape, self._handed)

    def _call(self, shape: Shape, cubin: bytes) -> Call:
        run = self._machine.precompiled
        rest: dict[str, Any] = {
            "name": self._name,
            "compiled_source": cubin,
            "scalars": shape.sizes,
            "shared_memory": self._binary.constants[0],
            "ensure_row_contiguous": True,
            **shape.arguments,
        }
        return lambda inputs: run(inputs=inputs, **rest)

    def _load(self, threads: int) -> bytes:
        """Have MLX load the binary, by a launch that does nothing; return what launches have to hand over."""
        source, count = self._source, len(self._source.outputs)
        nothing = Shape(((1,),) * count, (mx.float32,) * count, (0,) * count_of(source), threads, 1, False)
        inputs = [mx.zeros((1,)) for _ in source.inputs]

        def attempt(cubin: bytes) -> None:
            mx.eval(self._call(nothing, cubin)(inputs))

        try:
            with cuda_modules.offered(self._name, self._binary.cubin):
                attempt(b"")
            return b""
        except (OSError, RuntimeError):
            pass
        try:
            attempt(self._binary.cubin)
        except RuntimeError as error:
            raise CompileError(f"[cuda] {source.name}: {error}") from error
        return self._binary.cubin


class ViewForm:
    """A form that reads strides. MLX compiles it, when it is first evaluated, from a text that has compiled here."""

    def __init__(self, source: KernelSource, fixed: Sequence[int], name: str, machine: Machine) -> None:
        self._source = source
        program = Program(source.name, checked_view_text(source, fixed, name), (SCRATCH,))
        binary, text = machine.binary(program), view_text(source, fixed)
        self._run = machine.jit(
            name=name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.body,
            header=text.header,
            ensure_row_contiguous=False,
            shared_memory=binary.constants[0],
        )

    def launch(self, shape: Shape) -> Call:
        """Return the launch of a shape."""
        run, arguments, sizes = self._run, shape.arguments, mx.array(shape.sizes, mx.int32)
        strided = [name in self._source.strided for name in self._source.inputs]

        def call(inputs: Sequence[mx.array]) -> list[mx.array]:
            arrays = [a if view else mx.contiguous(a) for a, view in zip(inputs, strided, strict=True)]
            return run(inputs=[sizes, *arrays], **arguments)

        return call


class CudaKernel:
    """A kernel in the forms that its launches have needed so far: one for the values of the numbers it must know."""

    def __init__(self, source: KernelSource, machine: Machine) -> None:
        self.source = source
        self._machine, self._threads = machine, source.simdgroups * machine.device.lanes
        self._identity = source.identity(sources_digest())
        self._forms: dict[tuple[int, ...], Form | CompileError] = {}
        self._launches: dict[tuple[object, ...], Call] = {}

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
        if not groups:
            return [mx.zeros(output.shape, output.dtype) for output in outputs]
        key = (groups, poison, *numbers, *[a.shape for a in inputs], *[(o.shape, o.dtype) for o in outputs])
        call = self._launches.get(key)
        if call is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            call = self._launches[key] = self._launch(inputs, outputs, groups, numbers, poison)
        return call(inputs)

    def bind(
        self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        """Return a launch with everything fixed but the arrays; see `metile.targets.base.Kernel`."""
        calls: dict[tuple[tuple[int, ...], ...], Call] = {}

        def call(inputs: Sequence[mx.array]) -> list[mx.array]:
            shapes = tuple([array.shape for array in inputs])
            launch = calls.get(shapes)
            if launch is None:
                if not groups:
                    return self(inputs, outputs, groups=0, numbers=numbers)
                if len(calls) >= _MOST_LAUNCHES:
                    calls.clear()
                launch = calls[shapes] = self._launch(inputs, outputs, groups, numbers, False)
            return launch(inputs)

        return call

    def form(self, fixed: Sequence[int], whole: bool = True) -> Form:
        """Return the kernel for these values of the numbers that it must know.

        Args:
            fixed: the values.
            whole: whether its inputs are contiguous, if it asks for that.

        Raises:
            CompileError: it cannot be compiled for them.
        """
        views = bool(self.source.strided) and not (whole and WHOLE in self.source.numbers)
        key = (views, *fixed)
        found = self._forms.get(key)
        if found is None:
            make = ViewForm if views else PlainForm
            name = "_".join([self._identity, *map(str, fixed)])
            try:
                found = make(self.source, fixed, name, self._machine)
            except CompileError as error:
                found = error
            self._forms[key] = found
        if isinstance(found, CompileError):
            raise found
        return found

    def likely(self) -> list[tuple[int, ...]]:
        """Return the values of its numbers for which a launch is likely to want it."""
        values = (self.source.likely or _LIKELY) if knows_numbers(self.source) else (0,)
        return [(value,) * len(self.source.fixed) for value in values]

    def _launch(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        groups: int,
        numbers: Sequence[int],
        poison: bool,
    ) -> Call:
        source = self.source
        if len(numbers) != len(source.numbers) or len(inputs) != len(source.inputs):
            expected = f"numbers {source.numbers} and inputs {source.inputs}"
            raise mismatch(source.name, expected, f"{tuple(numbers)} and {len(inputs)} arrays")
        if groups * self._threads > _MOST_THREADS:
            raise mismatch(source.name, f"at most {_MOST_THREADS} threads", groups * self._threads)
        for name, array in zip(source.inputs, inputs, strict=True):
            if name in source.strided and array.ndim > MAX_DIMS:
                raise mismatch(source.name, f"{name} of at most {MAX_DIMS} axes", f"shape {array.shape}")
        known = dict(zip(source.numbers, numbers, strict=True))
        fixed = [known[name] if knows_numbers(source) else 0 for name in source.fixed]
        form = self.form(fixed, bool(known.get(WHOLE, 1)))
        shapes = [fold(array.shape) for array in inputs] + [fold(output.shape) for output in outputs]
        shape = Shape(
            outputs=tuple(output.shape for output in outputs),
            dtypes=tuple(output.dtype for output in outputs),
            sizes=tuple(sizes_of(groups, numbers, shapes)),
            threads=self._threads,
            groups=groups,
            poison=poison,
        )
        return form.launch(shape)


def knows_numbers(source: KernelSource) -> bool:
    """Return whether a kernel's text is another for other values of its fixed numbers."""
    text = source.body + source.scratch
    return any(re.search(rf"\b{name}\b", text) for name in source.fixed)


def _faults(wanted: Sequence[tuple[CudaKernel, tuple[int, ...]]]) -> list[CompileError | None]:
    """Compile forms in parallel; return what was wrong with each."""

    def attempt(form: tuple[CudaKernel, tuple[int, ...]]) -> CompileError | None:
        kernel, fixed = form
        try:
            kernel.form(fixed)
        except CompileError as error:
            return error
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(attempt, wanted))


@dataclass
class CudaTarget:
    """An NVIDIA GPU, reached through `mx.fast.precompiled_cuda_kernel` and `mx.fast.cuda_kernel`."""

    machine: Machine = field(default_factory=lambda: Machine(this_device()))
    _kernels: dict[str, CudaKernel] = field(default_factory=dict, init=False, repr=False)

    name = "cuda"
    timed = True

    def __post_init__(self) -> None:
        """Take the device's limits."""
        self.limits = self.machine.device.limits

    def chip(self) -> str:
        """Return the name of the GPU."""
        return self.machine.device.name

    def prepare(self, weights: Iterable[mx.array]) -> int:
        """Do nothing: a GPU streams weights from where they lie."""
        del weights
        return 0

    def expect(self, weights: Iterable[mx.array]) -> None:
        """Do nothing: see `prepare`."""
        del weights

    def compile(self, source: KernelSource) -> Kernel:
        """Return the kernel, compiled once; see `metile.targets.base.Target`.

        Where the text depends on numbers of the launch, it is compiled when it is launched.
        """
        kernel = self._kernel(source)
        if not knows_numbers(source):
            kernel.form(kernel.likely()[0])
        return kernel

    def compile_all(self, sources: Sequence[KernelSource]) -> list[Kernel | CompileError]:
        """Compile many kernels in parallel, for the numbers of launches that are likely to come.

        Returns:
            The kernels; one that can be compiled for none of them gives its error in its place.
        """
        kernels = [self._kernel(source) for source in sources]
        wanted = [(kernel, fixed) for kernel in kernels for fixed in kernel.likely()]
        faults = dict(zip([(id(kernel), fixed) for kernel, fixed in wanted], _faults(wanted), strict=True))

        def result(kernel: CudaKernel) -> Kernel | CompileError:
            found = [faults[id(kernel), fixed] for fixed in kernel.likely()]
            return kernel if None in found else next(error for error in found if error is not None)

        return [result(kernel) for kernel in kernels]

    def compile_forms(self, wanted: Sequence[tuple[KernelSource, Sequence[int]]]) -> list[Kernel | CompileError]:
        """Compile kernels in parallel, each for the values of its fixed numbers that a launch will have.

        Returns:
            The kernels; one that is rejected gives its error in its place.
        """
        forms = [(self._kernel(source), tuple(fixed)) for source, fixed in wanted]
        faults = _faults(
            [(kernel, fixed if knows_numbers(kernel.source) else kernel.likely()[0]) for kernel, fixed in forms]
        )
        return [fault or kernel for fault, (kernel, _) in zip(faults, forms, strict=True)]

    def _kernel(self, source: KernelSource) -> CudaKernel:
        identity = source.identity(sources_digest())
        if identity not in self._kernels:
            self._kernels[identity] = CudaKernel(source, self.machine)
        return self._kernels[identity]
