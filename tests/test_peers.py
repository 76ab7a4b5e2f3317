"""The comparison with other engines: its controller, its figures, its record and its command."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console
from test_demo import write_gguf

from metile import demo
from metile.errors import MetileError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

peer_control: Any = importlib.import_module("peer_control")
peer_engines: Any = importlib.import_module("peer_engines")
peer_plot: Any = importlib.import_module("peer_plot")
peer_record: Any = importlib.import_module("peer_record")
peers: Any = importlib.import_module("peers")

PACKAGES = {"llama.cpp": "llama_cpp", "torch": "torch"}
WORK = peer_record.Workload(
    model="m", threads=2, prompt_tokens=10, generation_tokens=5, rounds=3, plain_rounds=3, context=None, seed=0
)
MODEL = peer_record.Model(precision="bf16", weight_bytes=1000, cache_bytes_per_token=10)

# An engine whose clock goes by the tokens it is fed: `speed` of a prompt and half of that a step.
FAKE = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
from peer_engines import Stepwise
from peer_worker import Server

name, speed, fault, log = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4]
now, runs = 0.0, 0

class Fake(Stepwise):
    def load(self):
        if fault == "missing":
            sys.modules["llama_cpp"] = None
            import llama_cpp
        if fault == "noise":
            print("a warning", file=sys.stderr)
        return {{"runs": "fake"}}

    def generate(self, prompt, count):
        global runs
        runs += 1
        with open(log, "a") as file:
            file.write(name + "\\n")
        if fault == "dies" and runs == 3:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if fault == "raises" and runs == 1:
            raise ValueError("no such layer")
        if fault == "chatters":
            print("hello")
        return super().generate(prompt, count)

    def cut(self, length):
        self.length = length

    def feed(self, tokens):
        global now
        self.length += len(tokens)
        now += len(tokens) / speed if len(tokens) > 1 else 2 / speed * (2 if self.length > 50 else 1)
        return self.length + (fault == "other" and self.length > 12)

Server(lambda setup: Fake(setup, lambda: now)).serve(sys.stdin, sys.stdout)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the spec of a fake engine."""
    monkeypatch.setattr(peer_control, "SETTLE_SECONDS", 0.0)
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    setup = peer_engines.Setup("", "", 2, 100, 10)

    def make(name: str, speed: float, fault: str = "none") -> Any:
        command = (sys.executable, str(script), name, str(speed), fault, str(tmp_path / "log"))
        return peer_control.Spec(name, "bf16", setup, command)

    return make


def measured(specs: Sequence[Any], work: Any = WORK, long_prompt: Sequence[int] = ()) -> dict[str, Any]:
    prompt = list(range(work.prompt_tokens))
    rows = peer_control.measure(specs, work, MODEL, (prompt, list(long_prompt)), 60.0, lambda _: None)
    assert [row.engine for row in rows] == [spec.name for spec in specs]
    return {row.engine: row for row in rows}


# ---- the controller ----


def test_engines_take_turns_and_every_round_begins_with_another(fake: Any, tmp_path: Path) -> None:
    measured([fake("mlx", 10), fake("metile", 20), fake("torch", 5)])
    log = (tmp_path / "log").read_text().split()
    assert log[:3] == ["mlx", "metile", "torch"]  # warmed in order
    assert log[3:] == ["mlx", "metile", "torch", "metile", "torch", "mlx", "torch", "mlx", "metile"]


def test_figures_and_ratios_are_those_of_the_engines(fake: Any) -> None:
    rows = measured([fake("mlx", 10), fake("metile", 40), fake("torch", 20, "other")])
    ours = rows["metile"]
    assert ours.status == "measured"
    assert ours.details == {"runs": "fake"}
    assert len(ours.samples) == WORK.rounds
    assert ours.medians.prefill_tokens_per_second == pytest.approx(40)
    assert ours.medians.decode_tokens_per_second == pytest.approx(20)
    assert ours.medians.time_to_first_token_seconds == pytest.approx(10 / 40)
    assert ours.over_plain.prefill.median == pytest.approx(4)
    assert ours.over_plain.decode.least == pytest.approx(4)
    assert ours.metile_over is None
    assert rows["torch"].metile_over.first_token.most == pytest.approx(2)
    assert rows["mlx"].over_plain is None
    assert rows["mlx"].metile_over.decode.median == pytest.approx(4)
    assert ours.tokens == [10, 11, 12, 13, 14]
    assert ours.first_difference is None
    assert rows["torch"].first_difference == 3
    assert ours.peak_rss_bytes > 1 << 20


def test_plain_mlx_may_run_in_fewer_rounds(fake: Any) -> None:
    rows = measured([fake("mlx", 10), fake("metile", 40)], WORK.model_copy(update={"plain_rounds": 1}))
    assert (len(rows["mlx"].samples), len(rows["metile"].samples)) == (1, 3)
    assert rows["metile"].over_plain.prefill.median == pytest.approx(4)


