"""Run every candidate of every search space of a Metal GPU on the simulator: ``python tools/check_kernels.py``.

Candidates that differ only by what a launch is told, the order of blocks, share a kernel. Each kernel is compiled
twice. In checked mode every candidate runs at a small ragged shape: there must be no findings, and each element of
the output must be written once. Unchecked, the kernel runs at shapes that are aligned, off by one in each dimension,
not multiples of the tile, and of 1 to 17 rows. All results are compared with float64, on outputs prefilled with NaN.

Exits 1 when something fails, and lists it: candidate, shape, reason, and the file and line of a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import mlx.core as mx
from kernel_checks import random
from metal_checks import WatchedTarget, check, check_attend, check_turn
from test_rope import inputs_of

from metile.files import CACHE_VARIABLE, cache_root
from metile.ops.attention import AttentionKey
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey
from metile.ops.rope import RopeKey

DEVICE = "m1"  # the least threadgroup memory and threads of all that MLX runs on
DIMENSIONS = (64, 80, 96, 128, 256)
AT_ONCE = 8  # kernels a process is given at a time
TURNS = 25  # chunks after which a process is replaced: compiled kernels stay in its memory
Launch = Callable[[WatchedTarget], object]


@dataclass
class Kernel:
    """A kernel and the candidates that share it, from the spaces of one family."""

    family: str
    key: Any
    candidates: list[Any]


@dataclass
class Outcome:
    """What came of some kernels."""

    kernels: int = 0
    launches: int = 0
    checked: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add what came of others."""
        self.kernels += other.kernels
        self.launches += other.launches
        self.checked += other.checked
        self.failures += other.failures


def keys_of(family: str, dtype: str) -> Iterator[Any]:
    """Yield keys whose spaces together hold every candidate of a family."""
    if family == "linear":
        for epilogue, rows in itertools.product(("store", "bias", "residual", "swiglu"), ROW_BUCKETS):
            yield LinearKey(epilogue, rows, 1024, 1024, dtype)  # type: ignore[arg-type]
    elif family == "norm":
        for add in (False, True):
            yield NormKey(add, 64, 8192, 1e-5, dtype)
    elif family == "rope":
        for dimension in DIMENSIONS:
            yield RopeKey(64, 5, 3, dimension, dtype)
    else:
        for shared, dimension, rows in itertools.product(range(1, 17), DIMENSIONS, (1, 512)):
            yield AttentionKey(rows, 256, 2 * shared, 2, dimension, dtype)


FAMILIES = ("linear", "norm", "rope", "attention")


def kernels_of(family: str, dtype: str) -> list[Kernel]:
    """Return the kernels of a family, each with the candidates that share it."""
    limits = WatchedTarget(DEVICE).limits
    found: dict[tuple[Any, int], Kernel] = {}
    for key in keys_of(family, dtype):
        for candidate in key.space(limits):
            text = key.source(candidate), getattr(candidate, "outer_k", 0)
            kernel = found.setdefault(text, Kernel(family, key, []))
            if candidate not in kernel.candidates:
                kernel.candidates.append(candidate)
    return list(found.values())


# ---- shapes: a name of each, and a launch ----


def linear_cases(kernel: Kernel, checked: bool) -> Iterator[tuple[Any, str, Launch]]:
    """Yield candidates, shapes and launches of a linear kernel."""
    first: LinearTile = kernel.candidates[0]
    m, n, k = first.block_m, first.block_n, first.outer_k or (8 * first.k_unroll if first.program == "matrix" else 131)
    if checked:
        yield from (_linear(kernel.key, tile, m + 1, n + 1, k + 9) for tile in kernel.candidates)
        return
    shapes = [(m, n, k), (2 * m, 2 * n, 2 * k), (m + 1, n, k), (m, n + 1, k), (m, n, k + 1), (m, n, max(k - 1, 1))]
    shapes += [(max(m - 1, 1), n, k), (m, n - 1, k), (m + 1, n - 1, 2 * k + 1), (2 * m - 1, n + 1, 2 * k - 1)]
    shapes += [(rows, n + 1, k + 3) for rows in range(1, 18)] + [(3, 1, 1), (1, 2, 5), (m, n, 4099 if m < 64 else 523)]
    yield from (_linear(kernel.key, first, *shape) for shape in dict.fromkeys(shapes))
    yield from (_linear(kernel.key, tile, 3 * m + 1, 4 * n + 1, k + 3) for tile in kernel.candidates)


