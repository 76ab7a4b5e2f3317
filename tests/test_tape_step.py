"""Decode steps on a tape give what the launches of the model's Python give, bit for bit; and when there is no tape.

The reference is the patched model without tapes: its top module is called as its plain class.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from tape_models import begun, decode, ids, make, no_tapes, python_launches, same, tape_reasons, warm
from tiny_models import assert_close, patched

from metile import tape_step
from metile.demo import demo_folder
from metile.instances import plain_class, state_of, swap
from metile.targets.cpu import recorded
from metile.targets.cpu_tape import CpuTape

DTYPES = (mx.float32, mx.bfloat16, mx.float16)

# ---- the same numbers ----


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "smollm3"])
def test_steps_give_the_very_logits(kind: str, dtype: mx.Dtype, batch: int) -> None:
    model = make(kind, dtype)
    plain_logits = decode(model, begun(model, batch=batch), 6, batch)
    handle = patched(model)
    with no_tapes(model):
        cache = begun(model, batch=batch)
        handle.reset_engaged()
        expected, counts = decode(model, cache, 6, batch), handle.engaged()
    mine = begun(model, batch=batch)
    handle.reset_engaged()
    got = decode(model, mine, 6, batch)
    assert same(got, expected)
    assert_close(got, plain_logits)
    assert handle.engaged() == counts
    assert not handle.declined
    assert python_launches(model, mine) == 0
    for layer, other in zip(mine, cache, strict=True):
        assert layer.offset == 12
        assert same(layer.keys[:, :, :11], other.keys[:, :, :11])
        assert same(layer.values[:, :, :11], other.values[:, :, :11])


def test_an_untied_vocabulary_and_biases() -> None:
    model = make("llama", tied=False, attention_bias=True)
    patched(model)
    with no_tapes(model):
        expected = decode(model, begun(model))
    cache = begun(model)
    assert same(decode(model, cache), expected)
    assert python_launches(model, cache) == 0


def test_the_demo_checkpoint() -> None:
    model = mlx_lm.load(str(demo_folder("bf16")))[0]
    handle = patched(model)
    with no_tapes(model):
        expected = decode(model, begun(model), 5)
    cache = begun(model)
    assert same(decode(model, cache, 5), expected)
    assert python_launches(model, cache) == 0
    assert not handle.declined


def test_two_tokens_are_recorded_and_a_third_is_played() -> None:
    model = make()
    patched(model)
    cache = begun(model)
    launches = [python_launches(model, cache, seed) for seed in range(4)]
    assert launches[0] == launches[1] > 0 == launches[2] == launches[3]


def test_logits_are_the_callers_own() -> None:
    model = make()
    patched(model)
    warm(model)
    cache = begun(model)
    decode(model, cache, 1)
    first = model(ids(1, 1, 5), cache=cache)
    kept = first.tolist()
    decode(model, cache, 4)
    assert first.tolist() == kept


def test_generation() -> None:
    model = make(dtype=mx.bfloat16)
    handle = patched(model)
    prompt = ids(1, 7)[0]

    def generate() -> list[int]:
        return [token for token, _ in generate_step(prompt, model, max_tokens=20)]

    with no_tapes(model):
        expected = generate()
    assert generate() == expected
    assert not tape_reasons(handle)


# ---- what a tape takes for constant ----


def scaled(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[1].mlp.gate_proj.weight * 2


def written(model: Any) -> None:
    model.model.norm.weight[:100] = 3.0  # the same object, in other memory


def added(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight += 0.01


def embedded(model: Any) -> None:
    model.model.embed_tokens.weight[:60] *= 2


def quantized(model: Any) -> None:
    nn.quantize(model.model.layers[0].mlp, group_size=32, bits=4)


def adapted(model: Any) -> None:
    mx.random.seed(5)
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    for _, part in model.named_modules():
        if hasattr(part, "lora_b"):
            part.lora_b = 0.1 * mx.random.normal(part.lora_b.shape)
    model.eval()


def numbered(model: Any) -> None:
    model.model.layers[1].self_attn.scale = 0.5


def normed(model: Any) -> None:
    model.model.layers[1].input_layernorm.eps = 0.7


CHANGES: list[Callable[[Any], None]] = [scaled, written, added, embedded, quantized, adapted, numbered, normed]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_middle_is_seen(change: Callable[[Any], None]) -> None:
    def run(model: Any) -> list[mx.array]:
        cache = begun(model)
        first = decode(model, cache)
        change(model)
        return [first, decode(model, cache, 4, seed=5)]

    model, plain = make(), make()
    patched(model)
    for ours, expected in zip(run(model), run(plain), strict=True):
        assert_close(ours, expected)


def test_weights_that_come_back_run_on_a_tape_again() -> None:
    model = make()
    handle = patched(model)
    warm(model)
    cache = begun(model)
    layer = model.model.layers[0]
    kept = layer.mlp.up_proj
    layer.mlp.up_proj = nn.Linear(256, 96)
    decode(model, cache, 3)
    assert "reads what plain MLX computes" in tape_reasons(handle)[0]
    layer.mlp.up_proj = kept
    decode(model, cache, 3)
    assert python_launches(model, cache) == 0


def test_training_runs_the_model() -> None:
    model = make()
    patched(model)
    warm(model)
    cache = begun(model)
    decode(model, cache, 2)
    model.train()
    with recorded() as launches:
        decode(model, cache, 2)
    assert not launches
    assert cache[0].offset == 9
    model.eval()
    decode(model, cache, 3)
    assert python_launches(model, cache) == 0


def test_traced_steps_run_the_model() -> None:
    model = make()
    expected = decode(model, begun(model), 1)
    handle = patched(model)
    warm(model)
    cache = begun(model)
    step = mx.compile(lambda token: model(token, cache=cache))
    assert_close(step(ids(1, 1, 2)), expected)
    assert not handle.declined


# ---- the handle ----


def test_disabling_enabling_and_restoring() -> None:
    model = make()
    handle = patched(model)
    warm(model)
    cache = begun(model)
    expected = decode(model, copy.deepcopy(cache), 9)
    got = [decode(model, cache, 9)[:, :3]]
    trim_prompt_cache(cache, 6)
    with handle.suspended():
        assert python_launches(model, copy.deepcopy(cache)) == 0  # plain MLX, no kernels
        assert type(model) is plain_class(model)
        tokens = ids(1, 9, 2)
        got.append(mx.concatenate([model(tokens[:, i : i + 1], cache=cache) for i in (3, 4)], axis=1))
    got.append(mx.concatenate([model(tokens[:, i : i + 1], cache=cache) for i in (5, 6, 7, 8)], axis=1))
    assert_close(mx.concatenate(got, axis=1), expected)
    assert python_launches(model, cache) == 0
    handle.restore()
    assert type(model) is plain_class(model)
    assert state_of(model) is None


def test_a_model_that_is_gone_is_not_kept() -> None:
    model = make()
    handle = patched(model)
    warm(model)
    gone, weight = weakref.ref(model), weakref.ref(model.model.norm.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None
    assert handle


def test_a_kernel_that_fails_leaves_the_step_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    handle = patched(model)
    warm(model)
    with no_tapes(model):
        expected = decode(model, begun(model), 3)
    cache = begun(model)
    decode(model, cache, 1)
    trim_prompt_cache(cache, 1)

    def fail(*_: Any) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr(CpuTape, "run", fail)
    assert same(decode(model, cache, 3), expected)
    assert [item.reason for item in handle.declined] == ["its tape raised MemoryError: none is left"]


def test_threads_do_not_share_a_tape() -> None:
    model = make()
    handle = patched(model)
    warm(model)
    with no_tapes(model):
        expected = [decode(model, begun(model, length), 40, seed=length) for length in (4, 9, 30)]
    caches = [begun(model, length) for length in (4, 9, 30)]
    found: list[Any] = [None] * 3

    def run(place: int, length: int) -> None:
        found[place] = decode(model, caches[place], 40, seed=length)

    threads = [threading.Thread(target=run, args=item) for item in enumerate((4, 9, 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(same, found, expected))
    assert not handle.declined


# ---- no tape ----


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ("rms_norm", "reads what plain MLX computes"),
        ("graph_fusion", "reads what plain MLX computes"),
        ("dense_mlp", "reads what plain MLX computes"),
    ],
)
def test_a_plan_that_leaves_a_part_to_plain_mlx(left_out: str, reason: str) -> None:
    model = make()
    features = {"attention", "dense_mlp", "graph_fusion", "rms_norm", "dense_projections"} - {left_out}
    handle = patched(model, *features)
    with no_tapes(model):
        expected = decode(model, begun(model))
    cache = begun(model)
    assert same(decode(model, cache), expected)
    reasons = tape_reasons(handle)
    assert len(reasons) == 1
    assert reasons[0].startswith("its decode step has no tape: ")
    assert reasons[0].endswith(reason)


def wrapped(model: Any, call: Callable[..., mx.array]) -> None:
    """Let a part of the model do more than it does."""
    plain = type(model)
    swap(model, type(plain.__name__, (plain,), {"__call__": lambda self, *a, **k: call(plain.__call__, self, *a, **k)}))


@pytest.mark.parametrize(
    ("part", "call", "reason"),
    [
        ("logits", lambda plain, self, *a, **k: plain(self, *a, **k) * 2, "logits are not what the last kernel wrote"),
        ("embedding", lambda plain, self, x: plain(self, x) * 3, "is not the embedding of the token"),
    ],
)
def test_a_model_that_does_more(part: str, call: Callable[..., mx.array], reason: str) -> None:
    model = make(tied=False)
    wrapped(model if part == "logits" else model.model.embed_tokens, call)
    expected = decode(model, begun(model))
    handle = patched(model)
    assert_close(decode(model, begun(model)), expected)
    assert reason in tape_reasons(handle)[0]


def test_a_tape_that_gives_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    handle = patched(model)
    with no_tapes(model):
        expected = decode(model, begun(model))
    run = CpuTape.run
    monkeypatch.setattr(CpuTape, "run", lambda *arguments: run(*arguments) + 1e-6)
    assert same(decode(model, begun(model)), expected)
    assert tape_reasons(handle) == ["its decode step has no tape: the tape gives other logits, keys or values"]


def test_a_model_that_changes_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(plain: Any, self: Any, *arguments: Any, **named: Any) -> mx.array:
        object.__setattr__(self, "calls", vars(self).get("calls", 0) + 1000)
        return plain(self, *arguments, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(tape_step, "_MOST_RECORDS", 3)
    model = make()
    wrapped(model.model, count)
    handle = patched(model)
    with no_tapes(model):
        expected = decode(model, begun(model), 9)
    assert same(decode(model, begun(model), 9), expected)
    assert "its modules change at every token" in tape_reasons(handle)[0]
