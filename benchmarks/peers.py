"""Plain MLX, metile, llama.cpp and torch on one model, prompt and number of threads: ``python benchmarks/peers.py``.

Setup: each engine loads the demo checkpoint, in its own process; all hold the same numbers, in bfloat16 (llama.cpp in
float16 too, which its kernels are made for) or in 4 bits (llama.cpp from the very GGUF file that the checkpoint is).
Run: rounds in which one engine after the other generates greedily. Verify: the tokens are recorded, and where each
engine's part from plain MLX's. A peer that is not installed is a row that says so: ``pip install 'metile[peers]'``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cpu_record
import peer_plot
import peer_record
from mlx_lm.tokenizer_utils import load as load_tokenizer
from peer_control import Spec, Tell, measure
from peer_engines import ENGINES, Setup
from peer_gguf import gguf_of
from peer_record import Model, Row, Run, Speedups, Spread, Workload
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metile.demo import DEMO_MODELS, Precision, demo_folder, find_gguf
from metile.errors import MetileError, mismatch
from metile.targets import cpu
from metile.targets.cpu import CpuTarget, thread_count
from metile.targets.isa import current_isa
from metile.workload import text_prompt, token_ids

RESULTS = Path(__file__).resolve().parent / "results"
MODEL = "SmolLM2-135M-Instruct"
PRECISIONS: dict[Precision, str] = {precision: name for name, precision in DEMO_MODELS.items()}
Cells = Callable[[Row], tuple[str, ...]]
SPARE_TOKENS = 8  # of a context: mlx-lm begins a step too many


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers.py",
        description="Compare plain MLX, metile, llama.cpp and torch on the demo checkpoint.",
    )
    add = parser.add_argument
    add("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="which comparisons (default: all)")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="which engines (default: all)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="tokens of the prompt (default: 128)")
    add("--generation-tokens", type=int, default=64, metavar="N", help="tokens generated (default: 64)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds (default: 3)")
    add("--plain-rounds", type=int, metavar="N", help="plain MLX in the first N rounds only, where it is very slow")
    add("--seed", type=int, default=0, metavar="N", help="where in the text the prompt begins (default: 0)")
    add("--context", type=int, metavar="N", help="also decode after a prompt of N tokens")
    add("--limit-seconds", type=float, default=1800.0, metavar="S", help="for one generation, or for the long prompt")
    add("--tune", action="store_true", help="tune metile for the model first")
    add("--plot", type=Path, metavar="FILE", help="also write the figures as a PNG; needs matplotlib")
    add("--output", type=Path, help="the record's file (default: benchmarks/results/peers-CHIP.json)")
    return parser


def _checked(options: argparse.Namespace) -> Workload:
    for name, least in (
        ("prompt_tokens", 2),
        ("generation_tokens", 2),
        ("rounds", 1),
        ("plain_rounds", 1),
        ("context", 2),
        ("seed", 0),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise mismatch("peers", f"--{name.replace('_', '-')} of at least {least}", value)
    if not options.limit_seconds > 0:
        raise mismatch("peers", "positive --limit-seconds", options.limit_seconds)
    if options.plot is not None:
        peer_plot.check(options.plot)
    return Workload(
        model=MODEL,
        threads=thread_count(),
        prompt_tokens=options.prompt_tokens,
        generation_tokens=options.generation_tokens,
        rounds=options.rounds,
        plain_rounds=min(options.plain_rounds or options.rounds, options.rounds),
        context=options.context,
        seed=options.seed,
    )


def specs_of(precision: Precision, engines: Sequence[str], work: Workload) -> list[Spec]:
    """Return the engines of one precision, in the order of the table; torch has no row for 4 bits."""
    folder = demo_folder(precision)
    most = max(work.prompt_tokens, work.context or 0) + work.generation_tokens + SPARE_TOKENS

    def spec(name: str, weights: str, gguf: str = "") -> Spec:
        return Spec.of(name, weights, Setup(str(folder), gguf, work.threads, most, work.prompt_tokens))

    kept = "bf16" if precision == "bf16" else "4 bits, group 32"
    specs = [spec(name, kept) for name in ("mlx", "metile") if name in engines]
    if "llama.cpp" in engines and precision == "bf16":
        specs += [spec(f"llama.cpp {kind}", kind, str(gguf_of(find_gguf(), folder, kind))) for kind in ("f16", "bf16")]
    elif "llama.cpp" in engines:
        specs.append(spec("llama.cpp Q4_1", "Q4_1", str(find_gguf())))
    if "torch" in engines and precision == "bf16":
        specs.append(spec("torch", kept))
    return specs


def _tune(precision: Precision, work: Workload) -> None:
    """Run the tuner in a process of its own; what it prints is shown."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "metile.tune", "--model", PRECISIONS[precision]]
        command += ["--prompt-tokens", str(work.prompt_tokens), "--generation-tokens", str(work.generation_tokens)]
        done = subprocess.run([*command, "--output", str(Path(folder) / "report.json")], check=False)
    if done.returncode:
        raise mismatch("peers", "a tuning that succeeds", f"exit code {done.returncode} of {' '.join(command[1:])}")


