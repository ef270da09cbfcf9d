"""Evict what a trained scorer finds least likely to be used again, of the oldest leaves."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterator
from itertools import filterfalse

import numpy as np
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import History
from kvstore.server.eviction.flop_density import FlopDensity
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.scorer import FEATURES, Features, Scorer, StumpScorer
from kvstore.server.eviction.scorer_weights import WEIGHTS

CANDIDATES = 32
LEAST_CANDIDATES, MOST_CANDIDATES = 16, 64
BUDGET_S = 500e-6
"""How long a scorer may take for one decision."""

_VICTIM_SHARE = 4
"""Of the candidates, one in so many goes by one decision."""

_MOST_USES = 0xFFFF


def no_ttl(row: int) -> float:
    """Return how long a chunk has to live where nobody says: for ever."""
    return math.inf


class _Oldest:
    """The leaves that may go, the one used longest ago first, with those bared put in."""

    def __init__(self, leaves: Iterator[int], used: array[int]) -> None:
        self._leaves = leaves
        self._used = used
        self._next = next(leaves, NO_ROW)
        self._bared: list[tuple[int, int]] = []

    def add(self, row: int) -> None:
        heapq.heappush(self._bared, (self._used[row], row))

    def take(self) -> int:
        """Return the oldest, NO_ROW when there is none."""
        if self._bared and (not self._next or self._bared[0][0] < self._used[self._next]):
            return heapq.heappop(self._bared)[1]
        row, self._next = self._next, next(self._leaves, NO_ROW)
        return row


class LearnedEviction(LruEviction):
    """Of the oldest leaves evict the quarter that the scorer finds least likely to be used.

    The shape of Cold-RL (learned cache eviction with a deadline, beside NGINX): the K
    objects used longest ago, six features of each, a mask of victims from one decision, and
    native LRU when the decision takes longer than 500 us. Ours departs in the scorer: boosted
    stumps fitted offline to whether a chunk was used again (``bench/train_scorer.py``), worked
    out by numpy here, in place of a network asked over a sidecar; and only leaves are candidates.

    *clock* returns seconds and measures the budget; without one there is none. A decision that
    took longer counts in ``fallbacks`` and is not used: this call goes on as LRU. A victim costs
    O(K) at most, whatever is known. 61 bytes a row.
    """

    def __init__(
        self,
        history: History,
        scorer: Scorer | None = None,
        *,
        clock: Callable[[], float] | None = None,
        ttl_left_s: Callable[[int], float] = no_ttl,
        candidates: int = CANDIDATES,
    ) -> None:
        """Score by the weights shipped, or by *scorer*. Raises InvalidRequestError."""
        super().__init__()
        if not LEAST_CANDIDATES <= candidates <= MOST_CANDIDATES:
            limits = f"{LEAST_CANDIDATES} to {MOST_CANDIDATES}"
            raise InvalidRequestError("candidates", candidates, limits)
        self._history = history
        self._scorer = StumpScorer.from_json(WEIGHTS) if scorer is None else scorer
        self._clock = clock
        self._ttl_left_s = ttl_left_s
        self._candidates = candidates
        self._density = FlopDensity(history)
        self.fallbacks = 0
        """Decisions that took too long."""
        self._first_s = array("d", [0.0])
        self._last_s = array("d", [0.0])
        self._sizes = array("Q", [0])
        self._uses = array("H", [0])
        """Of a chunk that was evicted, what it had, until its row is another's."""
        self._costs = array("f", [0.0])

    @override
    def _extend(self, count: int) -> None:
        super()._extend(count)
        for column in (self._first_s, self._last_s, self._sizes, self._uses, self._costs):
            column.frombytes(bytes(count * column.itemsize))

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        super()._came(row, size_bytes, now_s)
        self._describe(row, size_bytes, now_s)

    @override
    def _came_chain(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._came_chain(rows, size_bytes, now_s)
        for row in rows.tolist():
            self._describe(row, size_bytes, now_s)

    def _describe(self, row: int, size_bytes: int, now_s: float) -> None:
        # The history knows a chunk that came back; a row it saw once is another chunk's now.
        if self._history.hits_of(row) < 2 or not self._uses[row]:
            self._uses[row] = 0
            self._first_s[row] = now_s
        self._uses[row] = min(self._uses[row] + 1, _MOST_USES)
        self._last_s[row] = now_s
        self._sizes[row] = size_bytes
        self._costs[row] = self._density.of(row, size_bytes)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        super()._use(rows, now_s)
        uses = np.frombuffer(self._uses, np.uint16)
        uses[rows] = np.minimum(uses[rows], _MOST_USES - 1) + 1
        np.frombuffer(self._last_s)[rows] = now_s

    def features(self, rows: list[int], now_s: float) -> Features:
        """Return the features of chunks that are here: (rows, 6), as ``scorer.FEATURES``."""
        found = np.empty((len(rows), len(FEATURES)))
        last_s, uses = np.frombuffer(self._last_s)[rows], np.frombuffer(self._uses, np.uint16)[rows]
        first_s = np.frombuffer(self._first_s)[rows]
        found[:, 0] = np.maximum(now_s - last_s, 0.0)
        found[:, 1] = np.frombuffer(self._sizes, np.uint64)[rows]
        found[:, 2] = uses
        gaps_s = np.maximum(last_s - first_s, 0.0) / np.maximum(uses.astype(np.float64) - 1.0, 1.0)
        found[:, 3] = np.where(uses > 1, gaps_s, np.inf)
        found[:, 4] = [self._ttl_left_s(row) for row in rows]
        found[:, 5] = np.frombuffer(self._costs, np.float32)[rows]
        return found

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        oldest = _Oldest(filterfalse(keep, self._leaves.walk()), self._used)
        orphaned: dict[int, int] = {}
        pool: list[int] = []
        is_scored = True
        while True:
            while len(pool) < (self._candidates if is_scored else 1):
                row = oldest.take()
                if not row:
                    break
                pool.append(row)
            if not pool:
                return
            chosen = self._decide(pool, now_s) if is_scored else pool
            if chosen is None:
                is_scored = False
                for row in pool:
                    oldest.add(row)
                pool = []
                continue
            pool = [row for row in pool if row not in chosen]
            for row in chosen:
                yield row
                parent = self._bared_by(row, orphaned)
                if parent and not keep(parent):
                    oldest.add(parent)

    def _decide(self, pool: list[int], now_s: float) -> list[int] | None:
        """Return who of the candidates goes, in order; None if that took too long to say.

        Of equal scores the one used longest ago goes.
        """
        started_s = self._clock() if self._clock else 0.0
        scores = self._scorer.score(self.features(pool, now_s))
        used = np.frombuffer(self._used, np.uint64)[pool]
        order = np.lexsort((used, scores))[: max(1, len(pool) // _VICTIM_SHARE)]
        if self._clock and self._clock() - started_s > BUDGET_S:
            self.fallbacks += 1
            return None
        return [pool[at] for at in order.tolist()]
