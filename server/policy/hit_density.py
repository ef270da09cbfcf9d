"""Evict what promises the fewest hits per second and byte, as learnt from what is remembered."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.chunk_classes import MAX_CLASSES
from kvstore.server.policy.class_queues import ClassQueues
from kvstore.server.policy.density import EDGES_S, bins_of
from kvstore.server.policy.history import History, Report
from kvstore.server.policy.leaves import LeafFirstEviction
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.regret import RegretGuard

CAP_S = 500e-6
"""How long one decision may take, before those after it are made as LRU makes them."""

_RANKED_AT_ONCE = 16
_EDGES_S: list[float] = EDGES_S.tolist()
_Entry = tuple[float, int, int, bool]
"""What an end of a queue promises, when it was used, its class, and whether it is the last."""


class HitDensityEviction(LeafFirstEviction):
    """Evict the leaf whose hits per second of residency, by class and age, are fewest a byte.

    The table of the History says what a chunk of a class promises at an age; what it promises
    here is that times its worth by byte: tokens, or prefill FLOPs with *weighs_flops*. Leaves of
    a class are queued by their last use, and the first of each queue is a candidate: O(classes)
    for the first victim, O(log) of them for each that follows. Where two promise the same, the
    one used longest ago goes, so what knows nothing yet is leaf-LRU.

    Ours, after LHD (Beckmann et al., NSDI 2018), with the tree, the queues and what is
    remembered of evicted chunks added. A decision that takes longer than 500 us on *clock* (none
    by default) ends in LRU order, and counts in ``fallbacks``. 35 bytes a row.
    """

    def __init__(
        self,
        history: History,
        *,
        weighs_flops: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self._history = history
        self._weighs_flops = weighs_flops
        self._clock = clock
        self._used = array("Q", [0])
        """When each chunk was last used, as the number of the use."""
        self._worth = array("f", [0.0])
        """By byte, up to a factor that is the same for all."""
        self._queues = ClassQueues(self._used, MAX_CLASSES)
        self._tick = 0
        self._flops = self._flops_bytes = 0.0
        self.fallbacks = 0
        self._guard = RegretGuard()
        self._is_full = False
        history.followers.append(self._requeue)
        history.watchers.append(self._compare)

    @override
    def _extend(self, count: int) -> None:
        for column in (self._used, self._worth):
            column.frombytes(bytes(count * column.itemsize))
        self._queues.extend(count)
        self._history.reach(len(self._used) - 1)

    # --- events

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._used[row] = self._tick
        self._worth[row] = self._worth_of(row, max(size_bytes, 1))

    def _worth_of(self, row: int, size_bytes: int) -> float:
        flops = self._history.flops_of(row) if self._weighs_flops else 0.0
        if flops:
            self._flops += flops
            self._flops_bytes += size_bytes
            return flops / size_bytes
        parent = self._parents[row]
        if self._history.is_partial(row) and self._here[parent]:
            return self._worth[parent]  # fewer tokens, and fewer bytes
        return self._flops / self._flops_bytes if self._flops else 1.0 / size_bytes

    @override
    def _came_chain(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        if self._weighs_flops:
            super()._came_chain(rows, size_bytes, now_s)
            return
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        np.frombuffer(self._used, np.uint64)[rows] = ticks
        self._tick += len(rows)
        size_bytes = max(size_bytes, 1)
        np.frombuffer(self._worth, np.float32)[rows] = 1.0 / size_bytes
        last = int(rows[-1])
        self._worth[last] = self._worth_of(last, size_bytes)

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        kind = self._history.classes[row]
        if is_new:
            self._queues.append(row, kind)
        else:
            self._queues.place(row, kind)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._queues.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        self._guard.hits += len(rows)
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        queues, kinds = self._queues, self._history.classes
        for row in rows[np.frombuffer(self._children, np.uint32)[rows] == 0].tolist():
            queues.remove(row)
            queues.append(row, kinds[row])
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        np.frombuffer(self._used, np.uint64)[rows] = ticks
        self._tick += len(rows)

    def _requeue(self, rows: Rows) -> None:
        """The classes of *rows* changed."""
        for row in rows[rows < len(self._here)].tolist():
            if self._is_leaf(row):
                self._queues.remove(row)
                self._queues.place(row, self._history.classes[row])

    def _compare(self, report: Report) -> None:
        """Hold what was hit since the last refresh against what LRU would have hit."""
        used = np.frombuffer(self._used, np.uint64)
        mine = used.take(report.rows, mode="clip") > 0
        self._guard.judge(report, mine)
        if self._is_full:
            count = len(self) / self._guard.share
            self._guard.lru_age_s = self._history.table.recency_s(report.time_s, count)

    def decide_as(self, other: HitDensityEviction) -> None:
        """Do as LRU does when *other* does: one like this, that sees what its own choices hit."""
        self._guard.prefers_lru = other._guard.prefers_lru

    # --- questions

    def promise(self, row: int, time_s: float) -> float:
        """Return what a chunk here promises at a time of the History's clock."""
        history = self._history
        age = bisect_left(_EDGES_S, time_s - history.last_s[row])
        return history.table.values.item(history.classes[row], age) * self._worth[row]

    def ends(self, time_s: float) -> _Ends:
        """Return the first and last of each queue, with what they promise."""
        history = self._history
        kinds, first, last = self._queues.ends(history.kinds.count)
        rows = np.concatenate((first, last))
        bins = bins_of(time_s - np.frombuffer(history.last_s)[rows])
        kinds = np.concatenate((kinds, kinds))
        values = history.table.values[kinds, bins]
        values *= np.frombuffer(self._worth, np.float32)[rows]
        return _Ends(values, np.frombuffer(self._used, np.uint64)[rows], kinds)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._is_full = True
        choice = _Choice(self, self._history.time_s(now_s))
        if self._guard.prefers_lru:
            choice.fall_back()
        clock = self._clock
        started_s = clock() if clock else 0.0
        row = choice.take()
        while row:
            if clock and not choice.is_lru and clock() - started_s > CAP_S:
                self.fallbacks += 1
                choice.fall_back()
            if keep(row):
                row = choice.take()
                continue
            yield row
            if clock:
                started_s = clock()
            row = choice.parent_like(row) or choice.take_after(row)


