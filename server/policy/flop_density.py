"""How many prefill FLOPs a byte of a chunk saves, beside those of other chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.server.policy.history import History
from kvstore.server.policy.leaves import FEW
from kvstore.server.policy.radix import Rows

LEAST_DENSITY, MOST_DENSITY = 1 / 64, 64.0
"""Bounds of a density: numbers of engines are not to be believed beyond them."""

_MOST_FLOPS = 1e30
_HALVED_AFTER = 4096
"""Chunks after which all before count half, so that no lie about one lasts."""


class FlopDensity:
    """FLOPs a byte, as multiples of the mean of the chunks asked about lately.

    A chunk whose FLOPs are not known counts as the mean: those of one model have the same bytes
    a token, so what they save a byte differs by their depth only.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._sum = 0.0
        self._chunks = 0

    def of(self, row: int, size_bytes: int) -> float:
        """Return the density of a chunk that takes *size_bytes*; 1 when nothing is known."""
        return self._of_one(self._history.flops_of(row), size_bytes)

    def of_all(self, rows: Rows, size_bytes: int) -> NDArray[np.float64]:
        """Return ``of`` of each of *rows*, in order: to the bit what one call each returns."""
        # The last place is always nobody's.
        flops = np.frombuffer(self._history.flops).take(rows, mode="clip")
        count = len(flops)
        is_plain = size_bytes and 0 < self._chunks < _HALVED_AFTER - count
        if count >= FEW and is_plain:
            found = np.minimum(flops, _MOST_FLOPS) / size_bytes
            # The sums before each and after the last, as adding one by one makes them.
            sums = np.cumsum(np.concatenate(([self._sum], found)))
            chunks = np.arange(self._chunks, self._chunks + count + 1)
            is_bound = found > MOST_DENSITY * sums[:-1] / chunks[:-1]
            if flops.min() >= 1.0 and not is_bound.any():
                self._sum, self._chunks = float(sums[-1]), self._chunks + count
                densities: NDArray[np.float64] = found * chunks[1:] / sums[1:]
                return densities.clip(LEAST_DENSITY, MOST_DENSITY)
        return np.array([self._of_one(one, size_bytes) for one in flops.tolist()], np.float64)

    def _of_one(self, flops: float, size_bytes: int) -> float:
        if flops < 1.0 or not size_bytes:
            return 1.0
        found = (flops if flops < _MOST_FLOPS else _MOST_FLOPS) / size_bytes
        # What is far above the mean raises it no more than what is at the bound.
        bound = MOST_DENSITY * self._sum / self._chunks if self._chunks else found
        self._sum += found if found < bound else bound
        self._chunks += 1
        if self._chunks == _HALVED_AFTER:
            self._sum, self._chunks = self._sum / 2, self._chunks // 2
        density = found * self._chunks / self._sum
        return min(max(density, LEAST_DENSITY), MOST_DENSITY)
