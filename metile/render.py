"""Pictures of a report: the tables that ``metile.report`` and the tuner print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from metile.report_dispatches import (
    FAMILIES,
    AttentionDispatch,
    Dispatch,
    LinearDispatch,
    NormDispatch,
)
from metile.report_rules import (
    DECODE_WIN,
    FLOORS,
    GUARDED,
    NAMES,
    PAIR_FLOOR,
    SPEEDUPS,
    VERIFICATION_LIMITS,
    WINS,
    pairs_needed,
    speedups_of,
)
from metile.report_schema import (
    METILE,
    MLX,
    ModelReport,
    PlanConfirmation,
    PlanFeatures,
    SuiteReport,
    Verification,
)

GOOD, BAD, QUIET, STRONG = "green", "red", "dim", "bold"
EVEN = 0.005
"""A speedup this close to 1 is shown without colour: nobody would notice it."""

_ORDER = ("decode_speedup", "prefill_speedup", "ttft_speedup", "end_to_end_speedup")
_MOST_LINES = 12  # of one of our additions; a longer one is for the file
_PLAIN = {"bits", "group_size", "mode"}


def report_tables(report: SuiteReport) -> list[RenderableType]:
    """Show a whole suite: one line a model, then each model in full."""
    tables: list[RenderableType] = [summary_table(report)]
    for model in report.models:
        tables += _model_tables(model)
    if report.metile:
        tables.append(additions_table("Notes on the suite", report.metile))
    return [_spaced(table) for table in tables]


def model_tables(model: ModelReport) -> list[RenderableType]:
    """Show one model: speed, verdict, plan, dispatches, fidelity, memory and machine."""
    return [_spaced(table) for table in _model_tables(model)]


def _model_tables(model: ModelReport) -> list[RenderableType]:
    tables: list[RenderableType] = [Rule(Text(model.model, STRONG)), speed_table(model)]
    tables.append(confirmation_view(model.plan_confirmation))
    tables += [plan_table(model), dispatch_table(model), verification_view(model.verification, _excused(model))]
    tables += [memory_table(model), machine_table(model)]
    if model.metile:
        tables.append(additions_table("Notes", model.metile))
    return tables


def summary_table(report: SuiteReport) -> Table:
    """Show the speedups and the verdict of each model, one line each."""
    table = _table(f"Suite {report.suite}, {report.recorded_at}", "Model")
    for name in _ORDER:
        table.add_column(Text(NAMES[name]))
    _numeric(table)
    table.add_column(Text("plan"))
    for model in report.models:
        cells = [_ratio(getattr(model.medians, name)) for name in _ORDER]
        table.add_row(Text(model.model), *cells, _plan_names(model))
    return table


def speed_table(model: ModelReport) -> Table:
    """Show the medians of both labels, and each speedup with the spread of its pairs."""
    shared = model.comparison_mode != "alternating"
    title = f"Speed, {_many(len(model.samples.mlx), 'shared run' if shared else 'alternating pair')}"
    table = _table(title, "Median", MLX, METILE, "speedup", "spread", "faster in")
    _numeric(table)
    pairs = [speedups_of(*pair) for pair in zip(model.samples.mlx, model.samples.metile, strict=True)]
    for name in _ORDER:
        ratios = [getattr(pair, name) for pair in pairs]
        wins = sum(ratio > 1 for ratio in ratios)
        table.add_row(
            Text(NAMES[name]),
            _measure(SPEEDUPS[name], getattr(model.medians, f"mlx_{SPEEDUPS[name]}")),
            _measure(SPEEDUPS[name], getattr(model.medians, f"metile_{SPEEDUPS[name]}")),
            _ratio(getattr(model.medians, name)),
            Text("shared", QUIET) if shared else Text(f"{min(ratios):.3f}-{max(ratios):.3f}"),
            Text("shared", QUIET) if shared else Text(f"{wins} of {len(ratios)}"),
        )
    return table


def confirmation_view(confirmation: PlanConfirmation | None) -> RenderableType:
    """Show what each guarded speedup had to reach, what it reached, and the verdict with its reasons."""
    if confirmation is None:
        return Text("No plan to confirm: this model runs plain MLX.", STRONG)
    count = len(confirmation.pairs)
    table = _table(f"Confirmation, {_many(count, 'pair')}", "Speedup", "median", "floor", "win from", "")
    table.columns[-1].header = Text(f"above {PAIR_FLOOR:g} ({pairs_needed(count)} needed)")
    _numeric(table)
    floors = {"decode_speedup": confirmation.decode_speedup_floor, **FLOORS}
    for name in _ORDER:
        steady = sum(getattr(pair, name) > PAIR_FLOOR for pair in confirmation.pairs)
        wanted = f"{WINS[name]:g}" if name in WINS else "-"
        table.add_row(
            Text(NAMES[name]),
            _ratio(getattr(confirmation.medians, name)),
            Text(f"{floors[name]:g}" if name in floors else "-"),
            Text(f"{DECODE_WIN:g} in {pairs_needed(count)}" if name == "decode_speedup" else wanted),
            Text(f"{steady} of {count}" if name in GUARDED else "-"),
        )
    return Group(table, *_verdict(confirmation))


def plan_table(model: ModelReport) -> Table:
    """Show which features were asked for, which the tuner proposed, and which stand."""
    table = _table("Plan", "Feature", "requested", "candidate", "selected")
    for name in PlanFeatures.model_fields:
        row = [getattr(plan, name) for plan in (model.features, model.candidate_plan, model.selected_plan)]
        table.add_row(Text(name), *map(_mark, row))
    candidate, selected = (_extra_features(model, stage) for stage in ("candidate", "selected"))
    for name in sorted({*candidate, *selected}):
        row = [None, candidate.get(name), selected.get(name)]
        table.add_row(Text(name), *map(_mark, row))
    notes = []
    if model.selected_plan.dense_mlp and model.dense_mlp_implementation:
        notes.append(f"dense MLP: {model.dense_mlp_implementation}")
    notes.append(f"weights: {model.precision_comparison.kind.replace('_', ' ')}")
    return _captioned(table, ", ".join(notes))


def dispatch_table(model: ModelReport) -> Table:
    """Show what was chosen for each shape bucket, family by family."""
    table = _table("Dispatches", "Family", "shape", "dtype", "chosen", "how")
    unused = []
    for family in FAMILIES:
        entries: Sequence[Dispatch] = getattr(model.selected_dispatches, family)
        if not entries:
            unused.append(family)
        for index, entry in enumerate(entries):
            ours = entry.algorithm == "metile"
            table.add_row(
                Text("" if index else family),
                Text(_shape(entry)),
                Text(entry.dtype.removeprefix("mlx.core.")),
                Text("meTile" if ours else "MLX", GOOD if ours else QUIET),
                Text(_how(entry) if ours else ""),
                end_section=index == len(entries) - 1,
            )
    return _captioned(table, f"not used: {', '.join(unused)}" if unused else "")


def verification_view(verification: Verification | None, excused: Sequence[str] = ()) -> RenderableType:
    """Show how far the patched model's logits are from plain MLX's, beside what is allowed.

    Args:
        verification: the record's block.
        excused: sentences on limits that plain MLX's own rounding exceeds too; they stand below the table.
    """
    if verification is None:
        return Text("No plan to verify.", QUIET)
    table = _table("Verification", "Logits against plain MLX", "found", "limit", "")
    same = verification.next_token == verification.actual_next_token
    table.add_row(
        Text("next token"),
        Text(str(verification.actual_next_token)),
        Text(str(verification.next_token)),
        _ok(same),
    )
    for name, limit in VERIFICATION_LIMITS.items():
        value = getattr(verification, name)
        table.add_row(Text(name.replace("_", " ")), Text(f"{value:.3g}"), Text(f"{limit:g}"), _ok(value <= limit))
    return _captioned(table, "\n".join(f"allowed: {sentence}" for sentence in excused))


def memory_table(model: ModelReport) -> Table:
    """Show MLX's account of its memory."""
    table = _table("Memory", "MLX", "bytes")
    _numeric(table)
    for name in ("active", "cache", "peak"):
        table.add_row(Text(name), Text(_bytes(getattr(model.memory, f"{name}_bytes"))))
    return table


