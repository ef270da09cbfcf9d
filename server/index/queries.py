"""Queries of the catalog off the request path: listings, and details of one chunk.

They do not count as uses of a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkInfo, ChunkKey, Namespace
from kvstore.server.index.access_log import CatalogState
from kvstore.server.index.in_flight import InFlightPuts
from kvstore.server.telemetry.events import Event

HELD_ROWS = 256
"""Rows per acquisition of the lock when listing all copies."""
_SAME_USE = 0.9
"""A chunk used nearly as often as its parent represents both."""


@dataclass(frozen=True, slots=True)
class ChunkDetails:
    """One chunk in the catalog, with its copies by tier name."""

    key: ChunkKey
    copies: Mapping[str, ChunkInfo]
    leases: int
    is_pinned: bool
    hits: int
    idle_s: float = -1.0
    """Time since it was last looked up or put; -1: unknown."""
    pinned_s: float = 0.0
    """Remaining time of its pin."""
    expires_s: float = 0.0
    """Remaining time to live; 0: unlimited."""
    priority: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReuseEstimate:
    """Inputs of a CopyRequest; ``context_tokens`` are those of the chunks before it.

    ``is_needed``: chunks with copies continue it and are useless without it.
    """

    size_bytes: int
    tokens: int
    context_tokens: int
    hits: int
    chance: float
    is_needed: bool


@dataclass(frozen=True, slots=True)
class ChunkStatus:
    """The current copies of a chunk by tier, and its state without any."""

    copies: Mapping[str, ChunkInfo]
    is_pending: bool
    is_announced: bool
    is_evicted: bool
    is_expired: bool


class CatalogQueries:
    """Reads *state* under its lock. Thread-safe."""

    def __init__(self, state: CatalogState, in_flight: InFlightPuts) -> None:
        self._state = state
        self._lock, self._index = state.lock, state.index
        self._in_flight = in_flight

    def details(self, key: ChunkKey) -> ChunkDetails | None:
        """Return the details of one chunk; None without a copy."""
        with self._lock:
            row = self._index.row(key)
            if not row:
                return None
            self._state.access_log.apply_all()
            now_s, known, holds = self._state.clock(), self._state.metadata, self._state.holds
            history, expiry_s, idle_s = known.history, known.hints.expiries[row], -1.0
            if history.hits_of(row):
                idle_s = max(0.0, history.time_s(now_s) - history.last_s.item(row))
            pinned = holds.pins.pinned
            return ChunkDetails(
                key,
                self._index.copies(row),
                holds.leases.pins.get(key, 0),
                key in pinned,
                self._index.hits[row],
                idle_s,
                max(0.0, pinned.get(key, (now_s, 0))[0] - now_s),
                max(0.0, expiry_s - now_s) if expiry_s else 0.0,
                known.hints.priority(row),
                self._index.context_tokens(row),
            )

    def page(
        self, space: Namespace, after: bytes = b"", prefix: bytes = b"", limit: int = 0
    ) -> Iterator[ChunkDetails]:
        """Yield chunks of a namespace in order of digest, at most *limit* unless 0.

        Only digests after *after* that begin with *prefix*. Chunks added or removed meanwhile may
        be missing.
        """
        keys = self.keys_from(space + prefix)
        if after:
            keys = [key for key in keys if key[DIGEST_BYTES:] > after]
        found = (held for held in map(self.details, keys) if held is not None)
        return islice(found, limit or None)

    def keys_from(self, start: bytes) -> list[ChunkKey]:
        """Return the keys of chunks with a copy that begin with *start*, in order."""
        with self._lock:
            keys = self._index.keys_starting(start)
        return sorted(map(ChunkKey, keys.tolist()))

    def spaces(self) -> Counter[Namespace]:
        """Return the number of chunks by namespace."""
        with self._lock:
            keys = self._index.keys_starting(b"")
        if not len(keys):
            return Counter()
        halves = keys.view(f"V{DIGEST_BYTES}").reshape(-1, 2)[:, 0]
        return Counter(map(Namespace, halves.tolist()))

    def top_prefixes(self, count: int) -> list[ChunkDetails]:
        """Return the last chunks of the most used prefixes, the most used first."""
        with self._lock:
            hits = np.frombuffer(self._index.hits, np.uint32).copy()
            parents = np.frombuffer(self._index.parents, np.uint32).copy()
        rows = _ends(hits, parents, count)  # scans a million rows without the lock
        with self._lock:
            keys = [self._index.key(row) for row in rows]
        return [held for held in map(self.details, keys) if held is not None]

    def reuse_estimate(self, key: ChunkKey, *, ahead: bool = True) -> ReuseEstimate | None:
        """Return an estimate for a chunk, with hits and chance if *ahead*; None without a copy."""
        with self._lock:
            if ahead:
                self._state.access_log.apply_all()
            index, known = self._index, self._state.metadata
            row, chance = index.row(key), 1.0
            if not row:
                return None
            if ahead and known.forecast is not None:
                chance = known.forecast.chance(row, self._state.clock())
            return ReuseEstimate(
                index.any_size_bytes(row),
                index.tokens(row),
                index.context_tokens(row),
                int(known.history.hits[row]) if row < len(known.history.hits) else 1,
                chance,
                index.continued(row) > 0,
            )

    def tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for those that no tier has."""
        with self._lock:
            return [self._index.tokens(self._index.row(key)) for key in keys]

    def status(self, key: ChunkKey) -> ChunkStatus:
        """Return the state of a chunk without counting a use."""
        with self._lock:
            index, row = self._index, self._index.row(key)
            return ChunkStatus(
                index.copies(row),
                key in self._in_flight.writers,
                key in self._in_flight.announced,
                not row and index.is_evicted(key),
                bool(row) and self._state.metadata.hints.is_expired(row, self._state.clock()),
            )

    def count_in(self, space: Namespace) -> int:
        """Return the number of chunks in a namespace."""
        with self._lock:
            return len(self._index.keys_starting(space))

    def looked_up_again(self, keys: Sequence[ChunkKey], tier: str) -> list[ChunkKey]:
        """Return the chunks of a chain that were requested before and that *tier* lacks."""
        with self._lock:
            self._state.access_log.apply_all()
            rows = self._index.known_prefix(keys)
            all_hits = self._state.metadata.history.hits
            rows = rows[rows < len(all_hits)]
            hits = np.frombuffer(all_hits, np.uint8)[rows]  # a copy: an exported array cannot grow
            held, _ = self._index.sizes(tier, rows, Accuracy.approximate)
            again = ~held & (hits > 1)
            return [keys[at] for at in np.flatnonzero(again).tolist()]

    def held_from(self, row: int, space: Namespace | None = None) -> tuple[list[Event], int]:
        """Return the copies in HELD_ROWS rows from *row*, and the next row, 0 at the end."""
        with self._lock:
            index, found = self._index, []
            rows, after = index.held_rows(row, HELD_ROWS)
            for at in rows:
                if space is None or index.key(at)[:DIGEST_BYTES] == space:
                    for tier, info in index.copies(at).items():
                        tokens = info.layout.tokens
                        found.append(Event(info.key, tier, tokens, info.parent, info.accuracy))
            return found, after

    def only_on(self, *tiers: str) -> list[ChunkKey]:
        """Return the chunks that are only on these tiers."""
        with self._lock:
            return self._index.only_on(tiers)


def _ends(hits: NDArray[np.uint32], parents: NDArray[np.uint32], count: int) -> list[int]:
    """Return the *count* most hit rows without a child hit nearly as often."""
    further = np.zeros(len(hits), np.uint32)
    np.maximum.at(further, parents, hits)  # row 0 belongs to no chunk
    found = np.where(further < _SAME_USE * hits, hits, 0)
    found[0] = 0
    rows = np.argpartition(found, -count)[-count:] if len(found) > count else np.arange(len(found))
    order = np.argsort(-found[rows].astype(np.int64), kind="stable")
    return [row for row in rows[order].tolist() if found[row]]
