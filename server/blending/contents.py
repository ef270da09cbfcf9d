"""Contents: finds chunks by what they say, and keeps what engines reported of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.proto.plans import NO_PRIORITY
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, Fidelity, Namespace
from kvstore.server.blending.content_index import (
    CONTENT_LIMIT,
    ContentIndex,
    Facts,
    Learned,
    Measured,
    Named,
)
from kvstore.server.blending.token_priority import Scores, TokenPriorities
from kvstore.server.index.access_log import Asked
from kvstore.server.index.hints import PutInfo
from kvstore.server.index.holds import Lease
from kvstore.server.index.results import LeaseTerms
from kvstore.server.index.state import CatalogState

MAX_UNREAD = 4096
"""Chunks whose frames are to be looked at; of more, the oldest are found by key only."""
GAVE_WAY_PRIORITY = NO_PRIORITY // 2
"""Of a variant that gave way to better ones; engines' words come before it."""
_MEMORY = "cpu"


class AskedChunk(NamedTuple):
    """A chunk of a prompt. ``key`` is empty where what is before it is not known."""

    key: ChunkKey
    content: bytes
    tokens: int


class Candidate(NamedTuple):
    """A chunk that can be read: *source* is the place of its tier among those asked for."""

    facts: Facts
    source: int
    size_bytes: int
    fidelity: Fidelity


class Matches(NamedTuple):
    """What there is of one chunk: itself, or others with its content, and its priorities."""

    is_exact: bool
    candidates: list[Candidate]
    priority: bytes


