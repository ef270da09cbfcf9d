"""Pins: chunks that clients asked to keep for a time, within a limit of bytes."""

from __future__ import annotations

from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.types import ChunkKey


class PinTable:
    """Pinned chunks, until when and how large. Not thread-safe: the catalog's lock guards it.

    ``until`` is in the clock's seconds.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._pinned: dict[ChunkKey, tuple[float, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._pinned)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._pinned

    def pin(self, key: ChunkKey, size_bytes: int, until: float) -> None:
        """Pin a chunk, or pin it again until then. Raises QuotaExceededError."""
        before = self._pinned.get(key, (0.0, 0))[1]
        if self._used_bytes - before + size_bytes > self._limit_bytes:
            raise QuotaExceededError("pin_limit_bytes", self._limit_bytes, "pins")
        self._used_bytes += size_bytes - before
        self._pinned[key] = (until, size_bytes)

    def left_s(self, key: ChunkKey, now: float) -> float:
        """Return for how much longer a chunk is pinned; 0 for one that is not."""
        return max(0.0, self._pinned.get(key, (now, 0))[0] - now)

    def extend(self, key: ChunkKey, size_bytes: int, until: float) -> bool:
        """Pin a chunk for no less long than it is; False when the limit does not allow it."""
        until = max(until, self._pinned.get(key, (until, 0))[0])
        try:
            self.pin(key, size_bytes, until)
        except QuotaExceededError:
            return False
        return True

    def unpin(self, key: ChunkKey) -> bool:
        """End a pin; return whether there was one."""
        pinned = self._pinned.pop(key, None)
        if pinned is None:
            return False
        self._used_bytes -= pinned[1]
        return True

    def expire(self, now: float) -> None:
        """End the pins whose time is up."""
        for key in [k for k, (until, _) in self._pinned.items() if until <= now]:
            self.unpin(key)
