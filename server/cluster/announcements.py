"""Announcements to the node directory: what this node holds, and what is still to be written.

The newest update of a key is the one that is sent; an older one that was not is dropped. Both
tables are bounded, and nothing here does I/O.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvstore.proto.types import ChunkKey

MAX_PENDING = 1 << 16
"""Words that wait to be sent; further ones are dropped and counted."""
ENTRY_TTL_S = 3600
"""An entry's life in Redis. It is said again at half of it, so that it outlives its chunk."""

Update = tuple[ChunkKey, bool]
"""Of a key: that this node holds it, or holds it no longer."""


class Announcements:
    """At most *limit* keys are announced at a time. Thread-safe; *clock* returns seconds."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._held: OrderedDict[ChunkKey, float] = OrderedDict()
        """When each key was last announced, the oldest first."""
        self._pending: OrderedDict[ChunkKey, bool] = OrderedDict()
        """True: announce; False: withdraw."""
        self._lost_at = -math.inf
        # Guards the tables.
        self._lock = threading.Lock()

    def announce(self, keys: Iterable[ChunkKey]) -> int:
        """Announce *keys*; return how many were left out for want of room."""
        with self._lock:
            return sum(not self._hold(key) for key in keys)

    def _hold(self, key: ChunkKey) -> bool:
        is_known = key in self._held
        if not is_known and len(self._held) >= self._limit:
            return False
        if not self._queue(key, is_held=True):
            return False
        self._held[key] = self._clock()
        self._held.move_to_end(key)
        return True

    def _queue(self, key: ChunkKey, *, is_held: bool) -> bool:
        if key not in self._pending and len(self._pending) >= MAX_PENDING:
            return False
        self._pending[key] = is_held
        return True

    def withdraw(self, keys: Iterable[ChunkKey]) -> int:
        """Withdraw those of *keys* that were announced; return how many words had no room.

        What could not be withdrawn ends by its lifetime, as it is not said again.
        """
        with self._lock:
            known = [key for key in keys if self._held.pop(key, None) is not None]
            return sum(not self._queue(key, is_held=False) for key in known)

    def take(self, count: int) -> list[Update]:
        """Take the oldest words, at most *count*, out of those that wait."""
        with self._lock:
            taken: list[Update] = []
            while self._pending and len(taken) < count:
                taken.append(self._pending.popitem(last=False))
            return taken

    def put_back(self, keys: Sequence[ChunkKey]) -> int:
        """What was last said of *keys* did not arrive: have what is true of them now wait.

        Half of the room stays free for others. Return how many had none.
        """
        with self._lock:
            dropped = 0
            for key in keys:
                if len(self._pending) < MAX_PENDING // 2:
                    self._queue(key, is_held=key in self._held)
                else:
                    dropped += 1
            return dropped

    def lost(self) -> None:
        """Redis has lost what was said: all of it is to be said again, as it finds room."""
        with self._lock:
            self._lost_at = self._clock()

    def repeat(self, count: int) -> None:
        """Announce again what was forgotten, or announced half a lifetime ago, *count* at most."""
        with self._lock:
            due = max(self._lost_at, self._clock() - ENTRY_TTL_S / 2)
            for _ in range(min(count, len(self._held), MAX_PENDING - len(self._pending))):
                key, said_at = next(iter(self._held.items()))
                if said_at >= due:
                    break
                self._hold(key)

    @property
    def waiting(self) -> int:
        """Words to be sent."""
        return len(self._pending)

    def __len__(self) -> int:
        return len(self._held)
