"""Holds keep chunks from eviction: leases, pins, hand-overs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.proto.errors import LeaseExpiredError, QuotaExceededError
from kvstore.proto.types import ChunkKey


class LeaseTerms(NamedTuple):
    """The session of a lease, and its lifetime from now."""

    session_id: int
    ttl_s: float


@dataclass(slots=True)
class Lease:
    """A pin on chunks, owned by a session. ``deadline`` is in seconds on the clock."""

    lease_id: int
    session_id: int
    keys: Sequence[ChunkKey]
    deadline: float
    tenant: str = ""


TenantOf = Callable[[int], tuple[str, int]]
"""Maps a session's id to its tenant and the tenant's limit of leases; 0: no limit."""


class Leases:
    """All leases and the sum of their pins. Not thread-safe: the catalog's lock guards it.

    Invariant: ``pins[key]`` is the number of leases on *key* plus its copies being moved; no
    entry is zero.
    """

    def __init__(self, limit_per_session: int, new_id: Callable[[], int]) -> None:
        self._limit = limit_per_session
        self._new_id = new_id
        self._leases: dict[int, Lease] = {}
        self._by_session: Counter[int] = Counter()
        self.pins: Counter[ChunkKey] = Counter()
        self.tenant_of: TenantOf = lambda session_id: ("", 0)
        self.by_tenant: Counter[str] = Counter()

    def grant(self, session_id: int, keys: Iterable[ChunkKey], deadline: float) -> Lease:
        """Pin *keys* for a session. Raises QuotaExceededError."""
        if self._by_session[session_id] >= self._limit:
            raise QuotaExceededError("max_leases_per_session", self._limit, f"session {session_id}")
        tenant, most = self.tenant_of(session_id)
        if most and self.by_tenant[tenant] >= most:
            raise QuotaExceededError("leases", most, f"tenant {tenant!r}")
        lease = Lease(self._new_id(), session_id, list(keys), deadline, tenant)
        self._leases[lease.lease_id] = lease
        self._by_session[session_id] += 1
        self.by_tenant[tenant] += 1
        self.pins.update(lease.keys)  # counts in C, three times as fast as a loop
        return lease

    def find(self, lease_id: int, session_id: int) -> Lease | None:
        """Return the session's lease, expired or not; None if there is no such lease."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.session_id == session_id else None

    def get(self, lease_id: int, session_id: int, now: float) -> Lease:
        """Return a live lease of the session. Raises LeaseExpiredError."""
        lease = self.find(lease_id, session_id)
        if lease is None or lease.deadline <= now:
            raise LeaseExpiredError(
                f"lease_id={lease_id}: released, expired or not this session's; call lookup again"
            )
        return lease

    def release(self, lease_id: int, session_id: int) -> bool:
        """Unpin the chunks of a lease. Return whether the session had such a lease."""
        lease = self.find(lease_id, session_id)
        if lease is None:
            return False
        del self._leases[lease_id]
        _count_down(self._by_session, session_id)
        _count_down(self.by_tenant, lease.tenant)
        pins = self.pins
        for key in lease.keys:
            if left := pins.pop(key) - 1:
                pins[key] = left
        return True

    def count_of(self, session_id: int) -> int:
        """Return how many leases a session has. Needs no lock."""
        return self._by_session[session_id]

    def drop(self, is_over: Callable[[Lease], bool]) -> int:
        """Release the leases for which *is_over*. Return how many."""
        over = [lease for lease in self._leases.values() if is_over(lease)]
        return sum(self.release(lease.lease_id, lease.session_id) for lease in over)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._leases

    def pin(self, key: ChunkKey) -> None:
        """Keep *key* from eviction until the matching ``unpin``."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``."""
        _count_down(self.pins, key)

    def __len__(self) -> int:
        return len(self._leases)


def _count_down(counter: Counter[Any], key: object) -> None:
    if left := counter.pop(key) - 1:
        counter[key] = left


class Pins:
    """Pinned chunks. Not thread-safe: the catalog's lock guards it.

    ``until`` is in seconds on the clock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self.pinned: dict[ChunkKey, tuple[float, int]] = {}
        """The end of each chunk's pin, and its bytes."""

    def pin(self, key: ChunkKey, size_bytes: int, until: float) -> bool:
        """Pin a chunk, or renew its pin; return False when that exceeds the limit."""
        before = self.pinned.get(key, (0.0, 0))[1]
        if self._used_bytes - before + size_bytes > self._limit_bytes:
            return False
        self._used_bytes += size_bytes - before
        self.pinned[key] = (until, size_bytes)
        return True

    def unpin(self, key: ChunkKey) -> bool:
        """End a pin; return whether there was one."""
        is_pinned = key in self.pinned
        self._used_bytes -= self.pinned.pop(key, (0.0, 0))[1]
        return is_pinned

    def expire(self, now: float) -> None:
        """End expired pins."""
        for key in [k for k, (until, _) in self.pinned.items() if until <= now]:
            self.unpin(key)


class Holds:
    """Leases, pins and hand-overs together. The catalog's lock guards it."""

    def __init__(self, leases: Leases, pin_limit_bytes: int) -> None:
        self.leases = leases
        self.pin_limit_bytes = pin_limit_bytes
        self.pins = Pins(pin_limit_bytes)
        self.handed_over = Pins(pin_limit_bytes // 2)
        """Chunks handed over to another engine."""

    def is_held(self, key: ChunkKey) -> bool:
        """Whether the chunk is leased, pinned or handed over."""
        return key in self.leases.pins or key in self.pins.pinned or key in self.handed_over.pinned

    def lease(self, keys: Sequence[ChunkKey], terms: LeaseTerms, now: float) -> Lease:
        """Lease *keys*, which ends their hand-over. Raises QuotaExceededError."""
        if self.handed_over.pinned:
            for key in keys:
                self.handed_over.unpin(key)
        return self.leases.grant(terms.session_id, keys, now + terms.ttl_s)

    def expire(self, now: float) -> int:
        """End expired holds; return how many leases."""
        self.pins.expire(now)
        self.handed_over.expire(now)
        return self.leases.drop(lambda lease: lease.deadline <= now)
