"""What every target shares: how a kernel is described, and what it is to launch one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

# Targets whose kernels run when they are called; those of the others are nodes of MLX's graph.
EAGER_TARGETS = frozenset({"cpu", "simulator"})

# The name of each dtype in kernel text.
KERNEL_TYPES: dict[mx.Dtype, str] = {mx.bfloat16: "bfloat", mx.float16: "half", mx.float32: "float"}


@dataclass(frozen=True)
class KernelSource:
    """One kernel: a call into a program below ``kernels/``, with names for what it is called on.

    Attributes:
        name: says the plan: op, dtype and every field of the candidate.
        program: the file that holds it, such as ``linear.metal``.
        body: statements that use the names below, ``group`` (the threadgroup) and nothing else.
        inputs: names of input arrays, in order.
        outputs: names of output arrays, in order.
        numbers: names of integers known at launch. One called ``whole`` says, where it is not 0, that all inputs are
            contiguous: strides of those that are `strided` need not be read.
        scratch: an expression of the numbers: bytes of threadgroup memory.
        strided: names of inputs taken with any strides; all others must fold to a matrix.
        fixed: names of numbers that a GPU must know to compile the kernel.
        simdgroups: simdgroups of a threadgroup, where a threadgroup is more than one thread.
        stages: slices of k in threadgroup memory at once, where a target brings them there ahead of their use.
        likely: values of the first fixed number that launches are known to have; no part of what the kernel is.
    """

    name: str
    program: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    scratch: str = "0"
    strided: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    simdgroups: int = 1
    stages: int = 4
    likely: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def identity(self, sources: str) -> str:
        """Return the kernel's unique name: its name and a digest of its text and of `sources`.

        Two kernels of one name but different text never share an identity.
        """
        text = repr(self) + sources
        return f"{self.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Output:
    """Shape and dtype of one output of a launch."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class Limits:
    """What a device allows; spaces prune their candidates by it.

    Attributes:
        lanes: elements that one instruction handles: vector lanes, or the simd width.
        registers: vector registers of a thread, which bound the accumulator tile.
        threadgroup_bytes: most threadgroup memory (on a CPU: what stays in its cache) a kernel may take.
        tile_dtypes: dtypes multiplied by a matrix unit with tiles of `tile_rows` rows.
        tile_rows: rows of such a tile, 0 without a matrix unit.
        warpgroups: whether four simdgroups multiply together, from threadgroup memory, while they go on.
        threads: most threads of a threadgroup; 1 where one thread runs it all and lanes are a vector register's.
        groups_exchange: whether a threadgroup can read what another one of the same launch has written.
        threadgroup_registers: of all threads of a threadgroup together, 0 where it is not known.
    """

    lanes: int
    registers: int
    threadgroup_bytes: int
    tile_dtypes: tuple[str, ...] = ()
    tile_rows: int = 0
    threads: int = 1
    warpgroups: bool = False
    groups_exchange: bool = False
    threadgroup_registers: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether a threadgroup is many threads."""
        return self.threads > 1


class Kernel(Protocol):
    """A compiled kernel."""

    source: KernelSource

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Run over `groups` threadgroups; with `poison`, outputs hold NaN until written."""

    def bind(
        self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        """Return the launch with everything fixed but the arrays: what a layer calls at every token."""


class Target(Protocol):
    """A machine kernels run on.

    Attributes:
        name: of the target.
        limits: what its device allows.
        timed: whether the time its kernels take says anything; a simulator's does not.
    """

    name: str
    limits: Limits
    timed: bool

    def chip(self) -> str:
        """Return the processor's name, with the instruction set where that is a choice."""

    def prepare(self, weights: Iterable[mx.array]) -> int:
        """Do what makes streaming these weights faster without copying them; return the bytes concerned."""

    def expect(self, weights: Iterable[mx.array]) -> None:
        """Make ready for these weights to be read again and again, in the same order, by a model in use."""

    def compile(self, source: KernelSource) -> Kernel:
        """Compile a kernel, or find it compiled.

        Raises:
            CompileError: the compiler rejects it.
        """
