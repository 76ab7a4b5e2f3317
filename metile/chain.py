"""Launches timed together, as nodes of one graph of MLX's: each needs what the one before gave.

Evaluated one by one, launches on a GPU would be timed with the wait for each. Independent ones of one graph run side by
side, as no layers of a model do; so each takes its first input from an output of the one before. Where an output has
elements enough that is a view; otherwise it is repeated, by an operation that stands in the chains of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

Launch = Callable[[Sequence[mx.array]], Sequence[mx.array]]


def linked(x: mx.array, outputs: Sequence[mx.array]) -> mx.array:
    """Return an array of the shape and dtype of `x` that cannot be computed before `outputs`."""
    alike = [output for output in outputs if output.dtype == x.dtype]
    y = next((output for output in reversed(alike) if output.size >= x.size), None)
    if y is not None:
        return y.reshape(-1)[: x.size].reshape(x.shape)
    y = alike[0].reshape(-1) if alike else outputs[0].reshape(-1).astype(x.dtype)
    return mx.tile(y, -(-x.size // y.size))[: x.size].reshape(x.shape)


class Chain:
    """A work that MLX evaluates as one graph, see `metile.measure.sample`.

    Args:
        launch: of one side.
        inputs: gives the inputs of a launch, with weights in another place at each call.
    """

    def __init__(self, launch: Launch, inputs: Callable[[], Sequence[mx.array]]) -> None:
        self._launch, self._inputs = launch, inputs

    def __call__(self) -> None:
        """Run once."""
        self.prepare(1)()

    def prepare(self, repeats: int) -> Callable[[], None]:
        """Return what runs so many launches, one after another, and waits for them."""
        x: mx.array | None = None
        all_outputs: list[mx.array] = []  # MLX would not compute what nobody asks for
        for _ in range(repeats):
            first, *others = self._inputs()
            outputs = self._launch([first if x is None else x, *others])
            x = linked(first, outputs)
            all_outputs += outputs
        return lambda: mx.eval(x, all_outputs)
