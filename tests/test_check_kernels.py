"""The check of all kernels: it knows every candidate, finds planted faults, and says so."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from metile.ops.attention import AttentionKey
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.rope import RopeKey
from metile.simulator.devices import find_device
from metile.targets import metal_text
from metile.targets.metal import limits_of


def _loaded() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "tools" / "check_kernels.py"
    spec = importlib.util.spec_from_file_location("check_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_kernels"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = _loaded()
LIMITS = limits_of(find_device("m1"))

# Shapes that the tool does not name, as a model could ask for them. Epilogues and dtypes differ in how much memory and
# how many registers they take: one of each kind.
OTHERS: list[OpKey] = [LinearKey("swiglu", rows, 49152, 576, "bfloat16") for rows in (1, 2, 4, 8, 16, 64, 4096)]
OTHERS += [NormKey(add, rows, hidden, 1e-6, "bfloat16") for add in (False, True) for rows in (1, 512)
           for hidden in (64, 576, 5000)]  # fmt: skip
OTHERS += [RopeKey(rows, 9, 3, 64, "bfloat16") for rows in (1, 4096)]
OTHERS += [
    AttentionKey(rows, 1024, *heads, dimension, "bfloat16")
    for rows in (1, 4, 64, 4096)
    for heads in ((9, 3), (32, 4), (64, 8), (16, 1), (5, 5))
    for dimension in tool.DIMENSIONS
]


def test_it_knows_every_candidate_of_every_space() -> None:
    known = {
        (kernel.key.source(candidate), candidate)
        for family in tool.FAMILIES
        for kernel in tool.kernels_of(family, "bfloat16")
        if family != "linear" or kernel.key.epilogue == "swiglu"
        for candidate in kernel.candidates
    }
    for key in OTHERS:
        missing = [tile.label() for tile in key.space(LIMITS) if (key.source(tile), tile) not in known]
        assert not missing, (key.subject(), missing[:3])


def test_kernels_are_told_apart_and_shared() -> None:
    kernels = tool.kernels_of("linear", "bfloat16")
    texts = [(kernel.key.source(tile), tile.outer_k) for kernel in kernels for tile in kernel.candidates[:1]]
    assert len(set(texts)) == len(texts) == len(kernels)
    for kernel in kernels[::97]:
        assert len({(kernel.key.source(tile), tile.outer_k) for tile in kernel.candidates}) == 1
        schedules = {tile.schedule for tile in kernel.candidates}
        assert len(schedules) == len(kernel.candidates) in (1, 7)


def some(family: str) -> Any:
    """Return a kernel of a family that compiles soon and has few shapes."""
    return tool.kernels_of(family, "float32")[0]


def test_a_right_kernel_passes_in_both_modes() -> None:
    outcome = tool.run([some("norm")])
    assert (outcome.kernels, outcome.checked, outcome.failures) == (1, 1, [])
    assert outcome.launches > 20


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("float(hidden) + eps", "float(hidden + 1) + eps", "wrong: "),
        ("m < min_of(first + ROWS, x.rows)", "m < min_of(first + ROWS, x.rows - 1)", "unwritten|nan"),
        ("m < min_of(first + ROWS, x.rows)", "m < first + ROWS + 1", "FindingsError: .*\n  .*header:[0-9]+: "),
        ("const Index hidden", "const double hidden", "CompileError: .*'double' is not supported in Metal"),
    ],
    ids=["wrong", "unwritten", "out of bounds", "illegal"],
)
def test_a_fault_is_a_failure_with_its_place(
    old: str, new: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = metal_text.written_out
    assert old in original("norm.metal")
    monkeypatch.setattr(metal_text, "written_out", lambda name: original(name).replace(old, new))
    kernel = some("norm")
    cases = tool.norm_cases
    monkeypatch.setitem(tool.CASES, "norm", lambda kernel, checked: list(cases(kernel, checked))[:2])
    monkeypatch.setattr(tool, "kernels_of", lambda family, dtype: [kernel])
    outcome = tool.run([kernel])
    assert outcome.failures
    assert all(failure.startswith("rms_norm float32 b1_s") for failure in outcome.failures)
    monkeypatch.setattr(tool, "run_all", lambda kernels, jobs: (outcome, 1.0))
    assert tool.main(["--family", "norm", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert re.search(words, text), text
    assert "rows=" in text
    assert text.splitlines()[-1].endswith(f"{len(outcome.failures)} failures, 1 s")


def test_progress_says_how_long_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = tool.Reporter(10)
    reporter.show(tool.Outcome(kernels=10, failures=["a"]))
    assert capsys.readouterr().err == "10 of 10 kernels, 1 failures, 0:00 left\n"


def test_options_thin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        tool, "run_all", lambda kernels, jobs: (asked.extend((len(kernels), jobs)), (tool.Outcome(), 0.0))[1]
    )
    assert tool.main(["--family", "norm", "--dtype", "float32", "--every", "5", "--jobs", "2"]) == 0
    assert asked == [8, 2]  # of 36
    assert "0 failures" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(["--every", "0"])
