"""The projections of attention in one launch equal three linear layers: on CPUs, a simulated GPU and emulated CUDA."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import test_cuda_vocabulary as cuda
from kernel_checks import BEST, NAMES, TARGETS, assert_near, check_identities, numpy_of, random
from metal_checks import CHECKED, FAST, check, projections_reference

from metile.cache import PlanCache
from metile.dispatch import Decision, Plan
from metile.errors import MetileError
from metile.ops.base import DTYPES, TOLERANCES, operation
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.ops.projections import ProjectionsKey
from metile.report_dispatches import SelectedDispatches
from metile.search import search
from metile.sites import key_at
from metile.store import DecisionStore, machine_key
from metile.targets.cpu import CpuTarget

EVERY = pytest.mark.parametrize("target", TARGETS, ids=NAMES)
OUTPUTS = [(48, 16, 16), (5, 3, 3), (16, 16, 16), (33, 129, 1)]
ROWS = (1, 3, 16, 70)


def key_of(outputs: tuple[int, int, int], inputs: int, bias: bool, dtype: str, rows: int = 64) -> ProjectionsKey:
    return ProjectionsKey(rows, outputs, inputs, bias, dtype)


def first(key: ProjectionsKey, program: str, target: CpuTarget) -> LinearTile:
    """Return the first candidate of a program, taken from a middling shape so that shapes share a kernel."""
    middling = dataclasses.replace(key, rows=4 if program == "rows" else 64, outputs=(577, 65, 65), inputs=577)
    return next(tile for tile in middling.space(target.limits) if tile.program == program)


def run(key: ProjectionsKey, tile: LinearTile, inputs: Sequence[mx.array], target: CpuTarget = BEST) -> list[mx.array]:
    return key.launch(target.compile(key.source(tile)), tile, inputs, poison=True)


def near(outputs: Sequence[mx.array], inputs: list[mx.array]) -> None:
    for ours, theirs in zip(outputs, projections_reference(inputs), strict=True):
        assert_near(ours, theirs)


# ---- right results on CPUs ----


@pytest.mark.parametrize("program", ["rows", "matrix"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES))
@EVERY
def test_three_products_on_a_cpu(target: CpuTarget, dtype: str, bias: bool, program: str) -> None:
    for outputs, inputs in itertools.product(OUTPUTS, (70, 1, 131)):
        key = key_of(outputs, inputs, bias, dtype)
        arrays = key.example(max(ROWS), seed=inputs)
        for rows in ROWS:
            x = [arrays[0][:rows], *arrays[1:]]
            near(run(key, first(key, program, target), x, target), x)


@pytest.mark.parametrize("bias", [False, True])
def test_they_are_what_three_linear_kernels_give(bias: bool) -> None:
    key = key_of((130, 33, 33), 257, bias, "bfloat16")
    tile, arrays = first(key, "matrix", BEST), key.example(37, seed=1)
    for place, ours in enumerate(run(key, tile, arrays)):
        linear = LinearKey("bias" if bias else "store", 64, key.outputs[place], 257, "bfloat16")
        inputs = [arrays[0], arrays[1 + place], *arrays[4 + place : 5 + place]]
        (theirs,) = linear.launch(BEST.compile(linear.source(tile)), tile, inputs, poison=True)
        assert mx.array_equal(ours, theirs)


def test_orders_of_blocks_and_slices_of_k() -> None:
    key = key_of((300, 100, 36), 1100, True, "float16", 256)
    arrays, tile = key.example(150, 0), first(key, "matrix", BEST)
    for outer_k, schedule in itertools.product((0, 512), SCHEDULES):
        near(run(key, dataclasses.replace(tile, outer_k=outer_k, schedule=schedule), arrays), arrays)


def test_axes_and_strides() -> None:
    key = key_of((48, 16, 16), 70, True, "bfloat16")
    flat = key.example(6, seed=2)
    wide = random(3, (2, 3, 140), "bfloat16")
    tall = random(4, (96, 90), "bfloat16", 0.1)
    arrays = [wide[..., ::2], tall[::2, 7:77], flat[2].T.reshape(70, 16).T, *flat[3:]]
    tiles = [first(key, program, BEST) for program in ("rows", "matrix")]
    for tile in tiles:
        outputs = run(key, tile, arrays)
        assert [y.shape for y in outputs] == [(2, 3, 48), (2, 3, 16), (2, 3, 16)]
        near(outputs, arrays)
        assert [y.shape for y in run(key, tile, [wide[:0, :, ::2], *arrays[1:]])] == [(0, 3, n) for n in key.outputs]
        assert run(key, tile, [wide[0, 0, ::2], *arrays[1:]])[1].shape == (16,)


def test_candidates_of_a_bucket() -> None:
    for rows, bias in ((1, True), (8, False), (64, True)):
        key = key_of((257, 65, 65), 131, bias, "bfloat16", rows)
        arrays, space = key.example(rows, seed=rows), key.space(BEST.limits)
        for tile in space[:: max(1, len(space) // 5)]:
            near(run(key, tile, arrays), arrays)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_plain_mlx_gives(dtype: str) -> None:
    key = key_of((48, 16, 16), 70, True, dtype)
    arrays = key.example(16, seed=0)
    assert {array.dtype for array in arrays} == {DTYPES[dtype]}
    assert [array.shape for array in arrays] == [(16, 70), (48, 70), (16, 70), (16, 70), (48,), (16,), (16,)]
    for ours, theirs in zip(key.reference(arrays), projections_reference(arrays), strict=True):
        error = abs(numpy_of(ours) - theirs).max() / abs(theirs).max()
        assert error < TOLERANCES[dtype]
    assert [array.shape[0] for array in map(arrays.__getitem__, key.weight_inputs())] == [48, 16, 16]


# ---- other machines ----

METAL = [
    (LinearTile("rows", 4, 16, 1, 4, 2, 0, "linear"), "bfloat16", True),
    (LinearTile("rows", 1, 8, 1, 4, 1, 0, "linear"), "float32", False),
    (LinearTile("rows", 16, 8, 1, 2, 1, 0, "linear"), "float16", True),
    (LinearTile("matrix", 8, 32, 1, 2, 2, 16, "linear"), "bfloat16", False),
    (LinearTile("matrix", 16, 32, 2, 2, 2, 0, "grouped2"), "float16", False),
    (LinearTile("matrix", 32, 32, 1, 2, 1, 32, "morton"), "float32", True),
]


@pytest.mark.parametrize("target", [FAST, CHECKED], ids=["fast", "checked"])
@pytest.mark.parametrize(("tile", "dtype", "bias"), METAL, ids=lambda item: getattr(item, "label", lambda: item)())
def test_on_a_simulated_gpu(tile: LinearTile, dtype: str, bias: bool, target: Any) -> None:
    # A checked launch also sees that every element is written once.
    shapes = [((48, 16, 16), 70), ((5, 3, 3), 33), ((33, 65, 17), 64)]
    for (outputs, inputs), rows in itertools.product(shapes[: 1 if target is CHECKED else 3], ROWS):
        key = key_of(outputs, inputs, bias, dtype)
        check(key, tile, key.example(rows, seed=rows), target)


CUDA = [
    (cuda.tile("rows", 1, 8, 1, 2, 2, 0), "bfloat16", True),
    (cuda.tile("rows", 4, 8, 1, 4, 1, 0), "float32", False),
    (cuda.tile("matrix", 8, 32, 4, 2, 1, 0), "float16", True),
    (cuda.tile("matrix", 16, 32, 2, 2, 2, 0), "bfloat16", False),
    (cuda.tile("matrix", 32, 64, 2, 2, 1, 64), "float16", False),
    (cuda.tile("matrix", 16, 32, 1, 2, 1, 16), "float32", True),
    (cuda.tile("matrix", 16, 64, 1, 4, 4, 64), "bfloat16", True),  # warpgroups
]


@pytest.mark.parametrize(("tile", "dtype", "bias"), CUDA, ids=lambda item: getattr(item, "label", lambda: item)())
def test_on_emulated_cuda(tile: LinearTile, dtype: str, bias: bool) -> None:
    for order, (outputs, inputs) in enumerate((((48, 16, 16), 136), ((5, 3, 3), 33), ((72, 33, 17), 64))):
        key = key_of(outputs, inputs, bias, dtype)
        kernel = cuda.Emulated(key.source(tile), dtype, order=order)
        for rows in ROWS if inputs == 136 else (3,):
            cuda.check(key, kernel, tile, key.example(rows, seed=rows), cuda.TOLERANCE[dtype])


# ---- the key ----


def test_candidates_are_those_of_the_widest_layer() -> None:
    for target, rows in itertools.product((BEST, FAST), (1, 64)):
        key = key_of((40, 300, 8), 500, False, "bfloat16", rows)
        widest = LinearKey("store", rows, 300, 500, "bfloat16")
        assert key.space(target.limits) == widest.space(target.limits)
        assert key.pruned(target.limits) == widest.pruned(target.limits)


def test_names_and_subjects() -> None:
    keys = [key_of((48, 16, 16), 70, bias, dtype, 8) for bias in (False, True) for dtype in DTYPES]
    check_identities(keys, BEST)  # type: ignore[arg-type]
    assert keys[0].subject() == "dense_matmul[q k v store] rows=8 n=48+16+16 k=70 bfloat16"
    others = [dataclasses.replace(keys[0], outputs=(16, 48, 16)), dataclasses.replace(keys[0], rows=16)]
    subjects = {key.subject() for key in (*keys, *others)}
    assert len(subjects) == len(keys) + 2
    linear, tile = keys[0].widest, first(keys[0], "rows", BEST)
    assert linear.subject() not in subjects
    assert linear.source(tile).name != keys[0].source(tile).name


def test_other_buckets_are_the_same_operation() -> None:
    key = key_of((48, 16, 16), 70, True, "bfloat16", 1)
    other = key_at(key, 100)
    assert other == dataclasses.replace(key, rows=128)
    assert operation(key) == operation(other) != operation(dataclasses.replace(key, bias=False))


def test_inputs_that_do_not_fit() -> None:
    key = key_of((5, 3, 3), 33, True, "bfloat16")
    tile, good = first(key, "rows", BEST), key.example(3, 0)
    kernel = BEST.compile(key.source(tile))
    swapped = [good[0], good[2], good[1], *good[3:]]
    cases = [[], good[:-1], [*good, good[0]], swapped, [good[0][:, :-1], *good[1:]], [good[0].T, *good[1:]]]
    cases += [[*good[:place], good[place].astype(mx.float32), *good[place + 1 :]] for place in range(7)]
    cases += [[*good[:4], good[4][:-1], *good[5:]]]
    for inputs in cases:
        with pytest.raises(MetileError, match=r"^\[projections\] expected arrays of bfloat16 and shapes "):
            key.launch(kernel, tile, inputs)


def test_dispatch_is_an_entry_of_the_report() -> None:
    key = key_of((48, 16, 16), 70, True, "float16", 8)
    tile = first(key, "matrix", BEST)
    entries = [key.dispatch(tile), key.dispatch(None)]
    parsed = SelectedDispatches.model_validate(
        {name: entries if name == key.family else [] for name in SelectedDispatches.model_fields}
    )
    metile, plain = parsed.dense_matmul
    assert (metile.algorithm, metile.output_features, metile.input_features) == ("metile", 80, 70)
    assert (metile.block_m, metile.wn, metile.schedule) == (tile.block_m, tile.wn, tile.schedule)
    assert (plain.algorithm, plain.output_features, plain.block_n) == ("mlx", 80, 0)


def test_a_plan_in_json() -> None:
    key = key_of((48, 16, 16), 70, True, "float16", 8)
    tile = first(key, "rows", BEST)
    linear = key.widest
    plan = Plan("cpu", frozenset({"dense_projections"}), {key: tile, linear: None})
    text = json.dumps(plan.to_json())
    back = Plan.from_json(json.loads(text))
    assert back == plan
    assert back is not None
    assert back.choices[key] == tile  # the same hash
    old = json.loads(text)
    old["choices"] = [choice for choice in old["choices"] if choice["op"] == "linear"]
    assert Plan.from_json(old) == Plan("cpu", plan.features, {linear: None})
    for wrong in (7, [48, 16, 16], None, {"rows": 1}):
        bad = json.loads(text)
        next(choice for choice in bad["choices"] if choice["op"] == "projections")["key"] = wrong
        assert Plan.from_json(bad) is None


def test_a_decision_that_is_kept(tmp_path: Path) -> None:
    keys = [key_of((48, 16, 16), 70, True, "float16", 8), key_of((48, 16, 16), 70, False, "float16", 8)]
    machine = machine_key(BEST)
    decisions = [Decision(keys[0], first(keys[0], "rows", BEST), 1.5, "faster"), Decision(keys[1], None, 1.0, "slower")]
    for decision in decisions:
        DecisionStore(PlanCache("model", tmp_path), machine).put(decision)
    store = DecisionStore(PlanCache("model", tmp_path), machine)
    assert [store.get(key) for key in keys] == decisions
    assert store.get(dataclasses.replace(keys[0], outputs=(16, 48, 16))) is None


def test_the_search_decides_it() -> None:
    key = key_of((96, 32, 32), 64, True, "bfloat16", 4)
    near_by = dataclasses.replace(key, rows=8)
    decisions = search([key], BEST, neighbours=[near_by], budget_seconds=20, max_candidates=4)
    assert set(decisions) == {key, near_by}
    assert not any("error" in reason or "raised" in reason for reason in decisions[key].rejected.values())
