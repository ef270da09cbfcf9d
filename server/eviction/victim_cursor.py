"""Whom hit density would evict, one after the other, while nothing is changed."""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING

import numpy as np

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.chunk_classes import MAX_CLASSES
from kvstore.server.eviction.class_ranking import Rank
from kvstore.server.eviction.queues import ClassQueues


class RestOfQueue:
    """What is left of a class: its queue from both ends on, and who was bared since."""

    __slots__ = ("_queues", "_walk", "bared", "first", "last")

    def __init__(self, queues: ClassQueues, kind: int) -> None:
        self._queues = queues
        self._walk = queues.walk(kind) if queues.has_late(kind) else None
        self.first = queues.head(kind) if self._walk is None else next(self._walk, NO_ROW)
        self.last = queues.tail(kind)
        self.bared: list[tuple[int, int]] = []
        """In the order of use."""

    def skip(self, taken: set[int]) -> None:
        """Let the first be one that was not taken."""
        while self.first in taken:
            walk = self._walk
            self.first = self._queues.after(self.first) if walk is None else next(walk, NO_ROW)

    def skip_back(self, taken: set[int]) -> None:
        """Let the last be one that was not taken."""
        while self.last in taken:
            self.last = self._queues.before(self.last)


if TYPE_CHECKING:  # its file imports this one
    from kvstore.server.eviction.hit_density import HitDensityEviction


class VictimChoice:
    """Whom to evict, one after the other, as far as it is asked for. Changes nothing.

    The ends of all queues are ranked already; what lies behind one that was taken is ranked when
    the next is asked for, as most often it is the taken one's parent that goes next.
    """

    def __init__(self, policy: HitDensityEviction, time_s: float, *, is_lru: bool) -> None:
        self._policy = policy
        self._time_s = time_s
        self._used, self._here = policy._used, policy._here
        self._parents, self._children = policy._parents, policy._children
        self._classes = policy._history.classes
        self._left: dict[int, int] = {}
        """Children not yet named, of parents that have lost some."""
        self._opened: dict[int, RestOfQueue] = {}
        self._taken: set[int] = set()
        """Rows of the queues that were taken."""
        self._ranks = policy._ranks
        self._ahead: list[Rank] = []
        """Those that have come to an end since; a heap."""
        self._due: tuple[int, ...] = ()
        """Ends that are not ranked."""
        self.is_lru = False
        if is_lru:
            self.fall_back()
        else:
            self._ranks.bring_up(time_s)

    def take(self) -> int:
        """Return whom to evict next, who is not named again; NO_ROW where nobody is left."""
        for end in self._due:
            self._rank(end)
        self._due = ()
        used, taken = self._used, self._taken
        while rank := self._next():
            _, when, end = rank
            queue = self._opened.get(end >> 1) or self._open(end >> 1)
            row = self._last(queue) if end & 1 else self._first(queue)
            if not row or row in taken or used[row] != when:
                continue  # another has come to this end, and is ranked
            if queue.bared and queue.bared[-(end & 1)][1] == row:
                del queue.bared[-(end & 1)]
                self._due = (end, end ^ 1)  # it may have been at both
            else:
                taken.add(row)
                self._due = (end,)
            return row
        return NO_ROW

    def _next(self) -> Rank | None:
        least = None if self.is_lru else self._ranks.least()
        if self._ahead and (least is None or self._ahead[0] < least):
            return heapq.heappop(self._ahead)
        return None if least is None else self._ranks.take()

    def take_after(self, row: int) -> int:
        """Return whom to evict when *row* is gone, whose parent may be a candidate then."""
        self._bare(row)
        return self.take()

    def _bare(self, row: int) -> None:
        parent = self._parents[row]
        if not parent or not self._here[parent]:
            return
        left = self._left.pop(parent, self._children[parent]) - 1
        if left:
            self._left[parent] = left
            return
        self._bring_in(parent)

    def _bring_in(self, row: int) -> None:
        kind = self._classes[row]
        queue = self._open(kind)
        insort(queue.bared, (self._used[row], row))
        if self._first(queue) == row:
            self._rank(2 * kind)
        if self._last(queue) == row:
            self._rank(2 * kind + 1)

    def fall_back(self) -> None:
        """Name the rest by their last use only."""
        self.is_lru = True
        kinds, rows, _ = self._policy._queues.ends(MAX_CLASSES)
        used = np.frombuffer(self._used, np.uint64)[rows].tolist()
        self._ahead = [
            (0.0, when, 2 * kind)
            for kind, when in zip(kinds.tolist(), used, strict=True)
            if kind not in self._opened
        ]
        heapq.heapify(self._ahead)
        for kind in self._opened:
            self._rank(2 * kind)

    def _open(self, kind: int) -> RestOfQueue:
        queue = self._opened.get(kind)
        if queue is None:
            queue = self._opened[kind] = RestOfQueue(self._policy._queues, kind)
        return queue

    def _first(self, queue: RestOfQueue) -> int:
        queue.skip(self._taken)
        first, bared = queue.first, queue.bared
        if bared and (not first or bared[0][0] < self._used[first]):
            return bared[0][1]
        return first

    def _last(self, queue: RestOfQueue) -> int:
        queue.skip_back(self._taken)
        last, bared = queue.last, queue.bared
        if bared and (not last or bared[-1][0] > self._used[last]):
            return bared[-1][1]
        return last

    def _rank(self, end: int) -> None:
        if self.is_lru and end & 1:
            return
        queue = self._open(end >> 1)
        row = self._last(queue) if end & 1 else self._first(queue)
        if row:
            promise = 0.0 if self.is_lru else self._policy.promise(row, self._time_s)
            heapq.heappush(self._ahead, (promise, self._used[row], end))
