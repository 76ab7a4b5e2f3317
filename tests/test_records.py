"""The committed records: each is what its writer reads, and the README quotes what it holds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from metile import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_record: Any = importlib.import_module("gpu_record")

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("record", ["h200-suite.json", "h200-suite-4bit.json"])
def test_the_suites_of_the_h200_are_reports_of_accepted_plans(record: str) -> None:
    (model,) = report.load(RESULTS / record).models
    assert model.plan_confirmation is not None
    assert model.plan_confirmation.accepted
    assert model.model.startswith("random:")
    m = model.medians
    decode = (
        f"| decode | {m.mlx_decode_tokens_per_second:.0f} tokens/s | {m.metile_decode_tokens_per_second:.0f} tokens/s"
    )
    times = (m.mlx_time_to_first_token_seconds * 1e3, m.metile_time_to_first_token_seconds * 1e3)
    first = f"| time to first token | {times[0]:.1f} ms | {times[1]:.1f} ms | {m.ttft_speedup:.2f}x |"
    assert f"{decode} | {m.decode_speedup:.2f}x |" in README
    assert first in README


def test_the_demo_on_an_amd_machine_is_what_the_readme_says() -> None:
    (model,) = report.load(RESULTS / "demo-amd-epyc-avx2-2-threads.json").models
    assert model.plan_confirmation is not None
    assert model.plan_confirmation.accepted
    m = model.medians
    ratios = (
        f"prefill {m.prefill_speedup:.1f}x, decode {m.decode_speedup:.2f}x, time to first token {m.ttft_speedup:.1f}x"
    )
    assert ratios in README


def test_the_kernels_of_the_h200_are_those_of_the_readme() -> None:
    run = gpu_record.load(RESULTS / "h200-kernels.json")
    assert run.machine.name == "NVIDIA H200"
    assert [(item.tool, "0 errors" in item.summary) for item in run.sanitizer] == [("memcheck", True), ("racecheck", True)]  # noqa: E501  # fmt: skip
    quoted = 0
    for point in run.points:
        own, plain, figures = point.metile_kernels, point.plain_kernels, point.figures
        assert own is not None
        assert plain is not None
        assert figures.metile_microseconds is not None
        ratios = [a / b for a, b in zip(point.plain_seconds, point.metile_seconds, strict=True)]
        assert figures.speedup == pytest.approx(median(ratios))
        line = (
            f"| {figures.plain_microseconds:.1f} | {figures.metile_microseconds:.1f} | {figures.speedup:.2f}x"
            f" | {plain.median_seconds * 1e6:.1f} | {own.median_seconds * 1e6:.1f} | {figures.floor_microseconds:.1f} |"
        )
        quoted += line in README
    lines = README.partition("GPU busy: MLX")[2].partition("The rest of a chain")[0].count("x |")
    assert quoted == lines > 10
