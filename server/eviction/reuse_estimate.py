"""How likely a chunk is requested again before a slower tier evicts it: for the value rule."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import Columns, Rows
from kvstore.server.eviction.reuse_statistics import AGE_BINS, bins_of

LENGTHS = 4
LENGTH_TOKENS = 8192
"""Prompts differ by how often they have so many tokens, up to three times."""
FREQUENCIES = 3
KINDS = 2 * LENGTHS * 2 * FREQUENCIES
FAMILIAR_CHUNKS = 2
"""A prompt of which so many chunks were known continues another; one may be a system prompt."""
STAY_WEIGHT = 0.01
_PRIOR_HITS, _PRIOR_CHUNKS = 1.0, 2.0
"""What is assumed of a kind before anything is known: half of it comes again."""


def reuse_chance(
    requests: float, hits: NDArray[np.float64], age_s: float, until_s: float = math.inf
) -> float:
    """Return the chance that a chunk, not asked for since *age_s*, is before *until_s*.

    It is hits with ages between / (*requests* - hits before), of all of its kind; *hits* are by
    bin of a DensityTable. Requests that none followed yet count as not followed: an estimate from
    below, which spares writes.
    """
    at, end = bins_of(np.array([age_s, until_s])).tolist()
    end = AGE_BINS if until_s == math.inf else max(at + 1, end)
    found = float(hits[at:end].sum())
    left = requests - float(hits[:at].sum())
    return min(1.0, (found + _PRIOR_HITS) / (max(left, found) + _PRIOR_CHUNKS))


class ReuseForecast:
    """The chance of each chunk that *history* remembers, by a kind of its own.

    A kind is how often it was asked for (1, 2, more), whether it ends its prompt, how long that
    was, and whether the prompt continued a known one: few, which are soon known well. ``requested``
    comes before that of *history*, ``seen`` after it. One byte a row. Not thread-safe.
    """

    def __init__(self, history: AccessHistory, chunk_tokens: int = 256) -> None:
        self.history = history
        self._chunk_tokens = chunk_tokens
        self._requests, self._hits = np.zeros(KINDS), np.zeros((KINDS, AGE_BINS))
        """By kind, and by age at the next."""
        self._columns = Columns()
        self._kinds: array[int] = self._columns.add("B")
        self._stay_s = 0.0

    def requested(self, rows: Rows, chunks: int, now_s: float) -> None:
        """A prompt of *chunks* chunks is looked up, whose first *rows* are known."""
        history = self.history
        rows = rows[rows < len(history.hits)]
        hits = history.hits[rows]
        rows, hits = rows[hits > 0], hits[hits > 0]
        if not len(rows):
            return
        self._columns.reach(int(rows.max()))
        kinds = np.frombuffer(self._kinds, np.uint8)
        ages_s = history.time_s(now_s) - history.last_s[rows]
        np.add.at(self._hits, (kinds[rows], bins_of(ages_s)), 1.0)
        is_end = kinds[rows] // FREQUENCIES % 2
        context = (len(rows) >= FAMILIAR_CHUNKS) * LENGTHS + self._length(chunks)
        fresh = (context * 2 + is_end) * FREQUENCIES + np.minimum(hits, FREQUENCIES - 1)
        kinds[rows] = fresh
        self._requests += np.bincount(kinds[rows], minlength=KINDS)

    def _length(self, chunks: int) -> int:
        return min(LENGTHS - 1, chunks * self._chunk_tokens // LENGTH_TOKENS)

    def seen(self, row: int, parent: int, facts: InsertInfo, now_s: float) -> None:
        """A chunk was stored that no tier had: if it is new it continues its parent's prompt."""
        self._columns.reach(max(row, parent))
        history = self.history
        if history.hits[row] != 1 or history.last_s[row] < history.time_s(now_s):
            return
        above = self._kinds[parent] // (FREQUENCIES * 2) if parent else 0
        context = above // LENGTHS * LENGTHS + self._length(history.chunks.item(row))
        self._kinds[row] = (context * 2 + (not facts.tokens_full)) * FREQUENCIES
        self._requests[self._kinds[row]] += 1

    def chance(self, row: int, now_s: float) -> float:
        """Return the chance that a chunk is asked for before the slow tier would give it up."""
        if not self.history.knows(row) or row >= len(self._kinds):
            return 1.0
        age_s = self._age_s(row, now_s)
        until_s = age_s + self._stay_s if self._stay_s else math.inf
        kind = self._kinds[row]
        return reuse_chance(float(self._requests[kind]), self._hits[kind], age_s, until_s)

    def evicted(self, row: int, now_s: float) -> None:
        """The slow tier evicted a chunk, which shows how long it keeps what is not asked for."""
        if not self.history.knows(row):
            return
        age_s = self._age_s(row, now_s)
        self._stay_s += STAY_WEIGHT * (age_s - self._stay_s) if self._stay_s else age_s

    def _age_s(self, row: int, now_s: float) -> float:
        return max(0.0, self.history.time_s(now_s) - self.history.last_s.item(row))
