"""What the tests of Metal kernels share: simulated targets that remember their launches, references, one check of all.

Every check runs on poisoned outputs and compares with float64. On a checked target a launch must have no findings, and
each element of an output must be written exactly once: a block that two threadgroups compute would be right twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import test_attention
import test_linear
import test_norm
import test_rope
from kernel_checks import assert_near, numpy_of

from metile.ops.attention import AttentionKey
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.projections import ProjectionsKey
from metile.ops.rope import RopeKey
from metile.simulator import metal_kernel
from metile.simulator.devices import Device, find_device
from metile.simulator.runtime import Launch
from metile.targets.base import Kernel
from metile.targets.metal import MetalTarget

Array = np.ndarray[Any, Any]
ROPE_OFFSET = 3  # of `RopeKey.launch`


class WatchedTarget(MetalTarget):
    """A simulated GPU that remembers the last launch of any of its kernels.

    Args:
        device: what to simulate.
        check: whether every launch is checked.
        threads: threads of this machine for a launch; None is all.
    """

    def __init__(self, device: str | Device = "m1", *, check: bool = False, threads: int | None = None) -> None:
        self.check, self.last = check, None
        self.made: list[dict[str, Any]] = []  # the text of each form of a kernel
        self._threads = threads
        self._simulated = find_device(device)
        super().__init__(self._simulated, self._watched)

    last: Launch | None

    def _watched(self, **text: Any) -> Callable[..., list[mx.array]]:
        self.made.append(text)
        kernel = metal_kernel(**text, strict=True, check=self.check, device=self._simulated)

        def call(**launch: Any) -> list[mx.array]:
            outputs = kernel(**launch, threads=self._threads)
            self.last = kernel.last
            return outputs

        return call


FAST = WatchedTarget()
CHECKED = WatchedTarget(check=True)


def reference(key: OpKey, inputs: list[mx.array]) -> list[Array]:
    """Return what `launch` of a key must give, in float64."""
    if isinstance(key, LinearKey):
        return [test_linear.reference(key, inputs)]
    if isinstance(key, ProjectionsKey):
        return projections_reference(inputs)
    if isinstance(key, NormKey):
        return test_norm.reference(key, inputs)
    if isinstance(key, RopeKey):
        return test_rope.reference(key, inputs, ROPE_OFFSET)
    assert isinstance(key, AttentionKey)
    return [test_attention.reference(*inputs, 1 / math.sqrt(key.dimension), True)]


def projections_reference(inputs: list[mx.array]) -> list[Array]:
    """Return x · Wᵀ of three weights, each with its bias if there are any, in float64."""
    x, *rest = (numpy_of(array) for array in inputs)
    biases = rest[3:] or [0.0] * 3
    return [np.asarray(x @ weight.T + bias) for weight, bias in zip(rest[:3], biases, strict=True)]


def check_launch(
    target: WatchedTarget, kernel: Kernel, launch: Callable[[Kernel], Sequence[mx.array]], expected: Sequence[Array]
) -> list[mx.array]:
    """Launch a kernel and compare; on a checked target also see that all is written once."""
    target.last = None
    outputs = list(launch(kernel))
    mx.eval(outputs)
    times = 2 if kernel.source.name.partition("_norm")[1] else 1  # a norm rounds before its weight and after
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_near(ours, theirs, times=times)
    if target.check and target.last is not None:
        assert target.last.findings == ()
        traffic = target.last.counters.traffic or {}
        for name, output in zip(kernel.source.outputs, outputs, strict=True):
            written = traffic[f"{name}_data"].written
            assert written == output.nbytes, f"{name}: {written} bytes written of {output.nbytes}"
    return outputs


def check(
    key: OpKey,
    candidate: Any,
    inputs: list[mx.array],
    target: WatchedTarget,
    expected: Sequence[Array] | None = None,
) -> list[mx.array]:
    """Check one launch of a candidate as the search launches it."""
    kernel = target.compile(key.source(candidate))
    wanted = reference(key, inputs) if expected is None else expected
    return check_launch(target, kernel, lambda k: key.launch(k, candidate, inputs, poison=True), wanted)


def check_attend(
    key: AttentionKey,
    candidate: Any,
    inputs: list[mx.array],
    target: WatchedTarget,
    *,
    scale: float = 0.125,
    causal: bool = True,
) -> mx.array:
    """Check one launch of attention with a scale and a mask; q is [B, H, L, D]."""
    expected = [test_attention.reference(*inputs, scale, causal)]

    def launch(kernel: Kernel) -> list[mx.array]:
        return [key.attend(kernel, candidate, inputs, scale=scale, causal=causal, poison=True)]

    return check_launch(target, target.compile(key.source(candidate)), launch, expected)[0]


def check_turn(
    key: RopeKey, candidate: Any, inputs: list[mx.array], target: WatchedTarget, *, offset: int
) -> list[mx.array]:
    """Check one launch of rope at an offset."""
    expected = test_rope.reference(key, inputs, offset)

    def launch(kernel: Kernel) -> list[mx.array]:
        return key.turn(kernel, candidate, inputs, offset=offset, poison=True)

    return check_launch(target, target.compile(key.source(candidate)), launch, expected)
