"""Case 4 of public reports: a device that allows less, and kernels that leave output unwritten.

A space leaves out what the device forbids, with the reason; what gets past the space is rejected by its label in the
search, on the simulated target, and another candidate or plain MLX is decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from metal_checks import WatchedTarget, check

from metile.dispatch import Decision
from metile.ops.attention import AttentionKey
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.linear_metal import threadgroup_bytes
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.ops.rope import RopeKey, RopeTile
from metile.search import search
from metile.simulator import FindingsError, SimulatorFault
from metile.simulator.devices import Device, find_device
from metile.targets.base import Kernel, KernelSource, Limits
from metile.targets.metal import limits_of
from metile.targets.simulated import SimulatedTarget

CAPS = (896, 832)
MANY, FEW = NormTile(1, 32), NormTile(1, 16)  # of 1024 and of 512 threads


def capped(threads: int) -> Device:
    return find_device("m1").with_pipeline_threads(threads)


# ---- what the spaces leave out ----


@pytest.mark.parametrize("cap", CAPS)
def test_spaces_keep_to_the_threads_of_the_device(cap: int) -> None:
    limits, whole = limits_of(capped(cap)), limits_of(find_device("m1"))
    keys: list[OpKey] = [
        NormKey(False, 4, 8192, 1e-5, "float32"),
        AttentionKey(1, 1024, 4, 2, 64, "bfloat16"),
        LinearKey("store", 512, 1024, 1024, "bfloat16"),
        RopeKey(16, 4, 2, 64, "bfloat16"),
    ]
    for key in keys:
        space = key.space(limits)
        assert space
        assert all(32 * key.source(tile).simdgroups <= cap for tile in space)
        more = {tile for tile in key.space(whole) if 32 * key.source(tile).simdgroups > cap}
        assert set(space) == set(key.space(whole)) - more
        reason = f"more threads than the device's {cap}"
        assert (key.pruned(limits).get(reason, 0) > 0) == (key in keys[:2]) == bool(more)


def test_spaces_keep_to_the_threadgroup_memory_of_the_device() -> None:
    tile = LinearTile("matrix", 128, 128, 4, 4, 1, 64, "linear")
    key = LinearKey("store", 512, 1024, 1024, "bfloat16")
    assert threadgroup_bytes(tile, 1, "bfloat16") == 36864
    for bytes_allowed, fits in ((32 << 10, False), (40192, True)):
        limits = dataclasses.replace(limits_of(find_device("m1")), threadgroup_bytes=bytes_allowed)
        reasons = key.pruned(limits)
        assert (tile in key.space(limits)) == fits
        assert (f"more threadgroup memory than the device's {bytes_allowed} bytes" in reasons) == (not fits)
    attention = AttentionKey(512, 1024, 4, 2, 256, "float32")
    assert "a block does not fit threadgroup memory" in attention.pruned(limits_of(find_device("m1")))


# ---- what gets past them ----


@dataclasses.dataclass(frozen=True)
class Few(NormKey):
    """A norm with the candidates that are given, whatever the device."""

    tiles: tuple[NormTile, ...] = ()
    fault: str = ""  # of the first of them

    def space(self, limits: Limits) -> list[NormTile]:
        return list(self.tiles)

    def source(self, candidate: NormTile) -> KernelSource:
        source = super().source(candidate)
        if candidate != self.tiles[0]:
            return source
        if self.fault == "memory":  # with the 16 bytes that every kernel has, 40,192
            return dataclasses.replace(source, name="greedy", scratch="40176")
        if self.fault == "double":
            return dataclasses.replace(source, name="double", body="double wide = 1.0; (void)wide;\n  " + source.body)
        if self.fault == "bounds":
            beyond = "\n  volatile float last = x.data[x.shape[0] * x.shape[1]];"
            return dataclasses.replace(source, name="bounds", body=source.body + beyond)
        return source

    def launch(
        self, kernel: Kernel, candidate: NormTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        if self.fault != "unwritten" or candidate != self.tiles[0]:
            return super().launch(kernel, candidate, inputs, poison=poison)
        return super().launch(_Short(kernel), candidate, inputs, poison=poison)


class _Short:
    """A launch of one threadgroup less than it takes."""

    def __init__(self, kernel: Any) -> None:
        self.source, self._kernel = kernel.source, kernel

    def __call__(self, inputs: Any, outputs: Any, *, groups: int, **others: Any) -> list[mx.array]:
        return list(self._kernel(inputs, outputs, groups=max(groups - 1, 1), **others))


def decided(key: NormKey, device: Device | None = None) -> Decision:
    return search([key], SimulatedTarget(device), budget_seconds=60)[key]


def norm_of(*tiles: NormTile, fault: str = "", rows: int = 2) -> Few:
    return Few(False, rows, 4100, 1e-5, "float32", tiles, fault)


@pytest.mark.parametrize("cap", CAPS)
def test_a_candidate_of_more_threads_is_rejected_and_another_runs(cap: int) -> None:
    decision = decided(norm_of(MANY, FEW), capped(cap))
    message = f"Thread group size (1024) is greater than  the maximum allowed threads per threadgroup ({cap})."
    assert message in decision.rejected[MANY.label()]
    assert decision.candidate == FEW
    assert FEW.label() not in decision.rejected
    with pytest.raises(ValueError, match=r"Thread group size \(1024\)"):
        check(norm_of(MANY), MANY, norm_of(MANY).example(2, 0), WatchedTarget(capped(cap)))


def test_plain_mlx_stays_where_no_other_candidate_is_left() -> None:
    decision = decided(norm_of(MANY), capped(832))
    assert decision.candidate is None
    assert decision.speedup == 1.0
    assert decision.reason.startswith("no candidate passed verification; the default, b1_s32, raised ")
    assert "(832)" in decision.reason


def test_what_the_space_leaves_out_is_told_with_its_reason() -> None:
    key = NormKey(False, 1, 4100, 1e-5, "float32")
    decision = search([key], SimulatedTarget(capped(832)), budget_seconds=60, max_candidates=1)[key]
    assert decision.candidate == FEW
    assert decision.rejected["pruned: more threads than the device's 832"] == "1 candidates"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("memory", "expected at most 32768 bytes of threadgroup memory but got 40192"),
        ("double", "'double' is not supported in Metal"),
        ("unwritten", "output 0 at 2 rows: 4100 of 8200 values are NaN or were never written"),
        ("bounds", "expected accesses within its buffers but got one at byte 16400 of x_data (16400 bytes)"),
    ],
)
def test_a_candidate_with_a_fault_is_rejected_by_name_and_another_runs(fault: str, words: str) -> None:
    key = norm_of(FEW, NormTile(2, 16), fault=fault)
    decision = decided(key)
    assert words in decision.rejected[FEW.label()]
    assert decision.candidate == NormTile(2, 16)
    assert list(decision.rejected)[-1] == FEW.label()


def test_plain_mlx_stays_where_the_only_candidate_is_too_large() -> None:
    decision = decided(norm_of(FEW, fault="memory"))
    assert decision.candidate is None
    assert "but got 40192" in decision.reason


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_too_much_threadgroup_memory_is_a_fault(checked: bool) -> None:
    key = norm_of(FEW, fault="memory")
    with pytest.raises(SimulatorFault, match="at most 32768 bytes of threadgroup memory but got 40192"):
        check(key, FEW, key.example(2, 0), WatchedTarget(check=checked))


def test_an_unwritten_output_is_found_without_and_with_a_fill() -> None:
    key = norm_of(FEW, fault="unwritten")
    inputs = key.example(2, 0)
    target = WatchedTarget(check=True)
    kernel = target.compile(key.source(FEW))
    with pytest.raises(FindingsError, match="unwritten output of 16400 bytes") as caught:
        key.launch(kernel, FEW, inputs)
    assert [finding.kind for finding in caught.value.findings] == ["unwritten output"]
    with pytest.raises(AssertionError, match="nan"):
        check(key, FEW, inputs, target)  # prefilled with NaN


@pytest.mark.parametrize("cap", CAPS)
def test_every_family_runs_on_a_capped_device(cap: int) -> None:
    # Tiles of other test files, so that nothing is compiled anew.
    target = WatchedTarget(capped(cap), check=True)
    runs: list[tuple[OpKey, Any, int]] = [
        (NormKey(True, 64, 300, 1e-5, "float16"), NormTile(4, 8), 5),
        (RopeKey(64, 5, 3, 80, "float16"), RopeTile(1, 8), 5),
        (LinearKey("store", 64, 33, 41, "bfloat16"), LinearTile("matrix", 8, 16, 1, 1, 1, 0, "linear"), 9),
    ]
    for key, tile, rows in runs:
        check(key, tile, key.example(rows, 0), target)
