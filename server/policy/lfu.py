"""Least frequently used, leaves of the prefix tree first."""

from __future__ import annotations

from array import array

import numpy as np
from typing_extensions import override

from kvstore.server.policy.heaped import HeapedEviction
from kvstore.server.policy.history import History
from kvstore.server.policy.radix import Rows

_TICK_BITS = 48
_MOST_USES = (1 << (64 - _TICK_BITS)) - 1


class LfuEviction(HeapedEviction):
    """Evict the leaf that was used least often, of several the one used longest ago.

    In-cache LFU (as in Lee et al., "LRFU", IEEE Trans. Computers 50(12), 2001, section 2, at the
    end of its spectrum): the count of a chunk begins at 1 when it comes. With *remembers* it goes
    on where it was when the chunk was evicted ("perfect LFU", Breslau et al., INFOCOM 1999).
    Ours departs in that only leaves are candidates. There is no ageing: what was used often
    once stays, which is why this policy is here for comparison.

    Every event costs O(log n) of the leaves. 25 bytes a row.
    """

    def __init__(self, history: History, *, remembers: bool = False) -> None:
        self._counts = array("Q", [0])
        """How often a chunk was used, then when, in one number."""
        super().__init__(self._counts)
        self._history = history if remembers else None

    @override
    def _extend(self, count: int) -> None:
        self._counts.frombytes(bytes(count * self._counts.itemsize))
        super()._extend(count)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        uses = self._history.hits_of(row) if self._history else 0
        self._counts[row] = max(uses, 1) << _TICK_BITS | self._tick

    @override
    def _rank(self, rows: Rows) -> None:
        counts = np.frombuffer(self._counts, np.uint64)
        uses = np.minimum((counts[rows] >> _TICK_BITS) + 1, _MOST_USES)
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        counts[rows] = uses << _TICK_BITS | ticks
        self._tick += len(rows)
