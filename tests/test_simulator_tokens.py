"""Tokens: the text comes back unchanged, brackets and template arguments match, lists split where they should."""

from __future__ import annotations

import pytest

from metile.simulator.tokens import Token, after_angle, after_bracket, blank, phrase, split, tokenize, untokenize

TEXTS = (
    "",
    "\n\n",
    "int a = 1;",
    '# 1 "file"\nint a; // comment with "quotes\n/* and ( [ { */ char c = \'"\';\n',
    "x = a >> 2 >= b ? 1.5e-3f : 0x1p-4 + .5h;",
    'printf("a \\" ; b");\n#pragma unroll\nfor (;;) {}',
    "vec<T, (a < b)> v; // no newline at the end",
    "auto é = 'x';\r\n\ty[1'000] = 2;",
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str) -> None:
    assert untokenize(tokenize(text)) == text


def test_kinds() -> None:
    kinds = [(token.kind, token.text) for token in tokenize("a->b += \"s;\" 'c' 1.0e+5f /*x*/ :: [[k]]")]
    assert kinds == [
        ("name", "a"),
        ("sign", "->"),
        ("name", "b"),
        ("sign", "+="),
        ("string", '"s;"'),
        ("character", "'c'"),
        ("number", "1.0e+5f"),
        ("sign", "::"),
        ("sign", "["),
        ("sign", "["),
        ("name", "k"),
        ("sign", "]"),
        ("sign", "]"),
        ("end", ""),
    ]


def test_line_markers_and_comments_are_space() -> None:
    tokens = tokenize('a\n# 7 "f.h" 2\n// c\nb')
    assert [token.text for token in tokens] == ["a", "b", ""]
    assert tokens[1].space == '\n# 7 "f.h" 2\n// c\n'


@pytest.mark.parametrize(
    ("text", "rest"),
    [("(a[1], {b}) c", "c"), ("[[x(1)]] c", "c"), ("{ ( ] ) } c", "c"), ("(a", ""), ('(")") c', "c")],
)
def test_after_bracket(text: str, rest: str) -> None:
    tokens = tokenize(text)
    assert phrase(tokens[after_bracket(tokens, 0) :]) == rest


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<a, b<c>> d", "d"),
        ("<(a > b)> d", "d"),
        ("<a[1 > 2]> d", "d"),
        ("<A && B, x> d", "d"),
        ("< b; c > d", None),
        ("< b) > d", None),
        ("< b", None),
    ],
)
def test_after_angle(text: str, rest: str | None) -> None:
    tokens = tokenize(text)
    stop = after_angle(tokens, 0)
    assert (None if stop is None else phrase(tokens[stop:])) == rest


def test_split() -> None:
    parts = split(tokenize("a<b, c> d, e(f, g), h[i, j] = {k, l}, m < n")[:-1])
    assert [phrase(part) for part in parts] == ["a<b, c> d", "e(f, g)", "h[i, j] = {k, l}", "m < n"]
    assert split([]) == []


def test_phrase_is_one_line() -> None:
    assert phrase(tokenize('a  b(\n# 3 "x"\n c /* d */, e)')) == "a b( c , e)"


def test_blank_keeps_lines() -> None:
    tokens = tokenize("a\nb\nc d")
    blank(tokens, 0, 3)
    assert untokenize(tokens) == "\n\n d"
    assert tokens[-1] == Token("end", "")
