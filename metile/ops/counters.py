"""Counters by which the threadgroups of one launch find out which of them is the last."""

from __future__ import annotations

import threading

import mlx.core as mx

RING = 256  # arrays of one size that are handed out in turn


class CounterPool:
    """Arrays of zeros that a kernel may count in, as long as it leaves them zero.

    A kernel counts up in an array that MLX takes for an input, so MLX does not see the write, and may run two launches
    that are given the same array at the same time: each would find the other's threadgroups counted. An array is
    therefore handed out again only after all others of its size, `RING` launches later. So far apart no two launches
    are in flight together: MLX hands a GPU a limited number of operations at once, fewer than `RING`, and begins with
    the next ones when those have run; and the attention of a model's layers follow one another anyway.

    Nothing has to clear the arrays: the count wraps to zero with the last threadgroup, so that a launch leaves an array
    as it found it. They are filled and evaluated once, when a size is first asked for.
    """

    def __init__(self) -> None:
        self._rings: dict[int, list[mx.array]] = {}
        self._given: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, count: int) -> mx.array:
        """Return an array uint32 [count] of zeros, the one whose turn it is."""
        with self._lock:
            ring = self._rings.get(count)
            if ring is None:
                ring = [mx.zeros((count,), mx.uint32) for _ in range(RING)]
                mx.eval(ring)
                self._rings[count], self._given[count] = ring, 0
            place = self._given[count]
            self._given[count] = (place + 1) % RING
            return ring[place]


COUNTERS = CounterPool()  # of this process
