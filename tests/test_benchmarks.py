"""The benchmark of the CPU kernels: its arithmetic, its limits, its record and its options; never its speed."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from metile.errors import MetileError
from metile.targets.cpu import CpuTarget
from metile.targets.isa import current_isa, supported_isas

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

cpu_kernels: Any = importlib.import_module("cpu_kernels")
cpu_limits: Any = importlib.import_module("cpu_limits")
cpu_record: Any = importlib.import_module("cpu_record")
cpu_shapes: Any = importlib.import_module("cpu_shapes")
cpu_trial: Any = importlib.import_module("cpu_trial")

ISAS = supported_isas()
TINY = (cpu_shapes.Shape("tiny", "odd", 80, 37), cpu_shapes.Shape("tiny", "vocabulary", 131, 64))


def run(*arguments: str) -> tuple[int, str]:
    text = io.StringIO()
    code = cpu_kernels.main(arguments, Console(file=text, width=100))
    return code, text.getvalue()


# ---- arithmetic ----


def test_the_roofline_is_the_lower_of_both_limits() -> None:
    # 4 flop a byte: at 10 bytes/s that is 40 flop/s
    assert cpu_record.roofline(8, 2, bandwidth=10, peak=100) == (40, "bandwidth")
    assert cpu_record.roofline(8, 2, bandwidth=10, peak=30) == (30, "multiply")
    assert cpu_record.roofline(8, 2, bandwidth=10, peak=40) == (40, "multiply")


@pytest.mark.parametrize("rows", [1, 16, 127, 512])
def test_a_call_moves_weights_x_and_y_once(rows: int) -> None:
    shape = cpu_shapes.Shape("m", "l", n=96, k=64)
    assert shape.flops(rows) == 2 * rows * 96 * 64
    assert shape.moved_bytes(rows) == 2 * (96 * 64 + rows * 64 + rows * 96)


def test_figures_are_medians_of_the_rounds_and_shares_are_paired() -> None:
    # The machine halves its speed in the second round; kernel and limits alike: the share stands still.
    rounds = [
        cpu_record.Round(kernel_seconds=1.0, stream_bytes_per_second=200.0, peak_flops_per_second=1e6),
        cpu_record.Round(kernel_seconds=2.0, stream_bytes_per_second=100.0, peak_flops_per_second=1e6),
        cpu_record.Round(kernel_seconds=1.0, stream_bytes_per_second=200.0, peak_flops_per_second=1e6),
    ]
    made = cpu_record.figures(rounds, flops=400, moved_bytes=100)
    assert made.seconds == 1.0
    assert made.share_of_stream == pytest.approx(0.5)
    assert made.share_of_limit == pytest.approx(0.5)  # 400 flop/s of 800
    assert made.binds == "bandwidth"
    assert made.gigabytes_per_second == pytest.approx(100 / 1e9)
    assert made.limit_gigaflops_per_second == pytest.approx(800 / 1e9)


def test_a_vocabulary_is_measured_at_few_rows_only() -> None:
    vocabulary = next(shape for shape in cpu_shapes.SHAPES if shape.layer == "vocabulary")
    assert [rows for rows in cpu_shapes.ROWS if vocabulary.takes(rows)] == [1, 2, 4, 8, 16]


def test_the_layers_are_those_of_the_three_models() -> None:
    sizes = {(shape.model, shape.n, shape.k) for shape in cpu_shapes.SHAPES}
    assert len(sizes) == 15
    assert ("SmolLM2-135M", 49152, 576) in sizes
    assert ("Qwen2.5-0.5B", 896, 4864) in sizes
    assert ("Qwen2.5-1.5B", 8960, 1536) in sizes


def test_chunks_of_the_streaming_read_are_pages_and_enough_for_all_threads() -> None:
    assert cpu_limits.chunk_bytes(64 << 20, 2) == 1 << 20
    assert cpu_limits.chunk_bytes(64 << 20, 64) == 128 << 10
    assert cpu_limits.chunk_bytes(100, 2) == 4096


# ---- the machine's limits ----


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("shape", [(3, 1000), (700, 1536), (2048, 1024), (1, 2)])
def test_the_streaming_read_reads_every_word(isa: Any, shape: tuple[int, int]) -> None:
    data = mx.random.normal(shape, key=mx.random.key(0)).astype(mx.bfloat16)
    words = np.array(cpu_limits.Meter(CpuTarget(isa)).read(data))
    wanted = np.bitwise_xor.reduce(np.array(data.reshape(-1).view(mx.uint32)))
    assert np.bitwise_xor.reduce(words) == wanted


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_the_peak_kernel_multiplies_what_it_counts(isa: Any) -> None:
    meter = cpu_limits.Meter(CpuTarget(isa))
    once, twice = (np.array(meter.multiply(steps)).astype(np.float64) for steps in (1000, 2000))
    none = np.array(meter.multiply(0)).astype(np.float64)
    assert np.isfinite(twice).all()
    # Each step adds the same products: twice the steps, twice the sums, whatever they began at.
    np.testing.assert_allclose(twice - none, 2 * (once - none), rtol=2e-2, atol=2e-3)
    assert np.abs(once - none).max() > 0
    assert cpu_limits.step_flops(isa) > 0
    assert meter.peak() > 0


# ---- a run ----


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "QUICK_SHAPES", TINY)
        patch.setattr(cpu_kernels, "QUICK_ROWS", (1, 5, 7, 33))
        path = tmp_path_factory.mktemp("record") / "new" / "record.json"
        code, text = run("--quick", "--output", str(path))
    assert code == 0
    return path, text


def test_a_quick_run_writes_a_record_and_prints_tables(tiny_run: Any) -> None:
    path, text = tiny_run
    record = cpu_record.load(path)
    # 33 rows are above what a vocabulary is measured at; 5 and 7 share a bucket
    assert [(p.layer, p.rows, p.bucket) for p in record.points] == [
        *[("odd", rows, bucket) for rows, bucket in ((1, 1), (5, 8), (7, 8), (33, 64))],
        *[("vocabulary", rows, bucket) for rows, bucket in ((1, 1), (5, 8), (7, 8))],
    ]
    assert [search.bucket for search in record.searches] == [1, 8, 64, 1, 8]
    assert "odd 80x37" in text
    assert "GEMV at rows < 16" in text
    assert str(path) in text.replace("\n", "")


def test_a_record_says_where_and_how_and_keeps_every_sample(tiny_run: Any) -> None:
    record = cpu_record.load(tiny_run[0])
    assert record.machine.isa == current_isa().name
    assert record.machine.threads >= 1
    assert record.versions.mlx
    assert "float32 accumulation" in record.precision
    for point in record.points:
        assert len(point.rounds) == cpu_trial.QUICK.rounds
        assert point.figures == cpu_record.figures(point.rounds, point.flops, point.moved_bytes)
        assert point.weight_sets * point.weight_set_bytes > record.cold_bytes
        assert point.weight_sets >= 2
        assert (point.plain.seconds is None) == (point.plain.reason is not None)
    assert record.summary == cpu_record.summarize(record.points)
    assert str(Path.home()) not in tiny_run[0].read_text()


def test_a_record_comes_back_equal_and_a_wrong_one_is_rejected(tiny_run: Any, tmp_path: Path) -> None:
    record = cpu_record.load(tiny_run[0])
    cpu_record.save(record, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == tiny_run[0].read_bytes()
    broken = json.loads(tiny_run[0].read_text())
    del broken["points"][0]["rounds"][0]["kernel_seconds"]
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(ValidationError, match="kernel_seconds"):
        cpu_record.load(tmp_path / "broken.json")


def test_a_quick_run_without_an_output_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "RESULTS", tmp_path)
    monkeypatch.setattr(cpu_kernels, "QUICK_SHAPES", TINY[:1])
    code, text = run("--quick", "--rows", "2")
    assert code == 0
    assert "Record:" not in text
    assert not list(tmp_path.iterdir())


def test_without_points_of_a_kind_its_figure_is_missing() -> None:
    summary = cpu_record.summarize([])
    assert summary.gemv_share_of_stream is None
    assert "not measured" in cpu_kernels.summary_line(summary)


def test_a_kernel_that_computes_nonsense_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CpuTarget()
    layer = cpu_trial.Layer(TINY[0], 4, target, cpu_trial.QUICK)
    monkeypatch.setattr(cpu_trial, "_timed", lambda *_: pytest.fail("timed before it was verified"))
    layer._reference = layer._reference + 1
    with pytest.raises(MetileError, match=r"expected a candidate that verifies but got .*error"):
        cpu_trial.tune(layer, 4)


def test_plain_mlx_is_left_out_where_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = cpu_trial.Layer(TINY[0], 64, CpuTarget(), cpu_trial.QUICK)
    monkeypatch.setattr(cpu_trial, "sample", lambda work, *_: work() or 0.1)
    assert layer.plain(2).seconds == 0.1
    plain = layer.plain(64)
    assert plain.seconds is None
    assert "about 3.2 s, more than 0.5 s" in plain.reason


@pytest.mark.parametrize(("n", "k"), [(96, 64), (20000, 64)])
def test_weights_are_of_unit_gain_and_hardly_two_rows_are_equal(n: int, k: int) -> None:
    weight = np.array(cpu_trial._weight(n, k).astype(mx.float32))
    assert weight.shape == (n, k)
    assert weight.std() * math.sqrt(k) == pytest.approx(1, abs=0.1)
    assert len(np.unique(weight, axis=0)) > 0.98 * n  # rows further on are earlier ones, scaled anew


def test_the_file_is_named_by_the_chip() -> None:
    assert cpu_record.slug("Intel(R) Xeon(R) Processor (amx, 2 threads)") == "intel-xeon-processor-amx-2-threads"
    assert cpu_record.slug("Apple M3 (neon, 8 threads)") == "apple-m3-neon-8-threads"
    assert cpu_record.slug("()") == "unknown"


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "GPT-2"], "[models] expected some of SmolLM2-135M, Qwen2.5-0.5B, Qwen2.5-1.5B but got 'GPT-2'"),
        (["--rows", "0"], "[rows] expected numbers from 1 to 4096 but got 0"),
        (["--rows", "1", "5000"], "[rows] expected numbers from 1 to 4096 but got 5000"),
        (["--isa", "sve"], "[isa] expected one of"),
        (["--cold-megabytes", "0"], "[cold-megabytes] expected at least 1 but got 0"),
    ],
)
def test_bad_options_are_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(*arguments)
    assert code == 2
    assert complaint in capsys.readouterr().err


def test_an_unknown_option_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--fast")
    assert "--fast" in capsys.readouterr().err
