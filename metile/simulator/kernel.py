"""A drop-in for `mx.fast.metal_kernel` that runs the kernel here, at once, on a simulated Apple GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.errors import MetileError
from metile.simulator import arguments, settings
from metile.simulator.devices import Device, find_device
from metile.simulator.findings import Finding, FindingsError
from metile.simulator.gradients import as_operation
from metile.simulator.memory import input_buffers, output_array, output_buffer
from metile.simulator.program import Options, Program, compile_program
from metile.simulator.runtime import Buffer, Launch, launch
from metile.simulator.signature import Body, Generated, Passed, Template

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class _Built:
    generated: Generated
    program: Program


class MetalKernel:
    """A kernel made by `metal_kernel`; call it to run it.

    Attributes:
        name: as given.
        last: the last launch: its counters, findings and benign findings; None before the first.
        launches: how often it ran.
    """

    def __init__(
        self, body: Body, *, contiguous: bool, strict: bool, check: bool | None, device: Device | None
    ) -> None:
        self.name = body.name
        self.last: Launch | None = None
        self.launches = 0
        self._body = body
        self._contiguous = contiguous
        self._strict = strict
        self._check = check
        self._device = device
        self._built: dict[object, _Built] = {}

    def __repr__(self) -> str:
        return f"<simulated Metal kernel {self.name!r}>"

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sizes,
        threadgroup: Sizes,
        template: Iterable[tuple[str, bool | int | mx.Dtype]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        check: bool | None = None,
        collect: bool | list[Finding] = False,
        device: str | Device | None = None,
        time_limit: float | None = None,
        threads: int | None = None,
    ) -> list[mx.array]:
        """Run the kernel; the outputs are there when it returns.

        Args:
            inputs: arrays, or Python scalars, which become arrays without axes.
            output_shapes: shape of each output.
            output_dtypes: dtype of each output.
            grid: threads of the whole grid; the last threadgroups may be partial.
            threadgroup: threads of a threadgroup.
            template: template arguments by name: a bool, an int or a dtype.
            init_value: what outputs hold before the kernel runs; without it every bit is set, which is NaN.
            verbose: whether to print the text that MLX would compile.
            stream: as in MLX; the CPU is refused.
            check: whether to run in checked mode; by default as the kernel was made, else as installed, else as the
                environment variable ``METILE_SIMULATOR_CHECK`` says.
            collect: in checked mode, leave findings in ``last`` instead of raising; a list is extended by them.
            device: what to simulate; by default as the kernel was made, else as installed, else an M1.
            time_limit: seconds after which the launch is given up.
            threads: threads of this machine to use; all by default. Checked mode has one.

        Returns:
            The outputs.

        Raises:
            FindingsError: checked mode found something, and nobody collects.
            SimulatorFault: the kernel touched memory that is not there, deadlocked, ran too long or exceeded a limit.
            CompileError: the text does not compile.
            ValueError: arguments that MLX refuses, in the words of MLX.
            TypeError: arguments of the wrong type.
        """
        arrays = arguments.arrays(inputs)
        values = arguments.template(template)
        shapes, dtypes = arguments.shapes(output_shapes), arguments.dtypes(output_dtypes)
        sizes = arguments.sizes("grid", grid), arguments.sizes("threadgroup", threadgroup)
        arguments.counts(self._body, arrays, shapes, dtypes)
        arguments.on_gpu(stream)
        simulated = find_device(device) if device is not None else self._device or settings.current().device
        arguments.fits(sizes[1], simulated)
        built = self._build(arrays, dtypes, values, settings.checked(self._check if check is None else check))
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{built.generated.shown}\n```")
        arguments.evaluate(arrays)
        buffers = input_buffers(built.generated.slots, arrays, self._contiguous)
        kinds = list(zip(shapes, dtypes, strict=True))
        outputs = [output_buffer(name, *kind, init_value) for name, kind in zip(self._body.outputs, kinds, strict=True)]
        buffers.update(enumerate(outputs, len(built.generated.slots) - len(outputs)))
        self._launch(built, buffers, sizes, simulated, threads=threads, time_limit=time_limit)
        self._report(collect)
        return as_operation(arrays, [output_array(one, *kind) for one, kind in zip(outputs, kinds, strict=True)])

    def _build(self, arrays: Sequence[mx.array], dtypes: Sequence[mx.Dtype], values: Template, check: bool) -> _Built:
        """Return the compiled kernel for arguments of this kind; text and library are made once."""
        passed = tuple(Passed.of(array) for array in arrays)
        kinds = tuple(type(value) for _, value in values)  # True and 1 are equal, but not the same argument
        key = (passed, tuple(dtypes), values, kinds, check)
        built = self._built.get(key)
        if built is None:
            generated = self._body.generate(passed, dtypes, values)
            options = Options(check=check, strict=self._strict)
            program = compile_program(generated.text, {generated.name: generated.instance}, options, file=self.name)
            built = self._built.setdefault(key, _Built(generated, program))
        return built

    def _launch(
        self,
        built: _Built,
        buffers: dict[int, Buffer],
        sizes: tuple[Sizes, Sizes],
        device: Device,
        *,
        threads: int | None,
        time_limit: float | None,
    ) -> None:
        grid, asked = sizes
        threadgroup = tuple(max(1, min(axis, limit)) for axis, limit in zip(asked, grid, strict=True))  # as MLX does
        self.last = launch(
            built.program,
            built.generated.name,
            buffers,
            grid,
            threadgroup,
            device=device,
            threads=threads,
            time_limit=time_limit,
        )
        self.launches += 1
        settings.current().launches[self.name] += 1

    def _report(self, collect: bool | list[Finding]) -> None:
        assert self.last is not None
        if isinstance(collect, list):
            collect.extend(self.last.findings)
        elif self.last.findings and not collect:
            raise FindingsError(self.last.findings, self.last.benign, self.name)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    *,
    strict: bool = False,
    check: bool | None = None,
    device: str | Device | None = None,
) -> MetalKernel:
    """Define a Metal kernel by its body, as `mx.fast.metal_kernel` does, to be run on this machine's processor.

    Args:
        name: name of the kernel.
        input_names: names of the inputs in the body.
        output_names: names of the outputs in the body.
        source: the body of a Metal function; the signature is made for it.
        header: text before the function.
        ensure_row_contiguous: whether inputs are copied into row-major order where they are not in it.
        atomic_outputs: whether outputs are ``device atomic<T>*``.
        compile_options: as in MLX. Arithmetic here is that of the math mode ``safe`` in every mode.
        strict: whether to reject also what only Apple's compiler rejects.
        check: checked mode of every launch that does not say otherwise.
        device: the simulated device of every launch that does not say otherwise.

    Returns:
        The kernel, to be called as MLX's are.

    Raises:
        ValueError: no output, unknown options, or a header that would swallow the signature.
    """
    outputs = arguments.names("output_names", output_names)
    if not outputs:
        raise MetileError("[metal_kernel] Must specify at least one output.")
    arguments.math_mode(compile_options)
    arguments.header_ends(header)
    body = Body(name, arguments.names("input_names", input_names), outputs, source, header, atomic_outputs)
    simulated = None if device is None else find_device(device)
    return MetalKernel(body, contiguous=ensure_row_contiguous, strict=strict, check=check, device=simulated)
