"""What shared tiers have just said they do not have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvstore.proto.types import ChunkKey

ABSENT_TTL_S = 0.1
MAX_ABSENT_KEYS = 4096


class AbsentKeys:
    """Remembers for a moment which chunk a shared tier did not have, so that nobody asks again.

    A scheduler looks a waiting prompt up at every step, and so does each rank of an engine. A
    chain ends at its first missing chunk, so one key stands for all that was asked behind it.
    What another node puts meanwhile is a miss until the entry ends, never a wrong answer; what
    this node puts is in the index, where nobody asks. The oldest entries go first, by their time
    or by the limit. Thread-safe; *clock* returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[ChunkKey, float] = OrderedDict()
        # Guards the dictionary.
        self._lock = threading.Lock()

    def note(self, key: ChunkKey) -> None:
        """Take note that *key* was asked for and is not there."""
        with self._lock:
            self._until.pop(key, None)
            if len(self._until) >= MAX_ABSENT_KEYS:
                self._until.popitem(last=False)
            self._until[key] = self._clock() + ABSENT_TTL_S

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            until = self._until.get(key)
            if until is not None and until <= self._clock():
                del self._until[key]
                until = None
            return until is not None

    def __len__(self) -> int:
        return len(self._until)
