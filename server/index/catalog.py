"""The Catalog: which copies exist, who holds them and which may go. One lock, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.plans import Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, KVLayout, Namespace
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.index.access_log import Asked, Stored, StoredChain
from kvstore.server.index.eviction_state import EXPIRED_AT_ONCE, EvictionState
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Lease, Leases, TenantOf
from kvstore.server.index.in_flight import InFlightPuts
from kvstore.server.index.prefix_ends import ResumeRequirements
from kvstore.server.index.queries import CatalogQueries
from kvstore.server.index.results import LeaseTerms, PrefixMatch
from kvstore.server.index.saved_history import MAX_CHUNKS, SavedHistory
from kvstore.server.index.state import CatalogListener, CatalogState
from kvstore.server.telemetry.outcomes import Outcomes

QUIET_S = 0.004
"""Requests have paused when none came for so long."""
_LOOKS_FOR_QUIET = 64
SPARED = 4
"""Events told behind one answer: what a lookup comes to that learned a chain, and one more."""
AT_ONCE = 32
"""Chunks noted, or told of, without letting go of the lock."""
_UNKNOWN = PutInfo()


class Catalog:
    """The index, the eviction policies and who holds what, kept in step under one lock.

    *metadata* is told of an event before the policies, which rank by it. ``listeners`` are told
    of copies; ``in_flight``, ``eviction`` and ``queries`` are parts that share the lock.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        leases: Leases,
        pin_limit_bytes: int,
        clock: Callable[[], float],
        metadata: ChunkMetadata | None = None,
    ) -> None:
        metadata = metadata or ChunkMetadata()
        self.state = CatalogState(policies, leases, pin_limit_bytes, clock, metadata)
        self.in_flight = InFlightPuts(self.state)
        self.eviction = EvictionState(self.state)
        self.queries = CatalogQueries(self.state, self.in_flight)
        self.listeners: list[CatalogListener] = []
        self.outcomes = Outcomes(clock)
        """What became of chunks that are not here."""
        self._orphans: dict[str, set[ChunkKey]] = {tier: set() for tier in policies}
        """Copies that were forgotten and that their tier has not freed yet."""

    # --- copies

    def needs_ends(self, space: Namespace, needs: ResumeRequirements) -> None:
        """Prefixes of *space* are of a model that goes on only where it has what it *needs*."""
        with self.state.lock:
            self.state.index.needs_ends(space, needs)

    def is_less_complete(self, key: ChunkKey, layout: KVLayout) -> bool:
        """Whether the chunk is here with less of its end than *layout* has."""
        with self.state.lock:
            row = self.state.index.row(key)
            return bool(row) and self.state.index.is_less_complete(row, layout)

    def is_absent_or_less_complete(self, key: ChunkKey, layout: KVLayout) -> bool:
        """Whether a chunk of *layout* would be news."""
        with self.state.lock:
            row = self.state.index.row(key)
            return not row or self.state.index.is_less_complete(row, layout)

    def note_sealed(self, tier: str, info: ChunkInfo, put_info: PutInfo | None = None) -> None:
        """A copy became visible on *tier*; *put_info* says where it came from, if it was put."""
        with self.state.lock:
            if self._contradicts(info):
                self._orphans[tier].add(info.key)
                return
            self._sealed(tier, info, put_info)
        self.state.news.set()

    def _sealed(self, tier: str, info: ChunkInfo, put_info: PutInfo | None) -> None:
        state, known = self.state, self.state.metadata
        self._orphans[tier].discard(info.key)
        is_new = not state.index.row(info.key)
        row = state.index.add(tier, info)
        parent, now = state.index.parent(row), state.clock()
        facts = known.facts(row, info, put_info or _UNKNOWN) if is_new else None
        known.hints.arrived(row)
        if is_new and state.holds.uses:
            if put_info is not None:  # whoever put it has used it
                state.holds.uses.used([info.key])
            state.holds.keep(info.key, info.size_bytes)
        number = state.index.tiers.index(tier)
        state.access_log.note(Stored(number, row, parent, info.size_bytes, facts, now))
        for listener in self.listeners:
            listener.stored(tier, info, put_info)

    def _contradicts(self, info: ChunkInfo) -> bool:
        """Whether there are copies with another layout: all copies of a chunk are alike."""
        row = self.state.index.row(info.key)
        return bool(row) and self.state.index.layout(row) != info.layout

    def forget(self, tier: str, key: ChunkKey) -> bool:
        """A copy is gone from *tier*. False if it was not known."""
        with self.state.lock:
            return self._forget(tier, key)

    def _forget(self, tier: str, key: ChunkKey) -> bool:
        state = self.state
        row = state.index.row(key)
        if not row:
            return False
        state.access_log.apply_all()
        state.policies[tier].remove(row)
        known = state.index.discard(tier, row)
        is_last = not state.index.holders(row)
        if is_last:
            self.state.metadata.hints.forget(row)
            state.holds.uses.gone(key)
        if known:
            for listener in self.listeners:
                listener.removed(tier, key, is_last=is_last)
        return known

    def cast_out(self, tier: str, key: ChunkKey, *, even_if_held: bool = True) -> bool:
        """A copy is about to leave *tier*, and an orphan until ``purged``.

        False if it was not there, or is held.
        """
        with self.state.lock:
            if not even_if_held and self.state.holds.is_held(key):
                return False
            known = self._forget(tier, key)
            if known:
                self._orphans[tier].add(key)
            return known

    def leave(self, tier: str, key: ChunkKey, other: str) -> bool:
        """A copy may leave *tier* as *other* has one, nobody holds it and it is not evicted there.

        It is an orphan then, until ``purged``.
        """
        with self.state.lock:
            holders = self.state.index.holders(self.state.index.row(key))
            if other not in holders or self.eviction.stays(key):
                return False
            known = self._forget(tier, key)
            if known:
                self._orphans[tier].add(key)
            return known

    def orphans(self, tier: str) -> set[ChunkKey]:
        """Return what was cast out of *tier* and may still lie there."""
        with self.state.lock:
            return set(self._orphans[tier])

    def is_orphan(self, tier: str, key: ChunkKey) -> bool:
        """Whether the chunk was cast out of *tier* and may still lie there."""
        with self.state.lock:
            return key in self._orphans[tier]

    def purged(self, tier: str, key: ChunkKey) -> None:
        """The tier has freed an orphan."""
        with self.state.lock:
            self._orphans[tier].discard(key)

    def copies(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name; empty when there is none."""
        with self.state.lock:
            return self.state.index.copies(self.state.index.row(key))

    def holders(self, key: ChunkKey, least: Fidelity = Fidelity.none) -> list[str]:
        """Return the tiers with such a copy of the chunk: less to ask for than ``copies``."""
        with self.state.lock:
            return self.state.index.holders(self.state.index.row(key), least)

    def is_common(self, key: ChunkKey) -> bool:
        """Whether several prompts have the chunk: two went on from it or from one behind it."""
        with self.state.lock:
            return self.state.index.is_common(self.state.index.row(key))

    def size_bytes(self, tier: str, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on *tier*; 0 when it is not there."""
        with self.state.lock:
            row = self.state.index.row(key)
            return (
                self.state.index.size_bytes(tier, row)
                if tier in self.state.index.holders(row)
                else 0
            )

    def any_size_bytes(self, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on the fastest tier that has it; 0 without one."""
        with self.state.lock:
            row = self.state.index.row(key)
            return self.state.index.size_bytes(self.state.index.holders(row)[0], row) if row else 0

    def evicted_count(self) -> int:
        """Chunks without a copy that are remembered."""
        return self.state.index.evicted_count

    def __len__(self) -> int:
        return len(self.state.index)

    # --- copies that others made, a chain at a time: somebody waits for it

    def note_found(self, tier: str, infos: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Others have copies on *tier*: note those that are not known, return those that say
        otherwise than what is here does.
        """
        others: list[ChunkInfo] = []
        for start in range(0, len(infos), AT_ONCE):
            with self.state.lock:
                for chain in _chains(infos[start : start + AT_ONCE]):
                    others += self._note(tier, chain)
        self.state.news.set()
        return others

    def _note(self, tier: str, chain: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Note a chain at once if nobody knows any of it, else its chunks one by one."""
        index = self.state.index
        is_told = self.state.holds.uses or any(one.covers(tier) for one in self.listeners)
        if len(chain) > 1 and not is_told and not any(index.row(info.key) for info in chain):
            self._note_chain(tier, chain)
            return []
        others = []
        for info in chain:
            if self._contradicts(info):
                others.append(info)
            elif tier not in index.holders(index.row(info.key)):
                self._sealed(tier, info, None)
        return others

    def _note_chain(self, tier: str, chain: Sequence[ChunkInfo]) -> None:
        """As ``_sealed`` of each chunk of a chain that nobody knows."""
        index, known = self.state.index, self.state.metadata
        if self._orphans[tier]:
            self._orphans[tier].difference_update([info.key for info in chain])
        rows = index.add_chain(tier, chain)
        facts, flops = known.facts_of_chain(rows, chain, _UNKNOWN)
        for row in rows:
            known.hints.arrived(row)
        number, parent = index.tiers.index(tier), index.parent(rows[0])
        size_bytes = chain[0].size_bytes
        stored = StoredChain(number, rows, parent, size_bytes, facts, flops, self.state.clock())
        self.state.access_log.note(stored)

    def infos_on(self, tier: str, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return what *tier* has of each of *keys*, of one namespace; None where it has nothing."""
        found: list[ChunkInfo | None] = []
        for start in range(0, len(keys), AT_ONCE):
            with self.state.lock:
                found += self._infos(tier, keys[start : start + AT_ONCE])
        return found

    def _infos(self, tier: str, keys: Sequence[ChunkKey]) -> Iterator[ChunkInfo | None]:
        index = self.state.index
        rows = index.known_prefix(keys)
        held, _ = index.sizes(tier, rows, Fidelity.none)
        for row, is_here in zip(rows.tolist(), held.tolist(), strict=True):
            yield index.info(tier, row) if is_here else None
        for key in keys[len(rows) :]:
            row = index.row(key)
            yield index.info(tier, row) if row and tier in index.holders(row) else None

    # --- lookups and leases

    def match(
        self,
        keys: Sequence[ChunkKey],
        min_fidelity: Fidelity,
        tiers: Sequence[str | None],
        lease: LeaseTerms | None = None,
        *,
        again: bool = False,
    ) -> PrefixMatch:
        """Find the longest prefix with copies of *min_fidelity* on *tiers*, the best named first.

        None stands for a tier that is not to be read. Touches all chunks that any tier has,
        unless it is the same lookup *again*. With *lease* what was found is leased. Raises
        QuotaExceededError.
        """
        with self.state.lock:
            now_s = self.state.clock()
            known = self.state.index.known_prefix(keys)
            rows = self._readable(known, min_fidelity, now_s)
            if not again:
                self.state.index.count_hits(rows)
            self.state.access_log.note(Asked(known, keys, now_s, again))
            pending = self._count_pending(keys, len(rows), now_s)
            shared = len(known) if self.state.index.has_ends(keys) else 0
            evicted = self.state.index.count_evicted(known[len(rows) :])
            sources, sizes = self._choose(rows, min_fidelity, tiers)
            lease_id = 0
            if lease is not None and len(sources):
                held = keys[: len(sources)]
                lease_id = self.state.holds.lease(held, lease, now_s).lease_id
        self.state.news.set()
        return PrefixMatch(len(rows), pending, sources, sizes, lease_id, evicted, shared)

    def held(
        self, tiers: Sequence[str], keys: Sequence[ChunkKey], least: Fidelity
    ) -> list[NDArray[np.bool_]]:
        """Return, for each of *tiers*, which of the known prefix of *keys* it has at *least*."""
        with self.state.lock:
            rows = self.state.index.longest_prefix(keys, least)
            return [self.state.index.sizes(tier, rows, least)[0] for tier in tiers]

    def read_plan(self, keys: Sequence[ChunkKey], least: Fidelity) -> list[list[str]]:
        """Return, for each of leased *keys*, the tiers with such a copy of it now."""
        index = self.state.index
        with self.state.lock:
            return [index.holders(index.row(key), least) for key in keys]

    def _readable(self, known: Rows, least: Fidelity, now_s: float) -> Rows:
        """Return the prefix of *known* rows that may be a hit."""
        return self.state.index.readable(self.state.metadata.hints.unexpired(known, now_s), least)

    def _count_pending(self, keys: Sequence[ChunkKey], known: int, now_s: float) -> int:
        """Return how many chunks after the known ones are being written, or are there already
        behind or before one that is.
        """
        at, is_any = known, False
        while at < len(keys):
            if self.in_flight.is_coming(keys[at]):
                is_any = True
            else:
                row = self.state.index.row(keys[at])
                if not row or self.state.metadata.hints.is_expired(row, now_s):
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
                held, there = self.state.index.sizes(tier, rows, min_fidelity)
                held &= open_rows
                sources[held] = number
                np.copyto(sizes, there, where=held)
                open_rows ^= held
        end = int(open_rows.argmax()) if open_rows.any() else len(rows)
        end = len(self.state.index.usable(rows[:end]))
        return sources[:end], sizes[:end]

    def grant(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> tuple[Lease, int]:
        """Lease the longest prefix of *keys* that still exists; return it and its length.

        Raises QuotaExceededError.
        """
        with self.state.lock:
            rows = self.state.index.known_prefix(keys)
            known = len(self._readable(rows, Fidelity.none, self.state.clock()))
            return self.state.holds.lease(keys[:known], terms, self.state.clock()), known

    def lease(self, lease_id: int, session_id: int) -> Lease:
        """Return a live lease. Raises LeaseExpiredError."""
        with self.state.lock:
            return self.state.holds.leases.get(lease_id, session_id, self.state.clock())

    def leased(self, lease_id: int, session_id: int) -> list[ChunkKey]:
        """Return the chunks of a lease, be its time up or not; none if there is no such lease."""
        with self.state.lock:
            return self.state.holds.leases.keys_of(lease_id, session_id)

    def release(self, lease_id: int, session_id: int) -> bool:
        """End a lease."""
        with self.state.lock:
            return self.state.holds.leases.release(lease_id, session_id)

    def release_session(self, session_id: int) -> int:
        """End all leases of a session, and what it announced."""
        with self.state.lock:
            self.state.holds.uses.end(session_id)
            self.in_flight.end_session(session_id)
            return self.state.holds.leases.release_session(session_id)

    def expire(self) -> int:
        """End leases and pins whose time is up; return how many leases."""
        with self.state.lock:
            now = self.state.clock()
            self.in_flight.expire(now)
            return self.state.holds.expire(now)

    def is_leased(self, lease_id: int) -> bool:
        """Whether there is such a lease; its time may be up."""
        with self.state.lock:
            return lease_id in self.state.holds.leases

    def lease_count(self) -> int:
        """Live leases."""
        return len(self.state.holds.leases)

    def held_count(self) -> int:
        """Sum of all pins that leases and moves hold; 0 when nothing is read or moved."""
        with self.state.lock:
            return sum(self.state.holds.leases.pins.values())

    def limit_leases(self, tenant_of: TenantOf) -> None:
        """Have *tenant_of* say whose sessions are and how many leases each tenant may have."""
        with self.state.lock:
            self.state.holds.leases.tenant_of = tenant_of

    def leases_of(self, tenant: str) -> int:
        """Return how many leases *tenant* has."""
        with self.state.lock:
            return self.state.holds.leases.by_tenant[tenant]

    # --- pins, hints and announced uses

    def pin(self, keys: Iterable[ChunkKey], ttl_s: float) -> int:
        """Keep known chunks for *ttl_s* seconds; return how many. Raises QuotaExceededError."""
        with self.state.lock:
            until = self.state.clock() + ttl_s
            count = 0
            for key in keys:
                row = self.state.index.row(key)
                if row:
                    self.state.holds.pinned.pin(key, self.state.any_size(row), until)
                    count += 1
            return count

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """End explicit pins; return how many there were."""
        with self.state.lock:
            return sum(self.state.holds.pinned.unpin(key) for key in keys)

    def hint(self, keys: Iterable[ChunkKey], hints: Hints) -> int:
        """An engine spoke of chunks; return how many pins are over the limit, and ignored."""
        with self.state.lock:
            now = self.state.clock()
            self.state.access_log.apply_all()
            rows = [row for key in keys if (row := self.state.index.row(key))]
            self.state.metadata.hinted(np.array(rows, np.intp), hints, now)
            return sum(
                not table.extend(
                    self.state.index.key(row), self.state.any_size(row), now + ms / 1000
                )
                for table, ms in (
                    (self.state.holds.pinned, hints.pin_ms),
                    (self.state.holds.handed_over, hints.handover_ms),
                )
                for row in (rows if ms else ())
            )

    def expired_keys(self) -> list[ChunkKey]:
        """Return some chunks whose time is up, and that are therefore nobody's hit any more."""
        with self.state.lock:
            rows = self.state.metadata.hints.expired(self.state.clock(), EXPIRED_AT_ONCE)
            return [self.state.index.key(row) for row in rows]

    def hold(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Keep *key* from eviction while it is moved; return its copies. Pair with ``let_go``."""
        with self.state.lock:
            self.state.holds.leases.pin(key)
            return self.state.index.copies(self.state.index.row(key))

    def let_go(self, key: ChunkKey) -> None:
        """Undo one ``hold``."""
        with self.state.lock:
            self.state.holds.leases.unpin(key)

    def is_held(self, key: ChunkKey) -> bool:
        """Whether somebody reads or pinned the chunk, so that it cannot be forgotten."""
        with self.state.lock:
            return self.state.holds.is_held(key)

    def announce(self, session_id: int, uses: Mapping[ChunkKey, int], ttl_s: float) -> int:
        """Keep chunks for the uses that a batch will make of them, for *ttl_s* at most.

        Return how many are here and kept; those that come later are kept as they come.
        """
        with self.state.lock:
            self.state.holds.uses.announce(session_id, uses, self.state.clock() + ttl_s)
            for key in uses:
                row = self.state.index.row(key)
                if row:
                    self.state.holds.keep(key, self.state.any_size(row))
            return sum(key in self.state.holds.uses for key in uses)

    def take_unkept(self) -> int:
        """Return how many announced chunks came since the last time that found no room."""
        with self.state.lock:
            holds = self.state.holds
            count, holds.unkept = holds.unkept, 0
            return count

    def gave_up(self, key: ChunkKey) -> None:
        """A lower tier is about to evict a chunk: it tells how long they stay there."""
        with self.state.lock:
            forecast, row = self.state.metadata.forecast, self.state.index.row(key)
            if forecast is not None and row:
                forecast.gave_up(row, self.state.clock())

    # --- what policies learn, between requests

    def drain(self, timeout_s: float) -> bool:
        """Wait until requests pause, and tell the policies what happened; a thread that does so
        spares the next requests the time. Return whether there was anything.
        """
        is_any = self.state.news.wait(timeout_s)
        for _ in range(_LOOKS_FOR_QUIET):
            if not self.state.news.is_set():
                break
            self.state.news.clear()
            time.sleep(QUIET_S)
        while not self.state.news.is_set() and self._step():
            time.sleep(0)  # lets go of the interpreter, which a request may be waiting for
        return is_any

    def drain_some(self) -> None:
        """Tell the policies of what came first, if more waits behind it.

        For who has just answered a lookup, whose asker now looks at the answer: of many lookups in
        a row, each would otherwise have to tell of an earlier one before it can be answered.
        """
        for _ in range(SPARED):
            if len(self.state.access_log) <= 1:
                break
            self._step()

    def _step(self) -> bool:
        with self.state.lock:
            return self.state.access_log.apply_next()

    # --- over a restart

    def save(self) -> SavedHistory:
        """Return what is remembered of chunks, here or evicted, those that left first first."""
        known = self.state.metadata
        with self.state.lock:
            self.state.access_log.apply_all()
            now = self.state.clock()
            rows = np.fromiter(filter(known.history.knows, self.state.index.known_rows()), np.intp)
            rows = rows[-MAX_CHUNKS:]
            saved = SavedHistory.of(known.groups.names(), known.history, rows, now)
            saved.chunks["key"] = self.state.index.keys(rows)
            known.hints.write(rows, saved.chunks, now)
            return saved

    def restore(self, saved: SavedHistory) -> int:
        """Remember what an earlier run did; return how many chunks. Before any other event.

        What engines said of chunks counts from ``note_sealed`` on. Raises InvalidRequestError.
        """
        known = self.state.metadata
        with self.state.lock:
            for names in saved.names:
                known.groups.number(*names)
            chunks = saved.chunks[-max(1, known.evicted_limit) :]
            keys = [ChunkKey(key) for key in chunks["key"].tolist()]
            rows = np.array([self.state.index.add_evicted(key) for key in keys], np.intp)
            chunks, rows = chunks[rows > 0], rows[rows > 0]
            replace(saved, chunks=chunks).fill(known.history, rows, self.state.clock())
            known.hints.restore(rows, chunks, self.state.clock())
            return len(chunks)


def _chains(infos: Sequence[ChunkInfo]) -> Iterator[list[ChunkInfo]]:
    """Cut *infos* where one does not continue the one before, or is of another layout or size."""
    chain: list[ChunkInfo] = []
    seen: set[ChunkKey] = set()
    for info in infos:
        if chain and not (_continues(chain[-1], info) and info.key not in seen):
            yield chain
            chain, seen = [], set()
        chain.append(info)
        seen.add(info.key)
    if chain:
        yield chain


def _continues(last: ChunkInfo, info: ChunkInfo) -> bool:
    is_next = info.parent_key == last.key and info.size_bytes == last.size_bytes
    return is_next and (info.layout is last.layout or info.layout == last.layout)
