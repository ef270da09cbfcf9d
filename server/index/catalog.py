"""The Catalog: which copies exist, who holds them and which may go. One lock, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.hints import Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity
from kvstore.server.index.found import Found as Found
from kvstore.server.index.found import Holding as Holding
from kvstore.server.index.found import LeaseTerms as LeaseTerms
from kvstore.server.index.found import Turn
from kvstore.server.index.hearsay import Hearsay
from kvstore.server.leases import Lease
from kvstore.server.policy.journal import Asked
from kvstore.server.policy.partitions import PartitionedEviction
from kvstore.server.policy.radix import Rows

LOOKED_AT = 4096
"""Victims that are gone through for one chunk's turn."""
_EXPIRED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """For which partition victims are: others' above their guarantee, or its own alone."""

    partition: int = 0
    is_own: bool = False


EVERYBODY = Wanted()


class Catalog(Hearsay):
    """The RadixIndex, the eviction policies, leases and pins, kept in step under one lock.

    Invariants: a policy knows exactly the rows of the copies on its tier; a key with a lease,
    a pin or a running move is never handed out as a victim; *knowledge* is told of an event
    before the policies, which rank by it. Rows never leave this file: a row may be another
    chunk's as soon as the lock is let go.
    """

    # --- lookups and leases

    def match(
        self,
        keys: Sequence[ChunkKey],
        min_fidelity: Fidelity,
        tiers: Sequence[str | None],
        lease: LeaseTerms | None = None,
        *,
        again: bool = False,
    ) -> Found:
        """Find the longest prefix with copies of *min_fidelity* on *tiers*, the best named first.

        None stands for a tier that is not to be read. Touches all chunks that any tier has,
        unless it is the same lookup *again*. With *lease* what was found is leased. Raises
        QuotaExceededError.
        """
        with self._lock:
            now_s = self._clock()
            known = self._index.known_prefix(keys)
            rows = self._readable(known, min_fidelity, now_s)
            if not again:
                self._index.count_hits(rows)
            self._journal.note(Asked(known, keys, now_s, again))
            pending = self._count_pending(keys, len(rows), now_s)
            shared = len(known) if self._index.has_ends(keys) else 0
            ghosts = self._index.count_ghosts(known[len(rows) :])
            sources, sizes = self._choose(rows, min_fidelity, tiers)
            lease_id = 0
            if lease is not None and len(sources):
                lease_id = self._lease(keys[: len(sources)], lease).lease_id
        self._news.set()
        return Found(len(rows), pending, sources, sizes, lease_id, ghosts, shared)

    def _lease(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> Lease:
        if self.uses:
            self.uses.used(keys, terms.session_id)
        if self._handed_over:
            for key in keys:
                self._handed_over.unpin(key)
        return self._leases.grant(terms.session_id, keys, self._clock() + terms.ttl_s)

    def held(
        self, tiers: Sequence[str], keys: Sequence[ChunkKey], least: Fidelity
    ) -> list[NDArray[np.bool_]]:
        """Return, for each of *tiers*, which of the known prefix of *keys* it has at *least*."""
        with self._lock:
            rows = self._index.longest_prefix(keys, least)
            return [self._index.sizes(tier, rows, least)[0] for tier in tiers]

    def _readable(self, known: Rows, least: Fidelity, now_s: float) -> Rows:
        """Return the prefix of *known* rows that may be a hit."""
        return self._index.readable(self.knowledge.hints.unexpired(known, now_s), least)

    def _count_pending(self, keys: Sequence[ChunkKey], known: int, now_s: float) -> int:
        """Return how many chunks after the known ones are being written, or are there already
        behind or before one that is.
        """
        at, is_any = known, False
        while at < len(keys):
            if self._is_coming(keys[at]):
                is_any = True
            else:
                row = self._index.row(keys[at])
                if not row or self.knowledge.hints.is_expired(row, now_s):
                    break
            at += 1
        return at - known if is_any else 0

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
        end = len(self._index.usable(rows[:end]))
        return sources[:end], sizes[:end]

    def grant(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> tuple[Lease, int]:
        """Lease the longest prefix of *keys* that still exists; return it and its length.

        Raises QuotaExceededError.
        """
        with self._lock:
            rows = self._index.known_prefix(keys)
            known = len(self._readable(rows, Fidelity.none, self._clock()))
            return self._lease(keys[:known], terms), known

    def lease(self, lease_id: int, session_id: int) -> Lease:
        """Return a live lease. Raises LeaseExpiredError."""
        with self._lock:
            return self._leases.get(lease_id, session_id, self._clock())

    def leased(self, lease_id: int, session_id: int) -> list[ChunkKey]:
        """Return the chunks of a lease, be its time up or not; none if there is no such lease."""
        with self._lock:
            return self._leases.keys_of(lease_id, session_id)

    def release(self, lease_id: int, session_id: int) -> bool:
        """End a lease."""
        with self._lock:
            return self._leases.release(lease_id, session_id)

    def release_session(self, session_id: int) -> int:
        """End all leases of a session, and what it announced."""
        with self._lock:
            self.uses.end(session_id)
            if self._promises.end(session_id):
                self._arrived.notify_all()
            return self._leases.release_session(session_id)

    def expire(self) -> int:
        """End leases and pins whose time is up; return how many leases."""
        with self._lock:
            now = self._clock()
            self._pinned.expire(now)
            self._handed_over.expire(now)
            if self._promises.expire(now):
                self._arrived.notify_all()
            self.uses.expire(now)
            return self._leases.expire(now)

    def is_leased(self, lease_id: int) -> bool:
        """Whether there is such a lease; its time may be up."""
        with self._lock:
            return lease_id in self._leases

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
            until = self._clock() + ttl_s
            count = 0
            for key in keys:
                row = self._index.row(key)
                if row:
                    self._pinned.pin(key, self._any_size(row), until)
                    count += 1
            return count

    def _any_size(self, row: int) -> int:
        return self._index.size_bytes(self._index.holders(row)[0], row)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """End explicit pins; return how many there were."""
        with self._lock:
            return sum(self._pinned.unpin(key) for key in keys)

    # --- hints

    def hint(self, keys: Iterable[ChunkKey], hints: Hints) -> int:
        """An engine spoke of chunks; return how many pins are over the limit, and ignored."""
        with self._lock:
            now = self._clock()
            self._journal.settle()
            rows = [row for key in keys if (row := self._index.row(key))]
            self.knowledge.hinted(np.array(rows, np.intp), hints, now)
            return sum(
                not table.extend(self._index.key(row), self._any_size(row), now + ms / 1000)
                for table, ms in (
                    (self._pinned, hints.pin_ms),
                    (self._handed_over, hints.handover_ms),
                )
                for row in (rows if ms else ())
            )

    def expired_keys(self) -> list[ChunkKey]:
        """Return some chunks whose time is up, and that are therefore nobody's hit any more."""
        with self._lock:
            return [self._index.key(row) for row in self._expired()]

    def _expired(self) -> list[int]:
        return self.knowledge.hints.expired(self._clock(), _EXPIRED_AT_ONCE)

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

    def partition(self, key: ChunkKey, tenant: str, category: str) -> int:
        """Return the partition that a chunk counts against, be it here or only to come."""
        with self._lock:
            row = self._index.row(key)
            known = self.knowledge
            return known.hints.partition(row) if row else known.partitions.number(tenant, category)

    def owed_bytes(self, tier: str, partition: int, need_bytes: int, need_chunks: int = 1) -> int:
        """Return what a partition has to free of its own on *tier* to take *need_bytes* more, in
        so many chunks.
        """
        policy = self._policies[tier]
        if not isinstance(policy, PartitionedEviction):
            return 0
        with self._lock:
            self._journal.settle()
            return policy.owed_bytes(partition, need_bytes, need_chunks)

    def claim_victims(
        self,
        tier: str,
        need_bytes: int,
        limit: int,
        among: Sequence[ChunkKey] | None = None,
        wanted: Wanted = EVERYBODY,
    ) -> list[ChunkKey]:
        """Choose whom to evict and keep others from choosing the same. Pair with ``unclaim``.

        *wanted* says for which partition. With *among* every chunk of it that may go is chosen,
        whatever the policy says.
        """
        with self._lock:
            self._journal.settle()
            if among is None:
                victims = self._victims(tier, need_bytes, limit, wanted)
            else:
                victims = [key for key in among if not self._stays(key)]
            self._leaving.update(dict.fromkeys(victims, tier))
            return victims

    def _victims(self, tier: str, need_bytes: int, limit: int, wanted: Wanted) -> list[ChunkKey]:
        """Return as many victims as free *need_bytes*, or *limit*, or all that may go."""
        index = self._index
        victims: dict[int, ChunkKey] = {}
        for row in self._candidates(tier, wanted):
            if need_bytes <= 0 or len(victims) == limit:
                break
            if row not in victims:
                victims[row] = index.key(row)
                need_bytes -= index.size_bytes(tier, row)
        return list(victims.values())

    def _candidates(self, tier: str, wanted: Wanted) -> Iterator[int]:
        index = self._index

        def stays(row: int) -> bool:
            return self._stays(index.key(row))

        rows = self._ordered(tier, wanted, stays)
        if tier == index.tiers[-1] != index.tiers[0]:
            rows = chain(self._sparing(tier, wanted, stays), rows)
        late = (row for row in self._expired() if tier in index.holders(row) and not stays(row))
        return rows if wanted.is_own else chain(late, rows)

    def _sparing(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Yield those candidates without which no chunk of a faster tier would be orphaned."""
        index = self._index
        named: Counter[int] = Counter()

        def spares(row: int) -> bool:
            is_way = index.continued(row) > named[row] and index.is_alone_on(tier, row)
            return is_way or stays(row)

        for row in self._ordered(tier, wanted, spares):
            named[index.parent(row)] += 1
            yield row

    def _ordered(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Yield who may go, as the tier's policy and the engines' priorities have it."""
        policy, now = self._policies[tier], self._clock()
        if not isinstance(policy, PartitionedEviction):
            rows = policy.victims(stays, now)
        elif wanted.is_own:
            rows = policy.victims_of(wanted.partition, stays, now)
        else:
            rows = policy.victims_for(wanted.partition, stays, now)
        return self.knowledge.hints.in_order(rows, self._index.parent, len(policy))

    def turn(self, tier: str, key: ChunkKey) -> Turn:
        """Return how many others *tier* would evict before *key*; nobody is."""
        with self._lock:
            self._journal.settle()
            row, before = self._index.row(key), 0
            for victim in islice(self._candidates(tier, EVERYBODY), LOOKED_AT):
                if victim == row:
                    return Turn(before)
                before += 1
            return Turn(before, is_at_least=True)

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

    def _stays(self, key: ChunkKey) -> bool:
        return key in self._leaving or self._is_held(key)
