"""Plans outlive the process that made them, and hold for one format of a model on one machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import TARGET, patched, plan_for, tiny
from tuning_world import WORK, write_model

import metile
from metile import cache as cache_module
from metile import hub, plan
from metile.cache import EntryKey, PlanCache
from metile.dispatch import Plan
from metile.errors import MetileError
from metile.files import CACHE_VARIABLE, cache_root
from metile.ops.linear import LinearKey
from metile.plans import cached_plan, digest_of, save_plan
from metile.store import machine_key
from metile.workload import Probe, generate

EMPTY = Plan("cpu", frozenset(), {})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, but for compiled kernels."""
    kernels, root = cache_root() / "kernels", tmp_path / "cache"
    root.mkdir()
    (root / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    monkeypatch.setattr(cache_module, "_warned", set())
    return root


def keep(model: nn.Module, kept: Plan, **workload: int) -> PlanCache:
    cache = PlanCache(digest_of(model))
    save_plan(cache, TARGET, kept, WORK.replace(**workload), {"refused": []})
    return cache


# ---- kept and found ----


def test_a_plan_is_found_again() -> None:
    model = tiny()
    assert cached_plan(model, TARGET) is None
    kept = plan_for(model)
    keep(model, kept)
    assert cached_plan(tiny(seed=9), TARGET) == kept  # of the same format, with other weights
    assert cached_plan(tiny(num_hidden_layers=3), TARGET) is None


def test_of_several_workloads_the_widest_is_taken() -> None:
    model = tiny()
    narrow, wide = plan_for(model, rows=(1, 16)), plan_for(model)
    keep(model, wide, prompt_tokens=60)
    keep(model, narrow, prompt_tokens=16)
    assert cached_plan(model, TARGET) == wide
    keep(model, EMPTY, prompt_tokens=60)
    assert cached_plan(model, TARGET) == narrow
    keep(model, EMPTY, prompt_tokens=16)
    assert cached_plan(model, TARGET) == EMPTY


def test_a_plan_that_was_refused_says_so() -> None:
    model = tiny()
    keep(model, EMPTY)
    handle = metile.patch(model)
    assert not handle
    assert handle.reason == "the plan is plain MLX"


@pytest.mark.parametrize("field", ["target", "chip", "limits", "os", "mlx", "metile", "kernels"])
def test_the_plan_of_another_machine_is_left_alone(field: str) -> None:
    model = tiny()
    cache = PlanCache(digest_of(model))
    other = dataclasses.replace(machine_key(TARGET), **{field: "another"})
    cache.put(EntryKey(other, cache.model, "plan", "selected plan", "w"), {"plan": plan_for(model).to_json()})
    with warnings.catch_warnings(record=True):
        assert cached_plan(model, TARGET) is None
    keep(model, EMPTY)
    assert len(cache.entries()) == 2  # nor is it lost


@pytest.mark.parametrize(
    "value",
    [
        1,
        "plan",
        [],
        {},
        {"plan": None},
        {"plan": {"target": "cpu", "features": ["dense_mlp"]}},
        {"plan": {"target": "cpu", "features": ["telepathy"], "choices": []}},
        {"plan": {"target": "cpu", "features": 3, "choices": []}},
        {"plan": {"target": "cuda", "features": [], "choices": []}},
        {"plan": {"target": "cpu", "features": [], "choices": [{"op": "linear"}]}},
        {"plan": {"target": "cpu", "features": [], "choices": [{"op": "alchemy", "key": {}, "candidate": None}]}},
        {"plan": {"target": "cpu", "features": [], "choices": [{"op": "norm", "key": {"a": 1}, "candidate": None}]}},
        {"plan": {"target": "cpu", "features": [], "choices": ["norm"]}},
    ],
)
def test_what_is_not_a_plan_is_a_miss(value: Any) -> None:
    model = tiny()
    cache = PlanCache(digest_of(model))
    cache.put(EntryKey(machine_key(TARGET), cache.model, "plan", "selected plan", "w"), value)
    assert cached_plan(model, TARGET) is None


@pytest.mark.parametrize("raw", [b"", b'{"plans":[', b"\xff\xfe", b"[]"])
def test_a_broken_file_is_one_warning_and_a_miss(raw: bytes) -> None:
    model = tiny()
    path = PlanCache(digest_of(model)).path
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert cached_plan(model, TARGET) is None
        assert cached_plan(model, TARGET) is None
    assert [warning.category for warning in caught] == [cache_module.CacheWarning]


# ---- what the file is named by ----


def test_the_digest_is_of_the_format() -> None:
    model = tiny()
    assert digest_of(model) == digest_of(tiny(seed=5))
    quantized = tiny()
    nn.quantize(quantized, group_size=32)
    others = [
        tiny(dtype=mx.bfloat16),
        tiny(num_hidden_layers=3),
        tiny(rms_norm_eps=1e-6),
        tiny(rope_theta=5e5),
        tiny(tied=True),
        tiny("qwen2"),
        quantized,
    ]
    digests = {digest_of(other) for other in [model, *others]}
    assert len(digests) == 1 + len(others)


def test_a_patched_model_has_the_digest_of_a_plain_one() -> None:
    model = tiny()
    before = digest_of(model)
    with patched(model):
        assert digest_of(model) == before


def test_a_model_without_a_configuration_has_a_digest() -> None:
    assert digest_of(nn.Linear(4, 4)) != digest_of(nn.Linear(4, 8))
    assert digest_of(nn.Linear(4, 4)) != digest_of(nn.RMSNorm(4))


# ---- metile.patch ----

_SECOND = """
import json, sys, time
from pathlib import Path
import mlx.core as mx
import metile
from metile import hub
from metile.suites import Workload
from metile.workload import generate

model, _ = hub.load(Path(sys.argv[1]))
work, prompt = Workload(9, 12, 1, 1, 1, 1, 0.0, 2048, 0), mx.arange(3, 12)
start = time.perf_counter()
handle = metile.patch(model)
seconds = time.perf_counter() - start
changed, ours = bool(handle), generate(model, prompt, work).tokens
engaged = handle.engaged()
handle.restore()
plain = generate(model, prompt, work).tokens
print(json.dumps([changed, seconds, engaged, ours == plain, ours]))
"""


def test_a_second_process_applies_the_plan(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", dtype=mx.float32)
    model, _ = hub.load(folder)
    kept = plan_for(model, ["dense_mlp", "rms_norm", "attention"])
    keep(model, kept)
    done = subprocess.run(
        [sys.executable, "-c", _SECOND, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    changed, seconds, engaged, same, tokens = json.loads(done.stdout.splitlines()[-1])
    assert changed
    assert seconds < 1
    assert set(engaged) == kept.features
    assert min(engaged.values()) > 0
    assert same
    assert tuple(tokens) == generate(model, mx.arange(3, 12), WORK.replace(generation_tokens=12)).tokens


def paced(monkeypatch: pytest.MonkeyPatch, ours: float) -> None:
    """Let plain MLX take a second in every probe, and a plan `ours`."""

    def time(self: plan.PlanSearch, features: frozenset[str]) -> Probe:
        return Probe(ours if features else 1.0, 0.0)

    monkeypatch.setattr(plan.PlanSearch, "_time", time)
    monkeypatch.setattr("metile.quick._MOST_ROWS", 32)  # the prompt of a quick plan has 24 tokens


def test_without_a_plan_a_quick_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, 0.5)
    model = tiny()
    expected = model(mx.arange(9)[None])
    with metile.patch(model) as handle:
        assert handle
        assert handle.plan.features >= {"dense_mlp", "attention"}
        assert mx.allclose(model(mx.arange(9)[None]), expected, atol=1e-4)
        assert handle.engaged()["dense_mlp"] > 0
    assert cached_plan(model, TARGET) is None  # it was not confirmed


def test_quick_passes_over_the_plan_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, 0.5)
    model = tiny()
    keep(model, EMPTY)
    assert not metile.patch(model)
    assert metile.patch(model, tune="quick")


def test_a_quick_plan_must_win(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, 2.0)
    handle = metile.patch(tiny(), tune="quick")
    assert not handle
    assert handle.reason == "untuned kernels run at 0.50 times the speed of plain MLX"


def test_a_quick_plan_must_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, 0.5)
    launch = LinearKey.launch
    monkeypatch.setattr(LinearKey, "launch", lambda *args, **named: [y * float("nan") for y in launch(*args, **named)])
    model = tiny()
    handle = metile.patch(model, tune="quick")
    assert not handle
    assert handle.reason.startswith("untuned kernels do not verify on this model: logits of the plan are not finite")
    assert mx.isfinite(model(mx.arange(9)[None])).all()


def test_a_model_with_nothing_to_patch() -> None:
    handle = metile.patch(nn.Sequential(nn.Conv1d(4, 4, 3)))
    assert not handle
    assert handle.reason == "the model holds nothing that metile knows how to patch"


def test_never_looks_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metile.api.quick_plan", lambda *_: pytest.fail("a quick plan was made"))
    model = tiny()
    handle = metile.patch(model, tune="never")
    assert not handle
    assert handle.reason == "no plan is kept for this model on this machine; python -m metile.tune makes one"
    assert handle.reason in str(handle)
    keep(model, plan_for(model))
    assert metile.patch(model, tune="never")


def test_wrong_arguments() -> None:
    model = tiny()
    with pytest.raises(MetileError, match=r"^\[patch\] expected tune to be one of cached, quick, never but got 'x'$"):
        metile.patch(model, tune="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^\[patch\] expected a model, an mlx.nn.Module, but got int$"):
        metile.patch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^\[patch\] expected a metile.Plan or None but got str$"):
        metile.patch(model, plan="plan")  # type: ignore[arg-type]
