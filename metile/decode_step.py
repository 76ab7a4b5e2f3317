"""A decode step as one graph that MLX repeats: the model is run in Python once, not at every token.

Building the graph of a token in Python takes a GPU's host about as long as running it takes the GPU. Most of that graph
is the same at every token; what changes is the token, how many are in the cache, and the cache. So the whole model is
traced by `mx.compile` with those as inputs, the kernels among its nodes, and repeated until the cache grows.

What `mx.compile` takes for constant is looked at before every step: weights, modules, numbers and training flags must
be the very objects that were traced. A step is used only after it has given the logits that the model itself gave.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from metile.constants import Constants
from metile.instances import STATE, patched_class, plain_class
from metile.ops.attention import token_bucket
from metile.ops.counters import COUNTERS
from metile.patched import Entry, Runtime, State
from metile.patched_decoder import AttentionState
from metile.sites import Declined
from metile.step_cache import StepCache, UntraceableError
from metile.tracing import is_traced, own_trace

_TOLERANCE = 0.05  # of the norm of the logits: attention may be cut into other parts
_MOST_STEPS = 16  # shapes whose steps are kept


class Step:
    """A traced step of one shape.

    Attributes:
        launched: kernels that it launches, and how often.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.launched: list[tuple[Entry, int]] = []
        self._compiled: Callable[..., list[mx.array]] = mx.compile(run)

    def __call__(self, inputs: mx.array, cache: Sequence[KVCache], blocks: int) -> tuple[mx.array, list[mx.array]]:
        """Return the logits of `inputs` [B, 1], and k and v of each layer as the step leaves them."""
        offset = cache[0].offset
        numbers = mx.array([offset], mx.int32), mx.array([offset + 1], mx.int32)
        counters = COUNTERS.take(len(cache) * blocks).reshape(len(cache), blocks)
        held = [array for layer in cache for array in (layer.keys, layer.values)]
        logits, *updated = self._compiled(inputs, *numbers, counters, *held)
        return logits, updated


