"""Arrays as the buffers of a launch, and back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metile.simulator.runtime import Buffer
from metile.simulator.signature import Slot

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_UNWRITTEN = 0xFF  # every byte: NaN in each float type, -1 in each signed integer


def as_numpy(array: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Return an evaluated array's memory, strides as they are; bfloat16, which numpy lacks, as uint16."""
    return np.asarray(mx.view(array, mx.uint16) if array.dtype == mx.bfloat16 else array)


def flat_bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Bytes:
    """Return an array's elements in row-major order, as bytes; a copy only where they are not in that order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _span(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> tuple[Bytes, int]:
    """Return the bytes from an array's lowest element to its highest, and where its first element is in them."""
    if array.size == 0:
        return np.zeros(0, np.uint8), 0
    steps = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    below = -sum(step for step in steps if step < 0)
    size = below + sum(step for step in steps if step > 0) + array.itemsize
    memory = (ctypes.c_uint8 * size).from_address(array.ctypes.data - below)
    return np.ctypeslib.as_array(memory).copy(), below


def _described(slot: Slot, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Bytes:
    if slot.role == "shape":
        return np.array(array.shape, np.int32).view(np.uint8)
    if slot.role == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64).view(np.uint8)
    return np.array([array.ndim], np.int32).view(np.uint8)


def input_buffers(slots: Sequence[Slot], arrays: Sequence[mx.array], contiguous: bool) -> dict[int, Buffer]:
    """Return the buffers of all inputs by index, with the shapes, strides and numbers of axes that are asked for.

    Args:
        slots: what each index holds; outputs are left out.
        arrays: the evaluated inputs.
        contiguous: whether an array whose elements are not in row-major order is copied into it. Where not, the
            kernel gets the memory as it is, and a pointer to the first element, which is not the lowest where a
            stride is negative.
    """
    buffers: dict[int, Buffer] = {}
    memory = [as_numpy(array) for array in arrays]
    if contiguous:
        memory = [array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in memory]
    for index, slot in enumerate(slots):
        if slot.role == "output":
            continue
        array = memory[slot.position]
        if slot.role != "data":
            buffers[index] = Buffer(slot.name, _described(slot, array), constant=True)
        elif array.flags.c_contiguous:
            buffers[index] = Buffer(slot.name, flat_bytes(array), constant=slot.constant)
        else:
            data, offset = _span(array)
            buffers[index] = Buffer(slot.name, data, constant=slot.constant, offset=offset)
    return buffers


def output_buffer(name: str, shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> Buffer:
    """Return an output's memory: filled with `init_value`, or with bits that are NaN and count as unwritten."""
    if init_value is not None:
        filled = mx.full(shape, init_value).astype(dtype)
        mx.eval(filled)
        return Buffer(name, flat_bytes(as_numpy(filled)).copy(), output=True)
    data = np.full(math.prod(shape) * dtype.size, _UNWRITTEN, np.uint8)
    return Buffer(name, data, output=True, initialised=False)


def output_array(buffer: Buffer, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return what a launch left in an output's memory."""
    return array_of(buffer.data, shape, dtype)


def array_of(data: Bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return bytes as an array."""
    if dtype == mx.bool_:
        return mx.array((data != 0).reshape(shape))
    carrier = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[dtype.size]
    numbers = mx.array(data.view(f"u{dtype.size}").reshape(shape))
    return numbers if carrier == dtype else mx.view(numbers, dtype)
