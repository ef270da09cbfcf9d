"""Which recurrent states a server keeps: those where prompts part, end, or come by again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvstore.proto.types import ChunkKey

MAX_REMEMBERED = 1 << 14
"""Partings, and as many states turned away, the latest. About 6 MB of each."""


class StateAdmission:
    """Says of a chunk that is put with a state whether the state is worth its bytes. Thread-safe.

    As Marconi admits (Pan et al., MLSys 2025, section 4.2): at the last token of a put, for who
    goes on from there, and where a lookup left what is known, for who goes another way. A state
    that was turned away is remembered, and admitted when it comes again.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        # Ordered: a plain dictionary looks for its first entry among those that were deleted.
        self._partings: OrderedDict[ChunkKey, None] = OrderedDict()
        self._turned_away: OrderedDict[ChunkKey, None] = OrderedDict()
        # Guards both.
        self._lock = threading.Lock()

    def parted(self, key: ChunkKey) -> None:
        """A lookup went no further than *key* in what is known."""
        with self._lock:
            self._remember(self._partings, key)

    def _remember(self, table: OrderedDict[ChunkKey, None], key: ChunkKey) -> None:
        table[key] = None
        table.move_to_end(key)
        if len(table) > self._limit:
            table.popitem(last=False)

    def admits(self, key: ChunkKey, *, is_end: bool) -> bool:
        """Whether to keep the state of *key*; one that is not kept is remembered."""
        with self._lock:
            if self._turned_away.pop(key, self) is None or is_end or key in self._partings:
                return True
            self._remember(self._turned_away, key)
            return False

    def forget(self, key: ChunkKey) -> None:
        """A state was not turned away after all: it is kept, or never came."""
        with self._lock:
            self._turned_away.pop(key, None)

    def has_turned_away(self, key: ChunkKey) -> bool:
        """Whether the state of *key* was turned away, and did not come again."""
        with self._lock:
            return key in self._turned_away

    def __len__(self) -> int:
        return len(self._partings) + len(self._turned_away)
