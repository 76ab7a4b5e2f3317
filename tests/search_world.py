"""Kernels that misbehave on request, in made-up time: what the tests of the search stand on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from metile.ops.base import count_reasons
from metile.targets.base import Kernel, KernelSource, Limits, Output
from metile.targets.compiler import CompileError

HIDDEN = 8


@dataclass
class World:
    """Time that passes only when a kernel, plain MLX or the compiler says so, and how each kernel behaves."""

    now: float = 0.0
    plain_seconds: float = 1e-2
    kernel_seconds: float = 1e-3
    compile_seconds: float = 0.0
    names: tuple[str, ...] = ("a", "b")
    seconds: dict[str, float] = field(default_factory=dict)
    behaviour: dict[str, str] = field(default_factory=dict)
    plain_calls: Counter[str] = field(default_factory=Counter)
    kernel_calls: Counter[str] = field(default_factory=Counter)
    compiled: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


WORLD = World()


@dataclass(frozen=True)
class FakeTile:
    name: str
    size: int = 1

    def label(self) -> str:
        return f"{self.name}{self.size}" if self.size > 1 else self.name


@dataclass(frozen=True)
class FakeKey:
    """y = 2x, by kernels that behave as the world says."""

    op: str
    rows: int
    margin: float = 0.02
    sizes: tuple[int, ...] = (1,)

    family = "rms_norm"

    def subject(self) -> str:
        return f"{self.op} rows={self.rows}"

    def space(self, limits: Limits) -> list[FakeTile]:
        return [FakeTile(name, size) for name in WORLD.names for size in self.sizes]

    def pruned(self, limits: Limits) -> dict[str, int]:
        return count_reasons(["needs 40192 bytes of threadgroup memory"] * 3)

    def source(self, candidate: FakeTile) -> KernelSource:
        return KernelSource(candidate.name, "fake.metal", "", ("x",), ("y",))

    def launch(
        self, kernel: Kernel, candidate: FakeTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        output = Output(inputs[0].shape, inputs[0].dtype)
        return kernel(inputs, (output,), groups=1, poison=poison)

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        if inputs[0].dtype == mx.bfloat16:
            WORLD.plain_calls[self.subject()] += 1
            WORLD.now += WORLD.plain_seconds
        return [inputs[0] * 2]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        return [mx.random.normal((rows, HIDDEN), key=mx.random.key(seed)).astype(mx.bfloat16)]

    def weight_inputs(self) -> tuple[int, ...]:
        return (0,)

    def dispatch(self, candidate: FakeTile | None) -> dict[str, Any]:
        return {}


@dataclass
class FakeKernel:
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
        name = self.source.name
        WORLD.kernel_calls[name] += 1
        WORLD.now += WORLD.seconds.get(name, WORLD.kernel_seconds)
        y = inputs[0] * 2
        return [_MISDEEDS[WORLD.behaviour.get(name, "right")](y, poison)]


def _unwritten(y: mx.array, poison: bool) -> mx.array:
    """Leave the last element as the memory was: by luck right, unless it was prefilled."""
    y[-1, -1] = float("nan") if poison else y[-1, -1]
    return y


def _raise(y: mx.array, poison: bool) -> mx.array:
    raise RuntimeError("device lost\nsecond line")


_MISDEEDS: dict[str, Callable[[mx.array, bool], mx.array]] = {
    "right": lambda y, _: y,
    "nan": lambda y, _: y * float("nan"),
    "inf": lambda y, _: y * float("inf"),
    "zeros": lambda y, _: mx.zeros_like(y),
    "unwritten": _unwritten,
    "raises": _raise,
    "shape": lambda y, _: y[:, :-1],
    "worse than plain MLX": lambda y, _: y * 1.015,  # within the tolerance of bfloat16, but plain MLX is exact
    "one row only": lambda y, _: y * (1 if y.shape[0] == 1 else 1.5),
}


class FakeTarget:
    name = "cpu"  # whose launches are timed one by one
    timed = True
    limits = Limits(lanes=4, registers=16, threadgroup_bytes=1 << 15)

    def chip(self) -> str:
        return "a chip"

    def compile(self, source: KernelSource) -> Kernel:
        WORLD.compiled.append(source.name)
        WORLD.now += WORLD.compile_seconds
        if WORLD.behaviour.get(source.name) == "does not compile":
            raise CompileError("[compile] k.cpp:3: error: no\nnote: more")
        return FakeKernel(source)
