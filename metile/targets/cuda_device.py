"""What an NVIDIA GPU says of itself, asked through its driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from metile.errors import MetileError, mismatch
from metile.targets.base import Limits

LEAST_CAPABILITY = (8, 0)  # of the instructions that the vocabulary is made of
FRAGMENT_ROWS = 16  # of weights in a fragment of the matrix unit
_REGISTERS = 255  # the most that an instruction can name, on every GPU from LEAST_CAPABILITY on
_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")

# Numbers of the driver's CUdevice_attribute.
_ATTRIBUTES = {
    "threads": 1,
    "lanes": 10,
    "block_registers": 12,
    "processors": 16,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "threadgroup_bytes": 97,  # with the consent that a kernel has to give
}


@dataclass(frozen=True)
class CudaDevice:
    """A GPU.

    Attributes:
        name: as the driver gives it.
        capability: compute capability.
        driver: newest version of CUDA that the driver knows.
        lanes: of a warp.
        threads: most of a threadgroup.
        threadgroup_bytes: most shared memory of a threadgroup.
        block_registers: of a threadgroup, all threads together.
        processors: multiprocessors.
        l2_bytes: of the second-level cache.
    """

    name: str
    capability: tuple[int, int]
    driver: tuple[int, int]
    lanes: int
    threads: int
    threadgroup_bytes: int
    block_registers: int
    processors: int
    l2_bytes: int

    @property
    def architecture(self) -> str:
        """The architecture as NVRTC names it, with the instructions that only Hopper has."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability == (9, 0) else "")

    @property
    def limits(self) -> Limits:
        """The limits that spaces prune by."""
        return Limits(
            lanes=self.lanes,
            registers=_REGISTERS,
            threadgroup_bytes=self.threadgroup_bytes,
            tile_dtypes=("bfloat16", "float16"),
            tile_rows=FRAGMENT_ROWS,
            threads=self.threads,
            warpgroups=self.capability == (9, 0),
            groups_exchange=True,
            threadgroup_registers=self.block_registers,
        )


class Driver:
    """The driver's library.

    Args:
        library: what stands in for it.

    Raises:
        MetileError: there is none, or it has no GPU.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _load()
        self._call("cuInit", 0)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise mismatch("cuda", "an NVIDIA GPU that its driver can use", f"error {status} of {function}")

    def version(self) -> tuple[int, int]:
        """Return the newest version of CUDA that the driver knows."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def device(self, index: int = 0) -> CudaDevice:
        """Return a GPU.

        Raises:
            MetileError: it is not there, or too old.
        """
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        self._call("cuDeviceGet", ctypes.byref(handle), index)
        self._call("cuDeviceGetName", name, len(name), handle)
        values = {}
        for word, number in _ATTRIBUTES.items():
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
            values[word] = value.value
        capability = values.pop("major"), values.pop("minor")
        if capability < LEAST_CAPABILITY:
            least, got = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
            raise mismatch("cuda", f"a GPU of compute capability {least} or more", f"{name.value.decode()}, {got}")
        return CudaDevice(name.value.decode(), capability, self.version(), **values)


def _load() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MetileError(str(mismatch("cuda", "NVIDIA's driver", f"none ({_LIBRARIES[0]} is not on this machine)")))


def this_device() -> CudaDevice:
    """Return the GPU that MLX uses: the first that is visible.

    Raises:
        MetileError: there is none; the message says what is missing.
    """
    return Driver().device()
