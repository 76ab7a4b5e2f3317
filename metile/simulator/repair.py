"""What is legal in Metal and clang's C++ for OpenCL has no rule for: the compiler's own errors show where to help it.

Five kinds: a copy of a struct out of constant memory (there is no such constructor), a method of thread memory called
on a temporary (which is in no address space) or from a constructor, pointers to members in constructors, structs of
two spaces as the choices of ``?:``, and casts between half and bfloat. The expression that the error names is wrapped
in a function that gives the same object in the space, or of a type, that is fit, and the text is compiled once more.
Other programs pay nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from metile.simulator import clang
from metile.simulator.clang import Build
from metile.simulator.diagnostics import Message, raise_errors, read_messages

_ROUNDS = 8
_FROM_CONSTANT = "cannot bind reference in address space '__constant' to object in address space '__generic'"
_OBJECT = r"^cannot initialize object parameter of type '(?:const )?__private [^']*' with an expression of type "
_ON_TEMPORARY = re.compile(_OBJECT + r"'(?!.*__\w+ )")
_ON_PART = re.compile(
    _OBJECT + r"'(?:const )?__generic "
    r"|^binding reference of type '(?:const )?__private [^']*' to value of type '(?:const )?__generic "
    r"|^cannot initialize .* of type '(?:const )?__private [^']*' with an [lr]value of type '(?:const )?__generic "
)
_HALF_CAST = re.compile(
    r"^(static_cast|C-style cast|functional-style cast) from (?=.*'half')(?=.*'(?:bfloat|__bf16)').* is not allowed$"
)
_CHOICES = re.compile(
    r"^incompatible operand types \('(?:const )?(?:__\w+ )?([^'*]+)' and '(?:const )?(?:__\w+ )?([^'*]+)'\)"
)
_MARKER = re.compile(r'^#\s*(?:line\s+)?\d+\s+"((?:[^"\\]|\\.)*)"', re.MULTILINE)


def compile_text(
    unit: str, build: Build, arguments: Sequence[str], source: str, file: str, include: Sequence[Path]
) -> str:
    """Compile `unit`, and return what the compiler printed.

    Args:
        unit: rewritten source.
        build: how to compile it.
        arguments: further ones of the compiler, which say what to make.
        source: the user's text, of which messages show lines.
        file: the name of that text.
        include: folders whose path is left out of names.

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
    """Return `unit` with the expressions wrapped that `messages` say have the wrong address space."""
    lines = unit.splitlines(keepends=True)
    files = {"<stdin>", *_MARKER.findall(unit)}
    edits: dict[int, dict[tuple[int, int], str]] = {}
    for index, message in enumerate(messages):
        if message.kind != "error" or not message.ranges or message.file not in files:
            continue
        function = _helper(messages, index)
        # Ranges count the lines of the text itself, whatever its line markers say.
        for first, begin, last, end in message.ranges[-2 if function == "valued" else -1 :]:
            if function and first == last <= len(lines):
                edits.setdefault(first - 1, {})[begin - 1, end - 1] = function
    for line, ranges in edits.items():
        lines[line] = _wrapped(lines[line], ranges)
    return "".join(lines)


def _helper(messages: Sequence[Message], index: int) -> str:
    """Return the function that helps with the error at `index`; empty where none does."""
    if _ON_TEMPORARY.match(messages[index].text):
        return "held"
    if _HALF_CAST.match(messages[index].text):
        return "widened"
    if _ON_PART.match(messages[index].text):
        return "mine"
    if (choices := _CHOICES.match(messages[index].text)) and choices.group(1) == choices.group(2):
        return "valued"
    return "copied" if _is_constant_copy(messages, index) else ""


def _is_constant_copy(messages: Sequence[Message], index: int) -> bool:
    """Tell whether a note of the error at `index` says that its source is in constant memory."""
    for message in messages[index + 1 :]:
        if message.kind != "note":
            return False
        if _FROM_CONSTANT in message.text and "the implicit" in message.text:
            return True
    return False


def _wrapped(line: str, ranges: Mapping[tuple[int, int], str]) -> str:
    """Wrap the parts of a line, given in bytes, in calls of functions; of two that overlap, the later."""
    data = line.encode()
    done = len(data)
    for (begin, end), function in sorted(ranges.items(), reverse=True):
        if end > done:
            continue
        text = data[begin:end]
        head, tail = (b"{", b"}") if text.startswith(b"{") and text.endswith(b"}") else (b"", b"")
        inner = text[len(head) : len(text) - len(tail)]
        if function == "mine" and re.match(rb"\w+\s*[(<]", data[begin:]) and re.fullmatch(rb"\w+", inner):
            changed = b"__msl_glue::mine(*this)." + inner
        else:
            changed = f"__msl_glue::{function}(".encode() + inner + b")"
        data = data[:begin] + head + changed + tail + data[end:]
        done = begin
    return data.decode()
