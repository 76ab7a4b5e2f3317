"""What the search, the plan and the patch need of every kernel family.

An operation at one shape bucket is a *key*; one way to run it is a *candidate*. Plain MLX is candidate zero
everywhere and is written as None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from metile.errors import mismatch
from metile.targets.base import Kernel, KernelSource, Limits

# Upper ends of the row buckets: a launch of m rows belongs to the first bucket that holds it.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

DTYPES: dict[str, mx.Dtype] = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

# Largest error allowed of a kernel against the same arithmetic in float32, relative to the largest reference value:
# a few roundings of the output dtype.
TOLERANCES: dict[str, float] = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


def dtype_name(dtype: mx.Dtype) -> str | None:
    """Return a dtype's name, or None for one that no kernel takes."""
    return next((name for name, value in DTYPES.items() if value == dtype), None)


def row_bucket(rows: int) -> int | None:
    """Return the upper end of the bucket that holds `rows`, or None where no bucket does."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), None) if rows > 0 else None


class Candidate(Protocol):
    """One point of a search space: a frozen dataclass of plan fields."""

    def label(self) -> str:
        """Return the plan fields as one short word, part of the kernel's name."""


class OpKey(Protocol):
    """One operation at one shape bucket: a frozen, printable dataclass."""

    @property
    def family(self) -> str:
        """The family's name in schema v8's ``selected_dispatches``."""

    @property
    def rows(self) -> int:
        """Upper end of the row bucket."""

    @property
    def margin(self) -> float:
        """How much faster than plain MLX a candidate must be, as a fraction, or MLX stays."""

    def subject(self) -> str:
        """Return the key as one printable line, for cache files and progress."""

    def space(self, limits: Limits) -> list[Any]:
        """Return the candidates that the device admits, the untuned default first."""

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates were left out, and how many each reason took."""

    def source(self, candidate: Any) -> KernelSource:
        """Return the kernel of a candidate."""

    def launch(
        self, kernel: Kernel, candidate: Any, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run the kernel on `inputs`, in the order of `example`."""

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return what plain MLX gives for the same inputs (lazy)."""

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return random inputs of realistic scale, evaluated; weights in their own places."""

    def weight_inputs(self) -> tuple[int, ...]:
        """Return which inputs are weights, the ones that timing rotates."""

    def dispatch(self, candidate: Any | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches`` for a decision, None being plain MLX."""


_BUCKET_FIELDS = ("rows", "tokens", "batch")


def operation(key: Any) -> tuple[Any, ...]:
    """Return what the keys of one operation have in common whatever the bucket."""
    fields = dataclasses.asdict(key).items()
    return (type(key), *[(name, value) for name, value in fields if name not in _BUCKET_FIELDS])


def buckets_apart(a: OpKey, b: OpKey) -> float:
    """Return how far the buckets of two keys of one operation stand apart, in doublings."""
    ratios = (getattr(a, name, 1) / getattr(b, name, 1) for name in _BUCKET_FIELDS)
    return sum(abs(math.log2(ratio)) for ratio in ratios)


def check_arrays(
    op: str,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    dtypes: Sequence[mx.Dtype] | None = None,
) -> None:
    """Check what a kernel is launched on: it reads memory by these shapes. A fifth of a microsecond an array.

    Args:
        op: what the error names.
        inputs: of the launch.
        shapes: one for each.
        dtype: of all, or of what `op` computes in where there are `dtypes`.
        dtypes: one for each, where they differ.

    Raises:
        MetileError: an array is missing, or of another shape or dtype.
    """
    wanted, count = DTYPES[dtype], len(shapes)
    for index, array in enumerate(inputs):
        kind = wanted if dtypes is None or index >= count else dtypes[index]
        if index == count or array.shape != shapes[index] or array.dtype != kind:
            break
    else:
        if len(inputs) == count:
            return
    got = ", ".join(f"{array.shape} {array.dtype}" for array in inputs)
    mixed = dtypes is not None and set(dtypes) != {wanted}
    kinds = ", ".join(str(kind).removeprefix("mlx.core.") for kind in dtypes or ()) if mixed else dtype
    raise mismatch(op, f"arrays of {kinds} and shapes {', '.join(map(str, shapes))}", got)


def count_reasons(reasons: Sequence[str]) -> dict[str, int]:
    """Return how often each reason stands in the list, the most frequent first."""
    ordered = sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))
    return {reason: reasons.count(reason) for reason in ordered}
