"""What Metal says and clang's OpenCL C++ does not, said in its words: attributes, kernels, constants, variables.

Every edit keeps the lines where they were, so that clang's messages and line tables speak of the user's source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from metile.simulator.function_pointers import function_aliases, rewrite_function_pointers
from metile.simulator.parameters import RawParameter, read_parameters
from metile.simulator.thread import rewrite_thread
from metile.simulator.threadgroup import rewrite_threadgroup
from metile.simulator.tokens import Token, after_angle, after_bracket, blank, phrase, split, tokenize, untokenize

Constant = bool | int | float

# Keywords of OpenCL that are ordinary names in Metal.
_OPENCL_WORDS = frozenset({"local", "global", "generic", "read_only", "write_only", "read_write", "pipe", "vec_step"})
_FLOAT = re.compile(
    r"((?:\d[\d']*\.[\d']*|\.\d[\d']*)(?:[eE][+-]?\d+)?|\d[\d']*[eE][+-]?\d+|0[xX][\da-fA-F.']+[pP][+-]?\d+)(bf|BF)?"
)
_MARKER = re.compile(r'^# (\d+) "([^"]*)"( 2)?[^\n]*\n', re.MULTILINE)
_HOST_NAME = re.compile(r'host_name\s*\(\s*((?:"[^"]*"\s*)+)\)')
_FUNCTION_CONSTANT = re.compile(r"\bfunction_constant\s*\(\s*(\d+)[uU]?\s*\)")
_MAX_THREADS = re.compile(r"\bmax_total_threads_per_threadgroup\s*\(\s*(\d+)[uU]?\s*\)")


@dataclass(frozen=True)
class KernelFunction:
    """A kernel function of the text.

    Attributes:
        name: with its namespaces.
        template: whether it takes template arguments.
        parameters: in order.
        max_threads: what ``max_total_threads_per_threadgroup`` says.
        returns: the return type.
    """

    name: str
    template: bool
    parameters: tuple[RawParameter, ...]
    max_threads: int | None
    returns: str


@dataclass
class Rewritten:
    """Text for clang, and what the rewriting learned.

    Attributes:
        text: OpenCL C++.
        kernels: kernel functions by name.
        instantiations: kernel with template arguments, by host name.
        undefined: function constants without a value: index by name.
    """

    text: str = ""
    kernels: dict[str, KernelFunction] = field(default_factory=dict)
    instantiations: dict[str, str] = field(default_factory=dict)
    undefined: dict[str, int] = field(default_factory=dict)


def rewrite(text: str, constants: Mapping[int, Constant]) -> Rewritten:
    """Rewrite preprocessed Metal source.

    Args:
        text: without directives, but for line markers.
        constants: values of function constants by index.

    Raises:
        CompileError: a declaration that has no counterpart.
    """
    head, tail = _included(text)
    before = _closed(head) if head else None
    if before is None:
        return _rewritten(tokenize(text), constants)
    after = _rewritten(tokenize(tail), constants)
    return Rewritten(
        before.text + after.text,
        before.kernels | after.kernels,
        before.instantiations | after.instantiations,
        after.undefined,
    )


def _included(text: str) -> tuple[str, str]:
    """Split preprocessed text behind the last of its includes; the first part may be empty."""
    main = _MARKER.search(text)
    returns = (
        [] if main is None else [match.end() for match in _MARKER.finditer(text) if match[2] == main[2] and match[3]]
    )
    place = returns[-1] if returns else 0
    return text[:place], text[place:]


@functools.lru_cache(maxsize=8)
def _closed(text: str) -> Rewritten | None:
    """Return what is included rewritten by itself, or None where the text behind it could change that."""
    tokens = tokenize(text)
    braces = [token.text for token in tokens]
    if "function_constant" in text or braces.count("{") != braces.count("}") or function_aliases(tokens):
        return None
    return _rewritten(tokens, {})


def _rewritten(tokens: list[Token], constants: Mapping[int, Constant]) -> Rewritten:
    result = Rewritten()
    _read_instantiations(tokens, result)
    _read_kernels(tokens, result)
    _define_constants(tokens, constants, result)
    for start, stop in _attributes(tokens, 0, len(tokens)):
        blank(tokens, start, stop)
    tokens = [token for token in tokens if token.text or token.space or token.kind == "end"]
    rewrite_function_pointers(tokens)
    rewrite_thread(tokens)
    rewrite_threadgroup(tokens)
    _rewrite_words(tokens)
    result.text = untokenize(tokens)
    return result


def _rewrite_words(tokens: list[Token]) -> None:
    """Rewrite single words: names that OpenCL takes, ``constant``, ``coherent``, literals."""
    for index, token in enumerate(tokens):
        if token.kind == "name" and token.text in _OPENCL_WORDS:
            token.text = f"__msl_{token.text}"
        elif token.text == "constant" and tokens[index - 1].text not in (")", "const"):
            # In Metal it implies const: a constant int& takes what is const too, a constant char* string literals.
            token.text = "constant" if tokens[index + 1].text == "const" else "constant const"
        elif token.kind == "name" and token.text == "coherent":
            blank(tokens, index, after_bracket(tokens, index + 1) if tokens[index + 1].text == "(" else index + 1)
        elif token.kind == "number" and (literal := _FLOAT.fullmatch(token.text)):
            # Single precision is what a literal has without a suffix.
            number, suffix = literal.groups()
            token.text = f"((bfloat){number}f)" if suffix else f"{number}f"


def _attributes(tokens: list[Token], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of the ``[[attributes]]`` between two indices."""
    found: list[tuple[int, int]] = []
    index = start
    while index < stop - 1:
        if tokens[index].text == "[" and tokens[index + 1].text == "[" and tokens[index].kind == "sign":
            found.append((index, after_bracket(tokens, index)))
            index = found[-1][1]
        else:
            index += 1
    return found


