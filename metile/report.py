"""Read, check, write and print suite reports: ``python -m metile.report FILE...``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from rich.console import Console

from metile.errors import MetileError, mismatch
from metile.files import write_atomic
from metile.render import report_tables
from metile.report_base import Fault, faults_of
from metile.report_dispatches import FAMILIES, SelectedDispatches
from metile.report_rules import (
    DECODE_FLOOR,
    Medians,
    Sample,
    Speedups,
    median_speedups,
    medians_of,
    refusals,
    speedups_of,
)
from metile.report_schema import (
    SAME_PRECISION,
    Hardware,
    ModelReport,
    PlanConfirmation,
    PlanFeatures,
    PrecisionComparison,
    Samples,
    Software,
    SuiteReport,
)

__all__ = [
    "FAMILIES",
    "Hardware",
    "Medians",
    "ModelReport",
    "PlanConfirmation",
    "PlanFeatures",
    "PrecisionComparison",
    "Sample",
    "Samples",
    "SelectedDispatches",
    "Software",
    "Speedups",
    "SuiteReport",
    "confirmation_of",
    "dumps",
    "hardware",
    "load",
    "loads",
    "medians_of",
    "model_now",
    "now",
    "precision_of",
    "save",
    "software",
    "speedups_of",
]

NATIVE = "model_native"


def loads(text: str, source: str = "") -> SuiteReport:
    """Parse a suite record.

    Args:
        text: the JSON text.
        source: where it came from, for the error; a file name, say.

    Raises:
        MetileError: it is not JSON, or not a record; the message lists every fault with its path.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise mismatch("report", f"JSON{_in(source)}", error) from None
    except RecursionError:
        raise mismatch("report", f"JSON{_in(source)}", "objects nested too deeply") from None
    try:
        return SuiteReport.model_validate(data)
    except ValidationError as error:
        raise _refusal(faults_of(error), source) from None


def load(path: str | os.PathLike[str]) -> SuiteReport:
    """Read a suite record from a file.

    Raises:
        OSError: the file cannot be read.
        MetileError: as `loads`.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise mismatch("report", f"UTF-8 text{_in(str(path))}", f"byte {error.start} that is not") from None
    return loads(text, str(path))


def dumps(report: SuiteReport) -> str:
    """Write a suite record as text: keys sorted, two spaces, a newline at the end."""
    return json.dumps(report.model_dump(by_alias=True), indent=2, sort_keys=True, allow_nan=False) + "\n"


def save(report: SuiteReport, path: str | os.PathLike[str]) -> None:
    """Write a suite record to a file, whole or not at all."""
    write_atomic(Path(path), dumps(report).encode())


def confirmation_of(pairs: Sequence[Speedups], decode_floor: float = DECODE_FLOOR) -> PlanConfirmation:
    """Judge a candidate plan by its confirmation pairs; ``.reasons`` says why one was refused.

    Raises:
        MetileError: there are no pairs. A model without a plan to confirm has no confirmation.
    """
    if not pairs:
        raise mismatch("report", "at least one confirmation pair", "none")
    return PlanConfirmation(
        accepted=not refusals(pairs, decode_floor),
        decode_speedup_floor=decode_floor,
        medians=Speedups(**median_speedups(pairs)),
        pairs=list(pairs),
    )


def precision_of(
    decode_weights: Sequence[str] = (),
    *,
    baseline_weights: str = NATIVE,
    prefill_weights: str | None = None,
    native_weights_preserved: bool = True,
) -> PrecisionComparison:
    """Say at what precision the selected plan ran.

    Args:
        decode_weights: formats of the weights that decoding reads; none means the baseline's own.
        baseline_weights: format that plain MLX reads.
        prefill_weights: format that the prompt reads; None means the baseline's own.
        native_weights_preserved: whether the weights as loaded are still in memory.
    """
    prefill = prefill_weights or baseline_weights
    decode = sorted(set(decode_weights)) or [baseline_weights]
    same = {prefill, *decode} == {baseline_weights}
    values = {
        "baseline_weights": baseline_weights,
        "class": SAME_PRECISION if same else "mixed_precision",
        "derived_from": "selected_plan",
        "native_weights_preserved": native_weights_preserved,
        "optimized_decode_weights": decode,
        "prefill_weights": prefill,
        "same_weight_representation": same,
    }
    return PrecisionComparison.model_validate(values)


def hardware() -> Hardware:
    """Describe this machine; ``unknown`` where it does not say."""
    mac = platform.system() == "Darwin"
    machine = platform.machine() or "unknown"
    return Hardware(
        chip=(_sysctl("machdep.cpu.brand_string") if mac else _linux_chip()) or "unknown",
        machine=machine,
        memory=_gigabytes(_sysctl("hw.memsize") if mac else _linux_memory()),
        model_name=(_sysctl("hw.model") if mac else _linux_model()) or "unknown",
        processor=platform.processor() or machine,
        release=platform.release() or "unknown",
        system=platform.system() or "unknown",
    )


def software() -> Software:
    """Name the versions of what runs here."""
    return Software(mlx=_version("mlx"), mlx_lm=_version("mlx-lm"), python=platform.python_version())


def model_now() -> str:
    """Return the time as a model record writes it: UTC, microseconds, ``+00:00``."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def now() -> str:
    """Return the time as a suite record writes it: UTC, seconds, ``Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main(argv: Sequence[str] | None = None) -> int:
    """Print each report as tables.

    Returns:
        0, or 1 when a file is not a valid report, or 2 when one cannot be read.
    """
    parser = argparse.ArgumentParser(prog="python -m metile.report", description="Print suite reports.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a suite report, as JSON")
    files: list[str] = parser.parse_args(argv).files
    return max([_print(file) for file in files])


def _print(file: str) -> int:
    try:
        report = load(file)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        print(mismatch("report", "a file that can be read", f"{file} ({reason})"), file=sys.stderr)
        return 2
    except MetileError as error:
        print(error, file=sys.stderr)
        return 1
    Console().print(*report_tables(report), sep="\n")
    return 0


def _in(source: str) -> str:
    return f" in {source}" if source else ""


def _refusal(faults: Sequence[Fault], source: str) -> MetileError:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = "".join(f"\n  {fault}" for fault in faults)
    return mismatch("report", f"a suite record of schema 3{_in(source)}", f"{count}:{lines}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} twice in one object")
    return data


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _linux_chip() -> str:
    """Return the first ``model name`` of /proc/cpuinfo, which ARM kernels leave out."""
    for line in _text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def _linux_memory() -> str:
    """Return the bytes of memory that Linux manages."""
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return str(int(line.split()[1]) * 1024)
    return ""


def _linux_model() -> str:
    return _text("/sys/class/dmi/id/product_name").strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _gigabytes(size: str) -> str:
    return f"{round(int(size) / 2**30)} GB" if size.isdigit() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
