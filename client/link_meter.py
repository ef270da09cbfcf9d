"""What a link has given lately: its mean, and what it keeps to four times out of five."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError

EWMA_WEIGHT = 0.3
SAMPLES_KEPT = 32
CAUTIOUS_SHARE = 0.2
WEIGHED_S = 0.05
"""A transfer that took longer than this counts for as many as it could have been."""
DOUBLING_S = 5.0
"""In what time a link of which nothing came is taken to give twice as much."""
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Bytes a second: to expect, and to count on. Raises InvalidRequestError unless positive."""

    mean_bytes_per_s: float
    p20_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("mean_bytes_per_s", "p20_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise InvalidRequestError(field, getattr(self, field), "give a positive number")


class LinkMeter:
    """Learns from transfers; *prior_bytes_per_s* stands until the first. Any thread may call.

    With a *clock* what was seen ages: a link from which nothing comes, as it was slow, would stay
    slow for ever. Its estimate doubles every DOUBLING_S, up to the prior, until the next transfer.
    """

    def __init__(self, prior_bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self._prior = LinkEstimate(prior_bytes_per_s, prior_bytes_per_s).mean_bytes_per_s
        self._mean = self._prior
        self._clock = clock or (lambda: 0.0)
        self._seen_s = 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of one transfer; an empty one says nothing."""
        if size_bytes <= 0:
            return
        found = size_bytes / max(seconds, _LEAST_S)
        weight = 1.0 - (1.0 - EWMA_WEIGHT) ** max(1.0, seconds / WEIGHED_S)
        with self._lock:
            self._mean += (weight if self._samples else 1.0) * (found - self._mean)
            self._samples.append(found)
            self._seen_s = self._clock()

    def estimate(self) -> LinkEstimate:
        """Return the exponentially weighted mean, and the 20th percentile of the last samples.

        The latter is never more than the mean: one slow transfer is caution enough.
        """
        with self._lock:
            mean, samples = self._mean, list(self._samples)
            age_s = self._clock() - self._seen_s
        ordered = sorted(samples) or [mean]
        cautious = min(mean, ordered[int(CAUTIOUS_SHARE * (len(ordered) - 1))])
        most = max(1.0, self._prior / mean)
        grown = min(most, 2.0 ** min(age_s / DOUBLING_S, 64.0)) if samples else 1.0
        return LinkEstimate(grown * mean, grown * cautious)
