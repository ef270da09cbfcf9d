"""A heap of rows, ordered by a column."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import Protocol


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
        self._places = array("I", [0]) if places is None else places
        """One more than where each row lies; 0 for rows that are not in the heap."""

    def extend(self, count: int) -> None:
        """Let there be *count* rows more."""
        self._places.frombytes(bytes(count * self._places.itemsize))

    def __contains__(self, row: int) -> bool:
        return self._places[row] != 0

    def push(self, row: int) -> None:
        """Put in a row that is not there."""
        self._rows.append(row)
        self._rise(len(self._rows) - 1, row)

    def remove(self, row: int) -> None:
        """Take out a row that is there."""
        at = self._places[row] - 1
        self._places[row] = 0
        last = self._rows.pop()
        if last != row:
            self._sink(at, last)

    def _rise(self, at: int, row: int) -> None:
        rows, places, order = self._rows, self._places, self._order
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
        rows, places, order = self._rows, self._places, self._order
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
