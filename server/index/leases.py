"""Leases: who reads what, until when. A leased chunk is never evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.proto.errors import LeaseExpiredError, QuotaExceededError
from kvstore.proto.types import ChunkKey


@dataclass(slots=True)
class Lease:
    """A pin on chunks, owned by a session. ``deadline`` is in the clock's seconds."""

    lease_id: int
    session_id: int
    keys: Sequence[ChunkKey]
    deadline: float
    tenant: str = ""


TenantOf = Callable[[int], tuple[str, int]]
"""From a session's id to its tenant and how many leases that may have; 0: as many as it likes."""


def _nobody(session_id: int) -> tuple[str, int]:
    return "", 0


class Leases:
    """All leases and the pins they add up to. Not thread-safe: the store's lock guards it.

    Invariant: ``pins[key]`` is the number of leases that name *key*, plus the copies of it
    that are being moved; no entry is zero.
    """

    def __init__(self, limit_per_session: int, new_id: Callable[[], int]) -> None:
        self._limit = limit_per_session
        self._new_id = new_id
        self._leases: dict[int, Lease] = {}
        self._by_session: dict[int, set[int]] = {}
        self.pins: dict[ChunkKey, int] = {}
        self.tenant_of: TenantOf = _nobody
        self.by_tenant: Counter[str] = Counter()

    def grant(self, session_id: int, keys: Iterable[ChunkKey], deadline: float) -> Lease:
        """Pin *keys* for a session. Raises QuotaExceededError."""
        owned = self._by_session.setdefault(session_id, set())
        if len(owned) >= self._limit:
            raise QuotaExceededError("max_leases_per_session", self._limit, f"session {session_id}")
        tenant, most = self.tenant_of(session_id)
        if most and self.by_tenant[tenant] >= most:
            if not owned:
                del self._by_session[session_id]
            raise QuotaExceededError("leases", most, f"tenant {tenant!r}")
        lease = Lease(self._new_id(), session_id, list(keys), deadline, tenant)
        self.by_tenant[tenant] += 1
        self._leases[lease.lease_id] = lease
        owned.add(lease.lease_id)
        pins, held = self.pins, self.pins.get
        for key in lease.keys:
            pins[key] = held(key, 0) + 1
        return lease

    def get(self, lease_id: int, session_id: int, now: float) -> Lease:
        """Return a live lease of the session. Raises LeaseExpiredError."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id or lease.deadline <= now:
            raise LeaseExpiredError(
                f"lease_id={lease_id}: released, expired or not this session's; call lookup again"
            )
        return lease

    def keys_of(self, lease_id: int, session_id: int) -> list[ChunkKey]:
        """Return the keys that a lease of the session names; none if there is no such lease."""
        lease = self._leases.get(lease_id)
        return list(lease.keys) if lease and lease.session_id == session_id else []

    def release(self, lease_id: int, session_id: int) -> bool:
        """Unpin what the lease holds. Return whether the session had such a lease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            return False
        del self._leases[lease_id]
        owned = self._by_session[session_id]
        owned.discard(lease_id)
        if not owned:
            del self._by_session[session_id]
        self.by_tenant[lease.tenant] -= 1
        if not self.by_tenant[lease.tenant]:
            del self.by_tenant[lease.tenant]
        for key in lease.keys:
            self.unpin(key)
        return True

    def release_session(self, session_id: int) -> int:
        """Release every lease of a session that ended. Return how many."""
        owned = list(self._by_session.get(session_id, ()))
        for lease_id in owned:
            self.release(lease_id, session_id)
        return len(owned)

    def expire(self, now: float) -> int:
        """Release every lease whose deadline has passed. Return how many."""
        late = [lease for lease in self._leases.values() if lease.deadline <= now]
        for lease in late:
            self.release(lease.lease_id, lease.session_id)
        return len(late)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def pin(self, key: ChunkKey) -> None:
        """Keep *key* from eviction until the matching ``unpin``."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``."""
        left = self.pins[key] - 1
        if left:
            self.pins[key] = left
        else:
            del self.pins[key]

    def __len__(self) -> int:
        return len(self._leases)