def _linear(like: LinearKey, tile: LinearTile, m: int, n: int, k: int) -> tuple[Any, str, Launch]:
    key = replace(like, outputs=n, inputs=k)
    return tile, f"m={m} n={n} k={k}", lambda target: check(key, tile, key.example(m, seed=m), target)


def norm_cases(kernel: Kernel, checked: bool) -> Iterator[tuple[Any, str, Launch]]:
    """Yield candidates, shapes and launches of a norm."""
    (tile,) = kernel.candidates
    width = 128 * tile.simdgroups  # of a row that the threads take at once
    lengths = (1, 3, width - 1, width, width + 1, 2 * width + 5)
    shapes = [(tile.block + 1, width + 5)] if checked else [(5, hidden) for hidden in lengths]
    if not checked:
        shapes += [(rows, width // 2 + 3) for rows in range(1, 18)]
    for rows, hidden in shapes:
        key = replace(kernel.key, hidden=hidden)
        inputs = partial(key.example, rows, seed=rows)
        yield tile, f"rows={rows} hidden={hidden}", lambda t, key=key, inputs=inputs: check(key, tile, inputs(), t)


def rope_cases(kernel: Kernel, checked: bool) -> Iterator[tuple[Any, str, Launch]]:
    """Yield candidates, shapes and launches of rope."""
    (tile,) = kernel.candidates
    shapes = (
        [(2, tile.block + 1, 7)] if checked else [(1, rows, 0) for rows in range(1, 18)] + [(2, 33, 131), (3, 1, 5)]
    )
    for batch, length, offset in shapes:
        inputs = partial(inputs_of, kernel.key, batch, length, offset + length)
        launch = partial(_turn, kernel.key, tile, inputs, offset)
        yield tile, f"batch={batch} rows={length} offset={offset}", launch


def _turn(key: RopeKey, tile: Any, inputs: Callable[[], list[mx.array]], offset: int, target: WatchedTarget) -> object:
    return check_turn(key, tile, inputs(), target, offset=offset)


def attention_cases(kernel: Kernel, checked: bool) -> Iterator[tuple[Any, str, Launch]]:
    """Yield candidates, shapes and launches of attention; keys and values are slices of a longer cache."""
    (tile,) = kernel.candidates
    keys = tile.block_keys
    if tile.program == "rows":
        shapes = [
            (2, 1, tokens) for tokens in ((keys + 1,) if checked else (1, keys - 1, keys, keys + 1, 3 * keys + 5))
        ]
    elif checked:
        shapes = [(1, tile.block + 1, tile.block + keys + 1)]
    else:
        heights = (1, tile.block - 1, tile.block, tile.block + 1, 2 * tile.block + 3)
        shapes = [(1, rows, rows + past) for rows in heights for past in (0, 1, keys)]
        shapes += [(1 + rows % 2, rows, rows + keys + 1) for rows in range(1, 18)]
    for batch, rows, tokens in dict.fromkeys(shapes):
        for causal in (True,) if tile.program == "rows" or checked else (True, False):
            launch = partial(_attend, kernel.key, tile, batch, rows, tokens, causal)
            yield tile, f"batch={batch} rows={rows} tokens={tokens} causal={causal}", launch


def _attend(
    key: AttentionKey, tile: Any, batch: int, rows: int, tokens: int, causal: bool, target: WatchedTarget
) -> object:
    q = random(1, (batch, rows, key.query_heads, key.dimension), key.dtype).transpose(0, 2, 1, 3)
    cached = (batch, key.key_value_heads, tokens + 7, key.dimension)
    k, v = (random(seed, cached, key.dtype)[..., :tokens, :] for seed in (2, 3))
    return check_attend(key, tile, [q, k, v], target, causal=causal)


CASES = {"linear": linear_cases, "norm": norm_cases, "rope": rope_cases, "attention": attention_cases}


# ---- running them ----


def run(kernels: Sequence[Kernel]) -> Outcome:
    """Run some kernels in both modes."""
    outcome = Outcome(kernels=len(kernels))
    for kernel in kernels:
        for checked in (True, False):
            target = WatchedTarget(DEVICE, check=checked, threads=1)
            for tile, shape, launch in CASES[kernel.family](kernel, checked):
                outcome.launches += 1
                outcome.checked += checked
                try:
                    launch(target)
                except Exception as error:
                    mode = " checked" if checked else ""
                    outcome.failures.append(f"{_name(kernel, tile)} at {shape}{mode}: {_reason(error)}")
    mx.clear_cache()
    return outcome


def _name(kernel: Kernel, tile: Any) -> str:
    key = kernel.key
    detail = f"[{key.epilogue}]" if kernel.family == "linear" else ""
    return f"{key.family}{detail} {key.dtype} {tile.label()}"


def _reason(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return f"wrong: {error}"
    return f"{type(error).__name__}: {error}"


class Reporter:
    """Progress on stderr, with the time that is left."""

    def __init__(self, total: int) -> None:
        self._total, self._start, self._shown = total, time.monotonic(), 0.0

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._start

    def show(self, outcome: Outcome) -> None:
        """Print a line, on a terminal over the last one, else every ten seconds."""
        now, done = self.seconds(), outcome.kernels
        terminal = sys.stderr.isatty()
        if not terminal and now - self._shown < 10 and done < self._total:
            return
        self._shown = now
        minutes, seconds = divmod(round(now / max(done, 1) * (self._total - done)), 60)
        line = f"{done} of {self._total} kernels, {len(outcome.failures)} failures, {minutes}:{seconds:02} left"
        print(f"\r{line}  " if terminal else line, end="" if terminal and done < self._total else "\n", file=sys.stderr)
        sys.stderr.flush()


def run_all(kernels: Sequence[Kernel], jobs: int) -> tuple[Outcome, float]:
    """Run kernels in several processes."""
    chunks = [kernels[start : start + AT_ONCE] for start in range(0, len(kernels), AT_ONCE)]
    outcome, reporter = Outcome(), Reporter(len(kernels))
    if jobs == 1:
        for chunk in chunks:
            outcome.add(run(chunk))
            reporter.show(outcome)
        return outcome, reporter.seconds()
    turn = TURNS * jobs
    for start in range(0, len(chunks), turn):
        _run_together(chunks[start : start + turn], jobs, outcome, reporter)
    return outcome, reporter.seconds()


def _run_together(chunks: Sequence[Sequence[Kernel]], jobs: int, outcome: Outcome, reporter: Reporter) -> None:
    """Run chunks of kernels in processes that end with them."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        given: list[Future[Outcome]] = [pool.submit(run, chunk) for chunk in chunks]
        try:
            for future in as_completed(given):
                outcome.add(future.result())
                reporter.show(outcome)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Run every candidate of every search space on the simulator.")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be repeated")
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="only this dtype; may be repeated")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only one kernel of N")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; all cores by default")
    options = parser.parse_args(arguments)
    if options.every < 1 or options.jobs < 1:
        parser.error("--every and --jobs must be at least 1")
    return options


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Keep compiled kernels, some gigabytes that nobody runs again, in a folder of this run."""
    before, zig = os.environ.get(CACHE_VARIABLE), (cache_root() / "zig").resolve()
    zig.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="metile-check-") as cache:
        (Path(cache) / "zig").symlink_to(zig)
        os.environ[CACHE_VARIABLE] = cache
        try:
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the options ask for; return the exit status."""
    options = parsed(arguments)
    pairs = itertools.product(options.family or FAMILIES, options.dtype or DTYPES)
    kernels = [kernel for family, dtype in pairs for kernel in kernels_of(family, dtype)][:: options.every]
    with _own_cache():
        try:
            outcome, seconds = run_all(kernels, options.jobs)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130
    for failure in outcome.failures:
        print(failure)
    print(
        f"{outcome.kernels} kernels, {outcome.launches} launches, {outcome.checked} checked, "
        f"{len(outcome.failures)} failures, {seconds:.0f} s"
    )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
