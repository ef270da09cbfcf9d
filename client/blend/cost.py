"""What computing takes, learned from what it took: seconds from rows and pairs of tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError

SAMPLES_KEPT = 64
_PRIOR_WEIGHT = 0.02
"""How firmly the prior stands: as a fraction of one sample, so the first ones replace it."""
LEVEL_SAMPLES = 5
"""Machines get slower and faster: the last samples say how much against the whole fit."""
ERRORS_KEPT = 16
_CAUTIOUS_SHARE = 0.8
_NO_SAMPLES_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass does in the mean layer: stored tokens placed, rows computed, pairs attended.

    A row at the end of n tokens attends n of them; m rows spread over n tokens about
    m (2 n - m) / 2, of which ``pairs`` is twice as many.
    """

    passes: float
    loaded: float
    rows: float
    pairs: float

    @classmethod
    def of(cls, rows: Sequence[float], tokens: int, loaded: int) -> Work:
        """Return the work of one pass: *rows* of each layer, of a prompt of *tokens*."""
        count = max(1, len(rows))
        pairs = sum(m * (2 * tokens - m) for m in rows) / count
        return cls(1.0, float(loaded), sum(rows) / count, pairs)

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that all layers take: of a pass, a token placed, a row, a pair."""

    pass_s: float
    loaded_s: float
    row_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if not all(np.isfinite(value) and value >= 0 for value in astuple(self)):
            raise InvalidRequestError("speed", astuple(self), "seconds are finite and not negative")
        if not self.row_s + self.pair_s > 0:
            raise InvalidRequestError("speed", astuple(self), "computing takes time")

    def seconds(self, work: Work) -> float:
        """Return what *work* takes."""
        pairs = zip(astuple(self), astuple(work), strict=True)
        return float(sum(a * b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What to expect, and the relative error that four of five predictions kept to."""

    speed: Speed
    error_share: float


class CostMeter:
    """Learns a Speed from finished work; *prior* stands until then. Any thread may call."""

    def __init__(self, prior: Speed) -> None:
        self._prior = prior
        self._lock = threading.Lock()
        self._samples: deque[tuple[Work, float]] = deque(maxlen=SAMPLES_KEPT)
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        self._estimate = CostEstimate(prior, _NO_SAMPLES_ERROR)

    def observe(self, work: Work, seconds: float) -> None:
        """Take note of what *work* took; what is not a positive number says nothing."""
        if not (np.isfinite(seconds) and seconds > 0):
            return
        with self._lock:
            before = self._estimate.speed
            if self._samples:  # the prior's error says nothing of the fit's
                self._errors.append(abs(before.seconds(work) / seconds - 1))
            self._samples.append((work, seconds))
            samples, errors = list(self._samples), sorted(self._errors)
        speed = _levelled(_fit(self._prior, samples), samples)
        place = int(_CAUTIOUS_SHARE * (len(errors) - 1))
        error = errors[place] if len(errors) >= 4 else _NO_SAMPLES_ERROR
        with self._lock:
            self._estimate = CostEstimate(speed, error)

    @property
    def is_measured(self) -> bool:
        """Whether anything was observed yet."""
        with self._lock:
            return bool(self._samples)

    def estimate(self) -> CostEstimate:
        """Return what is known now."""
        with self._lock:
            return self._estimate


def _fit(prior: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return the speed with the least relative error, none of its terms negative.

    Least squares; a term that would be negative is 0 and the others are fitted again.
    """
    work = np.array([astuple(one) for one, _ in samples])
    seconds = np.array([taken for _, taken in samples])
    start = np.array(astuple(prior))
    scale = np.where(start > 0, start, start.max())
    rows = np.vstack([work / seconds[:, None] * scale, _PRIOR_WEIGHT * np.eye(4)])
    wanted = np.concatenate([np.ones(len(samples)), _PRIOR_WEIGHT * start / scale])
    is_free = np.ones(4, dtype=bool)
    found: NDArray[np.float64] = np.zeros(4)
    while is_free.any():
        found = np.zeros(4)
        found[is_free] = np.linalg.lstsq(rows[:, is_free], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        is_free &= found > 0
    fitted = found * scale
    if not fitted[2:].sum() > 0:
        return prior
    return Speed(*fitted.tolist())


def _levelled(speed: Speed, samples: Sequence[tuple[Work, float]]) -> Speed:
    """Return *speed* made as much slower as the last samples were, in the median."""
    last = [(speed.seconds(work), taken) for work, taken in samples[-LEVEL_SAMPLES:]]
    level = median([taken / expected for expected, taken in last if expected > 0] or [1.0])
    return Speed(*(part * level for part in astuple(speed)))
