"""Is every candidate right on this GPU? ``python benchmarks/gpu_check.py --seconds 120``.

Candidates of all spaces, thinned evenly, meet small aligned and ragged shapes, on outputs that hold NaN. Failures are
printed in short and kept in a file, a line each. A kernel that takes the GPU's context down with it is noted, and the
script begins again after it: no later launch of the process would mean anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from gpu_work import compiled

from metile.check import Case, fault, make_case
from metile.errors import MetileError
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.weights import AFFINE_BITS, AFFINE_GROUPS
from metile.report_dispatches import BLOCK_FORMATS
from metile.targets import TARGETS, choose_target
from metile.targets.base import Kernel, Limits
from metile.targets.compiler import CompileError

AT_ONCE = 32  # candidates compiled together
DEADLY = ("illegal", "misaligned", "unspecified launch", "launch failed", "illegal instruction", "device-side")
DTYPES = ("bfloat16", "float16", "float32")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FORMATS = (*(f"affine{bits}g{group}" for bits in AFFINE_BITS for group in AFFINE_GROUPS), *BLOCK_FORMATS)
PACKED_TILES = 12  # of a format at each number of rows


@dataclass(frozen=True)
class Check:
    """A candidate, and the keys (of its own kernel) and rows that it meets."""

    name: str
    candidate: Any
    cases: tuple[tuple[Any, int], ...]


def linear_checks(limits: Limits) -> Iterator[Check]:
    """Yield the candidates of linear layers: each once for an epilogue and dtype, at three shapes."""
    for dtype, epilogue in itertools.product(DTYPES, ("store", "swiglu", "bias", "residual")):
        seen = set()
        for rows in ROWS:
            key = LinearKey(epilogue, rows, 512, 1024, dtype)  # type: ignore[arg-type]
            for tile in key.space(limits):
                if tile in seen:
                    continue
                seen.add(tile)
                ragged = dataclasses.replace(key, outputs=331, inputs=203)
                odd = dataclasses.replace(key, outputs=136, inputs=1096)
                cases = ((key, rows), (ragged, max(rows - 1, 1)), (odd, min(rows, rows // 2 + 1)))
                yield Check(f"{epilogue} {dtype} {rows} rows {tile.label()}", tile, cases)


def packed_checks(limits: Limits) -> Iterator[Check]:
    """Yield some candidates of quantized layers: every format at all rows, with dtypes and epilogues in turn."""
    turns = itertools.cycle(itertools.product(DTYPES, ("store", "swiglu", "bias", "residual")))
    for rows, weights in itertools.product(ROWS, FORMATS):
        dtype, epilogue = next(turns)
        key = LinearKey(epilogue, rows, 512, 1024, dtype, weights)  # type: ignore[arg-type]
        space, group = key.space(limits), key.format.group
        # MLX quantizes by 32 elements, of which a row may have half.
        ragged = dataclasses.replace(key, outputs=330, inputs=group * (416 // group // 2 * 2 + 1))
        for tile in space[:: max(len(space) // PACKED_TILES, 1)]:
            cases = ((key, rows), (ragged, max(rows - 1, 1)))
            yield Check(f"{weights} {dtype} {epilogue} {rows} rows {tile.label()}", tile, cases)


def norm_checks(limits: Limits) -> Iterator[Check]:
    """Yield the candidates of norms."""
    for dtype, add, hidden in itertools.product(DTYPES, (False, True), (1536, 577)):
        key = NormKey(add, 64, hidden, 1e-5, dtype)
        for tile in key.space(limits):
            yield Check(f"{key.family} {dtype} {hidden} {tile.label()}", tile, ((key, 64), (key, 5), (key, 1)))


def attention_checks(limits: Limits) -> Iterator[Check]:
    """Yield the candidates of attention, for one query and for many."""
    for dtype, (heads, shared), dimension in itertools.product(DTYPES, ((12, 2), (4, 4)), (128, 64)):
        for rows in (1, 64):
            seen = set()
            for tokens in (256, 1024):
                key = AttentionKey(rows, tokens, heads, shared, dimension, dtype)
                for tile in key.space(limits):
                    if tile not in seen:
                        seen.add(tile)
                        cases = ((key, rows), (dataclasses.replace(key, tokens=100), min(rows, 33)))
                        name = f"attention {dtype} {heads}/{shared} d{dimension} {rows} rows {tile.label()}"
                        yield Check(name, tile, cases)


FAMILIES = {"norm": norm_checks, "attention": attention_checks, "linear": linear_checks, "packed": packed_checks}


# Of each family, in turn: MLX takes two seconds to compile a kernel of attention, and linear layers have the most.
SHARES = {"linear": 8, "packed": 8, "norm": 1, "attention": 1}


def mixed(queues: dict[str, list[Check]]) -> list[Check]:
    """Return the checks of all families in one order, each beginning of which has its share of all."""
    order, places = [], dict.fromkeys(queues, 0)
    while any(places[name] < len(queue) for name, queue in queues.items()):
        for name, queue in queues.items():
            order += queue[places[name] : places[name] + SHARES[name]]
            places[name] += SHARES[name]
    return order


def spread(checks: Sequence[Check]) -> list[Check]:
    """Return the checks in an order of which every beginning is spread over all of them."""
    step = next(step for step in (61, 59, 53, 47, 1) if step == 1 or len(checks) % step)
    return [checks[index * step % len(checks)] for index in range(len(checks))]


def case_of_cpu(key: Any, rows: int) -> Case:
    """Return a case whose reference plain MLX computes on the CPU."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        return make_case(key, rows, 7, time.perf_counter)
    finally:
        mx.set_default_device(device)


