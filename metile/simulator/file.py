"""Running kernels of a plain ``.metal`` file: buffers by index or name, function constants, threadgroup arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from metile.errors import mismatch, wrong_type
from metile.simulator import settings
from metile.simulator.arguments import sizes
from metile.simulator.devices import Device, find_device
from metile.simulator.findings import FindingsError
from metile.simulator.memory import array_of, as_numpy, flat_bytes
from metile.simulator.program import Options, Program, compile_program
from metile.simulator.runtime import Buffer, Launch, launch
from metile.simulator.signature import TYPE_NAMES

OP = "MetalFile"
_FUNCTION_CONSTANT = re.compile(r"(\w+)\s*\[\[\s*function_constant\s*\(\s*(\d+)\s*\)\s*\]\]")
_DTYPES = {str(dtype).rpartition(".")[2]: dtype for dtype in TYPE_NAMES}
_UNWRITTEN = 0xFF


def find_dtype(dtype: object) -> mx.Dtype:
    """Return a dtype by its MLX name, such as ``bfloat16``, or from one of MLX or numpy.

    Raises:
        MetileError: Metal has no such type.
    """
    if isinstance(dtype, mx.Dtype):
        name = str(dtype).rpartition(".")[2]
    else:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[call-overload]
    found = _DTYPES.get(name)
    if found is None:
        raise mismatch(OP, f"a dtype that Metal has ({', '.join(_DTYPES)})", repr(name))
    return found


@dataclass(frozen=True)
class Empty:
    """Memory for an output: its elements hold nothing, and checked mode wants them all written.

    Attributes:
        shape: of the array that comes back.
        dtype: as `find_dtype` takes it.
    """

    shape: Sequence[int]
    dtype: Any = mx.float32


class Run(NamedTuple):
    """What a run left: arrays that were written, by buffer index, and the launch."""

    outputs: dict[int, Any]
    launch: Launch


@dataclass(frozen=True)
class _Argument:
    """A buffer argument: its memory, and how an array is made of it afterwards."""

    data: np.ndarray[tuple[int], np.dtype[np.uint8]]
    dtype: mx.Dtype
    shape: tuple[int, ...]
    numpy: bool
    empty: bool = False

    @classmethod
    def of(cls, value: object) -> _Argument:
        if isinstance(value, Empty):
            dtype, shape = find_dtype(value.dtype), tuple(value.shape)
            return cls(np.full(math.prod(shape) * dtype.size, _UNWRITTEN, np.uint8), dtype, shape, False, True)
        if isinstance(value, mx.array):
            mx.eval(value)
            return cls(flat_bytes(as_numpy(value)).copy(), find_dtype(value.dtype), tuple(value.shape), False)
        if isinstance(value, (bool, int, float)):
            kind = np.bool_ if isinstance(value, bool) else np.int32 if isinstance(value, int) else np.float32
            value = kind(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise wrong_type(OP, "an array, a scalar or Empty for each buffer", repr(value))
        array = np.asarray(value)
        return cls(flat_bytes(array).copy(), find_dtype(array.dtype), array.shape, True)

    def array(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Any:
        if self.numpy:
            return data.view(str(self.dtype).rpartition(".")[2].rstrip("_")).reshape(self.shape)
        return array_of(data, self.shape, self.dtype)


class MetalFile:
    """The kernels of a ``.metal`` file, or of a text.

    Args:
        path: the file; its folder is searched for what it includes.
        text: in place of a file, the text itself.
        include: more folders for ``#include``; the headers of the installed MLX are always found.
        constants: function constants by index or name.
        defines: macros, as ``NAME`` or ``NAME=value``.
        check: whether to run in checked mode; by default as ``METILE_SIMULATOR_CHECK`` says.
        strict: whether to reject also what only Apple's compiler rejects.
        device: what to simulate; an M1 by default.

    Raises:
        MetileError: no file, or constants that it does not have.
        CompileError: the text does not compile.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        text: str | None = None,
        include: Sequence[str | Path] = (),
        constants: Mapping[int | str, bool | int | float] | None = None,
        defines: Sequence[str] = (),
        check: bool | None = None,
        strict: bool = False,
        device: str | Device | None = None,
    ) -> None:
        if (path is None) == (text is None):
            raise mismatch(OP, "either a path or a text", "both" if path else "neither")
        folders = [Path(folder) for folder in include]
        if path is not None:
            try:
                text = Path(path).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise mismatch(OP, "a file that can be read", f"{path} ({error})") from None
            folders.insert(0, Path(path).absolute().parent)
        assert text is not None
        self.text = text
        self.device = find_device(device) if device is not None else settings.current().device
        self._file = str(path) if path is not None else "program_source"
        self._options = Options(
            check=settings.checked(check),
            strict=strict,
            constants=_by_index(text, constants or {}),
            include=tuple(folders),
            defines=tuple(defines),
        )
        self._program = compile_program(text, None, self._options, file=self._file)
        self._instances: dict[str, Program] = {}

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that are no templates, and of instantiated ones."""
        return tuple(self._program.entries)

    def _find(self, kernel: str | None) -> tuple[Program, str]:
        if kernel is None:
            if len(self.kernels) != 1:
                raise mismatch(OP, f"one of the kernels {', '.join(self.kernels) or '(none)'}", "no name")
            kernel = self.kernels[0]
        if kernel in self._program.entries:
            return self._program, kernel
        if "<" not in kernel:
            raise mismatch(OP, f"one of the kernels {', '.join(self.kernels) or '(none)'}", repr(kernel))
        if kernel not in self._instances:
            self._instances[kernel] = compile_program(self.text, {kernel: kernel}, self._options, file=self._file)
        return self._instances[kernel], kernel

    def run(
        self,
        kernel: str | None = None,
        *,
        buffers: Mapping[int | str, Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        threadgroup_memory: Mapping[int | str, int] | None = None,
        outputs: Collection[int | str] | None = None,
        collect: bool = False,
        time_limit: float | None = None,
        threads: int | None = None,
    ) -> Run:
        """Run a kernel.

        Args:
            kernel: its name, or ``name<arguments>`` of a template; not needed where there is only one.
            buffers: by index or name: arrays of numpy or MLX, scalars (int32, float32 or bool), or `Empty`. Those of
                parameters that a function constant turns on or off need not be there.
            grid: threads of the whole grid; the last threadgroups may be partial.
            threadgroup: threads of a threadgroup.
            threadgroup_memory: bytes of threadgroup arguments by index or name.
            outputs: which buffers come back; by default those that are `Empty` and those that the kernel changed.
            collect: in checked mode, leave findings in the launch instead of raising.
            time_limit: seconds after which the launch is given up.
            threads: threads of this machine to use.

        Returns:
            Outputs by index, each of the kind, dtype and shape of what was given, and the launch.

        Raises:
            FindingsError: checked mode found something, and `collect` is false.
            SimulatorFault: a fault, a deadlock, the time limit or a limit of the device.
            MetileError: buffers that the kernel lacks, or that it wants and were not given.
        """
        program, name = self._find(kernel)
        asked = sizes("grid", grid), sizes("threadgroup", threadgroup)
        names = {kind: _names(program, name, kind) for kind in ("buffer", "threadgroup")}
        optional = {parameter.index for parameter in program.entries[name].parameters if parameter.optional}
        bound = _indexed("buffers", names["buffer"], buffers, optional)
        given = {index: _Argument.of(value) for index, value in bound.items()}
        memory = _indexed("threadgroup_memory", names["threadgroup"], threadgroup_memory or {})
        wanted = None if outputs is None else set(_resolved(names["buffer"], outputs))
        held = {
            index: Buffer(
                names["buffer"][index],
                argument.data.copy(),
                output=argument.empty or wanted is None or index in wanted,
                initialised=not argument.empty,
            )
            for index, argument in given.items()
        }
        done = launch(
            program,
            name,
            held,
            *asked,
            device=self.device,
            threadgroup_arguments=memory,
            threads=threads,
            time_limit=time_limit,
        )
        if done.findings and not collect:
            raise FindingsError(done.findings, done.benign, name)
        written = {
            index: argument.array(held[index].data)
            for index, argument in given.items()
            if argument.empty
            or (index in wanted if wanted is not None else not np.array_equal(held[index].data, argument.data))
        }
        return Run(written, done)


def _by_index(text: str, constants: Mapping[int | str, bool | int | float]) -> dict[int, bool | int | float]:
    """Return function constants by index; names are looked up in the text."""
    known = {name: int(index) for name, index in _FUNCTION_CONSTANT.findall(text)}
    found = {}
    for key, value in constants.items():
        index = known.get(key) if isinstance(key, str) else key
        if index is None:
            raise mismatch(OP, f"one of the function constants {', '.join(known) or '(none)'}", repr(key))
        found[index] = value
    return found


def _names(program: Program, kernel: str, kind: str) -> dict[int, str]:
    parameters = program.entries[kernel].parameters
    return {parameter.index: parameter.name for parameter in parameters if parameter.kind == kind}


def _resolved(names: Mapping[int, str], keys: Collection[int | str]) -> list[int]:
    """Return indices of parameters given by index or name."""
    by_name = {name: index for index, name in names.items()}
    found = [by_name.get(key, -1) if isinstance(key, str) else key for key in keys]
    for key, index in zip(keys, found, strict=True):
        if index not in names:
            known = ", ".join(f"{index} ({name})" for index, name in names.items())
            raise mismatch(OP, f"one of {known or 'no buffers'}", repr(key))
    return found


def _indexed(
    what: str, names: Mapping[int, str], given: Mapping[int | str, Any], optional: Collection[int] = ()
) -> dict[int, Any]:
    """Return arguments by index, all of them but those that are optional."""
    found = dict(zip(_resolved(names, list(given)), given.values(), strict=True))
    missing = [f"{index} ({name})" for index, name in names.items() if index not in found and index not in optional]
    if missing:
        raise mismatch(OP, f"{what} for {', '.join(missing)}", "none")
    return found
