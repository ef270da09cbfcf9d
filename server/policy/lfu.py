"""Least frequently used, leaves of the prefix tree first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import override

from kvstore.server.policy.history import History
from kvstore.server.policy.leaves import LeafFirstEviction
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.row_heap import RowHeap

_TICK_BITS = 48
_ONE_USE = 1 << _TICK_BITS
_MOST_USES = (1 << (64 - _TICK_BITS)) - 1


class LfuEviction(LeafFirstEviction):
    """Evict the leaf that was used least often, of several the one used longest ago.

    In-cache LFU (as in Lee et al., "LRFU", IEEE Trans. Computers 50(12), 2001, section 2, at the
    end of its spectrum): the count of a chunk begins at 1 when it comes. With *remembers* it goes
    on where it was when the chunk was evicted ("perfect LFU", Breslau et al., INFOCOM 1999).
    Ours departs in that only leaves are candidates. There is no ageing: what was used often
    once stays, which is why this policy is here for comparison.

    Every event costs O(log n) of the leaves. 25 bytes a row.
    """

    def __init__(self, history: History, *, remembers: bool = False) -> None:
        super().__init__()
        self._history = history if remembers else None
        self._ranks = array("Q", [0])
        """How often a chunk was used, then when, in one number."""
        self._leaves = RowHeap(self._ranks)
        self._tick = 0

    @override
    def _extend(self, count: int) -> None:
        self._ranks.frombytes(bytes(count * self._ranks.itemsize))
        self._leaves.extend(count)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        uses = self._history.hits_of(row) if self._history else 0
        self._ranks[row] = max(uses, 1) << _TICK_BITS | self._tick

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        self._leaves.push(row)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._leaves.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        leaves = [row for row in dict.fromkeys(rows.tolist()) if row in self._leaves]
        for row in leaves:
            self._leaves.remove(row)
        ranks = np.frombuffer(self._ranks, np.uint64)
        uses = np.minimum((ranks[rows] >> _TICK_BITS) + 1, _MOST_USES)
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        ranks[rows] = uses << _TICK_BITS | ticks
        self._tick += len(rows)
        for row in leaves:
            self._leaves.push(row)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._leaves.sorted(), self._ranks.__getitem__, keep)
