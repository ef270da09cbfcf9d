"""The Catalog: which copies exist, which are held and which may be evicted. One lock, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.plans import Hints
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkInfo, ChunkKey, KVLayout, Namespace
from kvstore.server.eviction.access_history import MAX_CHUNKS, SavedHistory
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.index.access_log import CatalogListener, CatalogState, Lookup, Stored
from kvstore.server.index.chunk_index import ResumeRequirements
from kvstore.server.index.eviction_state import EXPIRED_AT_ONCE, EvictionState
from kvstore.server.index.hints import NEVER, ChunkMetadata, PutInfo
from kvstore.server.index.holds import Holds, Lease, Leases, LeaseTerms
from kvstore.server.index.in_flight import InFlightPuts
from kvstore.server.index.queries import CatalogQueries
from kvstore.server.telemetry.events import Outcomes

QUIET_S = 0.004
"""Requests count as paused after this time without one."""
_LOOKS_FOR_QUIET = 64
SPARED = 4
"""Events applied after one answer: those of a lookup that indexed a chain, and one more."""
AT_ONCE = 32
"""Chunks processed per acquisition of the lock."""
_UNKNOWN = PutInfo()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The chunks of the longest prefix that can be read.

    ``sources[i]`` is the index of chunk i's tier in the request and ``sizes[i]`` its bytes there.
    ``known`` counts the chunks that any tier has, ``pending`` those after them that are being
    written, ``evicted`` the evicted ones of the prompt; ``shared`` existing and evicted ones if the
    model cannot resume after every chunk, else 0. ``lease_id`` is 0 without a lease.
    """

    known: int
    pending: int
    sources: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    lease_id: int = 0
    evicted: int = 0
    shared: int = 0

    @property
    def first_missing(self) -> int:
        """Index in the chain of the first chunk that is neither known nor pending."""
        return self.known + self.pending


