"""The Metal target: kernels assembled for `mx.fast.metal_kernel`, nodes of MLX's graph like its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from metile.errors import MetileError, mismatch
from metile.simulator.devices import Device, custom, find_device
from metile.targets.base import Kernel, KernelSource, Limits, Output
from metile.targets.compiler import sources_digest
from metile.targets.gpu_text import MAX_DIMS, fold
from metile.targets.metal_text import LEAST_ELEMENTS, metal_text, sizes_of

_REGISTERS = 128  # floats of a thread before a GPU of any family spills
_MOST_SIZES = 256  # arrays of sizes that a kernel keeps; one that counts positions meets a new one at every token

# `mx.fast.metal_kernel`, or what stands in for it.
MakeKernel = Callable[..., Callable[..., list[mx.array]]]


class MetalKernel:
    """A kernel in the forms that its launches have needed so far.

    A form is a text of its own: for the values of the numbers it is compiled for, and for which inputs are views.
    """

    def __init__(self, source: KernelSource, make: MakeKernel, lanes: int) -> None:
        self.source = source
        self._make, self._threads = make, source.simdgroups * lanes
        self._identity = source.identity(sources_digest())
        self._forms: dict[tuple[object, ...], Callable[..., list[mx.array]]] = {}
        self._sizes: dict[tuple[object, ...], mx.array] = {}

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
        form = self.form(numbers, [array.size for array in inputs])
        arrays = [self._fitted(name, array) for name, array in zip(self.source.inputs, inputs, strict=True)]
        return form(
            inputs=[self._sizes_of(groups, numbers, inputs, outputs), *arrays],
            output_shapes=[output.shape for output in outputs],
            output_dtypes=[output.dtype for output in outputs],
            grid=(groups * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
            **({"init_value": math.nan} if poison else {}),
        )

    def bind(
        self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        """Return a launch with everything fixed but the arrays; see `metile.targets.base.Kernel`."""

        def call(inputs: Sequence[mx.array]) -> list[mx.array]:
            return self(inputs, outputs, groups=groups, numbers=numbers)

        return call

    def form(self, numbers: Sequence[int], sizes: Sequence[int]) -> Callable[..., list[mx.array]]:
        """Return the kernel for these numbers and inputs of so many elements."""
        source = self.source
        if len(numbers) != len(source.numbers) or len(sizes) != len(source.inputs):
            expected = f"numbers {source.numbers} and inputs {source.inputs}"
            raise mismatch(source.name, expected, f"{tuple(numbers)} and {len(sizes)} arrays")
        fixed = tuple(numbers[source.numbers.index(name)] for name in source.fixed)
        views = tuple(
            name
            for name, size in zip(source.inputs, sizes, strict=True)
            if name in source.strided and size >= LEAST_ELEMENTS
        )
        key = fixed, views
        if key not in self._forms:
            text = metal_text(source, fixed, views)
            name = "_".join([self._identity, *map(str, fixed), *views])
            self._forms[key] = self._make(
                name=name,
                input_names=list(text.inputs),
                output_names=list(text.outputs),
                source=text.body,
                header=text.header,
                ensure_row_contiguous=not source.strided,
            )
        return self._forms[key]

    def _fitted(self, name: str, array: mx.array) -> mx.array:
        """Return an input as its form takes it: strided where that is read, else contiguous and not too small."""
        if array.size < LEAST_ELEMENTS:
            return mx.pad(array.reshape(-1), (0, LEAST_ELEMENTS - array.size))
        if name in self.source.strided:
            if array.ndim > MAX_DIMS:
                raise mismatch(self.source.name, f"{name} of at most {MAX_DIMS} axes", f"shape {array.shape}")
            return array
        return mx.contiguous(array) if self.source.strided else array

    def _sizes_of(
        self, groups: int, numbers: Sequence[int], inputs: Sequence[mx.array], outputs: Sequence[Output]
    ) -> mx.array:
        shapes = [array.shape for array in inputs] + [output.shape for output in outputs]
        key = (groups, *numbers, *shapes)
        if key not in self._sizes:
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            values = sizes_of(groups, numbers, [fold(shape) for shape in shapes])
            self._sizes[key] = mx.array(values, mx.int32)
        return self._sizes[key]


def limits_of(device: Device) -> Limits:
    """Return the limits of a GPU as spaces know them."""
    return Limits(
        lanes=device.simd_width,
        registers=_REGISTERS,
        threadgroup_bytes=device.threadgroup_bytes,
        threads=device.max_threads,
    )


class MetalTarget:
    """An Apple GPU, reached through `mx.fast.metal_kernel`.

    MLX compiles a kernel when it is first evaluated. What Apple's compiler rejects raises then, and every candidate is
    verified before it is timed: it is rejected with the compiler's words.
    """

    name = "metal"
    timed = True

    def __init__(self, device: Device | None = None, make: MakeKernel | None = None) -> None:
        self.device = device or this_device()
        self.limits = limits_of(self.device)
        self._make: MakeKernel = make or mx.fast.metal_kernel  # type: ignore[assignment]
        self._kernels: dict[str, MetalKernel] = {}

    def chip(self) -> str:
        """Return the name of the GPU."""
        return self.device.name

    def prepare(self, weights: Iterable[mx.array]) -> int:
        """Do nothing: a GPU streams weights from where they lie."""
        del weights
        return 0

    def expect(self, weights: Iterable[mx.array]) -> None:
        """Do nothing: see `prepare`."""
        del weights

    def compile(self, source: KernelSource) -> Kernel:
        """Return the kernel, compiled once; see `metile.targets.base.Target`."""
        identity = source.identity(sources_digest())
        if identity not in self._kernels:
            self._kernels[identity] = MetalKernel(source, self._make, self.limits.lanes)
        return self._kernels[identity]


def this_device() -> Device:
    """Return the GPU of this machine, by the name MLX gives it; one that is not in the table has an M1's limits."""
    name = str(mx.device_info(mx.gpu).get("device_name", "Apple GPU"))
    try:
        return find_device(name)
    except MetileError:
        return custom(name)
