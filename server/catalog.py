"""The Catalog: which copies exist, who holds them and which may go. One lock, no I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, Namespace
from kvstore.server.leases import Lease, LeaseTable
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.radix import RadixIndex, Rows


@dataclass(frozen=True, slots=True)
class Holding:
    """One chunk as the catalog knows it: its copies by tier name."""

    key: ChunkKey
    copies: Mapping[str, ChunkInfo]
    leases: int
    is_pinned: bool
    hits: int


@dataclass(frozen=True, slots=True)
class Found:
    """The chunks of the longest prefix that can be read.

    ``sources[i]`` is the place of chunk i's tier among those asked for and ``sizes[i]`` its
    bytes there. ``known`` counts the chunks that any tier has, ``pending`` those behind them
    that are being written. ``lease_id`` is 0 when nothing was leased.
    """

    known: int
    pending: int
    sources: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    lease_id: int = 0

    @property
    def first_missing(self) -> int:
        """The place in the chain of the first chunk that is neither known nor being written."""
        return self.known + self.pending


class LeaseTerms(NamedTuple):
    """For whom, and for how long from now."""

    session_id: int
    ttl_s: float


class Catalog:
    """The RadixIndex, the eviction policies, leases and pins, kept in step under one lock.

    Invariants: a policy knows exactly the rows of the copies on its tier; a key with a lease,
    a pin or a running move is never handed out as a victim. Rows never leave this file: a row
    may be another chunk's as soon as the lock is let go.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        leases: LeaseTable,
        pin_limit_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._policies = policies
        self._leases = leases
        self._clock = clock
        self._index = RadixIndex(list(policies))
        self._pending: dict[ChunkKey, int] = {}
        self._leaving: dict[ChunkKey, str] = {}
        """Chunks being evicted, and the tier they leave."""
        self._strays: dict[str, set[ChunkKey]] = {tier: set() for tier in policies}
        """Copies that were forgotten and that their tier has not freed yet."""
        self._pinned: dict[ChunkKey, tuple[float, int]] = {}
        self._pin_limit_bytes = pin_limit_bytes
        # Guards all of the above; held for dictionary operations only.
        self._lock = threading.Lock()
        self._unclaimed = threading.Condition(self._lock)

    # --- copies

    def note_sealed(self, tier: str, info: ChunkInfo) -> None:
        """A copy became visible on *tier*."""
        with self._lock:
            self._strays[tier].discard(info.key)
            row = self._index.add(tier, info)
            parent = self._index.parent(row)
            self._policies[tier].insert(row, parent, info.size_bytes, self._clock())

    def forget(self, tier: str, key: ChunkKey) -> bool:
        """A copy is gone from *tier*. False if it was not known."""
        with self._lock:
            return self._forget(tier, key)

    def _forget(self, tier: str, key: ChunkKey) -> bool:
        row = self._index.row(key)
        if not row:
            return False
        self._policies[tier].remove(row)
        return self._index.discard(tier, row)

    def cast_out(self, tier: str, key: ChunkKey, *, even_if_held: bool = True) -> bool:
        """A copy is about to leave *tier*, and a stray until ``swept``.

        False if it was not there, or is held.
        """
        with self._lock:
            if not even_if_held and self._is_held(key):
                return False
            known = self._forget(tier, key)
            if known:
                self._strays[tier].add(key)
            return known

    def strays(self, tier: str) -> set[ChunkKey]:
        """Return what was cast out of *tier* and may still lie there."""
        with self._lock:
            return set(self._strays[tier])

    def is_stray(self, tier: str, key: ChunkKey) -> bool:
        """Whether the chunk was cast out of *tier* and may still lie there."""
        with self._lock:
            return key in self._strays[tier]

    def swept(self, tier: str, key: ChunkKey) -> None:
        """The tier has freed a stray."""
        with self._lock:
            self._strays[tier].discard(key)

    def copies(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name; empty when there is none."""
        with self._lock:
            return self._index.copies(self._index.row(key))

    def holders(self, key: ChunkKey, least: Fidelity = Fidelity.none) -> list[str]:
        """Return the tiers with such a copy of the chunk: less to ask for than ``copies``."""
        with self._lock:
            return self._index.holders(self._index.row(key), least)

    def size_bytes(self, tier: str, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on *tier*; 0 when it is not there."""
        with self._lock:
            row = self._index.row(key)
            return self._index.size_bytes(tier, row) if tier in self._index.holders(row) else 0

    def holding(self, key: ChunkKey) -> Holding | None:
        """Return what is known of one chunk."""
        with self._lock:
            row = self._index.row(key)
            if not row:
                return None
            leases, is_pinned = self._leases.pins.get(key, 0), key in self._pinned
            hits = self._index.hits(row)
            return Holding(key, self._index.copies(row), leases, is_pinned, hits)

    def holdings(self, space: Namespace) -> list[Holding]:
        """Return every chunk of a namespace. Those that come or go meanwhile may be left out."""
        with self._lock:
            keys = self._index.keys_of(space)
        return [held for key in keys if (held := self.holding(key)) is not None]

    def only_on(self, *tiers: str) -> list[ChunkKey]:
        """Return the chunks that are on no tier but these."""
        with self._lock:
            return self._index.only_on(tiers)

    def count_on(self, tier: str) -> int:
        """Copies known on *tier*."""
        return len(self._policies[tier])

    def __len__(self) -> int:
        return len(self._index)

    # --- lookups and leases

    def match(
        self,
        keys: Sequence[ChunkKey],
        min_fidelity: Fidelity,
        tiers: Sequence[str | None],
        lease: LeaseTerms | None = None,
    ) -> Found:
        """Find the longest prefix with copies of *min_fidelity* on *tiers*, the best named first.

        None stands for a tier that is not to be read. Touches all chunks that any tier has. With
        *lease* what was found is leased. Raises QuotaExceededError.
        """
        with self._lock:
            rows = self._index.longest_prefix(keys, min_fidelity)
            self._index.count_hits(rows)
            now_s = self._clock()
            for policy in self._policies.values():
                policy.touch(rows, now_s)
            pending = self._count_pending(keys, len(rows))
            sources, sizes = self._choose(rows, min_fidelity, tiers)
            lease_id = 0
            if lease is not None and len(sources):
                lease_id = self._lease(keys[: len(sources)], lease).lease_id
            return Found(len(rows), pending, sources, sizes, lease_id)

    def _lease(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> Lease:
        return self._leases.grant(terms.session_id, keys, self._clock() + terms.ttl_s)

    def held(
        self, tiers: Sequence[str], keys: Sequence[ChunkKey], least: Fidelity
    ) -> list[NDArray[np.bool_]]:
        """Return, for each of *tiers*, which of the known prefix of *keys* it has at *least*."""
        with self._lock:
            rows = self._index.longest_prefix(keys, least)
            return [self._index.sizes(tier, rows, least)[0] for tier in tiers]

    def _count_pending(self, keys: Sequence[ChunkKey], known: int) -> int:
        """Return how many chunks after the known ones are there or being written."""
        at = known
        while at < len(keys) and (keys[at] in self._pending or keys[at] in self._index):
            at += 1
        return at - known

    def _choose(
        self, rows: Rows, min_fidelity: Fidelity, tiers: Sequence[str | None]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the first of *tiers* that has each chunk, and its bytes, up to one without."""
        sources = np.zeros(len(rows), np.uint8)
        sizes = np.zeros(len(rows), np.int64)
        open_rows = np.ones(len(rows), np.bool_)
        for number, tier in enumerate(tiers):
            if tier is not None and open_rows.any():
                held, there = self._index.sizes(tier, rows, min_fidelity)
                held &= open_rows
                sources[held] = number
                np.copyto(sizes, there, where=held)
                open_rows ^= held
        end = int(open_rows.argmax()) if open_rows.any() else len(rows)
        return sources[:end], sizes[:end]

    def grant(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> tuple[Lease, int]:
        """Lease the longest prefix of *keys* that still exists; return it and its length.

        Raises QuotaExceededError.
        """
        with self._lock:
            known = len(self._index.longest_prefix(keys, Fidelity.none))
            return self._lease(keys[:known], terms), known

    def lease(self, lease_id: int, session_id: int) -> Lease:
        """Return a live lease. Raises LeaseExpiredError."""
        with self._lock:
            return self._leases.get(lease_id, session_id, self._clock())

    def release(self, lease_id: int, session_id: int) -> bool:
        """End a lease."""
        with self._lock:
            return self._leases.release(lease_id, session_id)

    def release_session(self, session_id: int) -> int:
        """End all leases of a session."""
        with self._lock:
            return self._leases.release_session(session_id)

    def expire(self) -> int:
        """End leases and pins whose time is up; return how many leases."""
        with self._lock:
            now = self._clock()
            for key in [k for k, (until, _) in self._pinned.items() if until <= now]:
                del self._pinned[key]
            return self._leases.expire(now)

    def lease_count(self) -> int:
        """Live leases."""
        return len(self._leases)

    def held_count(self) -> int:
        """Sum of all pins that leases and moves hold; 0 when nothing is read or moved."""
        with self._lock:
            return sum(self._leases.pins.values())

    # --- pins

    def pin(self, keys: Iterable[ChunkKey], ttl_s: float) -> int:
        """Keep known chunks for *ttl_s* seconds; return how many. Raises QuotaExceededError."""
        with self._lock:
            used = sum(size for _, size in self._pinned.values())
            until = self._clock() + ttl_s
            count = 0
            for key in keys:
                row = self._index.row(key)
                if not row:
                    continue
                size = self._index.size_bytes(self._index.holders(row)[0], row)
                if key not in self._pinned:
                    used += size
                if used > self._pin_limit_bytes:
                    raise QuotaExceededError("pin_limit_bytes", self._pin_limit_bytes, "pins")
                self._pinned[key] = (until, size)
                count += 1
            return count

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """End explicit pins; return how many there were."""
        with self._lock:
            return sum(self._pinned.pop(key, None) is not None for key in keys)

    # --- moves and victims

    def hold(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Keep *key* from eviction while it is moved; return its copies. Pair with ``let_go``."""
        with self._lock:
            self._leases.pin(key)
            return self._index.copies(self._index.row(key))

    def let_go(self, key: ChunkKey) -> None:
        """Undo one ``hold``."""
        with self._lock:
            self._leases.unpin(key)

    def begin_put(self, key: ChunkKey) -> bool:
        """Count a writer of *key*; False, counting nothing, when an exact copy exists."""
        with self._lock:
            if self._index.holders(self._index.row(key), Fidelity.exact):
                return False
            self._pending[key] = self._pending.get(key, 0) + 1
            return True

    def end_put(self, key: ChunkKey) -> None:
        """Undo one ``begin_put``."""
        with self._lock:
            left = self._pending[key] - 1
            if left:
                self._pending[key] = left
            else:
                del self._pending[key]

    def pending_count(self) -> int:
        """Writers at work."""
        with self._lock:
            return sum(self._pending.values())

    def claim_victims(
        self, tier: str, need_bytes: int, limit: int, among: Sequence[ChunkKey] | None = None
    ) -> list[ChunkKey]:
        """Choose whom to evict and keep others from choosing the same. Pair with ``unclaim``.

        With *among* every chunk of it that may go is chosen, whatever the policy says.
        """
        with self._lock:
            if among is None:
                victims = self._victims(tier, need_bytes, limit)
            else:
                victims = [key for key in among if not self._stays(key)]
            self._leaving.update(dict.fromkeys(victims, tier))
            return victims

    def _victims(self, tier: str, need_bytes: int, limit: int) -> list[ChunkKey]:
        """Return as many victims as free *need_bytes*, or *limit*, or all that may go."""
        index, stays = self._index, self._stays
        victims: list[ChunkKey] = []
        candidates = self._policies[tier].victims(lambda row: stays(index.key(row)), self._clock())
        while need_bytes > 0 and len(victims) < limit:
            row = next(candidates, 0)
            if not row:
                break
            victims.append(index.key(row))
            need_bytes -= index.size_bytes(tier, row)
        return victims

    def unclaim(self, keys: Iterable[ChunkKey]) -> None:
        """The eviction is over, whatever became of it."""
        with self._lock:
            for key in keys:
                del self._leaving[key]
            self._unclaimed.notify_all()

    def await_unclaimed(self, tier: str, deadline: float) -> bool:
        """Wait until an eviction from *tier* is over; False if none runs or time is up."""
        with self._unclaimed:
            left_s = deadline - self._clock()
            if tier not in self._leaving.values() or left_s <= 0:
                return False
            return self._unclaimed.wait(left_s)

    def _is_held(self, key: ChunkKey) -> bool:
        return key in self._leases.pins or key in self._pinned

    def _stays(self, key: ChunkKey) -> bool:
        return key in self._leaving or self._is_held(key)
