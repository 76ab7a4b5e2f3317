"""Variables in threadgroup memory: their declarations become references into the memory of the threadgroup."""

from __future__ import annotations

from metile.simulator.tokens import Token, after_angle, after_bracket, blank, phrase, split
from metile.targets.compiler import CompileError

_QUALIFIERS = frozenset({"const", "volatile", "static", "constexpr", "typename", "inline", "coherent", "threadgroup"})
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
    length, alignment = _specifiers([*statement, Token("end", "")])
    if not length or not any(token.text == "threadgroup" for token in statement[:length]):
        return index + 1
    declarators = split(statement[length:])
    if all(_is_pointer(declarator) for declarator in declarators):
        return stop
    text = _rewritten([t for t in statement[:length] if t.text], declarators, alignment)
    blank(tokens, start, stop)
    tokens[start].text = text
    return stop


def _specifiers(tokens: list[Token]) -> tuple[int, str]:
    """Return how many tokens the type takes (0: it is none), and its alignment; that is blanked."""
    index, named, alignment = 0, False, ""
    while tokens[index].kind != "end":
        text, after = tokens[index].text, tokens[index + 1].text if tokens[index].text else ""
        if text in ("alignas", "__attribute__") and after == "(":
            stop = after_bracket(tokens, index + 1)
            if text == "alignas":
                alignment = phrase(tokens[index + 2 : stop - 1])
                blank(tokens, index, stop)
            index = stop
        elif text in _QUALIFIERS or text in _BUILTIN:
            named = named or text in _BUILTIN
            index += 1
        elif named:
            break
        elif text == "decltype" and after == "(":
            index, named = after_bracket(tokens, index + 1), True
        elif text in ("struct", "union", "class", "enum"):
            index += 2 if tokens[index + 1].kind == "name" else 1
            index = after_bracket(tokens, index) if tokens[index].text == "{" else index
            named = True
        elif tokens[index].kind == "name" or text == "::":
            index, named = _qualified_name(tokens, index), True
        else:
            return 0, alignment
    return (index if named else 0), alignment


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


def _rewritten(specifiers: list[Token], declarators: list[list[Token]], alignment: str) -> str:
    kept = [token for token in specifiers if token.text not in ("threadgroup", "static", "constexpr", "coherent")]
    kind = " ".join(token.text for token in kept)
    statements: list[str] = []
    if len(declarators) > 1 and any(token.text == "{" for token in kept):
        base = f"__msl_base_{_name(declarators[0])}"
        statements, kind = [f"typedef {kind} {base}"], base
    for declarator in declarators:
        if _is_pointer(declarator):
            statements.append(f"threadgroup {kind} {phrase(declarator)}")
        else:
            statements.append(_variable(kind, declarator, alignment))
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
