"""The trial of one key where nothing can be timed: the candidate that moves the fewest bytes is decided.

Traffic is no time. What is decided here says which candidate to try first on a real GPU, and exercises on the way all
that a tuning does; it never stands in a report as a speedup.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from metile.check import first_line
from metile.dispatch import Decision
from metile.measure import Clock
from metile.targets.simulated import Moved
from metile.trial import Contest, Tell, verified_candidates


@runtime_checkable
class CountsTraffic(Protocol):
    """A target that counts what a launch moves."""

    def moved(self, key: Any, candidate: Any, inputs: Any) -> Moved:
        """Return the bytes that a launch moves."""


def decide_by_traffic(contest: Contest, target: CountsTraffic, clock: Clock, tell: Tell) -> Decision:
    """Hold the trial of one key; among equals the first candidate of the space stays ahead."""
    rejected = dict(contest.rejected)
    passed = verified_candidates(contest, rejected, clock, tell)
    if isinstance(passed, Decision):
        return passed
    verified, case = passed
    moved: dict[Any, Moved] = {}
    for number, candidate in enumerate(verified):
        tell("count", candidate.label(), number, len(verified))
        try:
            moved[candidate] = target.moved(contest.key, candidate, case.inputs)
        except Exception as error:
            rejected[candidate.label()] = f"raised {first_line(error)}"
    if not moved:
        return Decision(contest.key, None, 1.0, "no candidate could be counted", rejected)
    best = min(moved, key=lambda candidate: moved[candidate].bytes)
    ratio = round(moved[best].ratio, 3)
    reason = f"{best.label()} moves the fewest bytes of {len(moved)}, {ratio:.3g} times what is needed; not timed"
    return Decision(contest.key, best, 1.0, reason, rejected, ratio)
