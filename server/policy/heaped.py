"""Policies whose leaves lie in a heap, by a rank that changes with every use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

from typing_extensions import override

from kvstore.server.policy.leaves import LeafFirstEviction
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.row_heap import RowHeap, RowOrder


class HeapedEviction(LeafFirstEviction):
    """Evict the leaf of the least rank; every event costs O(log n) of the leaves."""

    def __init__(self, ranks: RowOrder) -> None:
        """*ranks* has the rank of each row; a subclass changes it in ``_came`` and ``_rank``."""
        super().__init__()
        self._ranks = ranks
        self._leaves = RowHeap(ranks)
        self._tick = 0

    @abstractmethod
    def _rank(self, rows: Rows) -> None:
        """Rank anew chunks that were used, the last of the chain first; none is in the heap."""

    @override
    def _extend(self, count: int) -> None:
        self._leaves.extend(count)

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
        self._rank(rows)
        for row in leaves:
            self._leaves.push(row)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._leaves.sorted(), self._ranks.__getitem__, keep)
