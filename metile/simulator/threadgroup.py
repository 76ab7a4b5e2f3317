"""Variables in threadgroup memory: their declarations become references into the memory of the threadgroup."""

from __future__ import annotations

from dataclasses import dataclass, field

from metile.simulator.tokens import Token, after_angle, after_bracket, blank, phrase, split
from metile.targets.compiler import CompileError

_QUALIFIERS = frozenset({"const", "volatile", "typename"})
_DROPPED = frozenset({"threadgroup", "static", "constexpr", "inline"})
_BUILTIN = frozenset({"unsigned", "signed", "long", "short", "int", "char", "float", "half", "bool", "double"})
_NO_DECLARATION = frozenset({"typedef", "using", "template", "return", "friend", "extern", "goto", "case"})


def rewrite_threadgroup(tokens: list[Token]) -> None:
    """Rewrite the declarations of threadgroup variables in place; pointers and references stay as they are.

    Raises:
        CompileError: a variable with an initializer.
    """
    blocks: list[bool] = []
    start = index = 0
    while index < len(tokens):
        token = tokens[index]
        if token.kind == "sign" and token.text in ("(", "["):
            index = _through_bracket(tokens, index)
            continue
        if token.kind == "sign" and token.text in (";", "{", "}", ":"):
            if token.text == "{":
                blocks.append(_is_block(tokens[start:index], blocks))
            elif token.text == "}" and blocks:
                blocks.pop()
            start = index + 1
        elif token.text == "threadgroup" and token.kind == "name" and blocks and blocks[-1]:
            index = _declaration(tokens, start, index)
            continue
        index += 1


def _through_bracket(tokens: list[Token], index: int) -> int:
    """Skip a bracket, but look into one that holds a block."""
    stop = after_bracket(tokens, index)
    return index + 1 if any(token.text == "{" for token in tokens[index:stop]) else stop


def _is_block(statement: list[Token], blocks: list[bool]) -> bool:
    words = [token.text for token in statement if token.text]
    if "namespace" in words or "extern" in words:
        return False
    record = any(word in ("struct", "class", "union", "enum") for word in words)
    return not record or "(" in words or "=" in words


def _declaration(tokens: list[Token], start: int, index: int) -> int:
    """Rewrite the statement from `start` with ``threadgroup`` at `index`, if it declares variables."""
    stop = index
    while tokens[stop].kind != "end" and tokens[stop].text != ";":
        stop = after_bracket(tokens, stop) if tokens[stop].text in ("(", "[", "{") else stop + 1
    while start < index and (tokens[start].text in ("else", "do", "") or tokens[start].text == "if"):
        start = after_bracket(tokens, start + 1) if tokens[start].text == "if" else start + 1
    statement = [token for token in tokens[start:stop] if token.text]
    if any(token.text in _NO_DECLARATION for token in statement[:2]):
        return index + 1
    kind = _specifiers([*statement, Token("end", "")])
    if kind is None:
        return index + 1
    declarators = split(statement[kind.length :])
    if all(_is_pointer(declarator) for declarator in declarators):
        return stop
    text = _rewritten(kind, declarators)
    blank(tokens, start, stop)
    tokens[start].text = text
    return stop


@dataclass
class _Type:
    """What stands before the declarators: how many tokens, the type without what is not of it, ``alignas``."""

    length: int = 0
    kept: list[Token] = field(default_factory=list)
    alignment: str = ""


def _specifiers(tokens: list[Token]) -> _Type | None:
    """Read the type that a declaration of threadgroup memory begins with; None where it is no such declaration."""
    found, named, own = _Type(), False, False
    while tokens[found.length].kind != "end":
        index = found.length
        text, after = tokens[index].text, tokens[index + 1].text
        if text == "alignas" and after == "(":
            found.length = after_bracket(tokens, index + 1)
            found.alignment = phrase(tokens[index + 2 : found.length - 1])
            continue
        if text in _DROPPED:
            own = own or text == "threadgroup"
            found.length += 1
            continue
        stop = _type_part(tokens, index, named)
        if stop == index:
            break
        named = named or not (text in _QUALIFIERS or text == "__attribute__")
        found.kept += tokens[index:stop]
        found.length = stop
    return found if named and own else None


def _type_part(tokens: list[Token], index: int, named: bool) -> int:
    """Return the index after the part of a type at `index`; `index` itself where the type has ended."""
    text, after = tokens[index].text, tokens[index + 1].text
    if text in ("__attribute__", "decltype") and after == "(":
        return index if named and text == "decltype" else after_bracket(tokens, index + 1)
    if text in _QUALIFIERS or text in _BUILTIN:
        return index + 1
    if named:
        return index
    if text in ("struct", "union", "class", "enum"):
        index += 2 if tokens[index + 1].kind == "name" else 1
        return after_bracket(tokens, index) if tokens[index].text == "{" else index
    return _qualified_name(tokens, index) if tokens[index].kind == "name" or text == "::" else index


def _qualified_name(tokens: list[Token], index: int) -> int:
    """Return the index after ``a::b<c>::template d<e>``."""
    while tokens[index].kind == "name" or tokens[index].text == "::":
        word = tokens[index].kind == "name" and tokens[index].text != "template"
        index += 1
        if tokens[index].text == "<":
            index = after_angle(tokens, index) or index + 1
        if word and tokens[index].text != "::":
            break
    return index


def _is_pointer(declarator: list[Token]) -> bool:
    first = declarator[0].text
    return first in ("*", "&") or (first == "(" and declarator[1].text in ("*", "&"))


def _rewritten(found: _Type, declarators: list[list[Token]]) -> str:
    kind = phrase(found.kept)
    statements: list[str] = []
    if len(declarators) > 1 and any(token.text == "{" for token in found.kept):
        base = f"__msl_base_{_name(declarators[0])}"
        statements, kind = [f"typedef {kind} {base}"], base
    for declarator in declarators:
        if _is_pointer(declarator):
            statements.append(f"threadgroup {kind} {phrase(declarator)}")
        else:
            statements.append(_variable(kind, declarator, found.alignment))
    return "; ".join(statements)


def _name(declarator: list[Token]) -> str:
    return next(token.text for token in declarator if token.kind == "name")


def _variable(kind: str, declarator: list[Token], alignment: str) -> str:
    name = _name(declarator)
    place = next(index for index, token in enumerate(declarator) if token.kind == "name")
    bounds = declarator[place + 1 :]
    index = 1 if bounds and bounds[0].text == ")" else 0
    end = index
    closed = [*bounds, Token("end", "")]
    while closed[end].text == "[":
        end = after_bracket(closed, end)
    if closed[end].kind != "end":
        raise CompileError(
            f"[compile] expected no initializer for threadgroup variable '{name}' but got {phrase(bounds[end:])}"
        )
    alias, align = f"__msl_type_{name}", "1"
    tag = ""
    if alignment:
        # A type or a number: alignas takes either, alignof of what it aligns is a number.
        tag, align = f"struct alignas({alignment}) __msl_aligned_{name} {{}}; ", f"alignof(__msl_aligned_{name})"
    return (
        f"{tag}typedef {kind} {alias}{phrase(bounds[index:end])}; static device char __msl_key_{name}; "
        f"threadgroup {alias}& {name} = "
        f'__msl_glue::variable<{alias}>(&__msl_key_{name}, {align}, "{name}")'
    )
