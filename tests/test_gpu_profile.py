"""What a GPU says of its kernels, gathered by launch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import gpu_profile
import gpu_record


class Event:
    def __init__(self, name: str, start: int, duration: int, device: str = "DeviceType.CUDA") -> None:
        self._name, self._start, self._duration, self._device = name, start, duration, device

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._duration

    def device_type(self) -> str:
        return self._device


def test_kernels_are_told_from_copies_and_from_the_host() -> None:
    events = [Event("b", 20, 7), Event("a", 10, 5), Event("Memcpy DtoH", 11, 9), Event("call", 1, 9, "DeviceType.CPU")]
    assert gpu_profile._kernels(events) == [("a", pytest.approx(5e-9)), ("b", pytest.approx(7e-9))]


def test_a_launch_is_all_of_its_kernels() -> None:
    events = [("gemm", 1.0), ("gemm", 2.0), ("act", 0.5), ("gemm", 3.0), ("gemm", 4.0), ("act", 0.25)]
    assert gpu_profile.per_launch(events, 2) == [3.5, 7.25]
    assert gpu_profile.per_launch(events[:-1], 2) == [10.5 / 2]  # one is missing: the mean stands for all
    assert gpu_profile.per_launch([], 2) == []


def test_times_are_kept_as_quartiles() -> None:
    time = gpu_record.kernel_time([4.0, 1.0, 3.0, 2.0, 5.0])
    assert time is not None
    assert (time.launches, time.lower_seconds, time.median_seconds, time.upper_seconds) == (5, 2.0, 3.0, 4.0)
    assert gpu_record.kernel_time([]) is None


def test_without_the_profiler_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", None)
    result: Any = gpu_profile.record(lambda: ran.append(1))
    assert result is None
    assert ran == []
