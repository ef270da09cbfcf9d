"""Contents: the part of the Catalog that knows chunks by what they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Fidelity, Namespace
from kvstore.server.index.found import LeaseTerms
from kvstore.server.index.prospects import Prospects
from kvstore.server.leases import Lease
from kvstore.server.policy.content_index import Facts, Learned, Measured, Named
from kvstore.server.policy.journal import Asked
from kvstore.server.policy.token_priority import Scores


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


class Likenesses(NamedTuple):
    """What there is of one chunk: itself, or others with its content, and its priorities."""

    is_exact: bool
    candidates: list[Candidate]
    priority: bytes


class Contents(Prospects):
    """Finds chunks by content, and keeps what engines reported of them."""

    report_count = 0
    """Reports that were taken in."""

    def likenesses(
        self,
        space: Namespace,
        chunks: Sequence[AskedChunk],
        least: Fidelity,
        tiers: Sequence[str | None],
        *,
        approximate: bool,
    ) -> list[Likenesses]:
        """Return what there is of each chunk on *tiers*, the best first, of *least* or better.

        None stands for a tier that is not to be read. Without *approximate* only the chunks
        themselves are looked for.
        """
        with self._lock:
            now_s = self._clock()
            found = []
            for chunk in chunks:
                exact = self._itself(chunk, least, tiers, now_s)
                others: list[Candidate] = []
                if exact is None and approximate:
                    others = self._others(space, chunk, least, tiers, now_s)
                priority = b""
                if others:
                    priority = self.knowledge.priorities.levels(space + chunk.content)
                found.append(Likenesses(exact is not None, [exact] if exact else others, priority))
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
        if self._index.tokens(row) != chunk.tokens:
            return None
        known = self.knowledge.contents.facts(chunk.key)
        if known is None:
            parent = self._index.info(self._index.holders(row)[0], row).parent
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
        for facts in self.knowledge.contents.variants(space, chunk.content):
            placed = self._placed(facts.key, least, tiers, now_s)
            if placed is not None and facts.tokens == chunk.tokens:
                found.append(Candidate(facts, *placed[:3]))
        return found

    def _placed(
        self, key: ChunkKey, least: Fidelity, tiers: Sequence[str | None], now_s: float
    ) -> tuple[int, int, Fidelity, int] | None:
        """Return the first of *tiers* that has the chunk, its bytes there, and its row."""
        row = self._index.row(key)
        if not row or self.knowledge.hints.is_expired(row, now_s):
            return None
        holders = self._index.holders(row, least)
        for source, tier in enumerate(tiers):
            if tier in holders:
                info = self._index.info(tier, row)
                return source, info.size_bytes, info.fidelity, row
        return None

    def lease_any(self, keys: Iterable[ChunkKey], terms: LeaseTerms) -> Lease | None:
        """Lease those of *keys* that exist, a chain or not; None when none does.

        Raises QuotaExceededError.
        """
        with self._lock:
            known = list(dict.fromkeys(key for key in keys if self._index.row(key)))
            if not known:
                return None
            return self._leases.grant(terms.session_id, known, self._clock() + terms.ttl_s)

    def chose(self, chosen: Sequence[tuple[ChunkKey, float]]) -> None:
        """Variants were given out, each with how much of its context was there, too."""
        with self._lock:
            for key, overlap in chosen:
                self.knowledge.contents.used(key, overlap)
            keys = [key for key, _ in chosen]
            rows = [row for key in keys if (row := self._index.row(key))]
            # The policies are told that they were used, the history not: it counts prompts.
            event = Asked(np.array(rows, np.intp), keys, self._clock(), is_again=True)
            self._journal.note(event)
        self._news.set()

    # --- reports

    def variant_tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for what is no variant."""
        with self._lock:
            found = [self.knowledge.contents.facts(key) for key in keys]
        return [0 if one is None else one.tokens for one in found]

    def reported(self, reports: Sequence[tuple[ChunkKey, Measured, Scores | None]]) -> None:
        """Take in what engines measured of variants; those that are gone by now are passed over.

        Scores: (tokens), -1 for those that were not measured.
        """
        with self._lock:
            contents, priorities = self.knowledge.contents, self.knowledge.priorities
            self.report_count += 1
            for key, measured, scores in reports:
                if contents.report(key, measured) and scores is not None:
                    priorities.note(key[:DIGEST_BYTES] + contents.content(key), scores)

    # --- over a restart

    def learned(self) -> list[Learned]:
        """Return what engines reported of variants, of those reported on last."""
        with self._lock:
            return self.knowledge.contents.learned()

    def recall(self, rows: Sequence[Learned]) -> None:
        """Take in what an earlier run learned of variants."""
        with self._lock:
            self.knowledge.contents.recall(rows)

    def name(self, chunk: Named) -> None:
        """A frame was read that says what its chunk is; no word of one that is gone."""
        with self._lock:
            if self._index.row(chunk.key):
                self._take_in(chunk)

    def next_unread(self) -> ChunkKey | None:
        """Return a chunk in memory whose frame nobody has looked at, once; None without one."""
        with self._lock:
            return self.unread.popleft() if self.unread else None

    def unnamed(self, tier: str, limit: int) -> list[ChunkKey]:
        """Return chunks on *tier* whose content is not known, at most *limit*."""
        with self._lock:
            contents, index = self.knowledge.contents, self._index
            return [
                key
                for row in index.known_rows()
                if tier in index.holders(row) and (key := index.key(row)) not in contents
            ][-limit:]

    def content_counts(self) -> tuple[int, int, int, int]:
        """Return how many contents and variants there are, contents left out, priorities' bytes."""
        with self._lock:
            contents = self.knowledge.contents
            size = self.knowledge.priorities.size_bytes
            return contents.content_count, len(contents), contents.left_out, size
