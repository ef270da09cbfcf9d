"""What the catalog is asked for and nobody waits for: listings, and what is known of one chunk.

Nobody's use of a chunk is counted by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, Fidelity, Namespace
from kvstore.server.index.in_flight import InFlightPuts
from kvstore.server.index.results import ChunkDetails, UsedPrefix
from kvstore.server.index.state import CatalogState
from kvstore.server.telemetry.events import Event

HELD_ROWS = 256
"""Looked at under the lock at a time, for who asks for all there is."""
_SAME_USE = 0.9
"""A chunk that is used nearly as often as the one before it stands for both."""


@dataclass(frozen=True, slots=True)
class ReuseEstimate:
    """A chunk as an CopyRequest needs it; ``context_tokens`` are those of the chunks before it.

    ``is_needed``: chunks with copies continue it and are of no use without it.
    """

    size_bytes: int
    tokens: int
    context_tokens: int
    hits: int
    chance: float
    is_needed: bool


@dataclass(frozen=True, slots=True)
class ChunkStatus:
    """What is known of one chunk now: its copies by tier, and what it is where it has none."""

    copies: Mapping[str, ChunkInfo]
    is_pending: bool
    is_announced: bool
    is_evicted: bool
    is_expired: bool


class CatalogQueries:
    """Reads what *state* has, under its lock. Thread-safe."""

    def __init__(self, state: CatalogState, in_flight: InFlightPuts) -> None:
        self._state = state
        self._in_flight = in_flight

    def details(self, key: ChunkKey) -> ChunkDetails | None:
        """Return what is known of one chunk."""
        with self._state.lock:
            row = self._state.index.row(key)
            if not row:
                return None
            self._state.access_log.apply_all()
            now_s, known = self._state.clock(), self._state.metadata
            expiry_s = known.hints.expiry(row)
            return ChunkDetails(
                key,
                self._state.index.copies(row),
                self._state.holds.leases.pins.get(key, 0),
                key in self._state.holds.pinned,
                self._state.index.hits(row),
                self._idle_s(row, now_s),
                self._state.holds.pinned.left_s(key, now_s),
                max(0.0, expiry_s - now_s) if expiry_s else 0.0,
                known.hints.priority(row),
                self._state.index.context_tokens(row),
            )

    def _idle_s(self, row: int, now_s: float) -> float:
        history = self._state.metadata.history
        if row >= len(history.hits) or not history.hits[row]:
            return -1.0
        return max(0.0, history.time_s(now_s) - history.last_s[row])

    def chunks_of(self, space: Namespace) -> list[ChunkDetails]:
        """Return every chunk of a namespace. Those that come or go meanwhile may be left out."""
        return self.page(space, b"", b"", 0)

    def page(self, space: Namespace, after: bytes, prefix: bytes, limit: int) -> list[ChunkDetails]:
        """Return the chunks of a namespace in the order of their digests, *limit* at most unless 0.

        Those behind the digest *after* whose digests begin with *prefix*.
        """
        keys = self.keys_from(space + prefix)
        if after:
            keys = [key for key in keys if key[DIGEST_BYTES:] > after]
        found = (self.details(key) for key in keys)
        return list(islice((held for held in found if held is not None), limit or None))

    def keys_from(self, start: bytes) -> list[ChunkKey]:
        """Return the keys of the chunks here that begin with *start*, in order."""
        with self._state.lock:
            keys = self._state.index.keys_starting(start)
        return sorted(map(ChunkKey, keys.tolist()))

    def spaces(self) -> Counter[Namespace]:
        """Return how many chunks each namespace has here."""
        with self._state.lock:
            keys = self._state.index.keys_starting(b"")
        if not len(keys):
            return Counter()
        halves = keys.view(f"V{DIGEST_BYTES}").reshape(-1, 2)[:, 0]
        return Counter(map(Namespace, halves.tolist()))

    def top_prefixes(self, count: int) -> list[UsedPrefix]:
        """Return the most used prefixes, each by its last chunk, the most used first."""
        with self._state.lock:
            hits, parents = self._state.index.all_hits()
        rows = _ends(hits, parents, count)  # a million rows are gone through while nobody waits
        with self._state.lock:
            index = self._state.index
            return [
                UsedPrefix(
                    index.key(row), index.hits(row), index.context_tokens(row) + index.tokens(row),
                    tuple(index.holders(row)),
                )
                for row in rows
                if index.holders(row)
            ]  # fmt: skip

    def reuse_estimate(self, key: ChunkKey, *, ahead: bool = True) -> ReuseEstimate | None:
        """Return what is to be expected of a chunk; None when no tier has it.

        Hits and chance are told *ahead* only, as they take time.
        """
        with self._state.lock:
            if ahead:
                self._state.access_log.apply_all()
            index, known = self._state.index, self._state.metadata
            row = index.row(key)
            if not row:
                return None
            forecast = known.forecast
            return ReuseEstimate(
                index.size_bytes(index.holders(row)[0], row),
                index.tokens(row),
                index.context_tokens(row),
                known.history.hits[row] if row < len(known.history.hits) else 1,
                forecast.chance(row, self._state.clock())
                if ahead and forecast is not None
                else 1.0,
                index.continued(row) > 0,
            )

    def tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for those that no tier has."""
        with self._state.lock:
            return [self._state.index.tokens(self._state.index.row(key)) for key in keys]

    def status(self, key: ChunkKey) -> ChunkStatus:
        """Return what is known of a chunk; nobody's use of it is counted."""
        with self._state.lock:
            index, row = self._state.index, self._state.index.row(key)
            return ChunkStatus(
                index.copies(row),
                self._in_flight.is_written(key),
                self._in_flight.is_announced(key),
                not row and index.remembers(key),
                bool(row) and self._state.metadata.hints.is_expired(row, self._state.clock()),
            )

    def count_in(self, space: Namespace) -> int:
        """Return how many chunks of a namespace are here."""
        with self._state.lock:
            return len(self._state.index.keys_of(space))

    def asked_again(self, keys: Sequence[ChunkKey], tier: str) -> list[ChunkKey]:
        """Return those of a chain that were asked for before and that *tier* does not have."""
        with self._state.lock:
            self._state.access_log.apply_all()
            rows = self._state.index.known_prefix(keys)
            hits = np.frombuffer(self._state.metadata.history.hits, np.uint8)
            rows = rows[rows < len(hits)]
            held, _ = self._state.index.sizes(tier, rows, Fidelity.none)
            again = ~held & (hits[rows] > 1)
            return [keys[at] for at in np.flatnonzero(again).tolist()]

    def held_from(self, row: int, space: Namespace | None = None) -> tuple[list[Event], int]:
        """Return the copies of *space*, or all, in HELD_ROWS rows from *row* on, as events.

        With them comes the next row to ask for; 0 when there are no more.
        """
        with self._state.lock:
            index, found = self._state.index, []
            rows, after = index.held_rows(row, HELD_ROWS)
            for at in rows:
                if space is None or index.key(at)[:DIGEST_BYTES] == space:
                    for tier, info in index.copies(at).items():
                        tokens = info.layout.tokens
                        found.append(Event(info.key, tier, tokens, info.parent, info.fidelity))
            return found, after

    def only_on(self, *tiers: str) -> list[ChunkKey]:
        """Return the chunks that are on no tier but these."""
        with self._state.lock:
            return self._state.index.only_on(tiers)


def _ends(hits: NDArray[np.uint32], parents: NDArray[np.uint32], count: int) -> list[int]:
    """Return the *count* rows found most of which no child was found nearly as often."""
    further = np.zeros(len(hits), np.uint32)
    np.maximum.at(further, parents, hits)  # row 0 is nobody's
    found = np.where(further < _SAME_USE * hits, hits, 0)
    found[0] = 0
    rows = np.argpartition(found, -count)[-count:] if len(found) > count else np.arange(len(found))
    order = np.argsort(-found[rows].astype(np.int64), kind="stable")
    return [row for row in rows[order].tolist() if found[row]]
