"""How many prefill FLOPs a byte of a chunk saves, beside those of other chunks."""

from __future__ import annotations

from kvstore.server.eviction.access_history import History

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
        flops = self._history.flops_of(row)
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
