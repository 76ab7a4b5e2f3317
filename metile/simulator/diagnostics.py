"""Clang's messages in the user's terms: the file and line of the source, Metal's names of address spaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from metile.targets.compiler import CompileError

_SHOWN = 5
_MESSAGE = re.compile(
    r"^(?P<file>.*?):(?P<line>\d+):(?P<column>\d+):(?P<ranges>(?:\{[\d:-]+\})*:?) "
    r"(?P<kind>fatal error|error|warning|note): (?P<text>.*)$"
)
_OWN_FILE = re.compile(r"(^|/)(<glue>|prelude-[0-9a-f]+\.h)$")
_SPACES = {
    "__global": "device",
    "__local": "threadgroup",
    "__constant": "constant",
    "__private": "thread",
    "__generic ": "",
}


@dataclass(frozen=True)
class Message:
    """One message of the compiler; `ranges` are the parts of the line it speaks of."""

    file: str
    line: int
    column: int
    kind: str
    text: str
    ranges: tuple[tuple[int, int, int, int], ...] = ()


def metal_words(text: str) -> str:
    """Return `text` with Metal's words for what OpenCL calls otherwise."""
    for word, metal in _SPACES.items():
        text = re.sub(rf"{word}\b" if word.strip() == word else word, metal, text)
    text = re.sub(r"__msl_(local|global|generic|read_only|write_only|read_write|pipe|vec_step)\b", r"\1", text)
    text = re.sub(r"__msl_type_(\w+)", r"type of \1", text)
    if "'this' argument" in text and "constant " in text:
        text = text.replace("is not marked const", "is not marked constant")
    return re.sub(r"\b__bf16\b", "bfloat", text).replace("OpenCL", "Metal")


def read_messages(stderr: str) -> list[Message]:
    """Read what the compiler wrote."""
    found: list[Message] = []
    for line in stderr.splitlines():
        if match := _MESSAGE.match(line):
            ranges = re.findall(r"\{(\d+):(\d+)-(\d+):(\d+)\}", match["ranges"])
            numbers = tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in ranges)
            kind = match["kind"].removeprefix("fatal ")
            where = int(match["line"]), int(match["column"])
            found.append(Message(match["file"], *where, kind, match["text"], numbers))
    return found


def located(file: str, line: int, text: str, source: str, source_file: str, include: Sequence[Path] = ()) -> str:
    """Return ``file:line: text`` and the line itself, where it is of the user's own text."""
    if _OWN_FILE.search(file):
        file = "metal_stdlib"
    for path in include:
        file = file.removeprefix(f"{path}/")
    lines = source.splitlines()
    shown = f"\n    {lines[line - 1].strip()}" if file == source_file and 0 < line <= len(lines) else ""
    return f"{file}:{line}: {metal_words(text)}{shown}"


def raise_errors(stderr: str, source: str, file: str, include: Sequence[Path] = ()) -> NoReturn:
    """Raise the first errors that the compiler wrote.

    Args:
        stderr: what it wrote.
        source: the user's text, of which lines are shown.
        file: the name of that text.
        include: folders whose path is left out of names.

    Raises:
        CompileError: always.
    """
    messages = read_messages(stderr)
    errors = [index for index, message in enumerate(messages) if message.kind == "error"]
    texts: list[str] = []
    for index in errors:
        message = messages[index]
        text = located(message.file, message.line, message.text, source, file, include)
        if message.file != file and (user := _user_note(messages, index, file)):
            text += f"\n  from {located(user.file, user.line, user.text, source, file)}"
        if text not in texts:
            texts.append(text)
    if not texts:
        raise CompileError(f"[compile] {(stderr.strip().splitlines() or ['no message'])[-1]}")
    more = f"\n({len(texts) - _SHOWN} more)" if len(texts) > _SHOWN else ""
    raise CompileError("[compile] " + "\n".join(texts[:_SHOWN]) + more)


def _user_note(messages: Sequence[Message], index: int, file: str) -> Message | None:
    """Return the first note after the error at `index` that speaks of the user's text."""
    for message in messages[index + 1 :]:
        if message.kind == "error":
            return None
        if message.file == file:
            return message
    return None
