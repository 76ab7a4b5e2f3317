"""What the benchmark measures: the linear layers of three models, and the numbers of rows they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metile.errors import mismatch
from metile.ops.base import row_bucket

ROWS = (1, 2, 4, 8, 16, 32, 64, 127, 128, 512)
VOCABULARY_ROWS = 16  # logits of more positions at once are nobody's wish
GEMV_ROWS = 16  # below this the figure is the share of the streaming bandwidth ...
GEMM_ROWS = 64  # ... and from here on the share of the roofline is a matrix product's


@dataclass(frozen=True)
class Shape:
    """A linear layer, its weight [n, k].

    Attributes:
        model: whose it is.
        layer: what it is there.
        n: rows of the weight, the outputs.
        k: columns of the weight, the inputs.
    """

    model: str
    layer: str
    n: int
    k: int

    def takes(self, rows: int) -> bool:
        """Return whether the layer is measured at `rows`."""
        return self.layer != "vocabulary" or rows <= VOCABULARY_ROWS

    def flops(self, rows: int) -> int:
        """Return the floating-point operations of a call, a multiply and an add being two."""
        return 2 * rows * self.n * self.k

    def moved_bytes(self, rows: int) -> int:
        """Return the bytes of weights, x and y in bfloat16, each moved once."""
        return 2 * (self.n * self.k + rows * (self.k + self.n))


def _layers(model: str, hidden: int, key_value: int, inner: int, vocabulary: int) -> tuple[Shape, ...]:
    return (
        Shape(model, "q, o", hidden, hidden),
        Shape(model, "k, v", key_value, hidden),
        Shape(model, "gate, up", inner, hidden),
        Shape(model, "down", hidden, inner),
        Shape(model, "vocabulary", vocabulary, hidden),
    )


SHAPES = (
    *_layers("SmolLM2-135M", 576, 192, 1536, 49152),
    *_layers("Qwen2.5-0.5B", 896, 128, 4864, 151936),
    *_layers("Qwen2.5-1.5B", 1536, 256, 8960, 151936),
)
MODELS = tuple(dict.fromkeys(shape.model for shape in SHAPES))
QUICK_SHAPES = SHAPES[:2]
QUICK_ROWS = (1, 64)


def shapes_of(models: Sequence[str]) -> tuple[Shape, ...]:
    """Return the layers of the named models.

    Raises:
        MetileError: a name is none of `MODELS`.
    """
    for name in models:
        if name not in MODELS:
            raise mismatch("models", f"some of {', '.join(MODELS)}", repr(name))
    return tuple(shape for shape in SHAPES if shape.model in models)


def checked_rows(rows: Sequence[int]) -> tuple[int, ...]:
    """Return the row counts in ascending order, each once.

    Raises:
        MetileError: one is below 1 or above what a kernel takes.
    """
    for count in rows:
        if row_bucket(count) is None:
            raise mismatch("rows", "numbers from 1 to 4096", count)
    return tuple(sorted(set(rows)))