def benchmark(precisions: Sequence[Precision], engines: Sequence[str], work: Workload, limit: float, tell: Tell) -> Run:
    """Measure everything and return the record.

    Raises:
        MetileError: the demo checkpoint is not installed.
    """
    start, before, versions = time.perf_counter(), cpu_record.load_average(), cpu_record.versions()
    rows: list[Row] = []
    models: list[Model] = []
    for precision in precisions:
        folder = demo_folder(precision)
        tokenizer = load_tokenizer(folder)
        short, long = (token_ids(text_prompt(tokenizer, n, work.seed)) for n in (work.prompt_tokens, work.context or 0))
        models.append(peer_record.model_of(folder, precision))
        rows += measure(specs_of(precision, engines, work), work, models[-1], (short, long), limit, tell)
    return Run(
        benchmark="peers",
        recorded_at=cpu_record.timestamp(),
        seconds=time.perf_counter() - start,
        machine=cpu_record.machine_of(CpuTarget(current_isa())),
        versions=versions,
        packages=peer_record.packages(),
        method=peer_record.METHOD,
        workload=work,
        models=models,
        load_average_before=before,
        load_average_after=cpu_record.load_average(),
        rows=rows,
    )


# ---- tables ----


def tables(run: Run) -> Iterator[Table]:
    """Yield for each precision a table of figures, two of speedups, and one of a long context where there was one."""
    for model in run.models:
        rows = [row for row in run.rows if row.precision == model.precision]
        title = f"{run.workload.model}, {model.precision}"
        yield _table(title, ("prefill/s", "decode/s", "first token", "peak RSS", "tokens"), rows, _figures)
        headings = ("prefill", "decode", "first token")
        yield _table(
            f"{title}: times as fast as mlx, median (least-most)", headings, rows, lambda row: _speedups(row.over_plain)
        )
        yield _table(f"{title}: metile times as fast as each", headings, rows, lambda row: _speedups(row.metile_over))
        if run.workload.context is not None:
            title = f"{title}: decode after {run.workload.context} tokens"
            yield _table(title, ("tokens/s", "share", "bytes explain", "prompt, s"), rows, _context)


def _table(title: str, headings: Sequence[str], rows: Sequence[Row], cells: Cells) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("engine", no_wrap=True)
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.engine, *cells(row))
    return table


def _figures(row: Row) -> tuple[str, ...]:
    if row.medians is None:
        return (row.status, "-", "-", "-", "-")
    difference = row.first_difference
    return (
        f"{row.medians.prefill_tokens_per_second:.1f}",
        f"{row.medians.decode_tokens_per_second:.2f}",
        f"{row.medians.time_to_first_token_seconds * 1e3:.0f} ms",
        f"{row.peak_rss_bytes / 1e6:.0f} MB" if row.peak_rss_bytes else "-",
        "-" if row.over_plain is None else "as MLX" if difference is None else f"differ at {difference}",
    )


def _speedups(found: Speedups | None) -> tuple[str, ...]:
    if found is None:
        return ("-",) * 3
    return tuple(_spread(item) for item in (found.prefill, found.decode, found.first_token))


def _spread(item: Spread) -> str:
    return f"{item.median:.3g} ({item.least:.3g}-{item.most:.3g})"


def _context(row: Row) -> tuple[str, ...]:
    if (found := row.context) is None:
        return ("-",) * 4
    speed = f"{found.median_tokens_per_second:.2f}"
    return (speed, f"{found.share:.0%}", f"{found.share_explained:.0%}", f"{found.fill_seconds:.1f}")


def notes(run: Run) -> Iterator[str]:
    """Yield what the tables leave out: how metile ran, and why an engine has no row or an incomplete one."""
    for row in run.rows:
        if row.engine == "metile" and row.details:
            yield f"{row.precision}, metile, plan {row.details['plan']}: {row.details['runs'].splitlines()[0]}"
        if row.reason:
            yield f"{row.precision}, {row.engine}: {row.status}: {row.reason}"


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; return its exit code: 0, 1 where plain MLX or metile fails, 2 for bad input."""
    options = _parser().parse_args(arguments)
    console = console or Console()
    try:
        work = _checked(options)
        if reason := cpu.available():
            raise MetileError(reason)
        if options.tune and "metile" in options.engines:
            for precision in options.precision:
                _tune(precision, work)
        with console.status("") as status:
            run = benchmark(
                options.precision,
                options.engines,
                work,
                options.limit_seconds,
                lambda text: status.update(escape(text)),
            )
    except MetileError as error:
        Console(stderr=True).print(str(error), highlight=False, markup=False, soft_wrap=True)
        return 2
    report(run, console)
    output = options.output or RESULTS / f"peers-{cpu_record.slug(CpuTarget(current_isa()).chip())}.json"
    peer_record.save(run, output)
    console.print(f"Record: {output}", highlight=False, soft_wrap=True)
    if options.plot is not None:
        peer_plot.write(run, options.plot)
        console.print(f"Plot: {options.plot}", highlight=False, soft_wrap=True)
    own = [row for row in run.rows if row.engine in ("mlx", "metile")]
    return 1 if any(row.status != "measured" for row in own) else 0


def report(run: Run, console: Console) -> None:
    """Print a record."""
    machine, work = run.machine, run.workload
    console.print(
        f"{machine.chip}, {machine.isa}, {work.threads} threads; {work.prompt_tokens} prompt and"
        f" {work.generation_tokens} generated tokens, medians of {work.rounds} rounds",
        highlight=False,
        soft_wrap=True,
    )
    for table in tables(run):
        console.print(table)
    for line in notes(run):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
