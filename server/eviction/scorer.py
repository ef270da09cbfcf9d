"""Scores chunks by features, with weights that were fitted offline."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError

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
