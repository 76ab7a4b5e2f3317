"""Kernels of the headers in the installed MLX, unmodified, on the simulator, and what their tests share.

Instances are made as MLX's own just-in-time compiler makes them: the text of the headers, and a line with a `host_name`
for each. Several share one program, which is compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from simulator_headers import BEFORE, BEFORE_TEXT

from metile.simulator import Empty, MetalFile

DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}
# Of the largest element of the reference. Half the last place of an output is 2**-12 and 2**-9 of it; some kernels
# round between steps too.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 1.5e-2}
UNUSED = np.zeros(1, np.float32)  # for a buffer that is declared and not read
Constants = tuple[tuple[int, bool | int], ...]
Sizes = tuple[int, int, int]


@functools.cache
def kernels(header: str, instances: tuple[str, ...], constants: Constants = (), check: bool = False) -> MetalFile:
    """Return the instances, such as ``gemv<float, 4>``, of kernels of a header, each by that name."""
    include = '#include "mlx/backend/metal/kernels/{}"\n'
    text = "".join(include.format(name) for name in ("utils.h", *BEFORE.get(header, ())))
    text += BEFORE_TEXT.get(header, "") + include.format(header)
    for instance in instances:
        text += f'template [[host_name("{instance}")]] [[kernel]] decltype({instance}) {instance};\n'
    return MetalFile(text=text, constants=dict(constants), check=check)


def run(
    file: MetalFile,
    kernel: str,
    buffers: Mapping[int, Any],
    groups: Sizes,
    threadgroup: Sizes,
    findings: Collection[tuple[str, str]] = (),
    partial: Sizes | None = None,
) -> dict[int, Any]:
    """Run a kernel on whole threadgroups (or a grid that is `partial`), and return its outputs by index.

    In checked mode its findings must be of the kinds and on the variables given, no more and no fewer.
    """
    grid = partial or tuple(count * size for count, size in zip(groups, threadgroup, strict=True))
    done = file.run(kernel, buffers=dict(buffers), grid=grid, threadgroup=threadgroup, collect=True, time_limit=60)
    found = {(finding.kind, finding.variable) for finding in done.launch.findings}
    assert found == set(findings), "\n".join(map(str, done.launch.findings))
    return done.outputs


def close(got: mx.array, want: mx.array, tolerance: float | None = None) -> None:
    """Assert that all of an output is there and near a reference in float32."""
    assert got.shape == want.shape
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    scale = mx.abs(want).max().item()
    assert 0 < scale < float("inf")
    error = mx.abs(got - want).max().item()
    assert error <= limit * scale, f"off by {error:.3g} where the largest element is {scale:.3g}"


def exact(got: mx.array, want: mx.array) -> None:
    """Assert that an output is the reference, and of its dtype."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert mx.array_equal(got, want).item()


def reference(function: Callable[..., mx.array], *arrays: Any) -> mx.array:
    """Call a function on MLX's CPU, floating-point arrays in float32."""
    narrow = (mx.float16, mx.bfloat16)
    wide = [
        array.astype(mx.float32) if isinstance(array, mx.array) and array.dtype in narrow else array for array in arrays
    ]
    with mx.stream(mx.cpu):
        result = function(*wide)
        mx.eval(result)
    return result


def normal(*shape: int, kind: str = "float", scale: float = 1.0) -> mx.array:
    """Return random numbers of a Metal type."""
    with mx.stream(mx.cpu):
        result = (mx.random.normal(shape) * scale).astype(DTYPES[kind])
        mx.eval(result)
    return result


def empty(shape: Sequence[int], kind: str = "float") -> Empty:
    return Empty(tuple(shape), DTYPES[kind])


def longs(*values: int) -> np.ndarray:
    """Return what a kernel takes as ``int64_t*`` or ``size_t&``."""
    return np.array(values, np.int64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def up_to_simdgroup(count: int) -> int:
    return ceil_div(count, 32) * 32


def packed(fields: Iterable[tuple[str, Sequence[int | float] | int | float]]) -> np.ndarray:
    """Return the bytes of a C structure: pairs of a numpy type and a value or values, aligned as C aligns them."""
    out, widest = b"", 1
    for kind, value in fields:
        array = np.atleast_1d(np.array(value, kind))
        widest = max(widest, array.itemsize)
        out += b"\0" * (-len(out) % array.itemsize) + array.tobytes()
    return np.frombuffer(out + b"\0" * (-len(out) % widest), np.uint8).copy()


def name_of(case: object) -> str:
    """Return what a test is called after."""
    return str(case).replace(" ", "")
