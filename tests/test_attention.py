"""Attention kernels equal softmax(scale · q · kᵀ) · v, on every instruction set of this machine."""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import BEST, NAMES, TARGETS, assert_near, check_identities, numpy_of, random, thinned

from metile.errors import MetileError
from metile.ops.attention import TOKEN_BUCKETS, AttentionKey, token_bucket
from metile.ops.attention_space import AttentionTile, is_valid, product
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.report_dispatches import SelectedDispatches
from metile.targets.base import Kernel, Limits
from metile.targets.cpu import CpuTarget

Array = np.ndarray[Any, Any]
PROGRAMS = ("rows", "matrix")
EVERY = pytest.mark.parametrize("target", TARGETS, ids=NAMES)
DIMENSIONS = (64, 80, 96, 128, 256)
Heads = tuple[int, int]

# Every width of heads, dtype and ratio on the best instruction set, one of each against the usual of the others: each
# distinct kernel costs a compilation. The others run two.
USUAL = (64, "bfloat16", (4, 2))
CASES = [(BEST, dimension, *USUAL[1:]) for dimension in DIMENSIONS]
CASES += [(BEST, 64, dtype, (4, 2)) for dtype in ("float16", "float32")]
CASES += [(BEST, 64, "bfloat16", heads) for heads in ((3, 3), (3, 1), (4, 1), (16, 1))]
CASES += [(target, *case) for target in TARGETS[1:] for case in (USUAL, (96, "float32", (4, 1)))]
EACH = pytest.mark.parametrize(
    ("target", "dimension", "dtype", "heads"),
    CASES,
    ids=[f"{target.isa.name}-d{d}-{dtype}-{h}of{k}" for target, d, dtype, (h, k) in CASES],
)


