"""Linear kernels equal x · Wᵀ and its epilogues, on every instruction set of this machine.

Each distinct kernel costs a compilation, so shapes share kernels: the first valid tile of each program, taken from one
key, runs at all shapes; the others run at one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import BEST, NAMES, TARGETS, assert_near, check_identities, numpy_of, random, thinned

from metile.errors import MetileError
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.ops.linear import LinearKey, is_valid
from metile.ops.linear_cpu import ROWS_AT_ONCE, product
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.report_dispatches import SelectedDispatches
from metile.targets.base import Limits
from metile.targets.cpu import CpuTarget

Array = np.ndarray[Any, Any]
EPILOGUES = ("store", "bias", "residual", "swiglu")
PROGRAMS = ("rows", "matrix")
EVERY = pytest.mark.parametrize("target", TARGETS, ids=NAMES)

# Every epilogue in every dtype on the best instruction set; the others meet each of both.
ALL = [(epilogue, dtype) for epilogue in EPILOGUES for dtype in DTYPES]
SOME = [("store", "bfloat16"), ("bias", "float16"), ("residual", "float32"), ("swiglu", "bfloat16")]
CASES = [
    pytest.param(target, *case, id=f"{target.isa.name}-{'-'.join(case)}")
    for target in TARGETS
    for case in (ALL if target is BEST else SOME)
]


def reference(key: LinearKey, inputs: list[mx.array]) -> Array:
    """Return epilogue(x · Wᵀ) in float64."""
    x, *rest = (numpy_of(array) for array in inputs)
    with np.errstate(all="ignore"):  # some tests put in Inf and NaN
        first = x @ rest[0].T
        if key.epilogue == "swiglu":
            return np.asarray(first / (1 + np.exp(-first)) * (x @ rest[1].T))
        return first if key.epilogue == "store" else first + rest[1]


@functools.cache
def tile(program: str, epilogue: Any, dtype: str, target: CpuTarget) -> LinearTile:
    """Return the first candidate of a program at a middling shape."""
    key = LinearKey(epilogue, 4 if program == "rows" else 64, 577, 577, dtype)
    return next(tile for tile in key.space(target.limits) if tile.program == program)


def run(key: LinearKey, candidate: LinearTile, inputs: list[mx.array], target: CpuTarget) -> mx.array:
    return key.launch(target.compile(key.source(candidate)), candidate, inputs, poison=True)[0]


def check(key: LinearKey, candidate: LinearTile, rows: int | Sequence[int], target: CpuTarget, seed: int = 0) -> None:
    """Check the first `rows` rows of an example, or each of several numbers of them."""
    counts = [rows] if isinstance(rows, int) else rows
    inputs = key.example(max(counts), seed)
    expected = reference(key, inputs)
    tall = (0, 2) if key.epilogue == "residual" else (0,)
    for count in counts:
        first = [array[:count] if place in tall else array for place, array in enumerate(inputs)]
        assert_near(run(key, candidate, first, target), expected[:count])


# ---- right results ----


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("target", "epilogue", "dtype"), CASES)
def test_rows_and_ragged_shapes(target: CpuTarget, epilogue: Any, dtype: str, program: str) -> None:
    candidate = tile(program, epilogue, dtype, target)
    check(LinearKey(epilogue, 64, 33, 70, dtype), candidate, (*range(1, 18), 31, 33, 127), target)
    # 577 and 4099 meet small partners: with each other they cost seconds and have the same edges.
    for outputs, inputs in ((1, 1), (31, 577), (577, 31), (127, 33), (128, 64), (65, 4099), (4099, 31)):
        check(LinearKey(epilogue, 64, outputs, inputs, dtype), candidate, (1, 3, 17), target)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 200),
    case=st.sampled_from(SOME),
    program=st.sampled_from(PROGRAMS),
    seed=st.integers(0, 9),
)
def test_any_shape(rows: int, outputs: int, inputs: int, case: tuple[Any, str], program: str, seed: int) -> None:
    for target in TARGETS:
        check(LinearKey(case[0], 64, outputs, inputs, case[1]), tile(program, *case, target), rows, target, seed)


@EVERY
def test_orders_of_blocks_and_slices_of_k(target: CpuTarget) -> None:
    for epilogue, dtype in SOME:
        key = LinearKey(epilogue, 256, 300, 1100, dtype)  # type: ignore[arg-type]
        inputs = key.example(150, 0)
        expected = reference(key, inputs)
        candidate = tile("matrix", epilogue, dtype, target)
        for outer_k in (0, 512, 1024):
            first = None
            for schedule in SCHEDULES:
                y = run(key, dataclasses.replace(candidate, outer_k=outer_k, schedule=schedule), inputs, target)
                assert_near(y, expected)
                first = y if first is None else first
                assert mx.array_equal(y, first), schedule  # the same sums, whatever the order


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(BEST, dtype) for dtype in DTYPES] + [(target, "bfloat16") for target in TARGETS[1:]],
    ids=[f"{BEST.isa.name}-{dtype}" for dtype in DTYPES] + NAMES[1:],
)
def test_candidates_at_a_ragged_shape(target: CpuTarget, dtype: str) -> None:
    # The spaces hold some 3000 distinct kernels over all instruction sets, 0.1 s to compile each: a few of each.
    count = 6 if target is BEST else 3
    names: dict[str, tuple[LinearKey, LinearTile]] = {}
    for index, rows in enumerate((1, 2, 8, 32, 512)):
        key = LinearKey(EPILOGUES[index % 4], rows, 577, 4099, dtype)  # type: ignore[arg-type]
        names |= {key.source(candidate).name: (key, candidate) for candidate in key.space(target.limits)}
    for key, candidate in thinned(list(names.values()), count):
        small = dataclasses.replace(key, outputs=131, inputs=97)
        check(small, candidate, min(key.rows, 70), target)


@pytest.mark.parametrize("program", PROGRAMS)
def test_shapes_and_strides_of_inputs(program: str) -> None:
    key, candidate = LinearKey("residual", 64, 33, 70, "bfloat16"), tile(program, "residual", "bfloat16", BEST)
    wide, tall = random(1, (6, 140), "bfloat16"), random(2, (66, 90), "bfloat16", 0.1)
    extra = random(3, (33, 6), "bfloat16")
    weights = [tall[::2, 7:77], random(4, (70, 33), "bfloat16").T]
    for x, r in ((wide[:, ::2], extra.T), (wide[::-1, 70:], extra.T), (wide[None, :, :70], extra.T[None])):
        for w in weights:
            assert_near(run(key, candidate, [x, w, r], BEST), reference(key, [x, w, r]))
    y = run(key, candidate, [wide[2, :70], weights[0], extra[:, 1]], BEST)
    assert_near(y, reference(key, [wide[2:3, :70], weights[0], extra.T[1:2]])[0])
    three = [random(5, (2, 3, 70), "bfloat16"), weights[1], random(6, (2, 3, 33), "bfloat16")]
    assert_near(run(key, candidate, three, BEST), reference(key, three))
    empty = [wide[:0, :70], weights[0], extra.T[:0]]
    assert run(key, candidate, empty, BEST).shape == (0, 33)


# ---- values that are not finite ----


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@EVERY
def test_what_is_not_finite_stays_in_its_row_and_column(target: CpuTarget, value: float, program: str) -> None:
    for epilogue, dtype in SOME:
        candidate = tile(program, epilogue, dtype, target)
        for inputs_count in (33, 64, 70):  # the ragged edge of k, and none
            key = LinearKey(epilogue, 64, 37, inputs_count, dtype)  # type: ignore[arg-type]
            plain = key.example(19, 0)
            before = numpy_of(run(key, candidate, plain, target))
            for place in range(1 + key.operands):
                for column in (0, -1):  # 0: past the end of the row before it; -1: beside the zeros of the edge
                    inputs = [mx.array(array) for array in plain]
                    inputs[place][3, column] = value
                    y = numpy_of(run(key, candidate, inputs, target))
                    finite = np.isfinite(reference(key, inputs))
                    assert (np.isfinite(y) == finite).all(), (epilogue, dtype, inputs_count, place, column)
                    assert finite.sum() == finite.size - (finite.shape[1] if place == 0 else finite.shape[0])
                    assert (y[finite] == before[finite]).all()


# ---- the space ----


def test_labels_and_names() -> None:
    for target in (BEST, TARGETS[-1]):
        # Fields of the tile make the name, whatever the epilogue: one bucket and fewer dtypes for most of them.
        keys = [LinearKey("store", rows, 577, 4099, dtype) for dtype in DTYPES for rows in (2, 64)]
        keys += [LinearKey(epilogue, 8, 577, 4099, dtype) for epilogue, dtype in ALL]  # type: ignore[arg-type]
        check_identities(keys, target)


@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_a_space_begins_with_its_default_and_holds_what_is_valid(rows: int) -> None:
    for target in (BEST, TARGETS[-1]):
        for epilogue, dtype in (("store", "bfloat16"), ("swiglu", "float32")):
            key = LinearKey(epilogue, rows, 577, 4099, dtype)  # type: ignore[arg-type]
            space, points = key.space(target.limits), product(key, target.limits)
            assert set(space) == {tile for tile in points if is_valid(key, tile, target.limits) is None}
            assert len(space) + sum(key.pruned(target.limits).values()) == len(points)
            assert space[0].program == ("rows" if rows <= 4 else space[0].program)
            assert rows <= ROWS_AT_ONCE or all(tile.program == "matrix" for tile in space)


LIMITS = Limits(lanes=16, registers=32, threadgroup_bytes=1 << 20)
TILES = Limits(lanes=16, registers=32, threadgroup_bytes=1 << 20, tile_dtypes=("bfloat16",), tile_rows=16)
SMALL = Limits(lanes=16, registers=32, threadgroup_bytes=1 << 14)
ROWS = LinearTile("rows", 8, 64, 1, 32, 1, 0, "linear")
MATRIX = LinearTile("matrix", 64, 64, 1, 8, 1, 0, "linear")


@pytest.mark.parametrize(
    ("rows", "candidate", "limits", "reason"),
    [
        (8, ROWS, LIMITS, None),
        (64, MATRIX, LIMITS, "accumulators do not fit the registers"),
        (64, dataclasses.replace(MATRIX, wm=2), LIMITS, None),
        (8, dataclasses.replace(ROWS, block_n=24), LIMITS, "block_n is not whole fragments for each simdgroup"),
        (8, dataclasses.replace(ROWS, wn=48), LIMITS, "block_n is not whole fragments for each simdgroup"),
        (8, dataclasses.replace(ROWS, block_n=256, wn=128), LIMITS, "block_n is wider than the matrix"),
        (16, ROWS, LIMITS, "more rows than the decode program takes at once"),
        (8, dataclasses.replace(ROWS, wn=4), LIMITS, "accumulators do not fit the registers"),
        (64, dataclasses.replace(MATRIX, wm=8), LIMITS, "block_m is not whole fragments for each simdgroup"),
        (32, dataclasses.replace(MATRIX, wm=2), LIMITS, "block_m is taller than the bucket"),
        (64, dataclasses.replace(MATRIX, wm=2, outer_k=512), LIMITS, "outer_k is not less than k"),
        (64, dataclasses.replace(MATRIX, wm=2, schedule="hilbert"), LIMITS, "a single row of blocks has one order"),
        (128, dataclasses.replace(MATRIX, wm=2, schedule="hilbert"), LIMITS, None),
        (64, dataclasses.replace(MATRIX, wm=2), TILES, "accumulators do not fit the tile registers"),
        (64, dataclasses.replace(MATRIX, wm=2, wn=4), TILES, None),
        (64, dataclasses.replace(MATRIX, wm=2), SMALL, "a block does not fit threadgroup memory"),
    ],
)  # fmt: skip
def test_reasons(rows: int, candidate: LinearTile, limits: Limits, reason: str | None) -> None:
    assert is_valid(LinearKey("store", rows, 127, 300, "bfloat16"), candidate, limits) == reason


# ---- what the search and the report ask ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_examples_and_plain_mlx(epilogue: Any, dtype: str) -> None:
    key = LinearKey(epilogue, 8, 33, 70, dtype)
    inputs = key.example(5, seed=3)
    shapes = {"store": [], "bias": [(33,)], "residual": [(5, 33)], "swiglu": [(33, 70)]}
    assert [array.shape for array in inputs] == [(5, 70), (33, 70), *shapes[epilogue]]
    assert {array.dtype for array in inputs} == {DTYPES[dtype]}
    assert all(mx.array_equal(a, b) for a, b in zip(inputs, key.example(5, seed=3), strict=True))
    assert not mx.array_equal(inputs[0], key.example(5, seed=4)[0])
    (y,) = key.reference(inputs)
    assert y.dtype == DTYPES[dtype]
    assert_near(y, reference(key, inputs), times=6)  # plain MLX rounds between the steps
    assert key.weight_inputs() == ((1, 2) if epilogue == "swiglu" else (1,))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_dispatches_are_those_of_the_schema(epilogue: Any) -> None:
    key = LinearKey(epilogue, 64, 577, 4099, "bfloat16")
    empty: dict[str, list[Any]] = {name: [] for name in SelectedDispatches.model_fields}
    for candidate in (None, *key.space(BEST.limits)[:20], tile("rows", epilogue, "bfloat16", BEST)):
        record = SelectedDispatches.model_validate(empty | {key.family: [key.dispatch(candidate)]})
        entry = getattr(record, key.family)[0]
        assert entry.algorithm == ("mlx" if candidate is None else "metile")
        assert (entry.rows, entry.output_features, entry.input_features) == (64, 577, 4099)
        assert (entry.block_n, entry.schedule) == (
            (0, "") if candidate is None else (candidate.block_n, candidate.schedule)
        )


# ---- errors ----


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_other_arrays_are_refused(epilogue: Any, program: str) -> None:
    key, candidate = LinearKey(epilogue, 8, 33, 70, "bfloat16"), tile(program, epilogue, "bfloat16", BEST)
    good = key.example(5, 0)
    for place, array in enumerate(good):
        others = [array.astype(mx.float32), array[..., :-1], mx.concatenate([array, array], axis=-1), array[None, None]]
        for other in others[:3] if place == 0 else others:  # x may have any leading axes
            inputs = [*good[:place], other, *good[place + 1 :]]
            with pytest.raises(
                MetileError, match=r"^\[linear\] expected arrays of bfloat16 and shapes \(.* but got \("
            ):
                run(key, candidate, inputs, BEST)
    for inputs in (good[:-1], [*good, good[0]], [mx.array(1.0, mx.bfloat16), *good[1:]]):
        with pytest.raises(MetileError, match=r"^\[linear\] expected arrays of bfloat16"):
            run(key, candidate, inputs, BEST)
