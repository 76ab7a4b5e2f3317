"""What an NVIDIA GPU says of itself, through a driver's library that answers from a table."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from test_cuda_target import HOPPER

from metile.errors import MetileError
from metile.targets.cuda_device import Driver


class FakeDriver:
    """A driver's library that answers from a table."""

    def __init__(self, **changed: int) -> None:
        known = {1: 1024, 10: 32, 12: 65536, 16: 132, 38: 60 << 20, 75: 9, 76: 0, 97: 232448}
        self.known = known | {int(name[1:]): value for name, value in changed.items()}

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.known.get(-1, flags)

    def cuDriverGetVersion(self, to: Any) -> int:  # noqa: N802
        to._obj.value = 13000
        return 0

    def cuDeviceGet(self, to: Any, index: int) -> int:  # noqa: N802
        to._obj.value = index
        return 0 if index == 0 else 101

    def cuDeviceGetName(self, to: Any, length: int, device: Any) -> int:  # noqa: N802
        to.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, to: Any, number: int, device: Any) -> int:  # noqa: N802
        to._obj.value = self.known[number]
        return 0


def test_a_device_is_what_the_driver_says() -> None:
    assert Driver(FakeDriver()).device() == HOPPER
    assert HOPPER.architecture == "sm_90a"
    assert Driver(FakeDriver(_75=8, _76=6)).device().architecture == "sm_86"


def test_an_old_gpu_and_a_missing_one_are_named() -> None:
    with pytest.raises(MetileError, match=r"expected a GPU of compute capability 8.0 or more but got NVIDIA H200, 7.5"):
        Driver(FakeDriver(_75=7, _76=5)).device()
    with pytest.raises(MetileError, match="error 101 of cuDeviceGet"):
        Driver(FakeDriver()).device(1)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr("metile.targets.cuda_device.ctypes.CDLL", missing)
    with pytest.raises(MetileError, match="expected NVIDIA's driver but got none"):
        Driver()