class _Ends:
    """The ends of all queues: what they promise, when they were used, and their class.

    The first of each queue, then the last of each, which may be the same.
    """

    def __init__(
        self, values: NDArray[np.float64], used: NDArray[np.uint64], kinds: NDArray[np.intp]
    ) -> None:
        self._values, self._used, self._kinds = values, used, kinds
        self._left: NDArray[np.intp] | None = np.arange(len(values))

    def ranked(self) -> list[_Entry]:
        """Return the few that go before all others, then the others, then nothing.

        As entries, the one to go first at the end.
        """
        places = self._left
        if places is None:
            return []
        self._left = None
        values = self._values
        if len(places) == len(values) > 2 * _RANKED_AT_ONCE:
            is_first = values <= np.partition(values, _RANKED_AT_ONCE)[_RANKED_AT_ONCE]
            places, self._left = np.flatnonzero(is_first), np.flatnonzero(~is_first)
        values, used, kinds = values[places], self._used[places], self._kinds[places]
        is_last = places >= len(self._values) // 2
        entries = zip(values.tolist(), used.tolist(), kinds.tolist(), is_last.tolist(), strict=True)
        return sorted(entries, reverse=True)


class _Queue:
    """What is left of a class: its queue from both ends on, and who was bared since."""

    __slots__ = ("back", "bared", "first", "last", "walk")

    def __init__(self, walk: Iterator[int], back: Iterator[int]) -> None:
        self.walk, self.back = walk, back
        self.first, self.last = next(walk, NO_ROW), next(back, NO_ROW)
        self.bared: list[tuple[int, int]] = []


