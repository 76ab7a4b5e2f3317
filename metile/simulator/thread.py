"""Thread memory: which methods belong to it, and parameters that a temporary may be bound to.

In Metal a method without an address space is one of thread memory; in OpenCL C++ it takes any. Clang has no constructor
of thread memory, and temporaries are in no space, so constructors and most operators stay without one.
"""

from __future__ import annotations

from metile.simulator.tokens import Token, after_angle, after_bracket, blank

# Stands where `thread` was taken away, and means nothing.
DROPPED = "__msl_thread"

_SPECIFIERS = frozenset({"template", "inline", "constexpr", "explicit", "METAL_FUNC", "__attribute__", "friend"})
_NOT_METHODS = frozenset({"static", "friend", "typedef", "using", "=", "operator", "static_assert", "extern"})
_NO_NAMES = frozenset({"__attribute__", "alignas", "decltype", "noexcept", "static_assert", "sizeof"})
_SPACES = frozenset({"thread", "device", "threadgroup", "constant"})


def rewrite_thread(tokens: list[Token]) -> None:
    """Rewrite in place what says, or in Metal means, ``thread``."""
    _rewrite_qualifiers(tokens)
    _qualify_methods(tokens)


def _qualify_methods(tokens: list[Token]) -> None:
    """Add ``thread`` to methods without an address space, in their classes and where they are defined outside."""
    classes: list[str] = []
    methods: set[tuple[str, str]] = set()
    start = index = 0
    while index < len(tokens):
        token = tokens[index]
        if token.kind == "sign" and token.text == "(":
            closing = after_bracket(tokens, index) - 1
            method = _method(tokens, start, index, closing, classes, methods)
            if method:
                methods.add(method)
                tokens[closing].text = ") thread"
            index = closing if method or not any(t.text == "{" for t in tokens[index:closing]) else index
        elif token.kind == "sign" and token.text in (";", "{", "}", ":"):
            if token.text == "{":
                classes.append(_class_name(tokens, start, index))
            elif token.text == "}" and classes:
                classes.pop()
            start = index + 1
        index += 1


def _class_name(tokens: list[Token], start: int, index: int) -> str:
    """Return the name of the class whose ``{`` stands at `index`; empty for any other brace."""
    words = [token.text for token in _without_specifiers(tokens[start:index])]
    if "(" in words or "=" in words:
        return ""
    kinds = [place for place, word in enumerate(words) if word in ("struct", "class", "union")]
    if not kinds:
        return ""
    name = words[kinds[0] + 1 : kinds[0] + 2]
    return name[0] if name else "?"


def _method(
    tokens: list[Token], start: int, opening: int, closing: int, classes: list[str], methods: set[tuple[str, str]]
) -> tuple[str, str] | None:
    """Return class and name where the bracket holds the parameters of a method that has no address space."""
    name = tokens[opening - 1]
    words = {token.text for token in tokens[start:opening]}
    if "operator" in words and "thread" in words:
        # It hands out a part of its object.
        words -= {"operator", "="}
        name = Token("name", name.text)
    if name.kind != "name" or name.text in _NO_NAMES or words & _NOT_METHODS:
        return None
    after = closing + 1
    while tokens[after].text in ("const", "volatile", "noexcept", ""):
        after += 1
    if tokens[after].text in _SPACES or tokens[after].text not in ("{", ";", "-"):
        return None
    declaration = _without_specifiers([token for token in tokens[start:opening] if token.text])
    if len(declaration) < 2 or not (
        declaration[-2].kind == "name" or declaration[-2].text in (">", "*", "&", "::", "~")
    ):
        return None
    if declaration[-2].text == "::":
        owner = _owner(declaration)
        return (owner, name.text) if (owner, name.text) in methods else None
    inside = bool(classes) and classes[-1] != ""
    return (classes[-1], name.text) if inside and declaration[-2].text != "~" else None


