"""Which chunks are worth the memory of a GPU: those that are read again while still remembered."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.proto.types import ChunkKey


class PromoteOnSecondHit:
    """Names a chunk at its second read, and then forgets it, so that it may come again later.

    Most prompts are read once; what is read twice tends to be read on (the reasoning of 2Q,
    Johnson and Shasha, VLDB 1994, with its first queue only). At most *limit* chunks are
    remembered, the latest. Not thread-safe: the owner locks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()

    def is_due(self, key: ChunkKey) -> bool:
        """Take note of a read; return whether the chunk should be promoted now."""
        if self._once.pop(key, self) is None:
            return True
        self._once[key] = None
        if len(self._once) > self._limit:
            self._once.popitem(last=False)
        return False

    def forget(self, key: ChunkKey) -> None:
        """It was read by nobody."""
        self._once.pop(key, None)

    def __len__(self) -> int:
        return len(self._once)
