"""Orders of rows: a heap by a column, and queues of leaves by class, in the order of use."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import NO_ROW


class RowOrder(Protocol):
    """What a heap orders rows by: a column, or what is made of several."""

    def __getitem__(self, row: int, /) -> float:
        """Return the rank of *row*."""
        ...


class RowHeap:
    """Rows with the smallest of ``order[row]`` first; any row is taken out in O(log n).

    ``order[row]`` may not change while the row is in the heap. Four bytes a row that is in it,
    and four for every row there is: heaps that never share a row may share *places*.
    """

    def __init__(self, order: RowOrder, places: array[int] | None = None) -> None:
        self._order = order
        self._rows = array("I")
        self.places = array("I", [0]) if places is None else places
        """One more than where each row lies; 0 for rows that are not in the heap."""

    def extend(self, count: int) -> None:
        """Let there be *count* rows more."""
        self.places.frombytes(bytes(count * self.places.itemsize))

    def __contains__(self, row: int) -> bool:
        return self.places[row] != 0

    def push(self, row: int) -> None:
        """Put in a row that is not there."""
        self._rows.append(row)
        self._rise(len(self._rows) - 1, row)

    def remove(self, row: int) -> None:
        """Take out a row that is there."""
        at = self.places[row] - 1
        self.places[row] = 0
        last = self._rows.pop()
        if last != row:
            self._sink(at, last)

    def _rise(self, at: int, row: int) -> None:
        rows, places, order = self._rows, self.places, self._order
        rank = order[row]
        while at:
            above = (at - 1) >> 1
            other = rows[above]
            if order[other] <= rank:
                break
            rows[at] = other
            places[other] = at + 1
            at = above
        rows[at] = row
        places[row] = at + 1

    def _sink(self, at: int, row: int) -> None:
        rows, places, order = self._rows, self.places, self._order
        rank, end = order[row], len(rows)
        while (below := 2 * at + 1) < end:
            other = rows[below]
            if below + 1 < end and order[rows[below + 1]] < order[other]:
                below += 1
                other = rows[below]
            if order[other] >= rank:
                break
            rows[at] = other
            places[other] = at + 1
            at = below
        self._rise(at, row)

    def first(self) -> int:
        """Return the first row; there must be one."""
        return self._rows[0]

    def sorted(self) -> Iterator[int]:
        """Yield the rows in order, changing nothing: O(log n) for each that is taken."""
        order, rows = self._order, self._rows
        ahead = [(order[rows[0]], 0)] if rows else []
        while ahead:
            _, at = heapq.heappop(ahead)
            yield rows[at]
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(rows):
                    heapq.heappush(ahead, (order[rows[below]], below))

    def __len__(self) -> int:
        return len(self._rows)


_STEPS = 8
"""How far to look for the place of a row from each end of a queue."""


class ClassQueues:
    """Rows in queues by class, those with the smallest of ``order[row]`` first.

    A row that was used goes to the end of its queue: O(1), as each queue is a list that is
    linked both ways. One that comes in between (a parent exposed by an eviction keeps its own
    last use) belongs somewhere inside: when that is not near one of the ends, a heap of the
    queue keeps it, O(log n) of such late ones. ``order[row]`` may not change while the row is
    queued. 14 bytes a row, in columns, and 28 a class.
    """

    def __init__(self, order: array[int], limit: int = 1) -> None:
        """Queues for the classes below *limit*."""
        self._order = order
        self.newer = array("I", [NO_ROW])
        """The row behind each that is not late; NO_ROW behind the last."""
        self.older = array("I", [NO_ROW])
        """The row before each that is not late; NO_ROW before the first."""
        self._classes = array("H", [0])
        self._places = array("I", [0])
        self.columns = (self.newer, self.older, self._classes, self._places)
        """By row: the owner makes them longer."""
        self._oldest = array("I", bytes(4 * limit))
        self.newest = array("I", bytes(4 * limit))
        """The last row of each queue but for late ones; NO_ROW where there is none."""
        # Views, as these two never grow.
        self._oldest_seen = np.frombuffer(self._oldest, np.uint32)
        self._newest_seen = np.frombuffer(self.newest, np.uint32)
        self._late: dict[int, RowHeap] = {}
        """Heaps with at least one row."""
        self.changed: set[int] = set()
        """Ends that may be another row, twice the class and one more for the last; its reader
        clears it."""

    def append(self, row: int, kind: int) -> None:
        """Put a row that is in no queue at the end of one: none in it has a greater order."""
        self._classes[row] = kind
        newest = self.newest[kind]
        self.older[row], self.newer[row] = newest, NO_ROW
        if newest:
            self.newer[newest] = row
        else:
            self._oldest[kind] = row
            self.changed.add(2 * kind)
        self.newest[kind] = row
        self.changed.add(2 * kind + 1)

    def place(self, row: int, kind: int) -> None:
        """Put a row that is in no queue where it belongs in one."""
        order = self._order
        rank = order[row]
        behind, before = self._oldest[kind], self.newest[kind]
        if not before or rank > order[before]:
            self.append(row, kind)
            return
        self._classes[row] = kind
        for _ in range(_STEPS):
            if rank < order[behind]:
                self._link(row, self.older[behind], behind)
                return
            behind = self.newer[behind]
            before = self.older[before]
            if rank > order[before]:
                self._link(row, before, self.newer[before])
                return
        late = self._late.get(kind)
        if late is None:
            late = self._late[kind] = RowHeap(self._order, self._places)
        late.push(row)
        self.changed.add(2 * kind)

    def _link(self, row: int, older: int, newer: int) -> None:
        """Link a row in between; its class is set, and *newer* is no NO_ROW."""
        self.older[row], self.newer[row] = older, newer
        self.older[newer] = row
        if older:
            self.newer[older] = row
        else:
            self._oldest[self._classes[row]] = row
            self.changed.add(2 * self._classes[row])

    def remove(self, row: int) -> None:
        """Take out a queued row."""
        kind = self._classes[row]
        if self._places[row]:
            late = self._late[kind]
            late.remove(row)
            self.changed.add(2 * kind)
            if not late:
                del self._late[kind]
            return
        older, newer = self.older[row], self.newer[row]
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
        row = self._oldest[kind]
        late = self._late.get(kind)
        if late is not None:
            first = late.first()
            if not row or self._order[first] < self._order[row]:
                return first
        return row

    def ends(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Return the classes below *count* with rows, their first, and their last but late ones."""
        first = self._oldest_seen[:count].astype(np.intp)
        last = self._newest_seen[:count]
        order = self._order
        for kind, late in self._late.items():
            row = late.first()
            if not first[kind] or order[row] < order[first[kind]]:
                first[kind] = row
        kinds = first.nonzero()[0]
        return kinds, first[kinds], last[kinds].astype(np.intp)

    def walk(self, kind: int = 0) -> Iterator[int]:
        """Yield the rows of a queue in order. Nothing may change before this is dropped."""
        return self.walk_late(kind) or self._linked(kind)

    def walk_late(self, kind: int) -> Iterator[int] | None:
        """Do as ``walk`` where the queue has late rows; None where following ``newer`` will do."""
        late = self._late.get(kind)
        if late is None:
            return None
        return heapq.merge(self._linked(kind), late.sorted(), key=self._order.__getitem__)

    def _linked(self, kind: int) -> Iterator[int]:
        newer = self.newer
        row = self._oldest[kind]
        while row:
            yield row
            row = newer[row]


class QueueCursor:
    """What is left of a class: its queue from both ends on, and what was exposed since."""

    __slots__ = ("_queues", "_walk", "exposed", "first", "last")

    def __init__(self, queues: ClassQueues, kind: int) -> None:
        self._queues = queues
        self._walk = queues.walk_late(kind)
        self.first = queues.head(kind) if self._walk is None else next(self._walk, NO_ROW)
        self.last = queues.newest[kind]
        self.exposed: list[tuple[int, int]] = []
        """In the order of use."""

    def skip(self, taken: set[int]) -> None:
        """Let the first be one that was not taken."""
        while self.first in taken:
            walk = self._walk
            self.first = self._queues.newer[self.first] if walk is None else next(walk, NO_ROW)

    def skip_back(self, taken: set[int]) -> None:
        """Let the last be one that was not taken."""
        while self.last in taken:
            self.last = self._queues.older[self.last]
