"""What a link has given lately: its mean, and what it keeps to four times out of five."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError

EWMA_WEIGHT = 0.3
SAMPLES_KEPT = 32
CAUTIOUS_SHARE = 0.2
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
    """Learns from transfers; *prior_bytes_per_s* stands until the first. Any thread may call."""

    def __init__(self, prior_bytes_per_s: float) -> None:
        self._mean = LinkEstimate(prior_bytes_per_s, prior_bytes_per_s).mean_bytes_per_s
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of one transfer; an empty one says nothing."""
        if size_bytes <= 0:
            return
        found = size_bytes / max(seconds, _LEAST_S)
        with self._lock:
            self._mean += (EWMA_WEIGHT if self._samples else 1.0) * (found - self._mean)
            self._samples.append(found)

    def estimate(self) -> LinkEstimate:
        """Return the exponentially weighted mean, and the 20th percentile of the last samples."""
        with self._lock:
            mean, samples = self._mean, list(self._samples)
        ordered = sorted(samples) or [mean]
        return LinkEstimate(mean, ordered[int(CAUTIOUS_SHARE * (len(ordered) - 1))])
