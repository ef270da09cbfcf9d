"""Queues of leaves by class, in the order of use."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.policy import Columns

_STEPS = 8
"""How far to look for the place of a row from each end of a queue."""


class ClassQueues:
    """Rows in queues by class, those with the smallest of ``order[row]`` first.

    A row that was used goes to the end of its queue: O(1), as each queue is a list that is
    linked both ways. One that comes in between (a parent exposed by an eviction keeps its own
    last use) belongs somewhere inside: when that is not near one of the ends, a sorted list of
    such *late* ones keeps it. ``order[row]`` may not change while the row is queued, and no two
    queued rows have the same. 10 bytes a row, in columns, 8 a class and some 120 a late row.
    """

    def __init__(self, order: array[int], columns: Columns, limit: int = 1) -> None:
        """Queues for the classes below *limit*."""
        self._order = order
        self.newer: array[int] = columns.add("I")
        """The row behind each; NO_ROW behind the last, and a late one itself."""
        self.older: array[int] = columns.add("I")
        """The row before each; NO_ROW before the first."""
        self._classes: array[int] = columns.add("H")
        self._oldest = array("I", bytes(4 * limit))
        self.newest = array("I", bytes(4 * limit))
        """The last row of each queue but for late ones; NO_ROW where there is none."""
        self._late: dict[int, list[tuple[int, int]]] = {}
        """By class: order and row."""
        self.changed: set[int] = set()
        """Ends that may be another row, twice the class and one more for the last; its reader
        clears it."""

    def append(self, row: int, kind: int) -> None:
        """Put a row that is in no queue at the end of one: none in it has a greater order."""
        self._link(row, kind, self.newest[kind], NO_ROW)

    def place(self, row: int, kind: int) -> None:
        """Put a row that is in no queue where it belongs in one."""
        order = self._order
        rank = order[row]
        behind, before = self._oldest[kind], self.newest[kind]
        if not before or rank > order[before]:
            self.append(row, kind)
            return
        for _ in range(_STEPS):
            if rank < order[behind]:
                self._link(row, kind, self.older[behind], behind)
                return
            behind = self.newer[behind]
            before = self.older[before]
            if rank > order[before]:
                self._link(row, kind, before, self.newer[before])
                return
        self._classes[row] = kind
        self.newer[row] = row
        insort(self._late.setdefault(kind, []), (rank, row))
        self.changed.add(2 * kind)

    def _link(self, row: int, kind: int, older: int, newer: int) -> None:
        self._classes[row] = kind
        self.older[row], self.newer[row] = older, newer
        if older:
            self.newer[older] = row
        else:
            self._oldest[kind] = row
            self.changed.add(2 * kind)
        if newer:
            self.older[newer] = row
        else:
            self.newest[kind] = row
            self.changed.add(2 * kind + 1)

    def remove(self, row: int) -> None:
        """Take out a queued row."""
        kind, older, newer = self._classes[row], self.older[row], self.newer[row]
        if newer == row:
            late = self._late[kind]
            del late[bisect_left(late, (self._order[row], row))]
            self.changed.add(2 * kind)
            if not late:
                del self._late[kind]
            return
        if older:
            self.newer[older] = newer
        else:
            self._oldest[kind] = newer
            self.changed.add(2 * kind)
        if newer:
            self.older[newer] = older
        else:
            self.newest[kind] = older
            self.changed.add(2 * kind + 1)

    def head(self, kind: int) -> int:
        """Return the first row of a queue; NO_ROW of an empty one."""
        row, late = self._oldest[kind], self._late.get(kind)
        if late and (not row or late[0][0] < self._order[row]):
            return late[0][1]
        return row

    def kinds(self) -> list[int]:
        """Return the classes with rows."""
        return [kind for kind, row in enumerate(self._oldest) if row or kind in self._late]

    def walk(self, kind: int = 0) -> Iterator[int]:
        """Yield the rows of a queue in order. Nothing may change before this is dropped."""
        linked, late = _follow(self._oldest[kind], self.newer), self._late.get(kind)
        if not late:
            return linked
        return heapq.merge(linked, (row for _, row in late), key=self._order.__getitem__)

    def walk_back(self, kind: int, *, with_late: bool = True) -> Iterator[int]:
        """Yield them the other way; without *with_late* those that are not late."""
        linked, late = _follow(self.newest[kind], self.older), self._late.get(kind)
        if not (late and with_late):
            return linked
        rows = (row for _, row in reversed(late))
        return heapq.merge(linked, rows, key=lambda row: -self._order[row])


def _follow(row: int, links: array[int]) -> Iterator[int]:
    while row:
        yield row
        row = links[row]
