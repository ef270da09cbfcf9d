"""Promises: chunks that sessions are about to put, and that lookups may wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.proto.types import ChunkKey

MAX_PROMISED_CHUNKS = 1 << 16
"""Chunks promised at once; of more nothing is known before they come."""
MAX_PROMISES = 1024
"""Promises at once."""


@dataclass(slots=True, eq=False)
class _Promise:
    """What one call promised and has not come yet, and until when it stands."""

    session_id: int
    until: float
    left: set[ChunkKey]


class Promises:
    """Promised chunks. The catalog's lock guards it. ``until`` is in the clock's seconds."""

    def __init__(self) -> None:
        self._promises: list[_Promise] = []
        self._by_key: dict[ChunkKey, _Promise] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._by_key

    def make(self, session_id: int, keys: Sequence[ChunkKey], until: float) -> int:
        """Promise those of *keys* that nobody has promised; return how many there was room for."""
        room = MAX_PROMISED_CHUNKS - len(self._by_key)
        new = {key for key in keys[: max(0, room)] if key not in self._by_key}
        if not new or len(self._promises) >= MAX_PROMISES:
            return 0
        promise = _Promise(session_id, until, new)
        self._promises.append(promise)
        self._by_key.update(dict.fromkeys(new, promise))
        return len(new)

    def over(self, key: ChunkKey) -> bool:
        """A chunk came, or will not come; return whether it was promised."""
        promise = self._by_key.pop(key, None)
        if promise is None:
            return False
        promise.left.discard(key)
        if not promise.left:
            self._promises.remove(promise)
        return True

    def take_back(self, session_id: int, keys: Sequence[ChunkKey]) -> int:
        """End the session's own promises of *keys*; return how many there were."""
        own = [key for key in keys if key in self._by_key]
        own = [key for key in own if self._by_key[key].session_id == session_id]
        return sum(self.over(key) for key in own)

    def expire(self, now: float) -> bool:
        """End the promises whose time is up; return whether there was any."""
        return self._drop(lambda promise: promise.until <= now)

    def end(self, session_id: int) -> bool:
        """End the promises of a session; return whether there was any."""
        return self._drop(lambda promise: promise.session_id == session_id)

    def _drop(self, is_over: Callable[[_Promise], bool]) -> bool:
        over = [promise for promise in self._promises if is_over(promise)]
        self._promises = [promise for promise in self._promises if promise not in over]
        for promise in over:
            for key in promise.left:
                del self._by_key[key]
        return bool(over)

    def __len__(self) -> int:
        return len(self._by_key)
