"""The command: ``python -m metile.simulator run FILE``, ``check FILE`` and ``devices``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metile.errors import MetileError, mismatch
from metile.simulator.devices import DEVICES, find_device
from metile.simulator.file import MetalFile, Run
from metile.simulator.runtime import SimulatorFault
from metile.simulator.specification import Specification, read_buffer, read_comments, read_scalar, read_sizes
from metile.targets.compiler import CompileError

FOUND, BAD_USAGE = 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m metile.simulator", description="Run Metal kernels on this machine's processor, and check them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {"run": "run a kernel of a .metal file", "check": "run it in checked mode; exit 1 when something is found"}
    for name, meaning in helps.items():
        _add_options(commands.add_parser(name, help=meaning, description=meaning))
    commands.add_parser("devices", help="list the devices that can be simulated")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="may say in a comment, // metile: grid=..., what options say")
    add("--kernel", metavar="NAME", help="name, or name<arguments> of a template; not needed where there is one kernel")
    add("--grid", metavar="X,Y,Z", help="threads of the whole grid")
    add("--threadgroup", metavar="X,Y,Z", help="threads of a threadgroup")
    pairs = (
        ("buffer", "0=float32:1024:random", "arange, zeros, ones, random, empty, a number; or 0=FILE.npy"),
        ("constant", "0=true", "a function constant"),
        ("threadgroup-memory", "0=BYTES", "bytes of a threadgroup argument"),
        ("save", "1=FILE.npy", "write an output to a file"),
    )
    for name, form, meaning in pairs:
        add(f"--{name}", action="append", default=[], metavar=form, help=meaning)
    add("--include", action="append", default=[], metavar="FOLDER", help="a folder for #include")
    add("--define", action="append", default=[], metavar="NAME=VALUE", help="a macro")
    add("--device", default="m1", help="the simulated device (default: m1)")
    add("--pipeline-threads", type=int, metavar="N", help="cap of threads in a threadgroup, below the device's")
    add("--strict", action="store_true", help="reject also what only Apple's compiler rejects")
    add("--print", type=int, default=8, metavar="N", help="elements of each output to print (default: 8)")
    add("--time-limit", type=float, metavar="SECONDS", help="give up after so long")


def _specification(options: argparse.Namespace, text: str) -> Specification:
    found = read_comments(text)
    for key in ("kernel", "grid", "threadgroup"):
        if getattr(options, key):
            found.add(key, "", getattr(options, key))
    for key in ("buffer", "constant", "threadgroup_memory"):
        found.add_pairs(key, getattr(options, key))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise mismatch("simulator", "a file that can be read", f"{path} ({reason})") from None


def _run(options: argparse.Namespace, check: bool) -> Run:
    given = _specification(options, _read(options.file))
    grid, threadgroup = read_sizes("grid", given.grid), read_sizes("threadgroup", given.threadgroup)
    buffers: dict[int | str, Any] = {index: read_buffer(text, index) for index, text in given.buffers.items()}
    memory: dict[int | str, int] = {index: int(read_scalar(text)) for index, text in given.threadgroup_memory.items()}
    device = find_device(options.device)
    if options.pipeline_threads is not None:
        device = device.with_pipeline_threads(options.pipeline_threads)
    file = MetalFile(
        options.file,
        include=options.include,
        constants={index: read_scalar(text) for index, text in given.constants.items()},
        defines=options.define,
        check=check,
        strict=options.strict,
        device=device,
    )
    return file.run(
        given.kernel or None,
        buffers=buffers,
        grid=grid,
        threadgroup=threadgroup,
        threadgroup_memory=memory,
        collect=True,
        time_limit=options.time_limit,
    )


def _save(pairs: Sequence[str], outputs: dict[int, Any]) -> None:
    for pair in pairs:
        index, equals, path = pair.partition("=")
        if not equals or not index.isdigit() or int(index) not in outputs:
            written = ", ".join(map(str, outputs)) or "none"
            raise mismatch("simulator", f"--save INDEX=FILE.npy of a buffer that was written ({written})", repr(pair))
        value = outputs[int(index)]
        if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
            value = value.astype(mx.float32)  # which holds each bfloat16 exactly; numpy has no such type
        try:
            np.save(path, np.asarray(value))
        except OSError as error:
            raise mismatch("simulator", "a file that can be written", f"{path} ({error.strerror})") from None


def _print_outputs(outputs: dict[int, Any], count: int) -> None:
    for index, value in sorted(outputs.items()):
        array = value if isinstance(value, mx.array) else mx.array(value)
        shown: Any = array.reshape(-1)[: max(count, 0)].tolist()
        more = " ..." if array.size > len(shown) else ""
        kind = str(array.dtype).rpartition(".")[2]
        numbers = " ".join(f"{number:.6g}" if isinstance(number, float) else str(number) for number in shown)
        print(f"buffer {index}: {kind} {'x'.join(map(str, array.shape))}: {numbers}{more}")


def _print_findings(run: Run) -> None:
    for finding in run.launch.findings:
        print(finding)
    for finding in run.launch.benign:
        print(f"benign: {finding}")
    count = len(run.launch.findings)
    print("nothing found" if not count else f"{count} finding{'s' * (count != 1)}")


def _devices() -> None:
    print(f"{'name':10} {'family':8} {'GPU cores':>9} {'GB/s':>7} {'threads':>8} {'threadgroup bytes':>18}")
    for device in DEVICES.values():
        print(
            f"{device.name:10} {device.family:8} {device.gpu_cores:9} {device.memory_gb_per_s:7g}"
            f" {device.max_threads:8} {device.threadgroup_bytes:18}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 where something is wrong with the kernel, 2 for bad usage."""
    options = _parser().parse_args(arguments)
    if options.command == "devices":
        _devices()
        return 0
    try:
        run = _run(options, options.command == "check")
        _save(options.save, run.outputs)
        if options.command == "check":
            _print_findings(run)
            return FOUND if run.launch.findings else 0
        _print_outputs(run.outputs, options.print)
    except (CompileError, SimulatorFault) as error:
        print(error, file=sys.stdout if options.command == "check" else sys.stderr)
        return FOUND
    except MetileError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
