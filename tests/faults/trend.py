"""The trend of a process's memory: its slope, and how sure that is.

What a leak raises is the floor, not the peaks of buffers that come and go: samples are cut into
blocks, of which the least counts, which also makes neighbours nearly independent. The slope is
the median of those between all pairs (Theil 1950), with the interval of Sen, "Estimates of the
Regression Coefficient Based on Kendall's Tau", JASA 63 (1968), section 3.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BLOCK_S = 10.0
LEAST_BLOCKS = 8
_Z95 = 1.96


class Trend(NamedTuple):
    """In percent of the median an hour: the slope and the ends of its 95 % interval."""

    slope: float
    low: float
    high: float


NO_TREND = Trend(math.nan, math.nan, math.nan)


def floors(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the least of each block of *samples*, (seconds, bytes), at the block's middle."""
    least: dict[int, float] = {}
    for at_s, size in samples:
        block = int((at_s - samples[0][0]) / BLOCK_S)
        least[block] = min(size, least.get(block, math.inf))
    return [((block + 0.5) * BLOCK_S, size) for block, size in sorted(least.items())]


def trend(samples: Sequence[tuple[float, float]]) -> Trend:
    """Return the trend of *samples*, (seconds, bytes); NaN of too few to tell."""
    points = floors(samples)
    count = len(points)
    if count < LEAST_BLOCKS:
        return NO_TREND
    times, sizes = (np.array(column, float) for column in zip(*points, strict=True))
    first, second = np.triu_indices(count, 1)
    slopes = np.sort((sizes[second] - sizes[first]) / (times[second] - times[first]))
    reach = _Z95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    last = len(slopes) - 1
    low = slopes[max(0, math.floor((last + 1 - reach) / 2))]
    high = slopes[min(last, math.ceil((last + 1 + reach) / 2))]
    unit = 100 * 3600 / np.median(sizes)
    return Trend(*(float(unit * slope) for slope in (np.median(slopes), low, high)))


class Sampler:
    """Takes a sample each second in a thread of its own, from ``start`` to ``stop``."""

    def __init__(self, look: Callable[[], float]) -> None:
        self.samples: list[tuple[float, float]] = []
        self._look = look
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[tuple[float, float]]:
        """End, and return the samples. Idempotent; nothing if it was not started."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        return self.samples

    def _work(self) -> None:
        while not self._is_over.wait(1.0):
            self.samples.append((time.monotonic(), self._look()))
