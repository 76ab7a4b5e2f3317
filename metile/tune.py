"""The command: ``python -m metile.tune --suite demo`` searches, plans, verifies, confirms, measures and reports."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metile import hub, models, report
from metile.errors import MetileError, mismatch
from metile.progress import Reporter
from metile.render import report_tables
from metile.report import ModelReport, SuiteReport
from metile.search import estimate
from metile.suites import Suite, SuiteModel, load_suite, suite_names
from metile.targets import choose_target
from metile.targets.base import Target
from metile.toolchain import ensure_compile
from metile.tuner import Tuner

TARGETS = ("auto", "cpu", "cuda", "metal")


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
        help="hub id, local folder or demo id; in place of the suite's",
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
    if workload.prompt_tokens < 2:
        raise mismatch("tune", "at least 2 prompt tokens, a prefix and a last one,", workload.prompt_tokens)
    return dataclasses.replace(suite, workload=workload)


def _dry_run(suite: Suite, target: Target, reporter: Reporter, offline: bool) -> None:
    tuner = Tuner(suite, target, reporter, offline=offline)
    for spec in suite.models:
        model, _ = hub.load(hub.resolve(spec, offline=offline))
        primary, secondary = tuner.keys(models.find(model))
        table = Table(title=f"{spec.id} on {target.chip()}", title_justify="left")
        for name in ("shape", "candidates", "kernels", "seconds"):
            table.add_column(name, justify="left" if name == "shape" else "right")
        rows = estimate(primary, target, neighbours=secondary, budget_seconds=suite.search_seconds)
        for row in rows:
            table.add_row(row.key.subject(), str(row.candidates), str(row.kernels), f"{row.seconds:.1f}")
        reporter.console.print(table)
        total = min(sum(row.seconds for row in rows), suite.search_seconds)
        reporter.say(f"The search would take about {total:.0f} s, of at most {suite.search_seconds:.0f} s.")


def _run(options: argparse.Namespace, reporter: Reporter) -> int:
    suite = _suite_of(options)
    target = choose_target(options.target)
    output = options.output or Path(f"metile-suite-{suite.name}.json")
    note = ensure_compile().note
    if note:
        reporter.say(note)
    if options.dry_run:
        _dry_run(suite, target, reporter, options.offline)
        return 0
    workload = suite.workload
    reporter.say(
        f"[bold]metile[/]: suite {suite.name}, {workload.prompt_tokens} prompt and {workload.generation_tokens}"
        f" generated tokens, on {target.chip()}"
    )
    tuner = Tuner(suite, target, reporter, offline=options.offline, fresh=options.fresh)
    records: list[ModelReport] = []
    failures: list[str] = []
    for spec in suite.models:
        try:
            records.append(tuner.tune(spec))
        except MetileError as error:
            failures.append(f"{spec.id}: {error}")
            reporter.console.print(f"[red]✗[/] {spec.id}", highlight=False)
            reporter.console.print(str(error), highlight=False, markup=False)
            continue
        result = SuiteReport(models=records, recorded_at=report.now(), schema_version=3, suite=suite.name)
        report.save(result, output)
    if records:
        for part in report_tables(result):
            reporter.console.print(part)
        reporter.say(f"Report: {output}")
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; return its exit code: 0, 1 where a model failed, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    reporter = Reporter(console)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: reporter.say(f"[yellow]![/] {message}")
            return _run(options, reporter)
    except MetileError as error:
        Console(stderr=True).print(str(error), highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        reporter.say("Interrupted. What was decided is kept; the same command goes on from there.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
