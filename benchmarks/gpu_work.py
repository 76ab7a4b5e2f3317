"""The operations of the kernel table: a chain of launches of each, in which every launch needs the one before.

MLX runs launches that do not depend on one another at the same time, which no layer of a model can. So each launch
takes its x from the last one's y. Where y has more columns than x, the first so many elements of its memory are the
next x: a view, no kernel. SwiGLU does not keep the scale of what goes through it, so a norm stands between two of
them; it is timed alone, and subtracted from both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from metile.measure import Rotation
from metile.ops.attention import AttentionKey, token_bucket
from metile.ops.linear import Epilogue, LinearKey
from metile.ops.norm import NormKey

HIDDEN, INNER = 1536, 8960
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
CONTEXTS = (256, 1024, 4096, 16384)
HEADS, KEY_HEADS, DIMENSION = 12, 2, 128
EPS = 1e-6
FOUR_BITS = "affine4g64"
_MOST_SETS = 512

Launch = Callable[[Sequence[mx.array]], list[mx.array]]


@dataclass(frozen=True)
class Operation:
    """A line of the table.

    Attributes:
        name: of the operation.
        key: of its kernel, at the bucket of its size.
        rows: of x; queries of attention.
        context: keys of attention, or 0.
        normed: whether a norm stands between two launches.
    """

    name: str
    key: Any
    rows: int
    context: int = 0
    normed: bool = False

    @property
    def moved_bytes(self) -> int:
        """What a launch must read and write, in bfloat16 where it is not codes."""
        if isinstance(self.key, LinearKey):
            weights = self.key.operands * self.key.format.bytes(self.key.outputs, self.key.inputs, self.key.dtype)
            return weights + 2 * self.rows * (self.key.inputs + self.key.outputs)
        if isinstance(self.key, NormKey):
            return 2 * self.key.hidden * (self.rows * (4 if self.key.add else 2) + 1)
        return 2 * DIMENSION * (2 * KEY_HEADS * self.context + 2 * HEADS)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        if isinstance(self.key, LinearKey):
            return 2 * self.rows * self.key.operands * self.key.outputs * self.key.inputs
        return 4 * HEADS * DIMENSION * self.context

    def example(self) -> list[mx.array]:
        """Return inputs of just this size."""
        if isinstance(self.key, AttentionKey):
            keys = mx.random.split(mx.random.key(5), 3)
            shapes = ((1, HEADS, 1, DIMENSION), *(((1, KEY_HEADS, self.context, DIMENSION),) * 2))
            made = [mx.random.normal(s, key=key).astype(mx.bfloat16) for s, key in zip(shapes, keys, strict=True)]
            mx.eval(made)
            return made
        arrays: list[mx.array] = self.key.example(self.rows, 5)
        return arrays

    def plain(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Launch plain MLX, as mlx-lm calls it."""
        if isinstance(self.key, LinearKey) and self.key.epilogue == "swiglu":
            gate, up = (self.key.format.product(inputs[0], matrix) for matrix in self.key.matrices(inputs))
            return [swiglu(gate, up)]
        outputs: list[mx.array] = self.key.reference(inputs)
        return outputs

    def next_inputs(self, inputs: Sequence[mx.array], outputs: Sequence[mx.array], norm: mx.array) -> list[mx.array]:
        """Return the inputs of the launch that follows; weights stay what they are."""
        x, y = inputs[0], outputs[-1]
        following = y.reshape(-1)[: x.size].reshape(x.shape)
        if self.normed:
            following = mx.fast.rms_norm(following, norm, EPS)
        return [following, *inputs[1:]]


def operations(names: Sequence[str], rows: Sequence[int], contexts: Sequence[int]) -> list[Operation]:
    """Return the lines of the table, those that matter most first."""

    def linear(name: str, epilogue: Epilogue, weights: str) -> list[Operation]:
        normed = epilogue == "swiglu"
        keys = [(m, LinearKey(epilogue, m, INNER, HIDDEN, "bfloat16", weights)) for m in rows]
        return [Operation(name, key, m, normed=normed) for m, key in keys]

    made: dict[str, list[Operation]] = {
        "swiglu": linear("swiglu", "swiglu", "dense"),
        "matmul": linear("matmul", "store", "dense"),
        "swiglu_4bit": linear("swiglu_4bit", "swiglu", FOUR_BITS),
        "matmul_4bit": linear("matmul_4bit", "store", FOUR_BITS),
        "attention": [
            Operation("attention", AttentionKey(1, token_bucket(s), HEADS, KEY_HEADS, DIMENSION, "bfloat16"), 1, s)
            for s in contexts
        ],
        "rms_norm": [Operation("rms_norm", NormKey(False, m, HIDDEN, EPS, "bfloat16"), m) for m in rows],
        "add_rms_norm": [Operation("add_rms_norm", NormKey(True, m, HIDDEN, EPS, "bfloat16"), m) for m in rows],
    }
    return [operation for name in names for operation in made[name]]


NAMES = ("swiglu", "matmul", "swiglu_4bit", "matmul_4bit", "attention", "rms_norm", "add_rms_norm")


def compiled(target: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the kernel of each key and candidate, or the error that it does not compile with."""
    sources = [(key.source(candidate), candidate) for key, candidate in pairs]
    if hasattr(target, "compile_forms"):
        forms = [(source, [getattr(candidate, name) for name in source.fixed]) for source, candidate in sources]
        return list(target.compile_forms(forms))
    return list(target.compile_all([source for source, _ in sources]))


class Chain:
    """Launches of one operation, one after another, on weights in rotation.

    Args:
        operation: what is launched.
        cold_bytes: what the sets of weights exceed together.
        memory_bytes: what they may not exceed.
    """

    def __init__(self, operation: Operation, cold_bytes: int, memory_bytes: int) -> None:
        self.operation = operation
        self.inputs = operation.example()
        self._norm = mx.ones((HIDDEN,), mx.bfloat16)
        places = operation.key.weight_inputs()
        set_bytes = sum(self.inputs[place].nbytes for place in places)
        cold = min(cold_bytes, (_MOST_SETS - 1) * set_bytes)

        def make(index: int) -> list[mx.array]:
            copied = [a + 0 if index and place in places else a for place, a in enumerate(self.inputs)]
            mx.eval(copied)
            return copied

        self._rotation = Rotation(make, set_bytes or 1, cold_bytes=cold if set_bytes else 0, memory_bytes=memory_bytes)
        self.sets = len(self._rotation)
        self.is_cold = not set_bytes or self._rotation.is_cold

    def build(self, launch: Launch, launches: int) -> mx.array:
        """Return the end of a chain, not evaluated."""
        operation, current = self.operation, self.inputs
        outputs: list[mx.array] = []
        for _ in range(launches):
            weights = self._rotation.next()
            moving = 2 if len(current) == 3 and isinstance(operation.key, NormKey) else 1
            outputs = launch([*current[:moving], *weights[moving:]])
            current = operation.next_inputs(current, outputs, self._norm)
        return current[0]

    def between(self, launches: int) -> mx.array:
        """Return the end of a chain of what stands between two launches, alone."""
        x = self.inputs[0]
        for _ in range(launches):
            x = mx.fast.rms_norm(x, self._norm, EPS)
        return x
