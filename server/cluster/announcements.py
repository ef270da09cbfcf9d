"""What the node directory still has to write: this node's own chunks, and entries of dead nodes.

All tables are bounded, and nothing here does I/O.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence

from kvstore.proto.types import ChunkKey

MAX_PENDING = 1 << 16
"""Updates that wait to be sent; further ones are dropped and counted."""
ENTRY_TTL_S = 3600
"""An entry's life in Redis. It is repeated at half of it, so that it outlives its chunk."""
MAX_UNKNOWN_NODES = 1024
MAX_STALE_ENTRIES = 4096
MAX_MEMBER_BYTES = 64
"""Ours have 20; of what else lies there only so much is kept."""

Update = tuple[ChunkKey, bool]
"""Of a key: that this node holds it, or holds it no longer."""
StaleEntry = tuple[ChunkKey, bytes]


class Announcements:
    """At most *limit* keys are announced at a time; of each only the newest update is sent.

    Thread-safe; *clock* returns seconds.
    """

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
        has_room = key in self._held or len(self._held) < self._limit
        if not has_room or not self._queue(key, is_held=True):
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
        """Withdraw those of *keys* that were announced; return how many updates had no room.

        What could not be withdrawn ends by its lifetime, as it is not repeated.
        """
        with self._lock:
            known = [key for key in keys if self._held.pop(key, None) is not None]
            return sum(not self._queue(key, is_held=False) for key in known)

    def take(self, count: int) -> list[Update]:
        """Take the oldest updates that wait, at most *count*."""
        with self._lock:
            return [self._pending.popitem(last=False) for _ in range(min(count, self.waiting))]

    def put_back(self, keys: Sequence[ChunkKey]) -> int:
        """The last updates of *keys* did not arrive: have what is true of them now wait.

        Half of the room stays free for others. Return how many had none.
        """
        with self._lock:
            dropped = 0
            for key in keys:
                has_room = len(self._pending) < MAX_PENDING // 2
                dropped += not (has_room and self._queue(key, is_held=key in self._held))
            return dropped

    def lost(self) -> None:
        """Redis has lost its entries: all are to be announced again, as they find room."""
        with self._lock:
            self._lost_at = self._clock()

    def repeat(self, count: int) -> None:
        """Announce again what was lost, or announced half a lifetime ago, *count* at most."""
        with self._lock:
            due = max(self._lost_at, self._clock() - ENTRY_TTL_S / 2)
            for _ in range(min(count, len(self._held), MAX_PENDING - len(self._pending))):
                key, announced_at = next(iter(self._held.items()))
                if announced_at >= due:
                    break
                self._hold(key)

    @property
    def waiting(self) -> int:
        """Updates to be sent."""
        return len(self._pending)

    def __len__(self) -> int:
        return len(self._held)


class UnknownMembers:
    """Nodes that entries name and that are not in the Membership. Thread-safe, bounded.

    One that stays unknown for *wait_s* is dead: a node that has just come is not listed here at
    once. Its entries are then stale, to be taken out of the directory. *clock* returns monotonic
    seconds.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float]) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._since: OrderedDict[bytes, float] = OrderedDict()
        self._stale: deque[StaleEntry] = deque(maxlen=MAX_STALE_ENTRIES)
        # Guards the tables.
        self._lock = threading.Lock()

    def note(self, key: ChunkKey, member: bytes) -> None:
        """The entry of *key* names *member*, which is unknown."""
        with self._lock:
            since = self._since.setdefault(member[:MAX_MEMBER_BYTES], self._clock())
            if len(self._since) > MAX_UNKNOWN_NODES:
                self._since.popitem(last=False)
            if self._clock() - since >= self._wait_s:
                self._stale.append((key, member[:MAX_MEMBER_BYTES]))

    def take_stale(self, living: Container[bytes], count: int) -> list[StaleEntry]:
        """Forget those who are *living* by now; take stale entries of the others, *count* at most.

        In one step: a reader with an older list may have taken one who is back for dead.
        """
        with self._lock:
            for member in [one for one in self._since if one in living]:
                del self._since[member]
            rest = [one for one in self._stale if one[1] not in living]
            self._stale.clear()
            self._stale.extend(rest[count:])
            return rest[:count]
