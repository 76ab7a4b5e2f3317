"""What the tests of kernel families share: a target for each instruction set, and rounding tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from metile.ops.base import DTYPES, OpKey
from metile.targets.cpu import CpuTarget
from metile.targets.isa import supported_isas

TARGETS = [CpuTarget(isa) for isa in supported_isas()]
NAMES = [target.isa.name for target in TARGETS]
BEST = TARGETS[0]

# Largest error relative to the largest reference value. The reference takes the inputs as the dtype holds them and
# computes in float64, so this is what the output dtype rounds, plus the sums in float32.
TOLERANCES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-5}


def numpy_of(array: mx.array) -> np.ndarray[Any, Any]:
    """Return an array's values in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def random(seed: int, shape: Sequence[int], dtype: str, scale: float = 1.0) -> mx.array:
    """Return scale * N(0, 1), evaluated."""
    x = (scale * mx.random.normal(tuple(shape), key=mx.random.key(seed))).astype(DTYPES[dtype])
    mx.eval(x)
    return x


def assert_near(actual: mx.array, expected: np.ndarray[Any, Any], *, times: float = 1.0) -> None:
    """Check shape and, within the tolerance of the dtype, values; a NaN is never near."""
    assert actual.shape == expected.shape
    tolerance = times * TOLERANCES[str(actual.dtype).removeprefix("mlx.core.")]
    error = np.abs(numpy_of(actual) - expected).max(initial=0)
    assert error <= tolerance * max(np.abs(expected).max(initial=0), 1e-30), error


def thinned(candidates: Sequence[Any], count: int) -> list[Any]:
    """Return about `count` candidates: the default, the last, and evenly spaced ones between them."""
    step = max(1, len(candidates) // count)
    return list(dict.fromkeys([*candidates[::step], *candidates[-1:]]))


def check_identities(keys: Sequence[OpKey], target: CpuTarget) -> None:
    """Check that labels tell candidates apart, and that no two different texts share a name."""
    texts: dict[str, str] = {}
    for key in keys:
        space = key.space(target.limits)
        assert len({candidate.label() for candidate in space}) == len(space)
        for candidate in space:
            source = key.source(candidate)
            text = (
                source.body + source.scratch + repr((source.inputs, source.outputs, source.numbers, source.simdgroups))
            )
            assert texts.setdefault(source.name, text) == text, source.name
            assert source.name.isidentifier()
    assert len(set(texts.values())) == len(texts)
