"""Evict what promises the fewest hits per second and byte, as learnt from what is remembered."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

import numpy as np
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.chunk_classes import MAX_CLASSES
from kvstore.server.policy.class_queues import ClassQueues
from kvstore.server.policy.density import EDGES_S
from kvstore.server.policy.history import History, Report
from kvstore.server.policy.leaves import FEW, LeafFirstEviction
from kvstore.server.policy.queue_ranks import QueueRanks, Rank
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.regret import RegretGuard
from kvstore.server.policy.rest_of_queue import RestOfQueue

CAP_S = 500e-6
"""How long one decision may take, before those after it are made as LRU makes them."""

_EDGES_S: list[float] = EDGES_S.tolist()


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
        self._ranks = QueueRanks(history, self._queues, self._used, self._worth)
        self._tick = 0
        self._flops = self._flops_bytes = 0.0
        self.fallbacks = 0
        self._guard = RegretGuard()
        self._is_full = False
        history.followers.append(self._requeue)
        history.watchers.append(self._compare)

    @property
    @override
    def ranks_by_flops(self) -> bool:
        return self._weighs_flops

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
        size_bytes = max(size_bytes, 1)
        worth = 1.0 / size_bytes
        if len(rows) < FEW:
            used, worths = self._used, self._worth
            for tick, row in enumerate(rows.tolist(), self._tick + 1):
                used[row] = tick
                worths[row] = worth
        else:
            self._stamp(rows)
            np.frombuffer(self._worth, np.float32)[rows] = worth
        self._tick += len(rows)
        last = int(rows[-1])
        self._worth[last] = self._worth_of(last, size_bytes)

    def _stamp(self, rows: Rows) -> None:
        ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        np.frombuffer(self._used, np.uint64)[rows] = ticks

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
        if len(rows) < FEW:
            names = rows.tolist()
            leaves = [row for row in names if not self._children[row]]
        else:
            leaves = rows[np.frombuffer(self._children, np.uint32)[rows] == 0].tolist()
        for row in leaves:
            queues.remove(row)
            queues.append(row, kinds[row])
        if len(rows) < FEW:
            for tick, row in enumerate(names, self._tick + 1):
                self._used[row] = tick
        else:
            self._stamp(rows)
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

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._is_full = True
        choice = _Choice(self, self._history.time_s(now_s), is_lru=self._guard.prefers_lru)
        return self._named(choice, keep)

    def victims_by_use(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """Yield whom LRU would evict, in order; else as ``victims``."""
        return self._named(_Choice(self, self._history.time_s(now_s), is_lru=True), keep)

    @override
    def first_victims(self, count: int, keep: Callable[[int], bool], now_s: float) -> list[int]:
        if self._clock is not None:
            return super().first_victims(count, keep, now_s)
        self._is_full = True
        choice = _Choice(self, self._history.time_s(now_s), is_lru=self._guard.prefers_lru)
        named: list[int] = []
        row = choice.take() if count > 0 else NO_ROW
        while row:
            if keep(row):
                row = choice.take()
                continue
            row = self._climb(row, named, count, keep)
            if len(named) == count:
                break
            row = choice.take() if keep(row) else choice.take_after(row)
        return named

    def _climb(self, row: int, named: list[int], count: int, keep: Callable[[int], bool]) -> int:
        """Name *row* and the parents that go right after it; return the last, or who is kept."""
        parents, children, here = self._parents, self._children, self._here
        used, worth = self._used, self._worth
        classes, last_s = self._history.classes, self._history.last_s
        kind, value, since_s = classes[row], worth[row], last_s[row]
        for _ in range(count - len(named)):
            named.append(row)
            parent = parents[row]
            if not (
                children[parent] == 1
                and classes[parent] == kind
                and -2 < used[parent] - used[row] < 2
                and last_s[parent] == since_s
                and here[parent] == 1
                and worth[parent] == value
            ):
                break
            row = parent
            if keep(row):
                break
        return row

    def _named(self, choice: _Choice, keep: Callable[[int], bool]) -> Iterator[int]:
        clock = self._clock
        started_s = clock() if clock else 0.0
        parents, children, here = self._parents, self._children, self._here
        used, worth = self._used, self._worth
        classes, last_s = self._history.classes, self._history.last_s
        row, is_same = choice.take(), False
        kind, value, since_s = 0, 0.0, 0.0
        while row:
            if clock and not choice.is_lru and clock() - started_s > CAP_S:
                self.fallbacks += 1
                choice.fall_back()
            if keep(row):
                row, is_same = choice.take(), False
                continue
            yield row
            if clock:
                started_s = clock()
            if not is_same:
                kind, value, since_s = classes[row], worth[row], last_s[row]
            # The parent goes next where it promises the same, as it does if it has no other
            # child, was used right before or after the row, and is of its class and worth.
            parent = parents[row]
            is_same = (
                children[parent] == 1
                and here[parent] == 1
                and -2 < used[parent] - used[row] < 2
                and classes[parent] == kind
                and worth[parent] == value
                and last_s[parent] == since_s
            )
            row = parent if is_same else choice.take_after(row)


class _Choice:
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
        kind = self._classes[parent]
        queue = self._open(kind)
        insort(queue.bared, (self._used[parent], parent))
        if self._first(queue) == parent:
            self._rank(2 * kind)
        if self._last(queue) == parent:
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
