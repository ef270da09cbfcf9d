"""Strangers: members of entries whom the roster does not know, until they are surely dead."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Container

from kvstore.proto.types import ChunkKey

MAX_STRANGERS = 1024
MAX_LEFTOVERS = 4096
MAX_MEMBER_BYTES = 64
"""Ours have 20; of what else lies there only so much is kept."""

Leftover = tuple[ChunkKey, bytes]


class Strangers:
    """Whom entries name in vain. Thread-safe, bounded; *clock* returns monotonic seconds.

    One that stays unknown for *patience_s* is dead: a node that has just come is not listed here
    at once. What a reader then finds of it is a leftover, to be taken out of the directory.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: OrderedDict[bytes, float] = OrderedDict()
        self._leftovers: deque[Leftover] = deque(maxlen=MAX_LEFTOVERS)
        # Guards the table.
        self._lock = threading.Lock()

    def met(self, key: ChunkKey, member: bytes) -> None:
        """The entry of *key* names somebody who is not in the roster."""
        with self._lock:
            since = self._since.setdefault(member[:MAX_MEMBER_BYTES], self._clock())
            if len(self._since) > MAX_STRANGERS:
                self._since.popitem(last=False)
            if self._clock() - since >= self._patience_s:
                self._leftovers.append((key, member[:MAX_MEMBER_BYTES]))

    def forget(self, living: Container[bytes]) -> None:
        """Those who came to be known are strangers no more, and left nothing behind."""
        with self._lock:
            for member in [one for one in self._since if one in living]:
                del self._since[member]
            rest = [one for one in self._leftovers if one[1] not in living]
            self._leftovers.clear()
            self._leftovers.extend(rest)

    def take(self, count: int) -> list[Leftover]:
        """Take leftovers, at most *count*. Right after ``forget``, or a reader with an older
        roster may have taken one who is back for dead.
        """
        with self._lock:
            return [self._leftovers.popleft() for _ in range(min(count, len(self._leftovers)))]
