"""Arrivals: chunks that are being put or were promised, and who waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.server.blend.contents import Contents


class Arrivals(Contents):
    """The part of the Catalog that knows what is about to come."""

    def begin_put(self, key: ChunkKey) -> bool:
        """Count a writer of *key*; False, counting nothing, when an exact copy exists."""
        with self._lock:
            row = self._index.row(key)
            if self._index.holders(row, Fidelity.exact):
                self.knowledge.live_on(row, self._clock())
                self._promises.over(key)
                return False
            self._pending[key] = self._pending.get(key, 0) + 1
            return True

    def end_put(self, key: ChunkKey) -> None:
        """Undo one ``begin_put``: the chunk is here, or will not come."""
        with self._lock:
            left = self._pending[key] - 1
            if left:
                self._pending[key] = left
            else:
                del self._pending[key]
            self._promises.over(key)
            self._arrived.notify_all()

    def pending_count(self) -> int:
        """Writers at work."""
        with self._lock:
            return sum(self._pending.values())

    def promise(self, session_id: int, keys: Sequence[ChunkKey], ttl_s: float) -> int:
        """A session will put *keys* within *ttl_s*; return how many nobody has put or promised.

        Without *ttl_s* it will not.
        """
        with self._lock:
            if not ttl_s:
                count = self._promises.take_back(session_id, keys)
                self._arrived.notify_all()
                return count
            absent = [key for key in keys if not self._index.holders(self._index.row(key))]
            return self._promises.make(session_id, absent, self._clock() + ttl_s)

    def _is_coming(self, key: ChunkKey) -> bool:
        return key in self._pending or key in self._promises

    def is_any_coming(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether the chunk behind those of *keys* that are here is being put, or promised."""
        with self._lock:
            at = self._first_absent(keys, 0)
            return at < len(keys) and self._is_coming(keys[at])

    def _first_absent(self, keys: Sequence[ChunkKey], at: int) -> int:
        while at < len(keys) and self._index.holders(self._index.row(keys[at])):
            at += 1
        return at

    def await_arrivals(self, keys: Sequence[ChunkKey], deadline: float) -> bool:
        """Wait until all of *keys* are here, or the first that is not will not come.

        False when time is up before that, or the server drains.
        """
        with self._arrived:
            at = self._first_absent(keys, 0)
            while at < len(keys) and self._is_coming(keys[at]):
                left_s = deadline - self._clock()
                if left_s <= 0 or self._no_waits:
                    return False
                self._arrived.wait(left_s)
                at = self._first_absent(keys, at)
            return True

    def end_waits(self) -> None:
        """Have nobody wait any more: the server drains."""
        with self._lock:
            self._no_waits = True
            self._arrived.notify_all()