class Contents:
    """A listener of the catalog. Shares the lock of *state*. Thread-safe but for what the catalog
    calls, which has the lock. *limit* contents are kept.
    """

    def __init__(self, state: CatalogState, limit: int = CONTENT_LIMIT) -> None:
        self._state = state
        self.content_index = ContentIndex(limit)
        self._priorities = TokenPriorities()
        self.report_count = 0
        """Reports that were taken in."""
        self.unread: deque[ChunkKey] = deque(maxlen=MAX_UNREAD)
        """Chunks that others put and that came into memory: their frames say what they hold."""

    # --- as a listener of the catalog

    def covers(self, tier: str) -> bool:
        """Frames are looked at in memory only."""
        return tier == _MEMORY

    def stored(self, tier: str, info: ChunkInfo, put_info: PutInfo | None) -> None:
        """Know a chunk by its content, or note that its frame is to be looked at."""
        if put_info is not None:
            tokens = info.layout.tokens
            self._take_in(Named(info.key, info.parent, put_info.content, tokens, put_info.position))
        elif tier == _MEMORY and info.key not in self.content_index:
            self.unread.append(info.key)

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """Forget a chunk that is nowhere any more."""
        if is_last:
            self.content_index.forget(key)

    def _take_in(self, chunk: Named) -> None:
        """Know a chunk by its content. A variant that gives way to it goes early: before others
        that are next to go, unless an engine ranked it.
        """
        key = self.content_index.note(chunk)
        row = self._state.index.row(key) if key is not None else 0
        if row and self._state.metadata.hints.priority(row) == NO_PRIORITY:
            self._state.metadata.hints.set_priority(row, GAVE_WAY_PRIORITY)

    # --- what is there

    def matches(
        self,
        space: Namespace,
        chunks: Sequence[AskedChunk],
        least: Fidelity,
        tiers: Sequence[str | None],
        *,
        approximate: bool,
    ) -> list[Matches]:
        """Return what there is of each chunk on *tiers*, the best first, of *least* or better.

        None stands for a tier that is not to be read. Without *approximate* only the chunks
        themselves are looked for.
        """
        with self._state.lock:
            now_s = self._state.clock()
            found = []
            for chunk in chunks:
                exact = self._itself(chunk, least, tiers, now_s)
                others: list[Candidate] = []
                if exact is None and approximate:
                    others = self._others(space, chunk, least, tiers, now_s)
                priority = b""
                if others:
                    priority = self._priorities.levels(space + chunk.content)
                found.append(Matches(exact is not None, [exact] if exact else others, priority))
            return found

    def _itself(
        self, chunk: AskedChunk, least: Fidelity, tiers: Sequence[str | None], now_s: float
    ) -> Candidate | None:
        if not chunk.key:
            return None
        placed = self._placed(chunk.key, least, tiers, now_s)
        if placed is None:
            return None
        source, size, fidelity, row = placed
        if self._state.index.tokens(row) != chunk.tokens:
            return None
        known = self.content_index.facts(chunk.key)
        if known is None:
            parent = self._state.index.info(self._state.index.holders(row)[0], row).parent
            known = Facts(chunk.key, parent, chunk.tokens, 0, 0.0, -1.0, 0, ())
        return Candidate(known, source, size, fidelity)

    def _others(
        self,
        space: Namespace,
        chunk: AskedChunk,
        least: Fidelity,
        tiers: Sequence[str | None],
        now_s: float,
    ) -> list[Candidate]:
        found = []
        for facts in self.content_index.variants(space, chunk.content):
            placed = self._placed(facts.key, least, tiers, now_s)
            if placed is not None and facts.tokens == chunk.tokens:
                found.append(Candidate(facts, *placed[:3]))
        return found

    def _placed(
        self, key: ChunkKey, least: Fidelity, tiers: Sequence[str | None], now_s: float
    ) -> tuple[int, int, Fidelity, int] | None:
        """Return the first of *tiers* that has the chunk, its bytes there, and its row."""
        row = self._state.index.row(key)
        if not row or self._state.metadata.hints.is_expired(row, now_s):
            return None
        holders = self._state.index.holders(row, least)
        for source, tier in enumerate(tiers):
            if tier in holders:
                info = self._state.index.info(tier, row)
                return source, info.size_bytes, info.fidelity, row
        return None

    def lease_any(self, keys: Iterable[ChunkKey], terms: LeaseTerms) -> Lease | None:
        """Lease those of *keys* that exist, a chain or not; None when none does.

        Raises QuotaExceededError.
        """
        with self._state.lock:
            known = list(dict.fromkeys(key for key in keys if self._state.index.row(key)))
            if not known:
                return None
            return self._state.holds.leases.grant(
                terms.session_id, known, self._state.clock() + terms.ttl_s
            )

    def chose(self, chosen: Sequence[tuple[ChunkKey, float]]) -> None:
        """Variants were given out, each with how much of its context was there, too."""
        with self._state.lock:
            for key, overlap in chosen:
                self.content_index.used(key, overlap)
            keys = [key for key, _ in chosen]
            rows = [row for key in keys if (row := self._state.index.row(key))]
            # The policies are told that they were used, the history not: it counts prompts.
            event = Asked(np.array(rows, np.intp), keys, self._state.clock(), is_again=True)
            self._state.access_log.note(event)
        self._state.news.set()

    # --- reports

    def variant_tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for what is no variant."""
        with self._state.lock:
            found = [self.content_index.facts(key) for key in keys]
        return [0 if one is None else one.tokens for one in found]

    def reported(self, reports: Sequence[tuple[ChunkKey, Measured, Scores | None]]) -> None:
        """Take in what engines measured of variants; those that are gone by now are passed over.

        Scores: (tokens), -1 for those that were not measured.
        """
        with self._state.lock:
            contents, priorities = self.content_index, self._priorities
            self.report_count += 1
            for key, measured, scores in reports:
                if contents.report(key, measured) and scores is not None:
                    priorities.note(key[:DIGEST_BYTES] + contents.content(key), scores)

    # --- over a restart

    def learned(self) -> list[Learned]:
        """Return what engines reported of variants, of those reported on last."""
        with self._state.lock:
            return self.content_index.learned()

    def recall(self, rows: Sequence[Learned]) -> None:
        """Take in what an earlier run learned of variants."""
        with self._state.lock:
            self.content_index.recall(rows)

    def name(self, chunk: Named) -> None:
        """A frame was read that says what its chunk is; no word of one that is gone."""
        with self._state.lock:
            if self._state.index.row(chunk.key):
                self._take_in(chunk)

    def next_unread(self) -> ChunkKey | None:
        """Return a chunk in memory whose frame nobody has looked at, once; None without one."""
        with self._state.lock:
            return self.unread.popleft() if self.unread else None

    def unnamed(self, tier: str, limit: int) -> list[ChunkKey]:
        """Return chunks on *tier* whose content is not known, at most *limit*."""
        with self._state.lock:
            contents, index = self.content_index, self._state.index
            return [
                key
                for row in index.known_rows()
                if tier in index.holders(row) and (key := index.key(row)) not in contents
            ][-limit:]

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many contents and variants there are, contents left out, priorities' bytes."""
        with self._state.lock:
            contents = self.content_index
            size = self._priorities.size_bytes
            return contents.content_count, len(contents), contents.left_out, size
