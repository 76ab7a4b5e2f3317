"""Which attention kernels a GPU admits whose threadgroups may share keys, how they are launched, and their counters."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from kernel_checks import check_identities
from mlx_lm.models.cache import KVCache, RotatingKVCache
from test_attention import arrays

from metile.dispatch import Decision, Plan
from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile, is_valid, product
from metile.ops.counters import RING, CounterPool
from metile.patched import Entry
from metile.patched_decoder import AttentionState
from metile.targets.base import Kernel, KernelSource, Limits, Output
from metile.targets.cuda_device import CudaDevice
from metile.targets.metal import limits_of
from metile.targets.simulated import find_device

HOPPER = CudaDevice("NVIDIA H200", (9, 0), (13, 0), 32, 1024, 232448, 65536, 132, 60 << 20).limits
KEY = AttentionKey(1, 1024, 12, 2, 128, "bfloat16")
SPLIT = AttentionTile("rows", 1, 64, 8, 16)


class Recorder:
    """A kernel that keeps its launches."""

    def __init__(self, source: KernelSource) -> None:
        self.source = source
        self.launches: list[dict[str, Any]] = []

    def __call__(self, inputs: Sequence[mx.array], outputs: Sequence[Output], **launch: Any) -> list[mx.array]:
        self.launches.append({"inputs": list(inputs), "outputs": list(outputs), **launch})
        return [mx.zeros(output.shape, output.dtype) for output in outputs]

    def bind(self, outputs: Sequence[Output], **launch: Any) -> Any:
        """Return the launch with everything fixed but the arrays."""
        return lambda inputs: self(inputs, outputs, **launch)


# ---- the space ----


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_the_space_of_a_gpu_whose_threadgroups_exchange(rows: int) -> None:
    for dimension in (64, 80, 96, 128, 256):
        for heads, batch in (((12, 2), 1), ((4, 4), 3), ((16, 1), 1), ((64, 64), 8)):
            key = AttentionKey(rows, 1024, *heads, dimension, "bfloat16", batch)
            space, whole = key.space(HOPPER), product(key, HOPPER)
            assert len(space) + sum(key.pruned(HOPPER).values()) == len(whole) == len(set(whole))
            assert space
            assert rows == 1 or {tile.parts for tile in space} == {1}
            for tile in space:
                groups = tile.parts * key.key_value_heads * batch
                assert tile.parts == 1 or (groups <= 4 * 132 and (tile.parts - 1) * tile.block_keys < key.tokens)
    assert len({tile.parts for tile in KEY.space(HOPPER)}) == 5


@pytest.mark.parametrize(
    ("tokens", "heads", "batch", "parts"),
    [(256, 2, 1, 4), (1024, 2, 1, 16), (4096, 2, 1, 32), (65536, 2, 1, 32), (65536, 8, 1, 8), (4096, 64, 1, 1),
     (4096, 2, 4, 8), (64, 2, 1, 1)],
)  # fmt: skip
def test_the_default_gives_each_threadgroup_enough(tokens: int, heads: int, batch: int, parts: int) -> None:
    key = AttentionKey(1, tokens, 6 * heads, heads, 128, "bfloat16", batch)
    first = key.space(HOPPER)[0]
    assert (first.program, first.parts) == ("rows", parts)
    assert first.block_keys in (32, 64)
    assert first.simdgroups in (4, 8)


def test_other_devices_split_nothing() -> None:
    metal = limits_of(find_device("m1"))
    cpu = Limits(lanes=16, registers=32, threadgroup_bytes=1 << 18)
    for limits in (metal, cpu):
        assert not limits.groups_exchange
        assert {tile.parts for tile in product(KEY, limits)} == {1}
        reason = is_valid(KEY, SPLIT, limits)
        assert reason == "threadgroups cannot share the keys"
    blocks = dataclasses.replace(SPLIT, program="matrix")
    assert is_valid(KEY, blocks, HOPPER) == "threadgroups cannot share the keys"


@pytest.mark.parametrize(
    ("key", "tile", "reason"),
    [
        (KEY, SPLIT, None),
        (KEY, AttentionTile("rows", 1, 64, 8, 32), "more threadgroups share the keys than there are blocks of them"),
        (KEY, AttentionTile("rows", 1, 32, 8, 32), None),
        (dataclasses.replace(KEY, batch=17), SPLIT, "more threadgroups than run at once"),
        (dataclasses.replace(KEY, batch=16), SPLIT, None),
        (dataclasses.replace(KEY, rows=2), SPLIT, "more than one query"),
        (KEY, AttentionTile("rows", 1, 64, 4), "scores and outputs do not fit the registers"),
        (KEY, AttentionTile("rows", 1, 64, 16), "scores and outputs do not fit the registers"),
        (AttentionKey(1, 1024, 2, 2, 128, "bfloat16"), AttentionTile("rows", 1, 64, 16), None),
        (AttentionKey(1, 1024, 16, 1, 128, "bfloat16"), SPLIT, None),
        (AttentionKey(1, 1024, 12, 2, 256, "float32"), SPLIT, "scores and outputs do not fit the registers"),
        (AttentionKey(64, 1024, 12, 2, 128, "bfloat16"), AttentionTile("matrix", 64, 64, 4),
         "scores and outputs do not fit the registers"),
        (AttentionKey(64, 1024, 12, 2, 128, "bfloat16"), AttentionTile("matrix", 64, 32, 4), None),
    ],
)  # fmt: skip
def test_reasons(key: AttentionKey, tile: AttentionTile, reason: str | None) -> None:
    assert is_valid(key, tile, HOPPER) == reason
    if tile in product(key, HOPPER):
        assert (tile in key.space(HOPPER)) == (reason is None)


# ---- names, plans and launches ----


def test_labels_and_names() -> None:
    assert SPLIT.label() == "rows_b1_bk64_s8_p16"
    assert dataclasses.replace(SPLIT, parts=1).label() == "rows_b1_bk64_s8"

    class Gpu:
        limits = HOPPER

    keys = [
        AttentionKey(1, tokens, *heads, dimension, "bfloat16")
        for tokens in (256, 4096)
        for heads in ((4, 4), (12, 2))
        for dimension in (64, 128)
    ]
    check_identities(keys, Gpu())  # type: ignore[arg-type]


def test_one_kernel_serves_all_numbers_of_parts() -> None:
    few, one = (dataclasses.replace(SPLIT, parts=parts) for parts in (4, 1))
    assert KEY.source(SPLIT) == KEY.source(few)
    assert KEY.source(SPLIT).identity("") != KEY.source(one).identity("")
    assert KEY.source(one).inputs == ("q", "k", "v")


def test_a_stored_plan_may_say_nothing_of_parts() -> None:
    for tile in (SPLIT, dataclasses.replace(SPLIT, parts=1)):
        plan = Plan("cuda", frozenset({"attention"}), {KEY: tile})
        stored = plan.to_json()
        assert Plan.from_json(stored) == plan
        decision = Decision(KEY, tile, 1.5, "won")
        assert Decision.from_json(KEY, decision.to_json()) == decision
        written = decision.to_json()
        for fields in (stored["choices"][0]["candidate"], written["candidate"]):
            del fields["parts"]
        one = dataclasses.replace(tile, parts=1)
        assert Plan.from_json(stored) == Plan("cuda", frozenset({"attention"}), {KEY: one})
        assert Decision.from_json(KEY, written) == dataclasses.replace(decision, candidate=one)


def test_dispatches_say_the_block() -> None:
    assert KEY.dispatch(SPLIT) == KEY.dispatch(dataclasses.replace(SPLIT, parts=1))
    assert KEY.dispatch(SPLIT)["block"] == 64


@pytest.mark.parametrize(("tokens", "parts"), [(1, 1), (64, 1), (65, 2), (640, 10), (1024, 16), (5000, 16)])
def test_launches(tokens: int, parts: int) -> None:
    kernel, batch = Recorder(KEY.source(SPLIT)), 3
    y = KEY.attend(kernel, SPLIT, arrays(KEY, 1, tokens, batch=batch), scale=0.5, causal=True)
    (launch,) = kernel.launches
    assert y.shape == (batch, 1, 12 * 128)
    assert launch["groups"] == batch * 2 * parts
    assert launch["numbers"] == [0x3F000000, 1, 12, 0, 0, parts]
    assert [(output.shape, output.dtype) for output in launch["outputs"]] == [
        ((batch, 1, 12 * 128), mx.bfloat16),
        ((batch * 2, parts, 6, 130), mx.float32),
    ]
    counters = launch["inputs"][3]
    assert (counters.shape, counters.dtype) == ((batch * 2,), mx.uint32)
    assert not counters.any()
    assert len(launch["inputs"]) == len(KEY.source(SPLIT).inputs)
    assert len(launch["numbers"]) == len(KEY.source(SPLIT).numbers)


def test_launches_that_follow_one_another_share_no_counters() -> None:
    kernel, inputs = Recorder(KEY.source(SPLIT)), arrays(KEY, 1, 100)
    for _ in range(8):
        KEY.attend(kernel, SPLIT, inputs, scale=0.5, causal=True)
    assert len({id(launch["inputs"][3]) for launch in kernel.launches}) == 8


def test_no_sequences() -> None:
    kernel: Kernel = Recorder(KEY.source(SPLIT))
    inputs = [array[:0] for array in arrays(KEY, 1, 100)]
    assert KEY.attend(kernel, SPLIT, inputs, scale=0.5, causal=True).shape == (0, 1, 12 * 128)


def patched_on(target: str) -> SimpleNamespace:
    """Return what `AttentionState._launch` asks of itself."""
    return SimpleNamespace(runtime=SimpleNamespace(target=SimpleNamespace(name=target)))


def test_a_patched_layer_hands_over_a_whole_cache_where_launches_are_a_graph() -> None:
    key, tile = AttentionKey(1, 256, 4, 2, 64, "float32"), AttentionTile("rows", 1, 16, 1, 4)
    for target, whole in (("cuda", True), ("cpu", False)):
        kernel, cache = Recorder(key.source(tile)), KVCache()
        entry, state = Entry(key, tile, kernel), patched_on(target)
        for tokens in (20, 1):
            q, k, v = arrays(key, 1, tokens)
            k, v = cache.update_and_fetch(k, v)
            AttentionState._launch(state, entry, (q, k, v), 0.5, False, cache)  # type: ignore[arg-type]
        seen = [(launch["inputs"][1].shape[2], *launch["numbers"][3:5]) for launch in kernel.launches]
        assert seen == ([(256, 20, 1), (256, 21, 1)] if whole else [(20, 0, 0), (21, 0, 0)])
    rotating = RotatingKVCache(64)
    k, v = rotating.update_and_fetch(*arrays(key, 1, 20)[1:])
    kernel = Recorder(key.source(tile))
    entry = Entry(key, tile, kernel)
    AttentionState._launch(patched_on("cuda"), entry, (q, k, v), 0.5, False, rotating)  # type: ignore[arg-type]
    assert kernel.launches[0]["numbers"][3:5] == [0, 0]


def test_a_patched_layer_gives_each_launch_its_parts_and_counters() -> None:
    tile = AttentionTile("rows", 1, 16, 1, 4)
    key = AttentionKey(1, 256, 4, 2, 64, "float32")
    kernel = Recorder(key.source(tile))
    entry, state = Entry(key, tile, kernel), patched_on("cuda")
    for tokens in (15, 16, 17, 64, 65, 66, 17):
        AttentionState._launch(state, entry, tuple(arrays(key, 1, tokens)), 0.5, False, None)  # type: ignore[arg-type]
    assert [launch["numbers"][5] for launch in kernel.launches] == [1, 1, 2, 4, 4, 4, 2]
    assert [launch["groups"] for launch in kernel.launches] == [2, 2, 4, 8, 8, 8, 4]
    assert [launch["outputs"][1].shape[1] for launch in kernel.launches] == [1, 1, 2, 4, 4, 4, 2]
    assert [launch["inputs"][1].shape[2] for launch in kernel.launches] == [15, 16, 17, 64, 65, 66, 17]
    assert len({id(launch["inputs"][3]) for launch in kernel.launches}) == 7
    assert entry.engaged == 7
    assert len(entry.bound) == 3  # one for each number of parts


# ---- counters ----


def test_counters_are_zero_and_come_in_turn() -> None:
    pool = CounterPool()
    first = [pool.take(4) for _ in range(RING)]
    assert len({id(array) for array in first}) == RING
    assert all(array.shape == (4,) and array.dtype == mx.uint32 and not array.any() for array in first)
    assert [id(pool.take(4)) for _ in range(RING)] == [id(array) for array in first]


def test_sizes_have_rings_of_their_own() -> None:
    pool = CounterPool()
    small = pool.take(1)
    assert pool.take(2).shape == (2,)
    following = [pool.take(1) for _ in range(RING)]
    assert following[-1] is small
    assert all(array is not small for array in following[:-1])


def test_threads_take_different_counters() -> None:
    pool, taken = CounterPool(), list[int]()

    def take() -> None:
        for _ in range(RING // 8):
            taken.append(id(pool.take(3)))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken) == RING