def _owner(declaration: list[Token]) -> str:
    """Return the class of ``type Class<arguments>::name``."""
    index = len(declaration) - 3
    depth = 0
    while index > 0:
        depth += {">": 1, "<": -1}.get(declaration[index].text, 0)
        if depth == 0 and declaration[index].kind == "name":
            break
        index -= 1
    return declaration[index].text


def _rewrite_qualifiers(tokens: list[Token]) -> None:
    """Take ``thread`` away where clang has no object of that space: constructors, operators, temporaries."""
    for index, token in enumerate(tokens):
        if token.kind == "name" and token.text == "thread":
            if _is_method_qualifier(tokens, index):
                if not _stays_thread(tokens, index):
                    token.text = DROPPED
            else:
                _pass_by_value(tokens, index)


def _is_method_qualifier(tokens: list[Token], index: int) -> bool:
    before = index - 1
    while tokens[before].text in ("const", "volatile", "noexcept", ""):
        before -= 1
    return before > 0 and tokens[before].text == ")"


def _open_bracket(tokens: list[Token], index: int) -> int:
    """Return the index of the ``(`` that the ``)`` at `index` closes."""
    depth = 0
    while index > 0:
        depth += {")": 1, "(": -1}.get(tokens[index].text, 0)
        if depth == 0:
            return index
        index -= 1
    return 0


def _stays_thread(tokens: list[Token], index: int) -> bool:
    """Tell whether the method with the qualifier at `index` can stay in thread memory.

    Clang has no constructor there, and no operator that a temporary could use; an operator that hands out a pointer or
    reference to thread memory must stay.
    """
    closing = index - 1
    while tokens[closing].text != ")":
        closing -= 1
    opening = before = _open_bracket(tokens, closing)
    while before > 0 and tokens[before - 1].text not in (";", "{", "}", ":"):
        before -= 1
    words = [token for token in tokens[before:opening] if token.text]
    if any(token.text == "operator" for token in words):
        return "thread" in [token.text for token in words[: [token.text for token in words].index("operator")]]
    head = _without_specifiers(words)
    if len(head) > 2 and head[-2].text == "::":
        return head[0].text != head[-1].text
    return len(head) > 1 and head[-2].text != "~"


def _without_specifiers(tokens: list[Token]) -> list[Token]:
    """Return the declaration without what may stand before its type: template parameters, specifiers."""
    tokens = [*tokens, Token("end", "")]
    index = 0
    while tokens[index].text in _SPECIFIERS:
        after = tokens[index + 1].text
        if after == "<":
            index = after_angle(tokens, index + 1) or index + 2
        else:
            index = after_bracket(tokens, index + 1) if after == "(" else index + 1
    return tokens[index:-1]


def _pass_by_value(tokens: list[Token], index: int) -> None:
    """Rewrite the parameter ``thread const X& name`` to ``const X name``: a temporary is in no address space."""
    others = [i for i in (index - 1, index + 1) if tokens[i].text == "const"]
    start = min([index, *others])
    if not others or tokens[start - 1].text not in ("(", ","):
        return
    end = start
    while tokens[end].text not in (",", ")", "&", "*", "(", ";", "{"):
        end = (after_angle(tokens, end) or end + 1) if tokens[end].text == "<" else end + 1
    after = end + 1 + (tokens[end + 1].kind == "name")
    if _is_copy_constructor(tokens, start, end):
        tokens[index].text = DROPPED
    elif tokens[end].text == "&" and tokens[after].text in (",", ")", "=", "["):
        blank(tokens, index, index + 1)
        blank(tokens, end, end + 1)


def _is_copy_constructor(tokens: list[Token], start: int, end: int) -> bool:
    """Tell whether the parameter from `start` is that of a copy constructor, which is never passed by value."""
    names = [
        token.text for token in tokens[start:end] if token.kind == "name" and token.text not in ("const", "thread")
    ]
    return tokens[start - 1].text == "(" and names[:1] == [tokens[start - 2].text]
