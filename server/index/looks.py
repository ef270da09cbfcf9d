"""Looks: the part of the Catalog that people ask: what is here, page by page.

Nobody's use of a chunk is counted by a look.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Namespace
from kvstore.server.index.found import Holding, UsedPrefix
from kvstore.server.trust.quota_book import QuotaBook

_SAME_USE = 0.9
"""A chunk that is used nearly as often as the one before it stands for both."""


class Looks(QuotaBook):
    """Lists chunks and says what is known of them. Thread-safe."""

    def holding(self, key: ChunkKey) -> Holding | None:
        """Return what is known of one chunk."""
        with self._lock:
            row = self._index.row(key)
            if not row:
                return None
            self._journal.settle()
            now_s, known = self._clock(), self.knowledge
            expiry_s = known.hints.expiry(row)
            return Holding(
                key,
                self._index.copies(row),
                self._leases.pins.get(key, 0),
                key in self._pinned,
                self._index.hits(row),
                self._idle_s(row, now_s),
                self._pinned.left_s(key, now_s),
                max(0.0, expiry_s - now_s) if expiry_s else 0.0,
                known.hints.priority(row),
                self._index.context_tokens(row),
            )

    def _idle_s(self, row: int, now_s: float) -> float:
        history = self.knowledge.history
        if row >= len(history.hits) or not history.hits[row]:
            return -1.0
        return max(0.0, history.time_s(now_s) - history.last_s[row])

    def holdings(self, space: Namespace) -> list[Holding]:
        """Return every chunk of a namespace. Those that come or go meanwhile may be left out."""
        return self.page(space, b"", b"", 0)

    def page(self, space: Namespace, after: bytes, prefix: bytes, limit: int) -> list[Holding]:
        """Return the chunks of a namespace in the order of their digests, *limit* at most unless 0.

        Those behind the digest *after* whose digests begin with *prefix*.
        """
        keys = self.keys_from(space + prefix)
        if after:
            keys = [key for key in keys if key[DIGEST_BYTES:] > after]
        found = (self.holding(key) for key in keys)
        return list(islice((held for held in found if held is not None), limit or None))

    def keys_from(self, start: bytes) -> list[ChunkKey]:
        """Return the keys of the chunks here that begin with *start*, in order."""
        with self._lock:
            keys = self._index.keys_starting(start)
        return sorted(map(ChunkKey, keys.tolist()))

    def spaces(self) -> Counter[Namespace]:
        """Return how many chunks each namespace has here."""
        with self._lock:
            keys = self._index.keys_starting(b"")
        if not len(keys):
            return Counter()
        halves = keys.view(f"V{DIGEST_BYTES}").reshape(-1, 2)[:, 0]
        return Counter(map(Namespace, halves.tolist()))

    def is_held(self, key: ChunkKey) -> bool:
        """Whether somebody reads or pinned the chunk, so that it cannot be forgotten."""
        with self._lock:
            return self._is_held(key)

    def top_prefixes(self, count: int) -> list[UsedPrefix]:
        """Return the most used prefixes, each by its last chunk, the most used first."""
        with self._lock:
            hits, parents = self._index.all_hits()
        rows = _ends(hits, parents, count)  # a million rows are gone through while nobody waits
        with self._lock:
            index = self._index
            return [
                UsedPrefix(
                    index.key(row), index.hits(row), index.context_tokens(row) + index.tokens(row),
                    tuple(index.holders(row)),
                )
                for row in rows
                if index.holders(row)
            ]  # fmt: skip


def _ends(hits: NDArray[np.uint32], parents: NDArray[np.uint32], count: int) -> list[int]:
    """Return the *count* rows found most of which no child was found nearly as often."""
    further = np.zeros(len(hits), np.uint32)
    np.maximum.at(further, parents, hits)  # row 0 is nobody's
    found = np.where(further < _SAME_USE * hits, hits, 0)
    found[0] = 0
    rows = np.argpartition(found, -count)[-count:] if len(found) > count else np.arange(len(found))
    order = np.argsort(-found[rows].astype(np.int64), kind="stable")
    return [row for row in rows[order].tolist() if found[row]]
