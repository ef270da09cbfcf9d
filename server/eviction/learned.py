"""Evict what a trained scorer finds least likely to be used again, of the oldest leaves."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.leaf_tree import LeafCursor
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.marconi import FlopDensity
from kvstore.server.eviction.policy import Rows

Features = NDArray[np.float64]

FEATURES = ("age_s", "size_bytes", "hits", "gap_s", "ttl_left_s", "cost")
"""By column: seconds since the last use; bytes; uses so far; the mean of the times between them,
inf after one use; seconds until it is forgotten anyway, inf for never; the FLOPs that a byte saves
as a multiple of the mean. All are 0 or more."""

VERSION = 1
MAX_STUMPS = 256


class Scorer(Protocol):
    """Says how likely chunks are to be used again."""

    def score(self, features: Features) -> NDArray[np.float64]:
        """Return one number a row of *features*, (chunks, 6); the least is evicted first."""
        ...


@dataclass(frozen=True, slots=True)
class Stump:
    """Adds ``low`` where a feature is at most ``limit``, else ``high``."""

    feature: int
    limit: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.feature < len(FEATURES):
            raise InvalidRequestError("feature", self.feature, f"0 to {len(FEATURES) - 1}")
        for name in ("limit", "low", "high"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequestError(name, getattr(self, name), "a finite number")


class StumpScorer:
    """The sum of decision stumps, as gradient boosting fits them (Friedman, Annals of Statistics
    29(5), 2001); with the logistic loss it is a log-odds.
    """

    def __init__(self, stumps: Sequence[Stump]) -> None:
        """Raises InvalidRequestError."""
        if not 0 < len(stumps) <= MAX_STUMPS:
            raise InvalidRequestError("stumps", len(stumps), f"1 to {MAX_STUMPS}")
        self.stumps = tuple(stumps)
        self._features = np.array([stump.feature for stump in stumps])
        self._limits = np.array([stump.limit for stump in stumps])
        self._low = np.array([stump.low for stump in stumps])
        self._high = np.array([stump.high for stump in stumps])

    def score(self, features: Features) -> NDArray[np.float64]:
        """See Scorer."""
        is_low = features[:, self._features] <= self._limits
        total: NDArray[np.float64] = np.where(is_low, self._low, self._high).sum(axis=1)
        return total

    def to_json(self) -> str:
        """Return the weights as text, with their version and a checksum."""
        rows = [[one.feature, one.limit, one.low, one.high] for one in self.stumps]
        body = {"version": VERSION, "features": list(FEATURES), "stumps": rows}
        text = json.dumps({"sha256": _checksum(body), **body})
        return text.replace("], [", "],\n[").replace(', "', ',\n"')

    @classmethod
    def from_json(cls, text: str) -> StumpScorer:
        """Return the scorer that ``to_json`` wrote. Raises InvalidRequestError."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("weights", text[:40], f"a JSON object ({error})") from None
        if not isinstance(body, dict):
            raise InvalidRequestError("weights", text[:40], "a JSON object")
        stated = body.pop("sha256", None)
        if body.get("version") != VERSION or body.get("features") != list(FEATURES):
            wrong = (body.get("version"), body.get("features"))
            raise InvalidRequestError("version, features", wrong, f"{VERSION} and {FEATURES}")
        if stated != _checksum(body):
            raise InvalidRequestError("sha256", stated, "weights as the trainer wrote them")
        rows = body.get("stumps")
        if not isinstance(rows, list) or not all(map(_is_stump, rows)):
            raise InvalidRequestError("stumps", str(rows)[:40], "rows of four numbers")
        return cls([Stump(int(row[0]), *map(float, row[1:])) for row in rows])


def _is_stump(row: object) -> bool:
    is_row = isinstance(row, list) and len(row) == 4
    return is_row and all(type(value) in (int, float) for value in row)  # type: ignore[attr-defined]


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


WEIGHTS = """
{"sha256": "5a8f7993742d4fcb29f347c57f6c4971c9085a47557a9ffce6c6e3d4794de446",
"version": 1,
"features": ["age_s",
"size_bytes",
"hits",
"gap_s",
"ttl_left_s",
"cost"],
"stumps": [[0, 0.0, -1.3328802733332814, -1.3328802733332814],
[2, 1.0, -0.230524, 0.322776],
[2, 1.0, -0.191523, 0.183321],
[2, 1.0, -0.156825, 0.116627],
[3, 1000.0, 0.0775526, -0.125916],
[0, 1.412, -0.218569, 0.0382574],
[0, 48.531, 0.0349004, -0.176761],
[0, 1.412, -0.180854, 0.0294361],
[3, 153.822, 0.0588373, -0.0940242],
[0, 36.042, 0.0291588, -0.132051],
[0, 0.761, -0.21105, 0.018296],
[3, 68.0833, 0.0497265, -0.0617623],
[0, 1.792, -0.122177, 0.0252621],
[0, 14.598, 0.0358125, -0.0710739],
[0, 2.21, -0.0933602, 0.0240511],
[0, 48.531, 0.0184517, -0.106354],
[0, 0.761, -0.144009, 0.0107355],
[3, 35.9616, 0.0461489, -0.0380211],
[0, 2.627, -0.064263, 0.0200773],
[0, 8.917, 0.0342539, -0.0440197],
[3, 1000.0, 0.0231867, -0.0454127],
[0, 2.627, -0.058913, 0.018578],
[0, 169.093, 0.00479768, -0.196615],
[0, 12.302, 0.0221472, -0.0396472],
[0, 1.071, -0.0909419, 0.00946012],
[5, 0.918184, 0.0756775, -0.011493],
[2, 8.0, 0.0137144, -0.055897],
[2, 2.0, -0.0271611, 0.0241135],
[0, 2.627, -0.0451835, 0.0140336],
[0, 7.736, 0.0248547, -0.0279075],
[5, 1.10389, -0.0106681, 0.0594508],
[0, 0.49, -0.114157, 0.00501008],
[3, 6.16667, 0.0974606, -0.00659889],
[0, 169.093, 0.00342529, -0.152756],
[2, 8.0, 0.011292, -0.0461506],
[5, 0.918184, 0.0629675, -0.00953116],
[0, 2.627, -0.0401713, 0.0124285],
[5, 1.05864, -0.0128538, 0.0357892],
[2, 2.0, -0.022581, 0.019995],
[2, 10.0, 0.00849296, -0.0509138],
[5, 0.89375, 0.0640401, -0.00653777],
[0, 48.531, 0.00775372, -0.0487776],
[0, 0.761, -0.0746766, 0.0049767],
[2, 13.0, 0.00549672, -0.0585947],
[3, 68.0833, 0.0162238, -0.0211376],
[0, 2.627, -0.0322703, 0.00982519],
[0, 7.736, 0.0179222, -0.0203265],
[2, 8.0, 0.00823199, -0.0336768],
[5, 0.918184, 0.0446305, -0.00684006]]}
"""
"""Weights of the scorer that is shipped: fitted by ``bench/train_scorer.py`` to our own synthetic
traces in ``data/traces`` (chats, agents and shared documents), blocks of 256 tokens."""


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
        history: AccessHistory,
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
        oldest = LeafCursor(filterfalse(keep, self._leaves.walk()), self._used.__getitem__)
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
                parent = self._exposed_by(row, orphaned)
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
