"""Least recently used, leaves of the prefix tree first."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.row_heap import RowHeap


class LruEviction(EvictionPolicy):
    """Evict the leaf that was used longest ago.

    A chunk is of no use without those before it, so only leaves (chunks none of whose
    continuations are on the tier) are candidates: this is the leaf-LRU of SGLang's
    RadixAttention (Zheng et al., arXiv 2312.07104, section 3.1), over chunks instead of tokens.

    Leaves are linked in the order of their use, so a use moves one to the end of the list. A
    chunk that becomes a leaf by what went after it belongs somewhere inside that list: when that
    is not at one of its ends, a heap keeps it until it is used. So every event costs O(1), or
    O(log n) of such late leaves. 28 bytes a row, in columns.
    """

    def __init__(self) -> None:
        self._used = array("Q", [0])
        """When each chunk was used; 0 for those not here."""
        self._parents = array("I", [NO_ROW])
        self._children = array("I", [0])
        """Chunks here that continue the row's, be it here or not."""
        # The list of leaves: from row 0 to the oldest, and so on, to the newest and row 0.
        self._newer = array("I", [0])
        self._older = array("I", [0])
        self._late = RowHeap(self._used)
        self._tick = 0
        self._count = 0

    def _reach(self, row: int) -> None:
        if row < len(self._used):
            return
        count = row + 1 - len(self._used) + spare_rows(row)
        for column in (self._used, self._parents, self._children, self._newer, self._older):
            column.frombytes(bytes(count * column.itemsize))
        self._late.extend(count)

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self._reach(max(row, parent))
        if self._used[row]:
            self.touch(np.array([row]), now_s)
            return
        if self._closes_circle(row, parent):
            parent = NO_ROW
        self._count += 1
        self._tick += 1
        self._used[row] = self._tick
        if not self._children[row]:
            self._link_after(self._older[0], row)
        self._parents[row] = parent
        if parent:
            if self._is_leaf(parent):
                self._unlink(parent)
            self._children[parent] += 1

    def _is_leaf(self, row: int) -> bool:
        return self._used[row] != 0 and not self._children[row]

    def _closes_circle(self, row: int, parent: int) -> bool:
        """Whether *row* is among its own ancestors, as a client that lies about parents can
        make it. A circle has no leaf and would never be evicted.
        """
        if parent != row and not self._children[row]:
            return False  # nothing continues it, so nothing leads back to it
        above = parent
        while above and above != row:
            above = self._parents[above]
        return above == row and row != NO_ROW

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[rows < len(self._used)][::-1]
        used = np.frombuffer(self._used, np.uint64)
        rows = rows[used[rows] > 0]
        leaves = rows[np.frombuffer(self._children, np.uint32)[rows] == 0]
        for row in leaves.tolist():
            self._unlink(row)
            self._link_after(self._older[0], row)
        used[rows] = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        self._tick += len(rows)

    @override
    def remove(self, row: int) -> None:
        if row >= len(self._used) or not self._used[row]:
            return
        if not self._children[row]:
            self._unlink(row)
        self._used[row] = 0
        self._count -= 1
        parent, self._parents[row] = self._parents[row], NO_ROW
        if parent:
            self._children[parent] -= 1
            if self._is_leaf(parent):
                self._link_late(parent)

    def _link_after(self, older: int, row: int) -> None:
        newer = self._newer[older]
        self._newer[older] = self._older[newer] = row
        self._older[row], self._newer[row] = older, newer

    def _unlink(self, row: int) -> None:
        if row in self._late:
            self._late.remove(row)
            return
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older

    def _link_late(self, row: int) -> None:
        used = self._used[row]
        oldest, newest = self._newer[0], self._older[0]
        if not oldest or used < self._used[oldest]:
            self._link_after(NO_ROW, row)
        elif used > self._used[newest]:
            self._link_after(newest, row)
        else:
            self._late.push(row)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        bared: list[tuple[int, int]] = []
        orphaned: dict[int, int] = {}
        used = self._used
        leaves = self._linked()
        if self._late:
            leaves = heapq.merge(leaves, self._late.sorted(), key=used.__getitem__)
        leaf = next(leaves, NO_ROW)
        while leaf or bared:
            if bared and (not leaf or bared[0][0] < used[leaf]):
                row = heapq.heappop(bared)[1]
            else:
                row, leaf = leaf, next(leaves, NO_ROW)
            if keep(row):
                continue
            yield row
            parent = self._parents[row]
            if not parent or not used[parent]:
                continue
            # The parent is a candidate once every child of it was named.
            orphaned[parent] = orphaned.get(parent, 0) + 1
            if orphaned[parent] == self._children[parent]:
                heapq.heappush(bared, (used[parent], parent))

    def _linked(self) -> Iterator[int]:
        row = self._newer[0]
        while row:
            yield row
            row = self._newer[row]

    @override
    def __len__(self) -> int:
        return self._count