def _statement_end(tokens: list[Token], start: int) -> int:
    """Return the index of the ``;`` or ``{`` that ends the statement at `start`."""
    index = start
    while tokens[index].kind != "end" and tokens[index].text not in (";", "{"):
        index = after_bracket(tokens, index) if tokens[index].text in ("(", "[") else index + 1
    return index


def _read_instantiations(tokens: list[Token], result: Rewritten) -> None:
    """Record ``template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;`` and take it out: entries instantiate."""
    for index, token in enumerate(tokens):
        if token.text != "template" or token.kind != "name" or tokens[index + 1].text == "<":
            continue
        stop = _statement_end(tokens, index)
        if tokens[stop].text != ";":
            continue
        attributes = _attributes(tokens, index, stop)
        text = " ".join(phrase(tokens[start:end]) for start, end in attributes)
        if not re.search(r"\b(kernel|host_name)\b", text) and not any(t.text == "kernel" for t in tokens[index:stop]):
            continue
        leading = index + 1
        for start, end in attributes:
            leading = end if start == leading else leading
        function = _instantiated(tokens, leading, stop)
        host = _HOST_NAME.search(text)
        name = "".join(re.findall(r'"([^"]*)"', host.group(1))) if host else function
        result.instantiations[name] = function
        blank(tokens, index, stop + 1)


def _instantiated(tokens: list[Token], start: int, stop: int) -> str:
    """Return ``f<T>`` of what follows the attributes of an explicit instantiation."""
    index = start
    while index < stop:
        after = tokens[index + 1].text
        if tokens[index].text == "decltype":
            return phrase(tokens[index + 2 : after_bracket(tokens, index + 1) - 1])
        if tokens[index].kind == "name" and after == "<":
            end = after_angle(tokens, index + 1) or stop
            if tokens[end].text == "(":
                begin = index
                while tokens[begin - 1].text == "::":
                    begin -= 2
                return phrase(tokens[begin:end])
            index = end
        elif tokens[index].kind == "name" and after == "(":
            return tokens[index].text
        else:
            index += 1
    return phrase(tokens[start:stop])


def _read_kernels(tokens: list[Token], result: Rewritten) -> None:
    """Record the kernel functions; the word ``kernel`` goes."""
    start, namespaces, index = 0, _Namespaces(), 0
    while index < len(tokens):
        token = tokens[index]
        if token.kind == "name" and token.text == "kernel":
            index = _read_kernel(tokens, start, index, namespaces.prefix(), result)
            continue
        if token.kind == "sign" and token.text in (";", "{", "}"):
            namespaces.step(tokens, start, index)
            start = index + 1
        index += 1


