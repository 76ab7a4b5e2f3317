"""The command: ``python -m metile.tune --suite demo`` searches, plans, verifies, confirms, measures and reports."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from metile import hub, models, report
from metile.errors import MetileError, mismatch
from metile.progress import Reporter
from metile.render import report_tables
from metile.report import ModelReport, SuiteReport
from metile.search import estimate
from metile.suites import Suite, SuiteModel, load_suite, suite_names
from metile.targets import TARGETS, choose_target
from metile.targets.base import Target
from metile.toolchain import ensure_compile
from metile.tuner import Tuner


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m metile.tune",
        description="Find on this machine where metile's kernels beat plain MLX, and write a suite report.",
        epilog=f"Suites: {', '.join(suite_names())}.",
    )
    add = parser.add_argument
    add("--suite", default="demo", help="a suite of suites/*.toml (default: demo, which needs no network)")
    add(
        "--model",
        action="append",
        metavar="MODEL",
        help="hub id, local folder, demo id or random:NAME; in place of the suite's",
    )
    add("--target", choices=TARGETS, default="auto", help="what runs the kernels (default: auto)")
    add("--output", type=Path, help="the report's file (default: metile-suite-SUITE.json)")
    add("--offline", action="store_true", help="never ask a model hub; use what is on disk")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="keep what was decided before (the default)")
    again.add_argument("--fresh", action="store_true", help="forget what was decided before")
    add(
        "--dry-run",
        action="store_true",
        help="say what would be searched and how long it would take, and stop",
    )
    add("--search-seconds", type=float, metavar="S", help="most seconds of a search (default: the suite's)")
    for name, meaning in (
        ("trials", "measured pairs of the report"),
        ("confirmation-trials", "pairs on which the plan is accepted or refused"),
        ("prompt-tokens", "tokens of the prompt"),
        ("generation-tokens", "tokens generated"),
        ("seed", "seed of the prompt and of the search"),
    ):
        add(f"--{name}", type=int, metavar="N", help=f"{meaning} (default: the suite's)")
    return parser


def _suite_of(options: argparse.Namespace) -> Suite:
    suite = load_suite(options.suite)
    if options.model:
        suite = suite.replace_models(tuple(SuiteModel.of(name) for name in options.model))
    workload = suite.workload.replace(
        trials=options.trials,
        confirmation_trials=options.confirmation_trials,
        prompt_tokens=options.prompt_tokens,
        generation_tokens=options.generation_tokens,
        seed=options.seed,
    )
    if options.search_seconds is not None:
        if not 0 < options.search_seconds < float("inf"):
            raise mismatch("tune", "positive --search-seconds", options.search_seconds)
        suite = dataclasses.replace(suite, search_seconds=options.search_seconds)
    if workload.prompt_tokens < 2:
        raise mismatch("tune", "at least 2 prompt tokens, a prefix and a last one,", workload.prompt_tokens)
    return dataclasses.replace(suite, workload=workload)


def _dry_run(suite: Suite, target: Target, reporter: Reporter, offline: bool) -> None:
    tuner = Tuner(suite, target, reporter, offline=offline)
    work = suite.workload
    for spec in suite.models:
        model, _ = hub.load(hub.resolve(spec, offline=offline))
        primary, secondary = tuner.keys(models.find(model))
        title = Text(f"{spec.id} on {target.chip()}", "bold")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("shape", "candidates", "kernels", "seconds"):
            table.add_column(name, justify="left" if name == "shape" else "right")
        rows = estimate(primary, target, neighbours=secondary, budget_seconds=suite.search_seconds)
        for row in rows:
            table.add_row(row.key.subject(), str(row.candidates), str(row.kernels), f"{row.seconds:.1f}")
        reporter.console.print(table)
        if not rows:
            reporter.say("The model holds nothing that metile knows how to patch; there is nothing to search.")
            continue
        total = min(sum(row.seconds for row in rows), suite.search_seconds)
        kernels, pairs = sum(row.kernels for row in rows), work.confirmation_trials + work.trials
        reporter.say(
            f"{len(rows)} shapes, {sum(row.candidates for row in rows)} candidates, {kernels} kernels to compile."
            f" The search would take about {total:.0f} s (its limit is {suite.search_seconds:.0f} s)."
            f" After the search, plain MLX and the plan each generate {work.generation_tokens} tokens {pairs} times."
        )


def _output_of(options: argparse.Namespace, suite: Suite) -> Path:
    """Return where the report goes, which is no surprise after minutes of tuning.

    Raises:
        MetileError: no file can be written there.
    """
    output: Path = options.output or Path(f"metile-suite-{suite.name}.json")
    if output.is_dir():
        raise mismatch("tune", "--output to be a file", f"{output}, which is a folder")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise mismatch("tune", "--output to be in a folder that can be written", output)
    return output


def _run(options: argparse.Namespace, reporter: Reporter) -> int:
    suite = _suite_of(options)
    target = choose_target(options.target)
    output = _output_of(options, suite)
    note = ensure_compile().note
    if note:
        reporter.say(escape(note))
    if options.dry_run:
        _dry_run(suite, target, reporter, options.offline)
        return 0
    workload = suite.workload
    reporter.say(
        f"[bold]metile[/]: suite {suite.name}, {workload.prompt_tokens} prompt and {workload.generation_tokens}"
        f" generated tokens, on {escape(target.chip())}"
    )
    tuner = Tuner(suite, target, reporter, offline=options.offline, fresh=options.fresh)
    records: list[ModelReport] = []
    failures = 0
    for spec in suite.models:
        try:
            records.append(tuner.tune(spec))
        except Exception as error:  # whatever befell one model, the others have their turn
            failures += 1
            reporter.console.print(f"[red]✗[/] {escape(spec.id)}", highlight=False)
            if isinstance(error, MetileError):
                reporter.console.print(str(error), highlight=False, markup=False)
            else:
                traceback.print_exc()
            continue
        result = SuiteReport(models=records, recorded_at=report.now(), schema_version=3, suite=suite.name)
        try:
            report.save(result, output)
        except OSError as error:
            raise mismatch("tune", f"a report that can be written to {output}", error) from error
    if records:
        for part in report_tables(result):
            reporter.console.print(part)
        reporter.say(f"Report: {escape(str(output))}")
    if failures:
        reporter.say(f"{failures} of {len(suite.models)} models failed; the reasons stand above.")
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; return its exit code: 0, 1 where a model failed, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    reporter = Reporter(console)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: reporter.say(f"[yellow]![/] {escape(str(message))}")
            return _run(options, reporter)
    except MetileError as error:
        Console(stderr=True).print(str(error), highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        reporter.say("Interrupted. What was decided is kept; the same command goes on from there.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