class StepState(State):
    """A model whose decode steps are repeated."""

    __slots__ = ("attentions", "blocks", "constants", "met", "steps")
    runs_kernels = False

    def __init__(self, model: nn.Module, attentions: Sequence[AttentionState], runtime: Runtime) -> None:
        plain = plain_class(model)
        self.path, self.feature, self.runtime = "", "attention", runtime
        self.module = weakref.ref(model)
        self.cls = patched_class(plain, "decode_step", {"__call__": call_patched})
        self.plain = plain.__call__
        self.ops, self.fixed, self.parts, self.read = (), (), (), ()
        self.entries, self.failed, self.one_position = {}, False, False
        self.attentions, self.blocks = len(attentions), max(state.op.query_heads for state in attentions)
        self.steps: dict[Any, Step] = {}
        self.met: set[Any] = set()
        self.constants: Constants | None = None

    def call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model: a traced step where the call is one, the model itself otherwise."""
        inputs, cache = step_arguments(arguments, named)
        if inputs is None or not self._fits(module, inputs, cache):
            return self.plain(module, *arguments, **named)
        place = inputs.shape, inputs.dtype, cache[0].keys.shape, token_bucket(cache[0].offset + 1)
        if self.steps and not self._unchanged(module):
            self.steps.clear()
            self.met.clear()
        step = self.steps.get(place)
        if step is not None:
            return self._run(step, inputs, cache)
        if place not in self.met:  # what is loaded at a first launch is nothing to trace
            self.met.add(place)
            return self.plain(module, inputs, cache=cache)
        return self._build(module, place, inputs, cache)

    def _fits(self, module: Any, inputs: Any, cache: Any) -> bool:
        """Return whether a call is a decode step over plain caches with room for one token more."""
        if not isinstance(cache, list) or len(cache) != self.attentions or not is_step(module, inputs, cache):
            return False
        return bool(cache[0].offset < cache[0].keys.shape[2])

    def _unchanged(self, module: nn.Module) -> bool:
        return self.constants is not None and self.constants.unchanged(module)

    def _run(self, step: Step, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        logits, updated = step(inputs, cache, self.blocks * inputs.shape[0])
        for layer, keys, values in zip(cache, updated[::2], updated[1::2], strict=True):
            layer.keys, layer.values = keys, values
            layer.offset += 1
        for entry, count in step.launched:
            entry.engaged += count
        return logits

    def _build(self, module: Any, place: Any, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        """Run the model on a token, trace its step, and keep that where both give the same."""
        if len(self.steps) >= _MOST_STEPS:
            self.steps.clear()
        step = Step(self._traced(module, cache[0].offset + 1))
        before = {id(entry): entry.engaged for entry in self.runtime.all_entries()}
        reason = ""
        try:
            logits, _ = step(inputs, cache, self.blocks * inputs.shape[0])
            step.launched = launched_since(self.runtime, before)
            mx.eval(logits)
        except Exception as error:
            logits, reason = None, f"its decode step cannot be traced: {(str(error).splitlines() or [''])[0]}"
        plain: mx.array = self.plain(module, inputs, cache=cache)
        if logits is not None and not _alike(logits, plain):
            reason = "its traced decode step gives other logits"
        if reason:
            self.failed = True
            self.runtime.failed.append(Declined(self.path, reason))
            object.__setattr__(module, "__class__", plain_class(module))
            return plain
        self.constants = Constants(module)
        self.steps[place] = step
        return plain

    def _traced(self, module: Any, tokens: int) -> Callable[..., list[mx.array]]:
        model, plain, layers = weakref.ref(module), self.plain, self.attentions

        def run(
            inputs: mx.array, offset: mx.array, count: mx.array, counters: mx.array, *held: mx.array
        ) -> list[mx.array]:
            caches = [
                StepCache(held[2 * i], held[2 * i + 1], offset, count, counters[i], tokens) for i in range(layers)
            ]
            with own_trace():
                logits = plain(model(), inputs, cache=caches)
            if not all(cache.attended for cache in caches):
                raise UntraceableError("a layer attends by plain MLX")
            return [logits, *(array for cache in caches for array in (cache.keys, cache.values))]

        return run


def call_patched(self: nn.Module, *arguments: Any, **named: Any) -> Any:
    """Call the state of a patched model."""
    return vars(self)[STATE].call(self, arguments, named)


def step_arguments(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Return the tokens and the cache of a model's call, where it has these only; the tokens as None otherwise."""
    cache: Any = named.get("cache", (*arguments, None, None)[1])
    alone = len(arguments) + len(named) == 2 and named.keys() <= {"cache"}
    return arguments[0] if alone else None, cache


def is_step(module: Any, inputs: Any, cache: Any) -> bool:
    """Return whether a call is a decode step over plain caches of one length, with nothing traced."""
    if not isinstance(inputs, mx.array) or inputs.ndim != 2 or inputs.shape[1] != 1 or not isinstance(cache, list):
        return False
    if not cache or vars(module).get("_training", False):
        return False
    offset = getattr(cache[0], "offset", 0)
    for layer in cache:
        if type(layer) is not KVCache or layer.keys is None or layer.offset != offset:
            return False
    halves = [array for layer in cache for array in (layer.keys, layer.values)]
    return cache[0].keys.shape[0] == inputs.shape[0] and not is_traced(inputs, *halves)


def launched_since(runtime: Runtime, before: dict[int, int]) -> list[tuple[Entry, int]]:
    """Return which kernels were launched, and how often, since their counts were what `before` says by their ids."""
    counts = ((entry, entry.engaged - before.get(id(entry), 0)) for entry in runtime.all_entries())
    return [(entry, count) for entry, count in counts if count > 0]


def _alike(a: mx.array, b: mx.array) -> bool:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return bool((mx.linalg.norm(a - b) <= _TOLERANCE * mx.linalg.norm(b)).item())