class Runner:
    """Runs checks, with the inputs and references of keys that several share."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._cases: dict[tuple[Any, int], Case] = {}

    def compiled(self, checks: Sequence[Check]) -> list[Kernel | CompileError]:
        """Return the kernel of each, or its error."""
        return compiled(self._target, [(check.cases[0][0], check.candidate) for check in checks])

    def reason(self, check: Check, kernel: Kernel | CompileError) -> str | None:
        """Return what is wrong with a candidate, or None."""
        if isinstance(kernel, CompileError):
            return str(kernel)
        for key, rows in check.cases:
            found = fault(key, check.candidate, kernel, self._case(key, rows))
            if found is not None:
                return f"{key.subject()}: {found}"
        return None

    def _case(self, key: Any, rows: int) -> Case:
        if (key, rows) not in self._cases:
            try:
                case = make_case(key, rows, 7, time.perf_counter)
            except Exception:  # plain MLX does not multiply every format and shape on every device
                case = case_of_cpu(key, rows)
            self._cases[key, rows] = case
        return self._cases[key, rows]


def run(checks: Sequence[Check], runner: Runner, log: Path, deadline: float, first: int) -> int:
    """Run checks from `first` on until the deadline, and note each in the log.

    Returns:
        The index of a check after which the process is of no use any more, or -1.
    """
    with log.open("a") as file:
        for start in range(first, len(checks), AT_ONCE):
            batch = checks[start : start + AT_ONCE]
            if time.time() >= deadline:
                return -1
            for index, (check, kernel) in enumerate(zip(batch, runner.compiled(batch), strict=True), start):
                reason = runner.reason(check, kernel)
                file.write(json.dumps({"check": check.name, "fault": reason}) + "\n")
                file.flush()
                if reason is not None and any(word in reason.lower() for word in DEADLY):
                    return index
    return -1


def summary(lines: Sequence[dict[str, Any]], planned: int, most: int = 25) -> str:
    """Return the outcome in a few lines: how many failed, and which, those with one reason together."""
    failed = [line for line in lines if line["fault"]]
    text = [f"gpu_check: {len(lines)} of {planned} candidates tried, {len(failed)} failed"]
    kinds = Counter(" ".join(line["check"].split()[:2]) for line in failed)
    text += [f"  {count:4} {kind}" for kind, count in kinds.most_common()]
    shown: set[str] = set()
    for line in failed:
        kind = line["fault"].rpartition(": ")[2][:40]
        if kind not in shown and len(shown) < most:
            shown.add(kind)
            text.append(f"  {line['check']}: {line['fault'][:200]}")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 where nothing failed."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu_check.py", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="when to stop (default: 120)")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--log", type=Path, default=Path("gpu-check.jsonl"))
    parser.add_argument("--first", type=int, default=0, help="index of the first check")
    parser.add_argument("--until", type=float, help="deadline as time.time() gives it")
    options = parser.parse_args(arguments)
    deadline = options.until or time.time() + options.seconds
    try:
        target = choose_target(options.target)
    except MetileError as error:
        print(error, file=sys.stderr)
        return 2
    checks = mixed({name: spread(list(FAMILIES[name](target.limits))) for name in options.families})
    options.log.parent.mkdir(parents=True, exist_ok=True)
    if not options.first:
        options.log.write_text("")
    dead = run(checks, Runner(target), options.log, deadline, options.first)
    if dead >= 0:
        again = ["--target", options.target, "--families", *options.families, "--log", str(options.log)]
        again += ["--first", str(dead + 1), "--until", str(deadline)]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *again])
    lines = [json.loads(line) for line in options.log.read_text().splitlines()]
    print(summary(lines, len(checks)), flush=True)
    mx.clear_cache()
    return 1 if any(line["fault"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
