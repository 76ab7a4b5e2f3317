"""Strict mode: what Apple's compiler rejects and clang's C++ for OpenCL lets pass is rejected here.

Clang itself rejects pointers and references that change address space. The rest is found in two passes: over the tokens
(words that Metal has no use for) and over the syntax tree.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from metile.simulator import clang
from metile.simulator.clang import Build
from metile.simulator.diagnostics import located
from metile.simulator.repair import compile_text
from metile.simulator.syntax import Lines, Violation, violations
from metile.simulator.tokens import Token, after_bracket, tokenize
from metile.targets.compiler import CompileError

_SHOWN = 8
_DEPTH = 20_000
_WORDS = {
    "double": "'double' is not supported in Metal",
    "goto": "'goto' is not supported in Metal",
    "try": "exceptions are not supported in Metal",
    "throw": "exceptions are not supported in Metal",
    "catch": "exceptions are not supported in Metal",
    "virtual": "virtual functions are not supported in Metal",
    "dynamic_cast": "'dynamic_cast' is not supported in Metal",
    "typeid": "'typeid' is not supported in Metal",
    "thread_local": "'thread_local' is not supported in Metal",
    "asm": "inline assembly is not supported in Metal",
    "__asm": "inline assembly is not supported in Metal",
    "__asm__": "inline assembly is not supported in Metal",
    "new": "'new' is not supported in Metal",
    "delete": "'delete' is not supported in Metal",
    **{
        word: f"'{word}' is no word of Metal: address spaces are device, threadgroup, thread and constant"
        for word in ("__global", "__local", "__private", "__generic", "__constant", "__kernel")
    },
}
_LAMBDA = "lambda expressions are not supported in Metal"
_BEFORE_SUBSCRIPT = frozenset({")", "]", ">", "}"})
_BEFORE_LAMBDA = frozenset({"return", "case", "else", "co_return"})


def check_strict(unit: str, source: str, preprocessed: str, file: str, include: Sequence[Path]) -> None:
    """Reject what Apple's compiler would; the verdict of a text is kept in the cache.

    Args:
        unit: rewritten source with entry points, which compiles.
        source: the user's text.
        preprocessed: the same after preprocessing.
        file: the name of the user's text.
        include: folders whose path is left out of names.

    Raises:
        CompileError: with a line for each violation.
    """
    path = clang.folder() / f"strict-{clang.key(Build(), 'strict', unit, preprocessed, _version())}.json"
    if clang.is_intact(path):
        found = [Violation(*one) for one in json.loads(clang.read_sealed(path))]
    else:
        found = list(_words(preprocessed))
        try:
            tree = compile_text(unit, Build(), ("-fsyntax-only", "-Xclang", "-ast-dump=json"), source, file, include)
            with _deep_trees():
                found += violations(json.loads(tree), Lines(unit))
        except CompileError:
            # Words give the better reason for what does not compile.
            if not found:
                raise
        found = sorted(dict.fromkeys(found), key=lambda one: (one.file != file, one.file, one.line))
        clang.write_sealed(path, json.dumps([(one.file, one.line, one.reason) for one in found]).encode())
    if found:
        texts = [located(one.file, one.line, one.reason, source, file, include) for one in found]
        more = f"\n({len(texts) - _SHOWN} more)" if len(texts) > _SHOWN else ""
        raise CompileError("[strict] " + "\n".join(texts[:_SHOWN]) + more)


def _version() -> str:
    """Return the text of the rules, a part of every verdict's name."""
    return "".join((Path(__file__).parent / name).read_text() for name in ("strict.py", "syntax.py"))


@contextlib.contextmanager
def _deep_trees() -> Iterator[None]:
    """Let long expressions, which are deep trees, be read."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _words(preprocessed: str) -> Iterator[Violation]:
    """Find what Metal has no use for whatever its meaning."""
    tokens = tokenize(preprocessed)
    lines = Lines(preprocessed)
    physical = 1
    for index, token in enumerate(tokens):
        physical += token.space.count("\n")
        if reason := _reason(tokens, index):
            yield Violation(*lines.place(physical), reason)
        physical += token.text.count("\n")


def _reason(tokens: list[Token], index: int) -> str:
    token, after = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else tokens[index]
    before = tokens[index - 1].text if index else ""
    if token.text == "[" and token.kind == "sign":
        return _LAMBDA if _is_lambda(tokens, index) else ""
    if token.kind != "name" or (token.text == "delete" and before == "=") or before in (".", "->"):
        return ""
    if token.text == "std" and after.text == "::":
        return "there is no namespace 'std' in Metal"
    return _WORDS.get(token.text, "")


def _is_lambda(tokens: list[Token], index: int) -> bool:
    before, after = tokens[index - 1], tokens[index + 1]
    if after.text == "[" or before.text == "[" or before.text in _BEFORE_SUBSCRIPT or before.kind in ("string", "end"):
        return False
    if before.kind in ("name", "number") and before.text not in _BEFORE_LAMBDA:
        return False
    return tokens[after_bracket(tokens, index)].text in ("(", "{") and not re.fullmatch(r"[&*]+", before.text)
