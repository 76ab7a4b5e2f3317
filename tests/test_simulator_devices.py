"""Simulated devices: what is published about them, finding one, and making one."""

from __future__ import annotations

import pytest

from metile.errors import MetileError
from metile.simulator.devices import DEVICES, custom, find_device


def test_every_device_has_the_published_limits() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        assert (device.max_threads, device.threadgroup_bytes, device.simd_width) == (1024, 32768, 32)
        assert device.pipeline_threads is None


@pytest.mark.parametrize(
    ("name", "family", "cores", "bandwidth"),
    [("m1", "apple7", 8, 68.25), ("m2-ultra", "apple8", 76, 800), ("m4-max", "apple9", 40, 546)],
)
def test_cores_and_bandwidth(name: str, family: str, cores: int, bandwidth: float) -> None:
    device = DEVICES[name]
    assert (device.family, device.gpu_cores, device.memory_gb_per_s) == (family, cores, bandwidth)


def test_generations_have_one_family_and_grow() -> None:
    for generation in "12345":
        devices = [device for name, device in DEVICES.items() if name.startswith(f"m{generation}")]
        assert len({device.family for device in devices}) == 1
        assert len(devices) >= 3
        cores = [device.gpu_cores for device in devices]
        assert cores == sorted(set(cores))
        bandwidth = [device.memory_gb_per_s for device in devices]
        assert bandwidth == sorted(set(bandwidth))


@pytest.mark.parametrize("spelling", ["m2-max", "M2 Max", "Apple M2 Max", "apple_m2_max", " m2  MAX "])
def test_spellings(spelling: str) -> None:
    assert find_device(spelling) is DEVICES["m2-max"]


def test_no_device_is_the_m1_and_a_device_is_itself() -> None:
    assert find_device(None) is DEVICES["m1"]
    assert find_device(DEVICES["m5"]) is DEVICES["m5"]


@pytest.mark.parametrize("name", ["m9", "", "a100", "m2-mini"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(MetileError, match=r"expected one of m1, m1-pro, .*m5-max but got") as caught:
        find_device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("threads", [896, 832])
def test_a_pipeline_caps_the_threads(threads: int) -> None:
    device = DEVICES["m1"].with_pipeline_threads(threads)
    assert device.max_threads == threads
    assert device.max_threads_per_threadgroup == 1024
    assert DEVICES["m1"].max_threads == 1024


def test_a_cap_above_the_device_changes_nothing() -> None:
    assert DEVICES["m1"].with_pipeline_threads(4096).max_threads == 1024


def test_custom_changes_only_what_is_given() -> None:
    device = custom("small", base="m3", threadgroup_bytes=16 << 10, pipeline_threads=512)
    assert (device.name, device.family, device.threadgroup_bytes, device.max_threads) == ("small", "apple9", 16384, 512)
    assert device.memory_gb_per_s == 100
    assert custom() == custom(base="m1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline_threads": 0}, "pipeline_threads to be a positive integer but got 0"),
        ({"threadgroup_bytes": -1}, "threadgroup_bytes to be a positive integer but got -1"),
        ({"gpu_cores": True}, "gpu_cores to be a positive integer but got True"),
        ({"memory_gb_per_s": 0}, "memory_gb_per_s to be positive but got 0"),
        ({"base": "m0"}, "one of m1"),
    ],
)
def test_limits_that_cannot_be(change: dict[str, int], said: str) -> None:
    with pytest.raises(MetileError, match=said):
        custom(**change)  # type: ignore[arg-type]
