"""Copies of a launch's buffers in memory that ends at a page nobody may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metile.errors import MetileError

if TYPE_CHECKING:
    from metile.simulator.runtime import Buffer

PAGE = 4096
POISON = 0xFF  # a NaN in every float type, -1 in every integer type
_VECTOR_BYTES = 16  # the largest alignment that vector types of the language ask for


@dataclass(frozen=True)
class Placed:
    """A buffer in guarded memory.

    Attributes:
        buffer: what was copied.
        index: its index among the kernel's buffers.
        address: of its first byte.
        memory: where its pages begin.
        bytes: of its pages.
    """

    buffer: Buffer
    index: int
    address: int
    memory: int
    bytes: int

    @property
    def size(self) -> int:
        """Return the buffer's size in bytes."""
        return self.buffer.data.nbytes


def _place(native: Any, index: int, buffer: Buffer) -> Placed:
    size = buffer.data.nbytes
    pages = -(-size // PAGE) * PAGE
    memory = native.metile_allocate(pages)
    if not memory:
        raise MetileError(f"[{buffer.name}] expected {size} bytes of memory but got none")
    address = memory + pages - size
    if size > _VECTOR_BYTES:
        address -= address % _VECTOR_BYTES
    if pages:
        ctypes.memset(memory, POISON, pages)
        if buffer.initialised:
            ctypes.memmove(address, buffer.data.ctypes.data, size)
    return Placed(buffer, index, address, memory, pages)


@contextmanager
def guarded(native: Any, buffers: Mapping[int, Buffer]) -> Iterator[list[Placed]]:
    """Place copies of buffers, poisoned with 0xff where they come without contents.

    A buffer ends where its pages end. One above 16 bytes begins at a multiple of 16, so up to 15 bytes may follow it.
    """
    placed: list[Placed] = []
    try:
        for index, buffer in buffers.items():
            placed.append(_place(native, index, buffer))
        yield placed
    finally:
        for item in placed:
            native.metile_release(item.memory, item.bytes)


def copy_back(placed: list[Placed]) -> None:
    """Copy the outputs from guarded memory to their arrays."""
    for item in placed:
        if item.buffer.output and item.size:
            ctypes.memmove(item.buffer.data.ctypes.data, item.address, item.size)
