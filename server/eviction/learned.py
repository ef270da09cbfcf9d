"""Of the oldest leaves, evict those that a trained scorer finds least likely to be used again."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LeafCursor, LruEviction
from kvstore.server.eviction.marconi import FlopDensity
from kvstore.server.eviction.policy import Rows

Features = NDArray[np.float64]

FEATURES = ("age_s", "size_bytes", "hits", "gap_s", "cost")
"""By column: seconds since the last use; bytes; number of uses; mean time between them, inf after
one use; FLOPs saved per byte as a multiple of the mean. All are 0 or more."""

VERSION = 1
MAX_STUMPS = 256


class Stump(NamedTuple):
    """Adds ``low`` if a feature is at most ``limit``, else ``high``."""

    feature: int
    limit: float
    low: float
    high: float


class StumpScorer:
    """The sum of decision stumps, as gradient boosting fits them (Friedman, Annals of Statistics
    29(5), 2001); with the logistic loss it is a log-odds.
    """

    def __init__(self, stumps: Sequence[Stump]) -> None:
        """Raises InvalidRequestError."""
        if not 0 < len(stumps) <= MAX_STUMPS:
            raise InvalidRequestError("stumps", len(stumps), f"1 to {MAX_STUMPS}")
        self.stumps = tuple(stumps)
        features, self._limits, self._low, self._high = np.array(stumps, np.float64).T
        self._features = features.astype(np.intp)

    def score(self, features: Features) -> NDArray[np.float64]:
        """Return the log-odds (chunks,) of further use, from features (chunks, 5)."""
        is_low = features[:, self._features] <= self._limits
        total: NDArray[np.float64] = np.where(is_low, self._low, self._high).sum(axis=1)
        return total

    @classmethod
    def from_json(cls, text: str) -> StumpScorer:
        """Return the scorer of weights written by the trainer. Raises InvalidRequestError."""
        try:
            body = json.loads(text)
            is_whole = body.pop("sha256") == weights_checksum(body)
            kind = body["version"], tuple(body["features"])
            stumps = [Stump(int(feature), *map(float, rest)) for feature, *rest in body["stumps"]]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequestError("weights", text[:40], f"a JSON object ({error})") from None
        if not is_whole or kind != (VERSION, FEATURES):
            raise InvalidRequestError("weights", kind, "use weights written by the trainer")
        return cls(stumps)


def weights_checksum(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a weights file without its checksum."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


WEIGHTS = Path(__file__).with_name("learned.json")
"""Weights of the built-in scorer: fitted by ``data/traces/train_scorer.py`` to the synthetic traces
beside it (chats, agents and shared documents), blocks of 256 tokens."""

CANDIDATES = 32
BUDGET_S = 500e-6
"""Time limit of the scorer for one decision."""

_VICTIM_SHARE = 4
"""One decision evicts one candidate in this many."""

_MOST_USES = 0xFFFF


class LearnedEviction(LruEviction):
    """Evict the quarter of the oldest leaves that the scorer finds least likely to be used.

    The design of Cold-RL (learned cache eviction with a deadline, in NGINX): the K least recently
    used objects, features of each, a mask of victims from one decision, and native LRU when a
    decision takes longer than 500 us on *clock*, which counts in ``fallbacks``. Ours departs in the
    scorer: boosted stumps fitted offline to whether a chunk was used again, instead of a network
    in a sidecar; and only leaves are candidates. A victim costs at most O(K). 57 bytes a row.
    """

    def __init__(
        self,
        history: AccessHistory,
        score: Callable[[Features], NDArray[np.float64]] | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Score by the built-in weights, or by *score*: one number a row, the least is evicted."""
        super().__init__()
        self._history = history
        self._score = score or StumpScorer.from_json(WEIGHTS.read_text()).score
        self._clock = clock
        self._density = FlopDensity(history)
        self.fallbacks = 0
        """Decisions that exceeded BUDGET_S."""
        self._first_s: array[float] = self._columns.add("d")
        self._last_s: array[float] = self._columns.add("d")
        self._sizes: array[int] = self._columns.add("Q")
        self._uses: array[int] = self._columns.add("H")
        """Evicted chunks keep their count until the row is reused."""
        self._costs: array[float] = self._columns.add("f")

    @override
    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._inserted(rows, size_bytes, now_s)
        for row in rows.tolist():
            # A chunk that came back has hits in the history; with one hit the row is reused.
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
        """Return the features of chunks on the tier: (rows, 5), as FEATURES."""
        found = np.empty((len(rows), len(FEATURES)))
        last_s, uses = np.frombuffer(self._last_s)[rows], np.frombuffer(self._uses, np.uint16)[rows]
        first_s = np.frombuffer(self._first_s)[rows]
        found[:, 0] = np.maximum(now_s - last_s, 0.0)
        found[:, 1] = np.frombuffer(self._sizes, np.uint64)[rows]
        found[:, 2] = uses
        gaps_s = np.maximum(last_s - first_s, 0.0) / np.maximum(uses.astype(np.float64) - 1.0, 1.0)
        found[:, 3] = np.where(uses > 1, gaps_s, np.inf)
        found[:, 4] = np.frombuffer(self._costs, np.float32)[rows]
        return found

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        oldest = LeafCursor(filterfalse(keep, self._queues.walk()), self._used.__getitem__)
        orphaned: dict[int, int] = {}
        pool: list[int] = []
        most = CANDIDATES
        while True:
            while len(pool) < most and (row := oldest.take()):
                pool.append(row)
            if not pool:
                return
            chosen = self._decide(pool, now_s) if most > 1 else pool
            if chosen is None:
                most = 1
                for row in pool:
                    oldest.add(row)
                pool = []
                continue
            pool = [row for row in pool if row not in chosen]
            for row in chosen:
                yield row
                parent = self._exposed_by(row, orphaned)
                if parent and not keep(parent):
                    oldest.add(parent)

    def _decide(self, pool: list[int], now_s: float) -> list[int] | None:
        """Return the victims, of equal scores the oldest first; None if that took too long."""
        started_s = self._clock() if self._clock else 0.0
        scores = self._score(self.features(pool, now_s))
        used = np.frombuffer(self._used, np.uint64)[pool]
        order = np.lexsort((used, scores))[: max(1, len(pool) // _VICTIM_SHARE)]
        if self._clock and self._clock() - started_s > BUDGET_S:
            self.fallbacks += 1
            return None
        return [pool[at] for at in order.tolist()]
