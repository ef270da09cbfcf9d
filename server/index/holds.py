"""Holds: what keeps chunks from eviction. Leases, pins, hand-overs, announced uses."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.types import ChunkKey
from kvstore.server.index.leases import Lease, Leases
from kvstore.server.index.planned_uses import PlannedUses
from kvstore.server.index.results import LeaseTerms


class Pins:
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


class Holds:
    """One question, ``is_held``, and who answers it. The catalog's lock guards it."""

    def __init__(self, leases: Leases, pin_limit_bytes: int) -> None:
        self.leases = leases
        self.pinned = Pins(pin_limit_bytes)
        self.handed_over = Pins(pin_limit_bytes // 2)
        """Chunks that another engine is about to read."""
        self.uses = PlannedUses(pin_limit_bytes)
        self.unkept = 0
        """Announced chunks that came and were not kept, for want of room."""

    def is_held(self, key: ChunkKey) -> bool:
        """Whether somebody reads, pinned or will use the chunk."""
        return (
            key in self.leases.pins
            or key in self.pinned
            or key in self.handed_over
            or key in self.uses
        )

    def lease(self, keys: Sequence[ChunkKey], terms: LeaseTerms, now: float) -> Lease:
        """Lease *keys*: uses that were announced of them are over. Raises QuotaExceededError."""
        if self.uses:
            self.uses.used(keys, terms.session_id)
        if self.handed_over:
            for key in keys:
                self.handed_over.unpin(key)
        return self.leases.grant(terms.session_id, keys, now + terms.ttl_s)

    def keep(self, key: ChunkKey, size_bytes: int) -> None:
        """Keep a chunk that is here for the uses that were announced, if there is room."""
        if not self.uses.keep(key, size_bytes):
            self.unkept += 1

    def expire(self, now: float) -> int:
        """End what is over by *now*; return how many leases."""
        self.pinned.expire(now)
        self.handed_over.expire(now)
        self.uses.expire(now)
        return self.leases.expire(now)
