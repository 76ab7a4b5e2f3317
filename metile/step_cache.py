"""What a model takes for its KV cache while a decode step is traced or recorded.

See `metile.decode_step` for the one and `metile.tape` for the other.
"""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from metile.errors import MetileError


class UntraceableError(MetileError):
    """A model whose decode step cannot be traced."""


class StepCache:
    """The cache of one layer, of a number of tokens that is known only when the step runs.

    Attributes:
        keys: [B, H_kv, room, D].
        values: [B, H_kv, room, D].
        offset: tokens in the cache, int32 [].
        count: tokens that the step's query sees, int32 [1].
        counters: zeros that the layer's attention may count in.
        tokens: as many as there are when the step is traced; picks the bucket.
        attended: whether a kernel attended over `count` tokens: plain MLX would see the whole room.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        offset: mx.array,
        count: mx.array,
        counters: mx.array,
        tokens: int,
    ) -> None:
        self.keys, self.values, self.count, self.counters, self.tokens = keys, values, count, counters, tokens
        self.offset, self._start = offset.reshape(()), offset
        self.attended = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put one token's keys and values behind the others; return all, and the room beyond."""
        self.keys = mx.slice_update(self.keys, keys, self._start, (2,))
        self.values = mx.slice_update(self.values, values, self._start, (2,))
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:  # noqa: N803
        """Return the mask of one query, which sees all: none.

        Raises:
            UntraceableError: there are more, or they see a window only.
        """
        if N != 1 or return_array or window_size is not None:
            raise UntraceableError("a mask depends on the number of tokens")


class RecordedCache(KVCache):  # type: ignore[misc]
    """The cache of one layer, which notes what the layer puts in and what it sees.

    Attributes:
        updates: how often the layer has put something in.
        given: the keys and the values that it put in last.
        seen: the keys and the values that it was given to see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0
        self.given: tuple[mx.array, ...] = ()
        self.seen: tuple[mx.array, ...] = ()

    @classmethod
    def of(cls, cache: KVCache) -> Self:
        """Return one that holds what `cache` holds; `give_back` brings it there again."""
        mine = cls()
        mine.keys, mine.values, mine.offset = cache.keys, cache.values, cache.offset
        return mine

    def give_back(self, cache: KVCache) -> None:
        """Let `cache` hold what this one holds."""
        cache.keys, cache.values, cache.offset = self.keys, self.values, self.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """See `KVCache.update_and_fetch`."""
        self.updates += 1
        self.given = keys, values
        self.seen = super().update_and_fetch(keys, values)
        return self.seen  # type: ignore[return-value]