def test_a_missing_package_is_a_row_that_says_so(fake: Any) -> None:
    rows = measured([fake("mlx", 10), fake("llama.cpp f16", 40, "missing"), fake("metile", 20)])
    row = rows["llama.cpp f16"]
    assert (row.status, row.samples, row.medians, row.over_plain) == ("not installed", [], None, None)
    assert "pip install llama-cpp-python" in row.reason
    assert rows["metile"].over_plain.decode.median == pytest.approx(2)


def test_an_engine_that_dies_keeps_its_samples_and_says_why(fake: Any) -> None:
    rows = measured([fake("mlx", 10), fake("torch", 20, "dies")])
    row = rows["torch"]
    assert row.status == "failed"
    assert row.reason == "the process ended with code 3: out of luck"
    assert len(row.samples) == 1  # it was warmed, ran the first round, and died in the second
    assert row.over_plain.prefill.median == pytest.approx(2)
    assert len(rows["mlx"].samples) == WORK.rounds


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("raises", "ValueError: no such layer"), ("chatters", "the process wrote 'hello', which is no answer")],
)
def test_an_error_is_a_row_that_says_so(fake: Any, fault: str, reason: str) -> None:
    row = measured([fake("mlx", 10), fake("torch", 20, fault)])["torch"]
    assert (row.status, row.reason, row.samples) == ("failed", reason, [])


def test_without_plain_mlx_or_metile_there_are_no_ratios(fake: Any) -> None:
    row = measured([fake("torch", 20)])["torch"]
    assert (row.over_plain, row.metile_over, row.first_difference) == (None, None, None)
    assert row.medians.decode_tokens_per_second == pytest.approx(10)


def test_a_program_that_cannot_be_started_is_a_row(fake: Any, tmp_path: Path) -> None:
    spec = replace(fake("torch", 20), command=(str(tmp_path / "nothing"),))
    row = measured([spec, fake("mlx", 10)])["torch"]
    assert row.status == "failed"
    assert "No such file" in row.reason


def test_no_answer_in_time_is_an_error() -> None:
    worker = peer_control.Worker([sys.executable, "-c", "import time; time.sleep(600)"], 2)
    with pytest.raises(peer_control.PeerError, match=r"no answer to 'load' within 0\.1 s"):
        worker.ask({"do": "load"}, 0.1)
    worker.close()


def test_a_long_context_is_read_once_and_decoded_after_in_every_round(fake: Any) -> None:
    work = WORK.model_copy(update={"context": 60})
    row = measured([fake("mlx", 10), fake("metile", 40)], work, range(60))["metile"]
    assert row.context.decode_tokens_per_second == [pytest.approx(10)] * 3
    assert row.context.share == pytest.approx(0.5)
    assert row.context.read_bytes == 10 * (60 + 2)
    assert row.context.share_explained == pytest.approx((1000 + 10 * 12) / (1000 + 10 * 62))


def test_libraries_are_told_the_number_of_threads() -> None:
    text = "import json, os; input(); print(json.dumps({'omp': os.environ['OMP_NUM_THREADS']}), flush=True); input()"
    worker = peer_control.Worker([sys.executable, "-c", text], 3)
    assert worker.ask({"do": "load"}, 60) == {"omp": "3"}
    worker.close()


# ---- statistics ----


def sample(prefill: float, decode: float, first: float) -> Any:
    return peer_record.Sample(
        prefill_tokens_per_second=prefill, decode_tokens_per_second=decode, time_to_first_token_seconds=first
    )


def test_speedups_are_medians_of_paired_rounds() -> None:
    # The machine slows down by 10 in the second round: the ratios stand still, the ratio of medians would not.
    plain = [sample(10, 1, 4.0), sample(1, 0.1, 40.0), sample(10, 1, 4.0)]
    other = [sample(20, 3, 2.0), sample(2, 0.3, 20.0), sample(40, 4, 1.0)]
    found = peer_record.speedups(plain, other)
    assert (found.prefill.median, found.prefill.least, found.prefill.most) == pytest.approx((2, 2, 4))
    assert found.decode.median == pytest.approx(3)
    assert found.first_token.most == pytest.approx(4)
    assert peer_record.speedups(plain, other[:1]).decode.most == pytest.approx(3)  # the rounds that both have
    assert peer_record.speedups(plain, []) is None


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=7))
def test_a_spread_holds_its_median_and_turns_over_with_its_sides(pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*pairs, strict=True)
    one, back = peer_record.spread(first, second), peer_record.spread(second, first)
    assert one.least <= one.median * (1 + 1e-9)
    assert one.median <= one.most * (1 + 1e-9)
    assert back.median == pytest.approx(1 / one.median)
    assert back.most == pytest.approx(1 / one.least)


def test_the_first_difference_is_a_place() -> None:
    assert peer_record.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert peer_record.first_difference([1, 2], [1, 2, 3]) is None
    assert peer_record.first_difference([5, 2], [1, 2]) == 0
    assert peer_record.first_difference([1, 2, 4], [1, 2, 3]) == 2


# ---- the command ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a small GGUF file and the bf16 folder of the same model."""
    root = tmp_path_factory.mktemp("tiny")
    source, folder = root / "tiny.gguf", root / "tiny-bf16"
    write_gguf(source)
    folder.mkdir()
    demo.convert(source, "bf16", folder)
    return source, folder


