"""The GPU benchmark without a GPU: its chains, arithmetic and record, its checks, and the script that runs it all."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metile.targets import choose_target
from metile.targets.compiler import CompileError
from metile.targets.cuda_device import CudaDevice

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

gpu_check: Any = importlib.import_module("gpu_check")
gpu_kernels: Any = importlib.import_module("gpu_kernels")
gpu_record: Any = importlib.import_module("gpu_record")
gpu_sanitize: Any = importlib.import_module("gpu_sanitize")
gpu_work: Any = importlib.import_module("gpu_work")

HOPPER = CudaDevice("NVIDIA H200", (9, 0), (13, 0), 32, 1024, 232448, 65536, 132, 1 << 20)
LIMITS = gpu_record.Limits(bytes_per_second=4e12, flops_per_second=8e14, launch_seconds=1e-6)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_work, "HIDDEN", 64)
    monkeypatch.setattr(gpu_work, "INNER", 160)


def lines(*names: str, rows: Sequence[int] = (1, 3), contexts: Sequence[int] = (40,)) -> list[Any]:
    return list(gpu_work.operations(names or gpu_work.NAMES, rows, contexts))


# ---- arithmetic ----


def test_the_table_has_its_lines() -> None:
    work = gpu_work.operations(gpu_work.NAMES, gpu_work.ROWS, gpu_work.CONTEXTS)
    assert len(work) == 6 * 10 + 4
    quantized = next(operation for operation in work if operation.name == "matmul_4bit" and operation.rows == 8)
    assert quantized.moved_bytes == 8960 * 1536 * 9 // 16 + 2 * 8 * (1536 + 8960)  # 4 bits and 2 / 64 of 16
    swiglu = next(operation for operation in work if operation.name == "swiglu" and operation.rows == 1)
    assert swiglu.moved_bytes == 2 * (2 * 8960 * 1536 + 1536 + 8960)
    assert swiglu.flops == 2 * 2 * 8960 * 1536
    attention = next(operation for operation in work if operation.context == 16384)
    assert attention.moved_bytes == 2 * (2 * 2 * 16384 * 128 + 2 * 12 * 128)
    assert attention.key.tokens == 16384
    added = next(operation for operation in work if operation.name == "add_rms_norm" and operation.rows == 8)
    assert added.moved_bytes == 2 * 1536 * (4 * 8 + 1)


def test_the_floor_is_the_slower_of_two_limits() -> None:
    streamed = gpu_record.figures([3e-6, 2e-6, 4e-6], [1e-6, 2e-6, 1e-6], 4_000_000, 10, LIMITS)
    assert (streamed.binds, streamed.floor_microseconds) == ("bytes", pytest.approx(1.0))
    assert (streamed.plain_microseconds, streamed.metile_microseconds) == (pytest.approx(3.0), pytest.approx(1.0))
    assert streamed.speedup == pytest.approx(3.0)  # the median of 3, 1 and 4
    multiplied = gpu_record.figures([1.0], [], 4, 8 * 10**14, LIMITS)
    assert (multiplied.binds, multiplied.floor_microseconds) == ("flops", pytest.approx(1e6))
    assert multiplied.metile_microseconds is multiplied.speedup is None


def test_candidates_are_the_nearest_and_some_of_the_others() -> None:
    space = list(range(200))
    chosen = gpu_kernels.candidates_of(space, 32)
    assert chosen[: gpu_kernels.NEAR] == space[: gpu_kernels.NEAR]
    assert len(set(chosen)) == 32
    assert max(chosen) > 180
    assert gpu_kernels.candidates_of(space[:5], 32) == space[:5]
    assert gpu_kernels.candidates_of(space[:20], 32) == space[:20]
    assert gpu_kernels.candidates_of(space, 4) == space[:4]


# ---- chains ----


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "name", ["matmul", "swiglu", "matmul_4bit", "swiglu_4bit", "rms_norm", "add_rms_norm", "attention"]
)
def test_each_launch_of_a_chain_takes_what_the_last_one_gave(name: str) -> None:
    (operation,) = lines(name, rows=(3,), contexts=(40,))
    chain = gpu_work.Chain(operation, 1 << 16, 1 << 30)
    seen: list[list[mx.array]] = []
    given: list[mx.array] = []

    def launch(inputs: Sequence[mx.array]) -> list[mx.array]:
        seen.append(list(inputs))
        outputs = operation.plain(inputs)
        given.append(outputs[-1])
        return list(outputs)

    end = chain.build(launch, 4)
    assert len(seen) == 4
    for inputs, y in zip([*(i[0] for i in seen[1:]), end], given, strict=True):
        wanted = y.reshape(-1)[: inputs.size].reshape(inputs.shape)
        if name.startswith("swiglu"):
            wanted = mx.fast.rms_norm(wanted, mx.ones((64,), mx.bfloat16), gpu_work.EPS)
        assert mx.array_equal(inputs, wanted)
    assert mx.isfinite(end.astype(mx.float32)).all()
    assert float(mx.abs(end.astype(mx.float32)).max().item()) > 1e-3  # nothing dies out


@pytest.mark.usefixtures("small")
def test_weights_take_turns_in_memory_and_keep_their_values() -> None:
    (operation,) = lines("matmul", rows=(2,))
    chain = gpu_work.Chain(operation, 5 * operation.key.inputs * operation.key.outputs * 2, 1 << 30)
    assert chain.sets == 6
    assert chain.is_cold
    seen: list[mx.array] = []
    chain.build(lambda inputs: seen.append(inputs[1]) or operation.plain(inputs), 7)  # type: ignore[func-returns-value]
    assert len({id(weight) for weight in seen}) == 6
    assert seen[6] is seen[0]
    assert all(mx.array_equal(weight, seen[0]) for weight in seen)


@pytest.mark.usefixtures("small")
def test_keys_and_values_are_whole_caches() -> None:
    (operation,) = lines("attention", contexts=(40,))
    chain = gpu_work.Chain(operation, 1 << 17, 1 << 30)
    for _ in range(chain.sets):
        _, k, v = chain._rotation.next()
        for array in (k, v):
            assert array.shape == (1, 2, 40, 128)
            assert memoryview(array.view(mx.uint16)).c_contiguous


@pytest.mark.usefixtures("small")
def test_plain_mlx_is_what_the_key_says() -> None:
    for operation in lines():
        inputs = operation.example()
        for got, wanted in zip(operation.plain(inputs), operation.key.reference(inputs), strict=True):
            assert got.shape == wanted.shape
            error = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
            assert error <= 0.02 * float(mx.abs(wanted.astype(mx.float32)).max().item())


# ---- the table ----


@pytest.mark.usefixtures("small")
def test_a_record_holds_every_line_and_is_written_as_it_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "kernels.json"
    run = gpu_record.empty(HOPPER, (13, 0), LIMITS)
    work = lines("swiglu", "rms_norm", rows=(1, 3))
    options = SimpleNamespace(seconds=30, candidates=2)
    saved = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            saved.append(output.is_file() and len(gpu_record.load(output).points))
            return getattr(choose_target("cpu"), name)

    result = gpu_kernels.benchmark(work, Spy(), LIMITS, run, output, options)
    assert gpu_record.load(output) == result
    assert [(point.operation, point.rows) for point in result.points] == [(o.name, o.rows) for o in work]
    assert set(saved) == {False, 1, 2, 3}
    for point in result.points:
        assert point.candidate in {tried.candidate for tried in point.tried if tried.seconds}
        assert len(point.plain_seconds) == len(point.metile_seconds) == gpu_kernels.ROUNDS
        assert (point.subtracted_seconds > 0) == (point.operation == "swiglu")
    assert result.machine.name == "NVIDIA H200"
    assert result.versions["nvrtc"] == "13.0"
    assert "swiglu             1" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_a_line_without_a_right_candidate_shows_plain_mlx(tmp_path: Path) -> None:
    class Rejects:
        limits = choose_target("cpu").limits

        def compile_all(self, sources: Sequence[Any]) -> list[CompileError]:
            return [CompileError("[cuda] error: no") for _ in sources]

    run = gpu_record.empty(HOPPER, (13, 0), LIMITS)
    options = SimpleNamespace(seconds=5, candidates=2)
    result = gpu_kernels.benchmark(lines("matmul", rows=(2,)), Rejects(), LIMITS, run, tmp_path / "r.json", options)
    (point,) = result.points
    assert point.candidate is point.figures.speedup is None
    assert [tried.rejected for tried in point.tried] == ["[cuda] error: no"] * 2
    assert "no candidate" in gpu_record.line_of(point)


def test_no_time_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = gpu_record.empty(HOPPER, (13, 0), LIMITS)
    options = SimpleNamespace(seconds=0, candidates=2)
    gpu_kernels.benchmark(lines("matmul", rows=(2, 4)), None, LIMITS, run, tmp_path / "r.json", options)
    assert capsys.readouterr().out == "no time for matmul 2, matmul 4\n"


def test_limits_are_measured() -> None:
    limits = gpu_kernels.measure_limits(copied=1 << 12, side=32)
    assert all(0 < value < math.inf for value in limits.model_dump().values())


@pytest.mark.skipif(mx.cuda.is_available(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_the_scripts_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_kernels.main(["--output", str(tmp_path / "k.json")]) == 2
    assert gpu_check.main(["--log", str(tmp_path / "c.jsonl")]) == 2
    assert gpu_sanitize.main(["--output", str(tmp_path / "s.json")]) == 2
    text = capsys.readouterr().err
    assert text.count("but got cuda") == 2
    assert "driver" in text
    assert not list(tmp_path.iterdir())


# ---- the check of candidates ----


def test_checks_are_spread_and_complete() -> None:
    for name, family in gpu_check.FAMILIES.items():
        checks = list(family(HOPPER.limits))
        mixed = gpu_check.spread(checks)
        assert sorted(map(id, mixed)) == sorted(map(id, checks)), name
        assert len({check.name.split()[1] for check in mixed[: len(mixed) // 3]}) >= 2


def test_families_take_turns() -> None:
    queues = {"norm": list(range(3)), "attention": list(range(10, 12)), "linear": list(range(20, 40))}
    order = gpu_check.mixed(queues)
    assert order[:10] == [0, 10, *range(20, 28)]
    assert sorted(order) == sorted([*queues["norm"], *queues["attention"], *queues["linear"]])


def test_a_gpu_compiles_the_forms_that_are_launched() -> None:
    pairs = [(o.key, o.key.space(HOPPER.limits)[0]) for o in lines("matmul", "rms_norm", rows=(64,))]
    seen: list[Any] = []
    target = SimpleNamespace(compile_forms=lambda forms: seen.extend(forms) or ["kernel"] * len(forms))
    assert gpu_work.compiled(target, pairs) == ["kernel"] * 2
    assert [list(fixed) for _, fixed in seen] == [[pairs[0][1].outer_k], []]
    assert [source for source, _ in seen] == [key.source(candidate) for key, candidate in pairs]


def test_candidates_are_checked_and_failures_told(tmp_path: Path) -> None:
    target = choose_target("cpu")
    checks = list(gpu_check.norm_checks(target.limits))[:3]

    class Half:
        """Kernels of which every other gives zeros."""

        limits = target.limits

        def compile_all(self, sources: Sequence[Any]) -> list[Any]:
            kernels = list(target.compile_all(sources))  # type: ignore[attr-defined]
            kernels[1] = lambda inputs, outputs, **_: [mx.zeros(output.shape, output.dtype) for output in outputs]
            return kernels

    log = tmp_path / "log"
    assert gpu_check.run(checks, gpu_check.Runner(Half()), log, time.time() + 60, 0) == -1
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["fault"] is None for line in noted] == [True, False, True]
    text = gpu_check.summary(noted, 9)
    assert text.startswith("gpu_check: 3 of 9 candidates tried, 1 failed\n     1 rms_norm bfloat16\n")
    assert "all values are zero" in text
    assert gpu_check.run(checks, gpu_check.Runner(Half()), log, time.time() - 1, 0) == -1
    assert len(log.read_text().splitlines()) == 3


def test_what_plain_mlx_lacks_on_a_device_is_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    chosen: list[Any] = []

    def made(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no such product")
        return arguments

    machine = SimpleNamespace(cpu="CPU", default_device=lambda: "GPU", set_default_device=chosen.append)
    monkeypatch.setattr(gpu_check, "make_case", made)
    monkeypatch.setattr(gpu_check, "mx", machine)
    assert gpu_check.Runner(None)._case("key", 3)[:2] == ("key", 3)
    assert chosen == ["CPU", "GPU"]


def test_quantized_checks_hold_every_format() -> None:
    checks = list(gpu_check.packed_checks(HOPPER.limits))
    assert {check.name.split()[0] for check in checks} == set(gpu_check.FORMATS)
    for check in checks:
        ragged, _ = check.cases[1]
        assert ragged.inputs % ragged.format.group == 0
        assert ragged.inputs // ragged.format.group % 2 == 1
        assert ragged.outputs * ragged.inputs % 32 == 0


def test_a_dead_context_ends_the_process_after_its_check(tmp_path: Path) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cudaStreamSynchronize failed: an illegal memory access was encountered")

    checks = list(gpu_check.norm_checks(choose_target("cpu").limits))[:4]
    target = SimpleNamespace(compile_all=lambda sources: [dies] * len(sources))
    assert gpu_check.run(checks, gpu_check.Runner(target), tmp_path / "log", time.time() + 60, 1) == 1
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "illegal memory access" in json.loads(line)["fault"]


def test_silu_is_what_the_benchmark_calls() -> None:
    """mlx-lm's fused SwiGLU takes the gate first."""
    gate, up = mx.array([1.0, -2.0]), mx.array([3.0, 5.0])
    assert mx.allclose(gpu_work.swiglu(gate, up), nn.silu(gate) * up)