class _Namespaces:
    """The namespaces around a token; every other brace has an empty name."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def step(self, tokens: list[Token], start: int, index: int) -> None:
        text = tokens[index].text
        if text == "{":
            words = [token.text for token in tokens[start:index] if token.text]
            self._names.append("".join(words[words.index("namespace") + 1 :]) if "namespace" in words else "")
        elif text == "}" and self._names:
            self._names.pop()

    def prefix(self) -> str:
        return "".join(f"{name}::" for name in self._names if name)


def _read_kernel(tokens: list[Token], start: int, index: int, prefix: str, result: Rewritten) -> int:
    """Read the function whose ``kernel`` stands at `index`, in a statement that begins at `start`."""
    around = [(a, b) for a, b in _attributes(tokens, start, _statement_end(tokens, start)) if a <= index < b]
    mark, after = around[0] if around else (index, index + 1)
    opening = _parameter_list(tokens, after)
    if opening is None:
        blank(tokens, index, index + 1)
        return index + 1
    closing = after_bracket(tokens, opening)
    end = _statement_end(tokens, closing)
    attributes = _attributes(tokens, start, opening) + _attributes(tokens, closing, end)
    text = " ".join(phrase(tokens[a:b]) for a, b in attributes)
    kernel = KernelFunction(
        prefix + tokens[opening - 1].text,
        tokens[start].text == "template" and tokens[start + 1].text == "<",
        read_parameters(split(tokens[opening + 1 : closing - 1])),
        int(limit.group(1)) if (limit := _MAX_THREADS.search(text)) else None,
        tokens[opening - 2].text,
    )
    if tokens[end].text == "{" or kernel.name not in result.kernels:
        result.kernels[kernel.name] = kernel
    if host := _HOST_NAME.search(text):
        result.instantiations["".join(re.findall(r'"([^"]*)"', host.group(1)))] = kernel.name
    blank(tokens, mark, after)
    if [token.text for token in tokens[start : start + 3]] != ["template", "<", ">"]:
        # Only the entry point calls it: no second copy of its code.
        tokens[mark].text = "static"
    return closing


def _parameter_list(tokens: list[Token], start: int) -> int | None:
    """Return the index of the ``(`` after a function's name."""
    index = start
    while tokens[index].kind != "end" and tokens[index].text not in (";", "{"):
        if tokens[index].text == "[" or tokens[index].text in ("__attribute__", "alignas"):
            index = after_bracket(tokens, index if tokens[index].text == "[" else index + 1)
        elif tokens[index].text == "(" and tokens[index - 1].kind == "name":
            return index
        else:
            index += 1
    return None


def _define_constants(tokens: list[Token], constants: Mapping[int, Constant], result: Rewritten) -> None:
    """Give function constants their values; one without is declared only, so that its use is an error."""
    defined: set[str] = set()
    for start, stop in _attributes(tokens, 0, len(tokens)):
        found = _FUNCTION_CONSTANT.search(phrase(tokens[start:stop]))
        if not found or tokens[stop].text != ";":
            continue
        number, name = int(found.group(1)), tokens[start - 1].text
        if number in constants:
            defined.add(name)
            tokens[start - 1].text = f"{name} = {_literal(constants[number])}"
        else:
            result.undefined[name] = number
            _declare_only(tokens, start)
    for index, token in enumerate(tokens):
        if token.text == "is_function_constant_defined" and tokens[index + 1].text == "(":
            stop = after_bracket(tokens, index + 1)
            value = "true" if tokens[stop - 2].text in defined else "false"
            begin = index - 2 if index > 1 and tokens[index - 1].text == "::" else index
            blank(tokens, begin, stop)
            token.text = value


def _declare_only(tokens: list[Token], index: int) -> None:
    while index > 0 and tokens[index - 1].text not in (";", "}", "{"):
        index -= 1
        if tokens[index].text in ("static", "constexpr", "extern"):
            blank(tokens, index, index + 1)
    tokens[index].space += "extern "


def _literal(value: Constant) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) + ("f" if isinstance(value, float) else "")