@pytest.fixture(scope="module")
def whole(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Run the command on the tiny model with every engine."""
    path, text = tmp_path_factory.mktemp("record") / "new" / "record.json", io.StringIO()
    options = "--precision bf16 --prompt-tokens 12 --generation-tokens 4 --rounds 2 --context 24 --output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "demo_folder", lambda _: tiny[1])
        patch.setattr(peers, "find_gguf", lambda: tiny[0])
        code = peers.main([*options.split(), str(path)], Console(file=text, width=100))
    return code, text.getvalue(), path


def test_a_run_has_a_row_for_every_engine(whole: tuple[int, str, Path]) -> None:
    code, text, path = whole
    run = peer_record.load(path)
    assert code == 0
    assert [row.engine for row in run.rows] == ["mlx", "metile", "llama.cpp f16", "llama.cpp bf16", "torch"]
    for row in run.rows:
        module = PACKAGES.get(row.engine.split()[0])
        installed = module is None or importlib.util.find_spec(module) is not None
        assert row.status == ("measured" if installed else "not installed"), row.reason
        assert (len(row.samples), len(row.tokens)) == ((2, 4) if installed else (0, 0))
        assert (row.context is not None) == installed
        assert row.engine in text
    assert "metile, plan quick: untuned defaults" in text
    assert text.count("not installed") == 2 * sum(row.status == "not installed" for row in run.rows)


def test_a_record_says_what_it_rests_on_and_its_figures_follow(whole: tuple[int, str, Path]) -> None:
    run = peer_record.load(whole[2])
    assert (run.workload.prompt_tokens, run.workload.rounds, run.workload.context) == (12, 2, 24)
    assert run.versions.mlx
    assert set(run.packages) >= {"torch", "llama-cpp-python", "transformers"}
    assert run.models[0].cache_bytes_per_token == 2 * 1 * 1 * 32 * 2  # K and V, layer, head, width, bytes
    assert run.models[0].weight_bytes > 2 * 20 * 64 * 2
    plain, ours = run.rows[:2]
    ratios = [a.time_to_first_token_seconds / b.time_to_first_token_seconds for a, b in zip(plain.samples, ours.samples, strict=True)]  # noqa: E501  # fmt: skip
    assert ours.over_plain.first_token.least == pytest.approx(min(ratios))
    assert ours.medians.decode_tokens_per_second == pytest.approx(
        median(one.decode_tokens_per_second for one in ours.samples)
    )


def test_a_record_with_another_key_is_refused(whole: tuple[int, str, Path], tmp_path: Path) -> None:
    data = json.loads(whole[2].read_text())
    data["rows"][0]["speed"] = 1
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValidationError, match=r"rows\.0\.speed"):
        peer_record.load(path)


def test_a_plot_is_a_picture_or_its_package_is_named(whole: tuple[int, str, Path], tmp_path: Path) -> None:
    run, path = peer_record.load(whole[2]), tmp_path / "new" / "figure.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MetileError, match="pip install matplotlib"):
            peer_plot.check(path)
    else:
        peer_plot.check(path)
        peer_plot.write(run, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_ends_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "benchmark", lambda *_: pytest.fail("something ran"))
    monkeypatch.setattr(peer_plot.importlib.util, "find_spec", lambda _: None)
    assert peers.main(["--plot", str(tmp_path / "figure.png")]) == 2
    assert "[peers] expected matplotlib, which --plot needs, but got none: run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds of at least 1 but got 0"),
        (["--prompt-tokens", "1"], "--prompt-tokens of at least 2"),
        (["--context", "1"], "--context of at least 2"),
        (["--limit-seconds", "nan"], "positive --limit-seconds but got nan"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(options) == 2
    assert message in capsys.readouterr().err


def test_four_bits_are_compared_on_the_very_file(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "demo_folder", lambda _: tiny[1])
    monkeypatch.setattr(peers, "find_gguf", lambda: tiny[0])
    specs = peers.specs_of("4bit", list(peer_engines.ENGINES), WORK)
    assert [spec.name for spec in specs] == ["mlx", "metile", "llama.cpp Q4_1"]
    assert specs[2].setup.gguf == str(tiny[0])
    assert specs[2].setup.most_tokens >= WORK.prompt_tokens + WORK.generation_tokens
    assert [spec.name for spec in peers.specs_of("bf16", ["torch"], WORK)] == ["torch"]


def test_tuning_comes_first_and_its_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 3

    monkeypatch.setattr(peers.subprocess, "run", lambda command, **_: commands.append(command) or Done())
    monkeypatch.setattr(peers, "benchmark", lambda *_: pytest.fail("something ran"))
    assert peers.main(["--tune", "--precision", "bf16", "--prompt-tokens", "99"]) == 2
    assert commands[0][1:5] == ["-m", "metile.tune", "--model", "demo:smollm2-135m-bf16"]
    assert commands[0][commands[0].index("--prompt-tokens") + 1] == "99"
    assert "exit code 3" in capsys.readouterr().err