def machine_table(model: ModelReport) -> Table:
    """Show where, with what and on which workload it was measured."""
    machine, software, work = model.hardware, model.software, model.workload
    table = _table("Run", "What", "value")
    tokens = f"{work.prompt_tokens} prompt tokens, {work.generation_tokens} generated"
    rows = {
        "chip": f"{machine.chip}, {machine.memory}",
        "machine": f"{machine.model_name}, {machine.system} {machine.release}, {machine.machine}",
        "software": f"mlx {software.mlx}, mlx-lm {software.mlx_lm}, Python {software.python}",
        "workload": f"{tokens}, seed {work.seed}",
        "recorded": model.recorded_at,
        "revision": model.revision or "unknown",
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def additions_table(title: str, additions: Mapping[str, JsonValue]) -> Table:
    """Show our own additions, whatever they are."""
    table = _table(title, "What", "value")
    for name, value in additions.items():
        lines = _lines(value)
        long = len(lines) > _MOST_LINES
        table.add_row(Text(name), Text(f"{len(lines)} entries, in the file" if long else "\n".join(lines)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, STRONG), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.pad_edge = False
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _captioned(table: Table, caption: str) -> Table:
    table.caption = Text(caption, QUIET) if caption else None
    table.caption_justify = "left"
    return table


def _spaced(table: RenderableType) -> Padding:
    return Padding(table, (0, 0, 1, 0))


def _numeric(table: Table, first: int = 1) -> None:
    for column in table.columns[first:]:
        column.justify = "right"
        column.no_wrap = True


def _verdict(confirmation: PlanConfirmation) -> Iterable[Text]:
    if confirmation.accepted:
        yield Text("Accepted.", f"{STRONG} {GOOD}")
        return
    text = Text("Refused, so plain MLX stays:", f"{STRONG} {BAD}")
    for reason in confirmation.reasons:
        text.append(f"\n- {reason}", "not bold default")
    yield text


def _plan_names(model: ModelReport) -> Text:
    extra = [name for name, on in _extra_features(model, "selected").items() if on]
    names = [*model.selected_plan.names(), *extra]
    return Text(", ".join(names), GOOD) if names else Text("plain MLX", QUIET)


def _extra_features(model: ModelReport, stage: str) -> dict[str, bool]:
    plan = model.metile.get("plan")
    features = plan.get(stage) if isinstance(plan, dict) else None
    return {name: bool(on) for name, on in features.items()} if isinstance(features, dict) else {}


def _shape(entry: Dispatch) -> str:
    if isinstance(entry, NormDispatch):
        return f"{_many(entry.row_bucket, 'row')} of {entry.hidden}"
    if isinstance(entry, AttentionDispatch):
        heads = f"{entry.query_heads}/{entry.key_value_heads} heads of {entry.dimension}"
        return f"{heads}, {_many(entry.token_bucket, 'token')}, batch {entry.batch}"
    if isinstance(entry, LinearDispatch):
        weight = entry.model_dump(include=_PLAIN)
        kind = f", {weight['mode']} {weight['bits']}-bit by {weight['group_size']}" if weight else ""
        return f"{_many(entry.rows, 'row')}, {entry.input_features} to {entry.output_features}{kind}"
    return ""


def _how(entry: Dispatch) -> str:
    values = entry.model_dump()
    words = [f"block {values['block']}"] if "block" in values else []
    if "block_m" in values:
        words += [f"{values['block_m']}x{values['block_n']}", values["schedule"] or "linear"]
        words.append(f"unroll {values['k_unroll']}")
    if "outer_k" in values:
        words += [f"outer k {values['outer_k']}", f"simdgroups {values['wm']}x{values['wn']}"]
    return ", ".join(words)


def _lines(value: JsonValue) -> list[str]:
    """Write a JSON value as short lines: nested objects on one line each, no brackets."""
    if isinstance(value, dict):
        return [f"{name}: {', '.join(_lines(item))}" for name, item in value.items()] or ["none"]
    if isinstance(value, list):
        return [", ".join(_lines(item)) for item in value] or ["none"]
    if isinstance(value, bool) or value is None:
        return [{True: "yes", False: "no", None: "none"}[value]]
    return [f"{value:.4g}" if isinstance(value, float) else str(value)]


def _ratio(value: float) -> Text:
    style = "" if abs(value - 1) < EVEN else GOOD if value > 1 else BAD
    return Text(f"{value:.3f}x" if value < 10 else f"{value:.1f}x", style)


def _measure(metric: str, value: float) -> Text:
    if not metric.endswith("_seconds"):
        return Text(f"{value:.1f} tok/s")
    return Text(f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s")


def _bytes(size: int) -> str:
    value, units = float(size), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.2f} {units[0]}"


def _excused(model: ModelReport) -> list[str]:
    said = (model.metile if "metile" in model.model_fields_set else {}).get("excused")
    return [str(sentence) for sentence in said] if isinstance(said, list) else []


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _mark(on: bool | None) -> Text:
    return Text("yes", GOOD) if on else Text("no" if on is False else "-", QUIET)


def _ok(good: bool) -> Text:
    return Text("ok", GOOD) if good else Text("beyond the limit", BAD)
