"""What a candidate must give: its key's reference on float32 copies of the inputs, within a tolerance.

Every output holds NaN until it is written, and each candidate meets several row counts of its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from metile.measure import Clock
from metile.ops.base import TOLERANCES, OpKey, dtype_name
from metile.targets.base import Kernel

PLAIN_FACTOR = 2.0  # a candidate's error may be this many times plain MLX's own ...
FLOOR = 0.25  # ... plus this part of its dtype's tolerance
RAGGED_ROWS = 257  # enough for a ragged last block behind whole ones, at any block_m


@dataclass(frozen=True)
class Case:
    """Inputs of one row count, and what must come of them.

    Attributes:
        rows: the row count.
        inputs: in the order of the key's `example`.
        reference: outputs in float32.
        dtypes: of the outputs.
        allowed: largest error of each output, relative to its largest reference value.
        plain_seconds: what one call of plain MLX took, the first one.
    """

    rows: int
    inputs: list[mx.array]
    reference: list[mx.array]
    dtypes: list[mx.Dtype]
    allowed: list[float]
    plain_seconds: float


def row_counts(bucket: int) -> list[int]:
    """Return the row counts a candidate is verified at: a single row, a ragged count, and the full bucket."""
    return sorted({1, min(bucket // 2 + 1, RAGGED_ROWS), bucket})


def make_case(key: OpKey, rows: int, seed: int, clock: Clock) -> Case:
    """Compute what the candidates of `key` are held against at one row count."""
    inputs = key.example(rows, seed)
    with mx.stream(_exact_device(inputs)):
        reference = key.reference([_widened(array) for array in inputs])
    mx.eval(reference)
    start = clock()
    plain = key.reference(inputs)
    mx.eval(plain)
    seconds = clock() - start
    errors = [_error(got, want) for got, want in zip(plain, reference, strict=True)]
    allowed = [_allowed(got.dtype, error) for got, error in zip(plain, errors, strict=True)]
    return Case(rows, inputs, reference, [array.dtype for array in plain], allowed, seconds)


def _exact_device(inputs: Sequence[mx.array]) -> mx.Device:
    """Return the device that multiplies what inputs hold exactly: a GPU may cut float32 short, as TF32 does."""
    floats = [array for array in inputs if mx.issubdtype(array.dtype, mx.floating)]
    cut = any(array.dtype == mx.float32 and array.ndim > 1 for array in floats[:2])
    return mx.Device(mx.cpu) if cut else mx.default_device()


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _error(got: mx.array, want: mx.array) -> float:
    """Return the largest error relative to the largest reference value."""
    return _number(mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max())


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())


def _allowed(dtype: mx.Dtype, plain_error: float) -> float:
    """Return the error a candidate may have; in float32 plain MLX, being the reference, has none."""
    tolerance = TOLERANCES[dtype_name(dtype) or "float32"]
    if dtype == mx.float32:
        return tolerance
    return min(tolerance, PLAIN_FACTOR * plain_error + FLOOR * tolerance)


def fault(key: OpKey, candidate: Any, kernel: Kernel, case: Case) -> str | None:
    """Return what is wrong with a candidate on a case, or None."""
    try:
        outputs = key.launch(kernel, candidate, case.inputs, poison=True)
        mx.eval(outputs)
    except Exception as error:
        return f"raised {first_line(error)}"
    expected = [(array.shape, dtype) for array, dtype in zip(case.reference, case.dtypes, strict=True)]
    got = [(array.shape, array.dtype) for array in outputs]
    if got != expected:
        return f"expected outputs {expected} but got {got}"
    for number, output in enumerate(outputs):
        reason = _wrong(output.astype(mx.float32), case.reference[number], case.allowed[number])
        if reason is not None:
            return f"output {number} at {case.rows} rows: {reason}"
    return None


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, and of a compiler's what it complains of."""
    lines = str(error).splitlines() or [""]
    complaint = next((f" ({line.strip()})" for line in lines[1:] if "error: " in line), "")
    return f"{type(error).__name__}: {lines[0]}{complaint}"


def _wrong(got: mx.array, want: mx.array, allowed: float) -> str | None:
    parts = (mx.isnan(got).sum(), mx.isinf(got).sum(), mx.abs(got).max(), mx.abs(got - want).max())
    nans, infinities, largest, error = (_number(part) for part in parts)
    scale = _number(mx.abs(want).max())
    if nans:
        return f"{nans} of {got.size} values are NaN or were never written"
    if infinities:
        return f"{infinities} of {got.size} values are infinite"
    if largest == 0 and scale > 0:
        return "all values are zero"
    if not error <= allowed * scale:
        return f"error {error:.3g} is more than {allowed:.3g} of the largest value, {scale:.3g}"
    return None
