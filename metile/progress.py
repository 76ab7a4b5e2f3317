"""What a person sees while the tuner works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_LINE_SECONDS = 10.0  # between two plain lines where there is no terminal


class Reporter:
    """Shows stages and what is being tried in each.

    Attributes:
        console: where everything is printed.
        seconds: time spent, by stage.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.seconds: dict[str, float] = {}
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._printed = 0.0

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a stage and show it; the line that remains says how long it took."""
        start = self._printed = time.perf_counter()
        try:
            if self.console.is_terminal:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False),
                    BarColumn(30),
                    TimeElapsedColumn(),
                )
                with Progress(*columns, console=self.console, transient=True) as live:
                    self._live, self._task = live, live.add_task(f"{name} {detail}", total=None)
                    yield
            else:
                yield
        finally:
            self._live = self._task = None
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.console.print(
            f"[green]✓[/] {name:<9} {escape(detail)}  [dim]{spent:.1f} s[/]", highlight=False, soft_wrap=True
        )

    def update(self, text: str, done: int = 0, total: int = 0, seconds_left: float | None = None) -> None:
        """Say what is being tried now, how much of the stage is done, and how long is left at most."""
        left = "" if seconds_left is None else f", at most {max(seconds_left, 0):.0f} s left"
        count = f" ({done}/{total}{left})" if total else left
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{text}{count}", completed=done, total=total or None)
        elif time.perf_counter() - self._printed > _LINE_SECONDS:
            self._printed = time.perf_counter()
            self.console.print(f"  {text}{count}", highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line that stays; markup in it is followed."""
        self.console.print(text, highlight=False, soft_wrap=True)
