"""Run a kernel in the simulator on arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metile.simulator.program import Options, compile_program
from metile.simulator.runtime import Buffer, launch

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
TYPES = {
    "bool": np.bool_,
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
    "long": np.int64,
    "ulong": np.uint64,
    "half": np.float16,
    "float": np.float32,
    "bfloat": np.uint16,
}


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """Return the bits of `x` as bfloat, rounded to the nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def as_type(values: np.ndarray, kind: str) -> np.ndarray:
    """Return what a buffer of `kind` holds for these values."""
    return to_bfloat(np.asarray(values)) if kind == "bfloat" else np.asarray(values).astype(TYPES[kind])


def of_type(data: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of what a buffer of `kind` holds."""
    return from_bfloat(data) if kind == "bfloat" else data


def run(
    source: str,
    arrays: Sequence[np.ndarray],
    threads: int = 1,
    threadgroup: int | None = None,
    options: Options | None = None,
) -> list[np.ndarray]:
    """Run kernel `k` of `source`, whose buffers are `arrays` in order, and return what they hold then."""
    program = compile_program(HEAD + source, {"k": "k"}, options)
    arrays = [np.ascontiguousarray(array).copy() for array in arrays]
    buffers = {i: Buffer(f"b{i}", a.reshape(-1).view(np.uint8), output=True) for i, a in enumerate(arrays)}
    launch(program, "k", buffers, (threads, 1, 1), (threadgroup or threads, 1, 1))
    return [buffers[i].data.view(a.dtype).reshape(a.shape) for i, a in enumerate(arrays)]


def evaluate(lines: Sequence[str], kind: str, *inputs: np.ndarray, names: str = "abcd", before: str = "") -> np.ndarray:
    """Return the values, as `kind`, of expressions of inputs `a`, `b`, ... one element of each a thread."""
    ctypes = {np.dtype(value): name for name, value in reversed(TYPES.items()) if name != "bfloat"}
    declared = "".join(f", device {ctypes[x.dtype]}* p{n}" for n, x in zip(names, inputs, strict=False))
    loads = "".join(f"  {ctypes[x.dtype]} {n} = p{n}[i];\n" for n, x in zip(names, inputs, strict=False))
    stores = "".join(f"  y[i * {len(lines)} + {n}] = ({kind})({line});\n" for n, line in enumerate(lines))
    size = inputs[0].size if inputs else 1
    head = f"kernel void k(device {kind}* y{declared}, uint i [[thread_position_in_grid]])"
    source = f"{before}\n{head} {{\n{loads}{stores}}}\n"
    out = np.zeros((size, len(lines)), TYPES[kind])
    return run(source, [out, *inputs], size, min(size, 256))[0].T