class Catalog:
    """The index, the eviction policies and the holds, consistent under one lock.

    *metadata* gets an event before the policies, which rank by it. ``listeners`` are called with
    copies; ``in_flight``, ``eviction`` and ``queries`` share the lock. Other threads may read
    single entries of ``leases``.
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
        self._holds = Holds(leases, pin_limit_bytes)
        self.state = state = CatalogState(policies, self._holds, clock, metadata)
        self._lock, self._clock = state.lock, clock
        self._index, self.leases = state.index, leases
        self._metadata, self._access_log = metadata, state.access_log
        self.in_flight, self.eviction = InFlightPuts(state), EvictionState(state)
        self.queries = CatalogQueries(state, self.in_flight)
        self.listeners: list[CatalogListener] = []
        self.outcomes = Outcomes(clock)
        """The fates of absent chunks."""
        self.orphans: dict[str, set[ChunkKey]] = {tier: set() for tier in policies}
        """By tier, copies that were dropped and may still exist there. Read-only for others."""

    # --- copies

    def needs_ends(self, space: Namespace, needs: ResumeRequirements) -> None:
        """Set what the model of *space* *needs* to resume after a prefix."""
        with self._lock:
            self._index.need(space, needs)

    def is_less_complete(self, key: ChunkKey, layout: KVLayout, *, absent: bool = False) -> bool:
        """Whether the chunk has less end state than *layout*; *absent* if it does not exist."""
        with self._lock:
            row = self._index.row(key)
            return self._index.is_less_complete(row, layout) if row else absent

    def note_sealed(self, tier: str, info: ChunkInfo, put_info: PutInfo | None = None) -> None:
        """Record a copy that became visible on *tier*; *put_info* describes its put, if any."""
        with self._lock:
            row = self._index.row(info.key)
            if row and self._index.layouts[row] != info.layout:  # all copies have one layout
                self.orphans[tier].add(info.key)
                return
            self._sealed(tier, (info,), put_info, is_new=not row)
        self.state.news.set()

    def _sealed(
        self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None, *, is_new: bool
    ) -> None:
        """Record the copy of one chunk, or of a new chain of one layout and size."""
        index, known = self._index, self._metadata
        if orphans := self.orphans[tier]:
            orphans.difference_update([info.key for info in infos])
        rows = index.add(tier, infos)
        facts, flops = None, [0.0]
        if is_new:
            facts, flops = known.facts(rows, infos, put_info or _UNKNOWN)
        number, parent = index.tiers.index(tier), index.parents[rows[0]]
        self._access_log.note(
            Stored(number, rows, parent, infos[0].size_bytes, facts, flops, self._clock())
        )
        for listener in self.listeners:
            listener.stored(tier, infos, put_info)

    def forget(self, tier: str, key: ChunkKey) -> bool:
        """Remove a copy on *tier* from the index. Return whether it was there."""
        with self._lock:
            return self._forget(tier, key)

    def _forget(self, tier: str, key: ChunkKey, *, to_orphans: bool = False) -> bool:
        row = self._index.row(key)
        if not row:
            return False
        self._access_log.apply_all()
        self.state.policies[tier].remove(row)
        known = self._index.discard(tier, row)
        is_last = not self._index.holders(row)
        if is_last:
            self._metadata.hints.forget(row)
        if known:
            for listener in self.listeners:
                listener.removed(tier, key, is_last=is_last)
            if to_orphans:
                self.orphans[tier].add(key)
        return known

    def drop_copy(self, tier: str, key: ChunkKey, *, even_if_held: bool = True) -> bool:
        """Make a copy an orphan until ``purged``. False if there is none, or it is held."""
        with self._lock:
            if not even_if_held and self._holds.is_held(key):
                return False
            return self._forget(tier, key, to_orphans=True)

    def leave(self, tier: str, key: ChunkKey, other: str) -> bool:
        """As ``drop_copy``, if *other* has a copy and the chunk is not held or being evicted."""
        with self._lock:
            if other not in self._index.holders(self._index.row(key)) or self.eviction.stays(
                key, tier
            ):
                return False
            return self._forget(tier, key, to_orphans=True)

    def purged(self, tier: str, key: ChunkKey) -> None:
        """Record that the tier has freed an orphan."""
        with self._lock:
            self.orphans[tier].discard(key)

    def copies(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name; empty when there is none."""
        with self._lock:
            return self._index.copies(self._index.row(key))

    def holders(self, key: ChunkKey, least: Accuracy = Accuracy.approximate) -> list[str]:
        """Return the tiers with a copy of at *least* this accuracy; faster than ``copies``."""
        with self._lock:
            return self._index.holders(self._index.find(key), least)

    def is_common(self, key: ChunkKey) -> bool:
        """Whether several prompts share the chunk: two branch from it or from a later one."""
        with self._lock:
            return self._index.is_common(self._index.row(key))

    def size_bytes(self, tier: str, key: ChunkKey) -> int:
        """Return the size of the chunk's frame on *tier*; 0 without a copy."""
        with self._lock:
            row = self._index.row(key)
            return self._index.size_bytes(tier, row) if tier in self._index.holders(row) else 0

    def evicted_count(self) -> int:
        """Return how many chunks without a copy are remembered."""
        return len(self._index.evicted)

    def __len__(self) -> int:
        return len(self._index)

    # --- copies of other servers, a chain at a time, as a request waits

    def note_found(self, tier: str, infos: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Record copies of other servers on *tier*; return those whose layout differs from ours."""
        others: list[ChunkInfo] = []
        index = self._index
        for start in range(0, len(infos), AT_ONCE):
            with self._lock:
                for chain in _chains(infos[start : start + AT_ONCE]):
                    if not any(index.row(info.key) for info in chain):
                        self._sealed(tier, chain, None, is_new=True)
                        continue
                    for info in chain:
                        row = index.row(info.key)
                        if row and index.layouts[row] != info.layout:
                            others.append(info)
                        elif tier not in index.holders(row):
                            self._sealed(tier, (info,), None, is_new=not row)
        self.state.news.set()
        return others

    def infos_on(self, tier: str, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return the copy on *tier* of each of *keys*, or None."""
        index = self._index
        found: list[ChunkInfo | None] = []
        for start in range(0, len(keys), AT_ONCE):
            with self._lock:
                rows = index.rows(keys[start : start + AT_ONCE]).tolist()
                found += [
                    index.info(tier, row) if tier in index.holders(row) else None for row in rows
                ]
        return found

    # --- lookups and leases

    def match(
        self,
        keys: Sequence[ChunkKey],
        min_accuracy: Accuracy,
        tiers: Sequence[str | None],
        lease: LeaseTerms | None = None,
        *,
        again: bool = False,
    ) -> PrefixMatch:
        """Find the longest prefix with copies of *min_accuracy* on *tiers*, given best first.

        None marks a tier that must not be read. Touches all chunks that any tier has, unless
        *again* repeats a lookup. *lease* leases the result. Raises QuotaExceededError.
        """
        index, hints = self._index, self._metadata.hints
        with self._lock:
            now_s = self._clock()
            known = index.known_prefix(keys)
            rows = index.readable(hints.unexpired(known, now_s), min_accuracy)
            if not again:
                np.frombuffer(index.hits, np.uint32)[rows] += 1
            self._access_log.note(Lookup(known, keys, now_s, again))
            pending = evicted = lease_id = 0
            if self.in_flight.writers or self.in_flight.announced:
                pending = self._count_pending(keys, len(rows), now_s)
            if len(known) > len(rows):
                evicted = int(np.frombuffer(index.evicted.here, np.uint8)[known[len(rows) :]].sum())
            has_ends = bool(keys) and keys[0][:DIGEST_BYTES] in index.needs
            sources, sizes = self._choose(rows, min_accuracy, tiers)
            if lease is not None and len(sources):
                lease_id = self._holds.lease(keys[: len(sources)], lease, now_s).lease_id
        self.state.news.set()
        shared = len(known) if has_ends else 0
        return PrefixMatch(len(rows), pending, sources, sizes, lease_id, evicted, shared)

    def held(self, tier: str, keys: Sequence[ChunkKey], least: Accuracy) -> NDArray[np.bool_]:
        """Return a mask over the known prefix of *keys*: which *tier* has at *least*."""
        with self._lock:
            rows = self._index.readable(self._index.prefix(keys), least)
            return self._index.sizes(tier, rows, least)[0]

    def read_plan(self, keys: Sequence[ChunkKey], least: Accuracy) -> list[list[str]]:
        """Return, for each of leased *keys*, the tiers that have it now at *least*."""
        index = self._index
        with self._lock:
            return [index.holders(row, least) for row in index.rows(keys).tolist()]

    def _count_pending(self, keys: Sequence[ChunkKey], known: int, now_s: float) -> int:
        """Return the length of the run of pending or existing chunks from *known*; 0 if none is."""
        is_coming, is_expired = self.in_flight.is_coming, self._metadata.hints.is_expired

        def follows(at: int) -> bool:
            row = self._index.row(keys[at])
            return is_coming(keys[at]) or (row != NO_ROW and not is_expired(row, now_s))

        run = list(takewhile(follows, range(known, len(keys))))
        return len(run) if any(is_coming(keys[at]) for at in run) else 0

    def _choose(
        self, rows: Rows, least: Accuracy, tiers: Sequence[str | None]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the first of *tiers* with each chunk, and its bytes, up to the first miss."""
        sources = np.zeros(len(rows), np.uint8)
        sizes = np.zeros(len(rows), np.int64)
        open_rows = np.ones(len(rows), np.bool_)
        for number, tier in enumerate(tiers):
            if tier is not None and open_rows.any():
                held, there = self._index.sizes(tier, rows, least)
                held &= open_rows
                sources[held] = number
                np.copyto(sizes, there, where=held)
                open_rows ^= held
        end = int(open_rows.argmax()) if open_rows.any() else len(rows)
        end = len(self._index.usable(rows[:end]))
        return sources[:end], sizes[:end]

    def grant(self, keys: Sequence[ChunkKey], terms: LeaseTerms) -> tuple[Lease, int]:
        """Lease the existing prefix; return the lease and length. Raises QuotaExceededError."""
        with self._lock:
            now_s = self._clock()
            rows = self._metadata.hints.unexpired(self._index.prefix(keys), now_s)
            known = len(self._index.readable(rows, Accuracy.approximate))
            return self._holds.lease(keys[:known], terms, now_s), known

    def release(self, lease_id: int, session_id: int) -> bool:
        """End a lease."""
        with self._lock:
            return self._holds.leases.release(lease_id, session_id)

    def release_session(self, session_id: int) -> int:
        """End all leases and announcements of a session; return how many leases."""
        with self._lock:
            self.in_flight.drop(lambda put: put.session_id == session_id)
            return self._holds.leases.drop(lambda lease: lease.session_id == session_id)

    def expire(self) -> int:
        """End expired leases, pins and announcements; return how many leases."""
        with self._lock:
            now = self._clock()
            self.in_flight.drop(lambda put: put.until <= now)
            return self._holds.expire(now)

    # --- pins and hints

    def pin(self, keys: Iterable[ChunkKey], ttl_s: float) -> int:
        """Keep known chunks for *ttl_s* seconds; return how many. Raises QuotaExceededError."""
        with self._lock:
            until = self._clock() + ttl_s
            rows = [(key, row) for key in keys if (row := self._index.row(key))]
            for key, row in rows:
                if not self._holds.pins.pin(key, self._index.any_size_bytes(row), until):
                    raise QuotaExceededError("pin_limit_bytes", self._holds.pin_limit_bytes, "pins")
            return len(rows)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """End explicit pins; return how many."""
        with self._lock:
            return sum(self._holds.pins.unpin(key) for key in keys)

    def hint(self, keys: Iterable[ChunkKey], hints: Hints) -> int:
        """Apply an engine's hints to chunks; return how many pins were ignored, over the limit."""
        index = self._index
        with self._lock:
            now = self._clock()
            self._access_log.apply_all()
            rows = [row for key in keys if (row := index.row(key))]
            self._metadata.hinted(np.array(rows, np.intp), hints, now)
            ignored = 0
            pins, handed_over = self._holds.pins, self._holds.handed_over
            for table, ms in ((pins, hints.pin_ms), (handed_over, hints.handover_ms)):
                for key, row in ((index.key(row), row) for row in rows if ms):
                    until = max(now + ms / 1000, table.pinned.get(key, (0.0, 0))[0])
                    ignored += not table.pin(key, index.any_size_bytes(row), until)
            return ignored

    def expired_keys(self) -> list[ChunkKey]:
        """Return some expired chunks; these no longer hit."""
        with self._lock:
            index, hints, keys = self._index, self._metadata.hints, list[ChunkKey]()
            for row in hints.expired(self._clock(), EXPIRED_AT_ONCE):
                if index.holders(row):
                    keys.append(index.key(row))
                else:  # not stored again since the restart
                    hints.set_expiry(row, NEVER)
            return keys

    def hold(self, key: ChunkKey) -> dict[str, ChunkInfo]:
        """Hold *key* while it is moved; return its copies. Pair with ``release_hold``."""
        with self._lock:
            self._holds.leases.pin(key)
            return self._index.copies(self._index.row(key))

    def release_hold(self, key: ChunkKey) -> None:
        """Undo one ``hold``."""
        with self._lock:
            self._holds.leases.unpin(key)

    def is_held(self, key: ChunkKey) -> bool:
        """Whether the chunk is leased, pinned or handed over, so that it must not be deleted."""
        with self._lock:
            return self._holds.is_held(key)

    def evicted_below(self, key: ChunkKey) -> None:
        """Record that a lower tier evicts a chunk, for the forecast of lifetimes there."""
        with self._lock:
            forecast, row = self._metadata.forecast, self._index.row(key)
            if forecast is not None and row:
                forecast.evicted(row, self._clock())

    # --- policy updates between requests

    def drain(self, timeout_s: float) -> bool:
        """Wait for a pause of requests and apply events; return False if there were none."""
        is_any = self.state.news.wait(timeout_s)
        for _ in range(_LOOKS_FOR_QUIET):
            if not self.state.news.is_set():
                break
            self.state.news.clear()
            time.sleep(QUIET_S)
        while not self.state.news.is_set() and self._step():
            time.sleep(0)  # release the interpreter lock for waiting requests
        return is_any

    def drain_some(self) -> None:
        """Apply the oldest events after the answer to a lookup, down to one; in a burst, each
        lookup would otherwise apply an earlier event before its answer.
        """
        for _ in range(SPARED):
            if len(self._access_log) <= 1:
                break
            self._step()

    def _step(self) -> bool:
        with self._lock:
            return self._access_log.apply_next()

    # --- restarts

    def save(self) -> SavedHistory:
        """Return the history of chunks, evicted ones first, the earliest evicted first."""
        known = self._metadata
        with self._lock:
            self._access_log.apply_all()
            now = self._clock()
            rows = np.fromiter(filter(known.history.hits_of, self._index.known_rows()), np.intp)
            rows = rows[-MAX_CHUNKS:]
            saved = SavedHistory.of(list(known.groups), known.history, rows, now)
            saved.chunks["key"] = self._index.keys(rows)
            known.hints.write(rows, saved.chunks, now)
            return saved

    def restore(self, saved: SavedHistory) -> int:
        """Restore the history of an earlier run; return how many chunks. Before any other event.

        Raises InvalidRequestError.
        """
        known = self._metadata
        with self._lock:
            for names in saved.names:
                known.group(*names)
            chunks = saved.chunks[-max(1, known.evicted_limit) :]
            keys = [ChunkKey(key) for key in chunks["key"].tolist()]
            rows = np.array([self._index.add_evicted(key) for key in keys], np.intp)
            chunks, rows = chunks[rows > 0], rows[rows > 0]
            replace(saved, chunks=chunks).fill(known.history, rows, self._clock())
            known.hints.restore(rows, chunks, self._clock())
            return len(chunks)


def _chains(infos: Sequence[ChunkInfo]) -> Iterator[list[ChunkInfo]]:
    """Split *infos* where one does not continue the previous one, or differs in layout or size."""
    chain: list[ChunkInfo] = []
    seen: set[ChunkKey] = set()
    for info in infos:
        last = chain[-1] if chain else info
        is_alike = (info.size_bytes, info.layout) == (last.size_bytes, last.layout)
        if chain and not (is_alike and info.parent_key == last.key and info.key not in seen):
            yield chain
            chain, seen = [], set()
        chain.append(info)
        seen.add(info.key)
    if chain:
        yield chain
