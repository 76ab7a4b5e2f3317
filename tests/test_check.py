"""What a rejected candidate's reason says of an exception."""

from __future__ import annotations

import pytest

from metile.check import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("wrong\nand more"), "ValueError: wrong"),
        (RuntimeError(""), "RuntimeError: "),
        (
            RuntimeError(
                "[metal::Device] Unable to build metal library from source\n"
                "program_source:7:3: error: use of undeclared identifier 'y'\n  y[0] = 1;\n1 error generated."
            ),
            "RuntimeError: [metal::Device] Unable to build metal library from source"
            " (program_source:7:3: error: use of undeclared identifier 'y')",
        ),
    ],
)
def test_a_reason_is_one_line_and_says_what_a_compiler_complains_of(error: Exception, said: str) -> None:
    assert first_line(error) == said