class _Choice:
    """Whom to evict, one after the other, as far as it is asked for. Changes nothing.

    The ends of all queues are ranked at once; what lies behind one that was taken is ranked when
    the next is asked for, as most often it is the taken one's parent that goes next.
    """

    def __init__(self, policy: HitDensityEviction, time_s: float) -> None:
        self._policy = policy
        self._time_s = time_s
        self._used, self._worth, self._here = policy._used, policy._worth, policy._here
        self._parents, self._children = policy._parents, policy._children
        self._classes, self._last_s = policy._history.classes, policy._history.last_s
        self._left: dict[int, int] = {}
        """Children not yet named, of parents that have lost some."""
        self._opened: dict[int, _Queue] = {}
        self._taken: set[int] = set()
        """Rows of the queues that were taken."""
        self._ends = policy.ends(time_s)
        self._ranked = self._ends.ranked()
        self._ahead: list[_Entry] = []
        """Those that have come to an end since; a heap."""
        self._due: tuple[int, bool] | None = None
        """The class, and which end of it, that is not ranked."""
        self.is_lru = False

    def parent_like(self, row: int) -> int:
        """Return the parent of a row just named where it goes next, as it promises the same.

        So it does if it has no other child, was used right before or after the row, and is of
        its class and worth. NO_ROW where that is to be found out.
        """
        parent = self._parents[row]
        if self._children[parent] != 1 or not self._here[parent]:
            return NO_ROW
        if (
            -2 < self._used[parent] - self._used[row] < 2
            and self._classes[parent] == self._classes[row]
            and self._worth[parent] == self._worth[row]
            and self._last_s[parent] == self._last_s[row]
        ):
            return parent
        return NO_ROW

    def take(self) -> int:
        """Return whom to evict next, who is not named again; NO_ROW where nobody is left."""
        if self._due is not None:
            self._rank(*self._due)
            self._due = None
        while entry := self._next():
            _, used, kind, is_last = entry
            queue = self._open(kind)
            row = queue.last if is_last else self._first(queue)
            if not row or row in self._taken or self._used[row] != used:
                continue  # another has come to this end, and is ranked
            if queue.bared and queue.bared[0][1] == row:
                heapq.heappop(queue.bared)
            else:
                self._taken.add(row)
            self._due = kind, is_last
            return row
        return NO_ROW

    def _next(self) -> _Entry | None:
        if not self._ranked:
            self._ranked = self._ends.ranked()
        if self._ahead and (not self._ranked or self._ahead[0] < self._ranked[-1]):
            return heapq.heappop(self._ahead)
        return self._ranked.pop() if self._ranked else None

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
        kind = self._classes[parent]
        queue = self._open(kind)
        heapq.heappush(queue.bared, (self._used[parent], parent))
        if queue.bared[0][1] == parent:
            self._rank(kind, False)

    def fall_back(self) -> None:
        """Name the rest by their last use only."""
        self.is_lru = True
        entries = [*self._ranked, *self._ahead, *self._ends.ranked()]
        self._ranked, self._ahead = [], []
        for kind in {entry[2] for entry in entries}:
            self._rank(kind, False)

    def _open(self, kind: int) -> _Queue:
        queue = self._opened.get(kind)
        if queue is None:
            queues = self._policy._queues
            queue = self._opened[kind] = _Queue(queues.walk(kind), queues.walk_back(kind))
        return queue

    def _first(self, queue: _Queue) -> int:
        while queue.first in self._taken:
            queue.first = next(queue.walk, NO_ROW)
        first, bared = queue.first, queue.bared
        if bared and (not first or bared[0][0] < self._used[first]):
            return bared[0][1]
        return first

    def _rank(self, kind: int, is_last: bool) -> None:
        queue = self._open(kind)
        if is_last:
            while queue.last in self._taken:
                queue.last = next(queue.back, NO_ROW)
        row = queue.last if is_last else self._first(queue)
        if row:
            promise = 0.0 if self.is_lru else self._policy.promise(row, self._time_s)
            heapq.heappush(self._ahead, (promise, self._used[row], kind, is_last))
