"""Least recently used, leaves of the prefix tree first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import override

from kvstore.server.eviction.leaf_tree import LeafFirstEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues


class LruEviction(LeafFirstEviction):
    """Evict the leaf that was used longest ago.

    All leaves are in one queue, so that every event costs O(1), or O(log n) of the leaves that
    came into it late. 31 bytes a row, in columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self._used: array[int] = self._column("Q")
        """When each chunk was last used, as the number of the use."""
        self._leaves = ClassQueues(self._used)
        self._columns += self._leaves.columns
        self._tick = 0

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._used[row] = self._tick

    @override
    def _came_chain(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        self._stamp(rows)

    def _stamp(self, rows: Rows) -> None:
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        np.frombuffer(self._used, np.uint64)[rows] = ticks
        self._tick += len(rows)

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        if is_new:
            self._leaves.append(row, 0)
        else:
            self._leaves.place(row, 0)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._leaves.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        leaves = rows[np.frombuffer(self._children, np.uint32)[rows] == 0].tolist()
        for row in leaves:
            self._leaves.remove(row)
            self._leaves.append(row, 0)
        self._stamp(rows)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._leaves.walk(), self._used.__getitem__, keep)
