"""The tables of a report, and the command that prints them."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from report_data import AFFINE, LINEAR, MODEL, SEED, TEXT, TILE, at, mutated, native_record, pair
from rich.console import Console

from metile import report
from metile.render import confirmation_view, report_tables


def drawn(*tables: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*tables, sep="\n")
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def drawn_record(record: dict[str, Any], width: int = 120) -> str:
    return drawn(*report_tables(report.loads(json.dumps(record))), width=width)


def row(text: str, *words: str) -> bool:
    """Whether some line of `text` has all `words`, in order."""
    return any(" ".join(words) in " ".join(line.split()) for line in text.splitlines())


def test_seed_in_tables() -> None:
    text = drawn_record(json.loads(TEXT))
    assert row(text, "mlx-community/Qwen2.5-1.5B-Instruct-bf16", "0.999x 1.060x 1.004x 0.999x", "dense_mlp")
    assert row(text, "prefill 1493.9 tok/s 1555.8 tok/s 1.060x 0.973-1.208 8 of 9")
    assert row(text, "TTFT 1.022x 0.995 1.02 8 of 9")
    assert row(text, "Accepted.")
    assert row(text, "dense_mlp yes yes yes")
    assert row(
        text,
        "128 rows, 1536 to 8960 bfloat16 meTile 128x128, grouped4, unroll 1, outer k 128",
    )
    assert row(text, "attention 12/2 heads of 128, 256 tokens, batch 1 bfloat16 MLX")
    assert row(text, "not used: affine_matmul, affine_residual_qmv, affine_swiglu, block_scaled")
    assert row(text, "kl divergence 0 0.001 ok")
    assert row(text, "peak 4.83 GB")
    assert row(text, "chip Apple M5, 32 GB")
    assert "Notes" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_keep_to_the_width(width: int) -> None:
    assert all(len(line) <= width for line in drawn_record(json.loads(TEXT), width).splitlines())


def test_model_with_nothing_to_patch() -> None:
    text = drawn_record(native_record())
    assert row(text, "1.000x 1.000x 1.000x 1.000x plain MLX")
    assert row(text, "Speed, 9 shared runs")
    assert row(text, "No plan to confirm: this model runs plain MLX.")
    assert row(text, "No plan to verify.")
    assert row(text, "revision unknown")


def test_refusal_gives_its_reasons() -> None:
    text = drawn(confirmation_view(report.confirmation_of([pair(decode=0.9, ttft=1.5)] * 3)))
    assert row(text, "Refused, so plain MLX stays:")
    assert row(text, "- decode median 0.9000 is below the floor 0.99")
    assert row(text, "- decode is above 0.98 in 0 of 3 pairs, 2 needed")


def test_quantized_dispatch_shows_its_format() -> None:
    entry = {**LINEAR, **TILE, **AFFINE}
    text = drawn_record(mutated((*MODEL, "selected_dispatches", "affine_matmul"), [entry]))
    assert row(text, "affine_matmul 1 row, 576 to 1536, affine 4-bit by 32 bfloat16 meTile 64x64, linear")


def test_verification_beyond_its_limits() -> None:
    record = mutated((*MODEL, "verification", "kl_divergence"), 0.01)
    at(record, (*MODEL, "verification"))["next_token"] = 12
    text = drawn_record(record)
    assert row(text, "next token 11 12 beyond the limit")
    assert row(text, "kl divergence 0.01 0.001 beyond the limit")


def test_additions_are_shown() -> None:
    additions = {
        "plan": {"candidate": {"dense_projections": True}, "selected": {"dense_projections": True}},
        "declined": [{"module": "lm_head", "reason": "LoRA [bold]adapter"}],
        "seconds": {"search_seconds": 12.3456},
        "notes": [],
        "complete": True,
    }
    record = mutated((*MODEL, "metile"), additions)
    record["metile"] = {"target": "cpu"}
    text = drawn_record(record)
    assert row(text, "dense_mlp, dense_projections")
    assert row(text, "dense_projections - yes yes")
    assert row(text, "module: lm_head, reason: LoRA [bold]adapter")
    assert row(text, "search_seconds: 12.35")
    assert row(text, "notes none")
    assert row(text, "complete yes")
    assert row(text, "target cpu")


@pytest.mark.parametrize("plan", ["x", ["x"], {"selected": "x"}, {"selected": None}])
def test_additions_of_another_shape_do_no_harm(plan: Any) -> None:
    assert row(drawn_record(mutated((*MODEL, "metile"), {"plan": plan})), "plan")


def test_command_prints_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(SEED), str(SEED)]) == 0
    assert capsys.readouterr().out.count("Suite bf16-dense") == 2


def test_command_names_the_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(mutated(("schema_version",), 2)))
    assert report.main([str(bad), str(SEED)]) == 1
    out, err = capsys.readouterr()
    assert err == (
        f"[report] expected a suite record of schema 3 in {bad} but got 1 fault:\n"
        "  schema_version: expected 3 but got 2\n"
    )
    assert "Suite bf16-dense" in out


def test_command_on_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.json"
    assert report.main([str(missing), str(SEED)]) == 2
    assert f"expected a file that can be read but got {missing} (no such file" in capsys.readouterr().err


def test_command_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["metile.report", str(SEED)])
    monkeypatch.delitem(sys.modules, "metile.report")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("metile.report", run_name="__main__")
    assert caught.value.code == 0
    assert "Suite bf16-dense" in capsys.readouterr().out
