"""Metal source as tokens, each with the space before it, so that an edit keeps every line where it was."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<marker>^[ \t]*\#[^\n]*(?:\\\n[^\n]*)*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<character>'(?:\\.|[^'\\\n])*')
  | (?P<name>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
  | (?P<sign>::|->|<<=|>>=|<=>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class Token:
    """One token: its kind (``name``, ``number``, ``string``, ``character``, ``sign``), text, and what stands before it.

    `space` holds blanks, comments, and the line markers of a preprocessor. The last token of a text is empty, of
    kind ``end``, so that a look ahead always finds one.
    """

    kind: str
    text: str
    space: str = ""


def tokenize(text: str) -> list[Token]:
    """Split `text`; `untokenize` gives it back unchanged."""
    tokens: list[Token] = []
    space = ""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "sign"
        if kind in ("space", "marker"):
            space += match.group()
        else:
            tokens.append(Token(kind, match.group(), space))
            space = ""
    return [*tokens, Token("end", "", space)]


def untokenize(tokens: list[Token]) -> str:
    """Return the text of `tokens`, spaces included."""
    return "".join(token.space + token.text for token in tokens)


def phrase(tokens: list[Token]) -> str:
    """Return the text of `tokens` on one line, with single blanks, comments and line markers left out."""
    parts: list[str] = []
    for token in tokens:
        if parts and token.space:
            parts.append(" ")
        parts.append(token.text)
    return "".join(parts).strip()


def blank(tokens: list[Token], start: int, stop: int) -> None:
    """Empty the tokens from `start` up to `stop`; the lines stay."""
    for token in tokens[start:stop]:
        token.kind, token.text = "sign", ""


def after_bracket(tokens: list[Token], start: int) -> int:
    """Return the index after the bracket that closes the ``(``, ``[`` or ``{`` at `start` (the end if none does)."""
    stack = [_CLOSING[tokens[start].text]]
    index = start + 1
    while stack and tokens[index].kind != "end":
        text = tokens[index].text if tokens[index].kind == "sign" else ""
        if text in _CLOSING:
            stack.append(_CLOSING[text])
        elif text == stack[-1]:
            stack.pop()
        index += 1
    return index


def after_angle(tokens: list[Token], start: int) -> int | None:
    """Return the index after the ``>`` that closes the ``<`` at `start`; None where it is a comparison."""
    depth, index = 0, start
    while tokens[index].kind != "end":
        text = tokens[index].text
        if text in ("(", "[", "{") and tokens[index].kind == "sign":
            index = after_bracket(tokens, index)
            continue
        if text in (";", "}", ")", "]"):
            return None
        depth += {"<": 1, ">": -1}.get(text, 0)
        index += 1
        if depth == 0:
            return index
    return None


def split(tokens: list[Token], separator: str = ",") -> list[list[Token]]:
    """Split at each `separator` that stands in no bracket, template arguments included."""
    parts: list[list[Token]] = [[]]
    index, copy = 0, [*tokens, Token("end", "")]
    while index < len(tokens):
        token, stop = tokens[index], index + 1
        if token.kind == "sign" and token.text in _CLOSING:
            stop = after_bracket(copy, index)
        elif token.text == "<" and index and tokens[index - 1].kind == "name":
            stop = after_angle(copy, index) or stop
        if token.text == separator:
            parts.append([])
        else:
            parts[-1].extend(tokens[index:stop])
        index = stop
    return [part for part in parts if part]
