"""Prospects: what the catalog knows of a chunk's future, for those who place copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, Namespace
from kvstore.server.index.copies import Copies


@dataclass(frozen=True, slots=True)
class Prospect:
    """A chunk as an Offer needs it; ``context_tokens`` are those of the chunks before it.

    ``is_needed``: chunks with copies continue it and are of no use without it.
    """

    size_bytes: int
    tokens: int
    context_tokens: int
    hits: int
    chance: float
    is_needed: bool


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of one chunk now: its copies by tier, and what it is where it has none."""

    copies: Mapping[str, ChunkInfo]
    is_pending: bool
    is_promised: bool
    is_ghost: bool
    is_expired: bool


class Prospects(Copies):
    """The part of the Catalog that looks ahead."""

    def prospect(self, key: ChunkKey, *, ahead: bool = True) -> Prospect | None:
        """Return what is to be expected of a chunk; None when no tier has it.

        Hits and chance are told *ahead* only, as they take time.
        """
        with self._lock:
            if ahead:
                self._journal.settle()
            index, known = self._index, self.knowledge
            row = index.row(key)
            if not row:
                return None
            forecast = known.forecast
            return Prospect(
                index.size_bytes(index.holders(row)[0], row),
                index.tokens(row),
                index.context_tokens(row),
                known.history.hits[row] if row < len(known.history.hits) else 1,
                forecast.chance(row, self._clock()) if ahead and forecast is not None else 1.0,
                index.continued(row) > 0,
            )

    def tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for those that no tier has."""
        with self._lock:
            return [self._index.tokens(self._index.row(key)) for key in keys]

    def sighting(self, key: ChunkKey) -> Sighting:
        """Return what is known of a chunk; nobody's use of it is counted."""
        with self._lock:
            index, row = self._index, self._index.row(key)
            return Sighting(
                index.copies(row),
                key in self._pending,
                key in self._promises,
                not row and index.remembers(key),
                bool(row) and self.knowledge.hints.is_expired(row, self._clock()),
            )

    def count_in(self, space: Namespace) -> int:
        """Return how many chunks of a namespace are here."""
        with self._lock:
            return len(self._index.keys_of(space))

    def asked_again(self, keys: Sequence[ChunkKey], tier: str) -> list[ChunkKey]:
        """Return those of a chain that were asked for before and that *tier* does not have."""
        with self._lock:
            self._journal.settle()
            rows = self._index.known_prefix(keys)
            hits = np.frombuffer(self.knowledge.history.hits, np.uint8)
            rows = rows[rows < len(hits)]
            held, _ = self._index.sizes(tier, rows, Fidelity.none)
            again = ~held & (hits[rows] > 1)
            return [keys[at] for at in np.flatnonzero(again).tolist()]

    def leave(self, tier: str, key: ChunkKey, other: str) -> bool:
        """A copy may leave *tier* as *other* has one, nobody holds it and it is not evicted there.

        It is a stray then, until ``swept``.
        """
        with self._lock:
            holders = self._index.holders(self._index.row(key))
            if other not in holders or key in self._leaving or self._is_held(key):
                return False
            known = self._forget(tier, key)
            if known:
                self._strays[tier].add(key)
            return known

    def gave_up(self, key: ChunkKey) -> None:
        """A lower tier is about to evict a chunk: it tells how long they stay there."""
        with self._lock:
            forecast, row = self.knowledge.forecast, self._index.row(key)
            if forecast is not None and row:
                forecast.gave_up(row, self._clock())

    # --- announced uses

    def announce(self, session_id: int, uses: Mapping[ChunkKey, int], ttl_s: float) -> int:
        """Keep chunks for the uses that a batch will make of them, for *ttl_s* at most.

        Return how many are here and kept; those that come later are kept as they come.
        """
        with self._lock:
            self.uses.announce(session_id, uses, self._clock() + ttl_s)
            for key in uses:
                row = self._index.row(key)
                if row:
                    self._keep(key, self._index.size_bytes(self._index.holders(row)[0], row))
            return sum(key in self.uses for key in uses)

    def take_unkept(self) -> int:
        """Return how many announced chunks came since the last time that found no room."""
        with self._lock:
            count, self.unkept = self.unkept, 0
            return count
