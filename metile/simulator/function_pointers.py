"""Template parameters that are pointers to functions: clang's OpenCL C++ takes them as ``auto`` only."""

from __future__ import annotations

from metile.simulator.tokens import Token, after_angle, after_bracket, blank


def rewrite_function_pointers(tokens: list[Token]) -> None:
    """Rewrite ``template <Function f>`` and ``template <void (*f)(int)>`` to ``template <auto f>`` in place."""
    aliases = function_aliases(tokens)
    for index, token in enumerate(tokens):
        if token.text == "template" and tokens[index + 1].text == "<":
            stop = after_angle(tokens, index + 1)
            for start, end in _parameters(tokens, index + 2, (stop or index + 3) - 1):
                _rewrite_parameter(tokens, start, end, aliases)


def function_aliases(tokens: list[Token]) -> set[str]:
    """Return the names that ``using`` and ``typedef`` give to pointers to functions."""
    names: set[str] = set()
    for index, token in enumerate(tokens):
        if token.kind != "name" or token.text not in ("using", "typedef"):
            continue
        end = index
        while tokens[end].text not in (";", "{") and tokens[end].kind != "end":
            if name := _pointer(tokens, end):
                names.add(tokens[index + 1].text if token.text == "using" else name)
            end += 1
    return names


def _pointer(tokens: list[Token], index: int) -> str:
    """Return the name in ``(*name)(``, or ``*`` where it has none; empty where there is no such thing at `index`."""
    if tokens[index].text != "(" or tokens[index + 1].text != "*":
        return ""
    named = tokens[index + 2].kind == "name"
    closing = index + 2 + named
    found = tokens[closing].text == ")" and tokens[closing + 1].text == "("
    return (tokens[index + 2].text if named else "*") if found else ""


def _parameters(tokens: list[Token], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of the template parameters between two indices."""
    ranges: list[tuple[int, int]] = []
    begin = index = start
    while index < stop:
        if tokens[index].text == ",":
            ranges.append((begin, index))
            begin = index + 1
        if tokens[index].text in ("(", "[", "{"):
            index = after_bracket(tokens, index)
        elif tokens[index].text == "<":
            index = after_angle(tokens, index) or index + 1
        else:
            index += 1
    return [*ranges, (begin, stop)]


def _rewrite_parameter(tokens: list[Token], start: int, end: int, aliases: set[str]) -> None:
    for index in range(start, end):
        if name := _pointer(tokens, index):
            blank(tokens, start, end)
            tokens[start].text = f"auto {name}" if name != "*" else "auto"
            return
    if tokens[start].text in aliases:
        after = after_angle(tokens, start + 1) if tokens[start + 1].text == "<" else start + 1
        if after is not None and after <= end:
            blank(tokens, start, after)
            tokens[start].text = "auto"