def reference(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> Array:
    """Return attention of q [B, H, L, D] over k, v [B, H_kv, S, D] in float64, as [B, L, H * D]."""
    queries, keys, values = (numpy_of(array) for array in (q, k, v))
    keys, values = (array.repeat(q.shape[1] // k.shape[1], axis=1) for array in (keys, values))
    scores = scale * queries @ keys.swapaxes(-1, -2)
    length, tokens = scores.shape[-2:]
    if causal:
        scores[..., ~np.tri(length, tokens, tokens - length, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = weights / weights.sum(axis=-1, keepdims=True) @ values
    return np.asarray(y.swapaxes(1, 2).reshape(q.shape[0], length, -1))


@functools.cache
def ready(
    program: str, dimension: int, dtype: str, heads: Heads, target: CpuTarget
) -> tuple[AttentionKey, Any, Kernel]:
    """Return a key, the first candidate of a program, and its kernel."""
    key = AttentionKey(1 if program == "rows" else 64, 256, *heads, dimension, dtype)
    candidate = key.space(target.limits)[0]
    assert candidate.program == program
    return key, candidate, target.compile(key.source(candidate))


def arrays(key: AttentionKey, length: int, tokens: int, batch: int = 1, seed: int = 0) -> list[mx.array]:
    """Return random q, k and v."""
    shapes = [(batch, key.query_heads, length), *[(batch, key.key_value_heads, tokens)] * 2]
    return [random(seed + n, (*shape, key.dimension), key.dtype) for n, shape in enumerate(shapes)]


def check(
    which: tuple[AttentionKey, Any, Kernel], inputs: list[mx.array], *, scale: float = 0.125, causal: bool = True
) -> mx.array:
    key, candidate, kernel = which
    y = key.attend(kernel, candidate, inputs, scale=scale, causal=causal, poison=True)
    assert_near(y, reference(*inputs, scale, causal))
    return y


# ---- right results ----


@EACH
def test_one_query(target: CpuTarget, dimension: int, dtype: str, heads: Heads) -> None:
    for program in PROGRAMS:  # blocks of queries take one as well, where a plan says so
        which = ready(program, dimension, dtype, heads, target)
        for tokens in (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 577):
            check(which, arrays(which[0], 1, tokens, batch=2), scale=dimension**-0.5)
    which = ready("rows", dimension, dtype, heads, target)
    check(which, arrays(which[0], 1, 4099), causal=False)


@EACH
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_queries(target: CpuTarget, dimension: int, dtype: str, heads: Heads, causal: bool) -> None:
    which = ready("matrix", dimension, dtype, heads, target)
    for length, past in ((2, 0), (3, 31), (16, 0), (17, 127), (31, 1), (33, 0), (64, 64), (127, 33)):
        check(which, arrays(which[0], length, length + past, batch=2), causal=causal, scale=dimension**-0.5)
    if not causal:
        check(which, arrays(which[0], 33, 17), causal=False)  # fewer keys than queries


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 70),
    past=st.integers(0, 200),
    batch=st.integers(1, 3),
    causal=st.booleans(),
    scale=st.sampled_from([1e-3, 0.125, 2.0]),
)
def test_any_length_and_scale(length: int, past: int, batch: int, causal: bool, scale: float) -> None:
    for target in TARGETS:
        which = ready("rows" if length == 1 else "matrix", 96, "float32", (4, 1), target)
        if target is not BEST:
            check(which, arrays(which[0], length, length + past, batch), causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@EVERY
def test_candidates(target: CpuTarget, dtype: str) -> None:
    # Block sizes are the kernel's only other parameters; a few of each on the best instruction set.
    for rows in (1, 512):
        key = AttentionKey(rows, 1024, 4, 2, 64, dtype)
        space = key.space(target.limits)
        for candidate in thinned(space, 4) if target is BEST else space[:1]:
            which = key, candidate, target.compile(key.source(candidate))
            check(which, arrays(key, 1 if rows == 1 else 70, 333))


def test_scores_that_would_overflow() -> None:
    for program in PROGRAMS:
        which = ready(program, 64, "float32", (4, 2), BEST)
        q, k, v = arrays(which[0], 1, 300)
        q, k = 100 * q, 100 * k  # scores of some 10^5: one weight is 1
        k[:, :, 250] = 0
        y = which[0].attend(which[2], which[1], [q, k, v], scale=1.0, causal=True, poison=True)
        assert_near(y, reference(q, k, v, 1.0, True))


@pytest.mark.parametrize("program", PROGRAMS)
def test_strides_of_inputs(program: str) -> None:
    which = ready(program, 64, "bfloat16", (4, 2), BEST)
    key, length = which[0], 1 if program == "rows" else 19
    base = random(1, (2, length, 4, 64), "bfloat16")
    cache = [random(n, (2, 2, 256, 64), "bfloat16") for n in (2, 3)]
    held = [array[..., :100, :] for array in cache]
    y = check(which, [base.transpose(0, 2, 1, 3), *held])
    assert mx.array_equal(y, check(which, [mx.contiguous(base.transpose(0, 2, 1, 3)), *map(mx.contiguous, held)]))
    wide = random(4, (2, 2, 100, 128), "bfloat16")
    check(which, [base.transpose(0, 2, 1, 3), wide[..., 64:], wide[..., :64]])
    check(which, [base.transpose(0, 2, 1, 3), wide[:, ::-1, ::-1, 64:], wide[..., ::2]])
    shared = mx.broadcast_to(cache[0][:, :1, :100], (2, 2, 100, 64))
    check(which, [base.transpose(0, 2, 1, 3), shared, shared])
    assert key.attend(which[2], which[1], [base[:0].transpose(0, 2, 1, 3), *(array[:0] for array in held)],
                      scale=1.0, causal=True).shape == (0, length, 256)  # fmt: skip


# ---- values that are not finite ----


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@EVERY
def test_what_lies_past_the_context_is_not_read(target: CpuTarget, value: float) -> None:
    for program, (dimension, dtype, heads) in (
        (p, case) for p in PROGRAMS for case in (USUAL, (96, "float32", (4, 1)))
    ):
        if target is BEST and dtype == "float32":
            continue
        which = ready(program, dimension, dtype, heads, target)
        for tokens in (1, 33, 64, 100):
            length = 1 if program == "rows" else min(tokens, 19)
            q, k, v = arrays(which[0], length, tokens)
            unused = mx.full((1, heads[1], 60, dimension), value, k.dtype)
            cached = [mx.concatenate([array, unused], axis=2)[..., :tokens, :] for array in (k, v)]
            assert mx.array_equal(check(which, [q, *cached]), check(which, [q, k, v]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("program", PROGRAMS)
@EVERY
def test_what_is_not_finite_reaches_whom_it_reaches_in_plain_mlx(target: CpuTarget, program: str, value: float) -> None:
    key, candidate, kernel = ready(program, *USUAL, target)
    length = 1 if program == "rows" else 37
    plain = arrays(key, length, length + 40)
    before = key.launch(kernel, candidate, plain, poison=True)[0]
    for place, token in ((0, 0), (0, -1), (1, 0), (1, 40 + length // 2), (2, 3), (2, -1)):
        inputs = [mx.array(array) for array in plain]
        inputs[place][0, 1, token, 5] = value  # head 1 of the queries, or of the keys, which two heads share
        ours, theirs = (
            np.isfinite(numpy_of(y))
            for y in (key.launch(kernel, candidate, inputs, poison=True)[0], *key.reference(inputs))
        )
        assert ours[theirs].all(), (place, token)  # nobody else
        alone = (numpy_of(before) == numpy_of(key.launch(kernel, candidate, inputs, poison=True)[0])) | ~theirs
        assert alone.all() or place == 1  # a key of -Inf has no weight, and changes those of the others
        # Plain MLX multiplies what a causal mask hides by a weight of 0, which makes a NaN; a kernel may pass over it.
        position = token % inputs[place].shape[2] - (0 if place == 0 else 40)
        seen = np.arange(length) == position if place == 0 else np.arange(length) >= position
        assert not (ours & ~theirs)[:, seen].any(), (place, token)


# ---- the space, the search and the report ----


def test_buckets_of_context() -> None:
    assert [token_bucket(tokens) for tokens in (1, 256, 257, 65536, 10**6)] == [256, 256, 1024, 65536, 65536]
    assert list(TOKEN_BUCKETS) == sorted(TOKEN_BUCKETS)


@pytest.mark.parametrize("rows", ROW_BUCKETS)
@EVERY
def test_the_space(target: CpuTarget, rows: int) -> None:
    limits = target.limits
    for dimension in (*DIMENSIONS, 72):
        key = AttentionKey(rows, 1024, 4, 2, dimension, "bfloat16")
        space, whole = key.space(limits), product(key, limits)
        assert set(space) == {tile for tile in whole if is_valid(key, tile, limits) is None}
        assert len(space) + sum(key.pruned(limits).values()) == len(whole) == len(set(whole))
        assert {tile.program for tile in space} <= ({"rows", "matrix"} if rows == 1 else {"matrix"})
        assert dimension == 72 or space or rows < limits.lanes // 2
        assert not space or space[0].program == ("rows" if rows == 1 else "matrix")


LIMITS = Limits(lanes=16, registers=32, threadgroup_bytes=1 << 18)
MATRIX = AttentionTile("matrix", 32, 64)
ROW = AttentionTile("rows", 1, 128)


@pytest.mark.parametrize(
    ("rows", "heads", "dimension", "candidate", "reason"),
    [
        (1, (4, 2), 64, ROW, None),
        (32, (4, 2), 64, MATRIX, None),
        (8, (4, 2), 64, AttentionTile("matrix", 16, 64), None),
        (1, (4, 2), 72, ROW, "head_dim is none of 64, 80, 96, 128, 256"),
        (1, (4, 3), 64, ROW, "more than 16 query heads share a key head, or an uneven number"),
        (1, (32, 1), 64, ROW, "more than 16 query heads share a key head, or an uneven number"),
        (2, (4, 2), 64, ROW, "more than one query"),
        (4, (4, 2), 64, MATRIX, "fewer queries than half the lanes"),
        (16, (4, 2), 64, MATRIX, "block is taller than the bucket"),
        (32, (4, 2), 256, MATRIX, None),
        (64, (4, 2), 256, AttentionTile("matrix", 64, 128), "a block does not fit threadgroup memory"),
    ],
)
def test_reasons(rows: int, heads: Heads, dimension: int, candidate: AttentionTile, reason: str | None) -> None:
    assert is_valid(AttentionKey(rows, 256, *heads, dimension, "bfloat16"), candidate, LIMITS) == reason


def test_labels_and_names() -> None:
    keys = [
        AttentionKey(rows, 256, *heads, dimension, dtype)
        for rows in (1, 512)
        for heads in ((4, 4), (4, 1))
        for dimension in DIMENSIONS
        for dtype in DTYPES
    ]
    check_identities(keys, BEST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64])
def test_examples_and_plain_mlx(rows: int, dtype: str) -> None:
    key = AttentionKey(rows, 256, 4, 2, 64, dtype, batch=2)
    inputs = key.example(min(rows, 19), seed=3)
    assert [array.shape for array in inputs] == [(2, 4, min(rows, 19), 64), (2, 2, 192, 64), (2, 2, 192, 64)]
    assert {array.dtype for array in inputs} == {DTYPES[dtype]}
    assert all(mx.array_equal(a, b) for a, b in zip(inputs, key.example(min(rows, 19), seed=3), strict=True))
    assert key.example(300, seed=0)[1].shape[2] == 300  # the queries are of the context
    (y,) = key.reference(inputs)
    assert y.dtype == DTYPES[dtype]
    assert_near(y, reference(*inputs, 1 / math.sqrt(64), True), times=6)  # plain MLX rounds between the steps
    assert key.weight_inputs() == (1, 2)


def test_dispatches_are_those_of_the_schema() -> None:
    key = AttentionKey(1, 1024, 4, 2, 64, "bfloat16", batch=2)
    empty: dict[str, list[Any]] = {name: [] for name in SelectedDispatches.model_fields}
    for candidate in (None, *key.space(BEST.limits)):
        record = SelectedDispatches.model_validate(empty | {"attention": [key.dispatch(candidate)]})
        (entry,) = record.attention
        assert entry.algorithm == ("mlx" if candidate is None else "metile")
        assert entry.block == (0 if candidate is None else candidate.block_keys)
        assert (entry.batch, entry.dimension, entry.query_heads, entry.key_value_heads) == (2, 64, 4, 2)
        assert entry.token_bucket == 1024


# ---- errors ----


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_arrays_are_refused(program: str) -> None:
    key, candidate, kernel = ready(program, *USUAL, BEST)
    good = arrays(key, 1 if program == "rows" else 19, 33, batch=2)
    bad = [good[:-1], [*good, good[0]], good[::-1]]
    for place, array in enumerate(good):
        others = [array.astype(mx.float32), array[..., :-1], array[:, :1], array[:1], array[0], array[None]]
        others += [array[:, :, 1:]] if place else []
        bad += [[*good[:place], other, *good[place + 1 :]] for other in others]
    for inputs in bad:
        with pytest.raises(MetileError, match=r"^\[attention\] expected .* but got .*\("):
            key.attend(kernel, candidate, inputs, scale=1.0, causal=False)


def test_masks_and_programs_that_do_not_fit_are_refused() -> None:
    key, candidate, kernel = ready("rows", *USUAL, BEST)
    with pytest.raises(MetileError, match=r"^\[attention\] expected one query for rows_b1_bk128 but got 2$"):
        key.attend(kernel, candidate, arrays(key, 2, 9), scale=1.0, causal=False)
    key, candidate, kernel = ready("matrix", *USUAL, BEST)
    with pytest.raises(
        MetileError, match=r"^\[attention\] expected a key for each query but got 20 queries and 9 keys$"
    ):
        key.attend(kernel, candidate, arrays(key, 20, 9), scale=1.0, causal=True)
