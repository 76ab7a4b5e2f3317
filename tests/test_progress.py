"""Progress is a live line on a terminal and a few plain lines elsewhere; text is shown as it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from metile import progress
from metile.progress import Reporter


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def reporter(terminal: bool) -> tuple[Reporter, io.StringIO]:
    file = io.StringIO()
    return Reporter(Console(file=file, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})), file


def test_a_stage_leaves_one_line(clock: Clock) -> None:
    shown, file = reporter(False)
    with shown.stage("search", "3 shapes"):
        clock.now += 2.34
    assert file.getvalue() == "✓ search    3 shapes  2.3 s\n"
    assert shown.seconds == {"search": pytest.approx(2.34)}
    with shown.stage("search"):
        clock.now += 1
    assert shown.seconds == {"search": pytest.approx(3.34)}


def test_plain_lines_come_at_most_every_ten_seconds(clock: Clock) -> None:
    shown, file = reporter(False)
    with shown.stage("search"):
        for step in range(25):
            clock.now += 1
            shown.update(f"try {step}", step, 25, 60.0 - step)
    lines = file.getvalue().splitlines()
    assert lines[:-1] == ["  try 10 (10/25, at most 50 s left)", "  try 21 (21/25, at most 39 s left)"]


def test_what_is_known_of_the_rest_is_said(clock: Clock) -> None:
    shown, file = reporter(False)
    for arguments in ((), (3, 7), (3, 7, 12.4), (0, 0, 12.6), (1, 2, -5.0)):
        clock.now += 11
        shown.update("try", *arguments)
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "try",
        "try (3/7)",
        "try (3/7, at most 12 s left)",
        "try, at most 13 s left",
        "try (1/2, at most 0 s left)",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stage_that_fails_is_timed_and_not_ticked(terminal: bool, clock: Clock) -> None:
    shown, file = reporter(terminal)

    def work() -> None:
        with shown.stage("plan"):
            clock.now += 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert shown.seconds == {"plan": pytest.approx(3)}
    assert "✓" not in file.getvalue()
    shown.update("after the stage")  # no live line is left to write to
    shown.say("goes on")
    assert file.getvalue().endswith("goes on\n")


def test_a_terminal_shows_what_is_tried() -> None:
    shown, file = reporter(True)
    with shown.stage("search", "3 shapes"):
        shown.update("verify b32", 1, 3, 20.0)
        assert shown._live is not None
        shown._live.refresh()
        assert "verify b32 (1/3, at most 20 s left)" in file.getvalue()
        shown.update("without a number")
        shown._live.refresh()
        assert "without a number" in file.getvalue()
    assert "search" in file.getvalue().splitlines()[-1]
    assert "\x1b[?25h" in file.getvalue()  # the cursor is back


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_are_not_markup(terminal: bool) -> None:
    shown, file = reporter(terminal)
    name = "/models/[bold]a[/tmp]"
    with shown.stage("load", name):
        shown.update(name, 1, 2)
        if shown._live is not None:
            shown._live.refresh()
    text = file.getvalue()
    assert text.count("[bold]") == (1 if not terminal else text.count("[/tmp]"))
    assert name in text or terminal
