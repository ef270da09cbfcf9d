"""Evict what promises the fewest hits per second and byte, as learnt from what is remembered."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import MAX_CLASSES, AccessHistory, RefreshReport
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues, QueueCursor
from kvstore.server.eviction.reuse_statistics import AGE_BINS, EDGES_S

BUDGET = 0.005
"""Hits that may be lost to LRU, as a share of what is asked for. What a change back to LRU finds
gone is lost besides, and not known before: so there is nothing on top of that share. A smaller
share is used up by less than one prompt of a small cache, and then nothing more is learnt."""

WARM_REQUESTS = 100
"""Requests from which to learn before anything is done otherwise than LRU does it."""

WINDOW_CHUNKS = 1 << 18
"""Of what was asked for before these, half is forgotten."""

CAP_S = 500e-6
"""How long one decision may take, before those after it are made in LRU order."""

Rank = tuple[float, int, int]
"""What an end of a queue promises, when it was used, and which end it is: twice the class, and
one more for the last."""

_EDGES_S: list[float] = EDGES_S.tolist()
_ENDS_S = np.append(EDGES_S, np.inf)
_STALE_SHARE, _STALE_LEAST = 4, 256
_LAST_AGE = AGE_BINS - 1
_NOBODY: Rank = (0.0, 0, 0)


class LruSafeguard:
    """Counts the hits of a policy and those that LRU would have had, and which of them is ahead.

    LRU would have hit a chunk that waited no longer than the last of those it holds: its stack
    distance (Mattson, Gecsei, Slutz and Traiger, IBM Systems Journal 9(2), 1970), with the counts
    of those that wait for a stack. While the policy is behind by more than the budget it is to do
    as LRU does, which costs no more hits, until the budget has grown by what was asked for since.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Chunks that were here when asked for, since the last ``judge``."""
        self.lru_age_s = np.inf
        """How long a chunk may have waited for LRU to have it still."""
        self.share = 1.0
        """How much of what is asked for and known was ever here."""
        self.is_active = True
        self._requests = 0.0
        self._is_warm = False
        """Whether there was something to learn from."""
        self._asked = 0.0
        self._behind = 0.0

    def judge(self, report: RefreshReport, mine: NDArray[np.bool_]) -> None:
        """Take note of what was asked for since the last call, and of it what was ever here."""
        if len(mine):
            self.share += 0.1 * (max(float(mine.mean()), 0.01) - self.share)
        lru_hits = int(np.count_nonzero(report.ages_s[mine] <= self.lru_age_s))
        self._asked += report.chunks * self.share
        self._requests += report.requests
        if not self.is_active:  # else the difference is no policy's doing
            self._behind += lru_hits - self.hits
        self.hits = 0
        if self._asked > WINDOW_CHUNKS:
            self._asked /= 2
            self._behind /= 2
            self._requests /= 2
        self._is_warm = self._is_warm or self._requests >= WARM_REQUESTS
        self.is_active = not self._is_warm or self._behind > BUDGET * self._asked


class ClassRanking:
    """The first and last of each queue, those that promise the least first.

    A promise is the table's value of the class at the age, times the worth of the row. It stays
    until another row comes to that end, the row's age comes to the next bin, or the table is
    refreshed; so a decision ranks those few ends again, O(log) of the classes for each, and after
    a refresh all. 200 bytes an end. Not thread-safe.
    """

    def __init__(
        self, history: AccessHistory, queues: ClassQueues, used: array[int], worth: array[float]
    ) -> None:
        self.history = history
        self.queues = queues
        self.used = used
        self._worth = worth
        self._current: list[Rank] = []
        """By end: what counts of the two heaps; the rest of them is stale."""
        self._ranks: list[Rank] = []
        self._due: list[tuple[float, Rank]] = []
        """When the next bin begins for each: a little early, as sums are rounded."""
        self._version = -1

    def bring_up(self, time_s: float) -> None:
        """Rank what has changed until now. *time_s* is on the AccessHistory's clock."""
        table, changed = self.history.table, self.queues.changed
        most = _STALE_SHARE * len(self._current) + _STALE_LEAST
        if self._version != table.version or max(len(self._ranks), len(self._due)) > most:
            self._version = table.version
            changed.clear()
            self._rank_all(time_s)
            return
        due = self._due
        while due and due[0][0] <= time_s:
            rank = heappop(due)[1]
            if self._current[rank[2]] is rank:
                self._current[rank[2]] = _NOBODY
                changed.add(rank[2])
        self._rank_changed(time_s)

    def _rank_changed(self, time_s: float) -> None:
        current, used, worth = self._current, self.used, self._worth
        queues, history = self.queues, self.history
        missing = 2 * history.kinds.count - len(current)
        if missing > 0:
            current += [_NOBODY] * missing
        newest, head_of, last_s = queues.newest, queues.head, history.last_s
        value_of = history.table.values.item
        ranks, dues = self._ranks, self._due
        for end in queues.changed:
            kind = end >> 1
            row = newest[kind] if end & 1 else head_of(kind)
            if not row:
                current[end] = _NOBODY
                continue
            when = used[row]
            if current[end][1] == when:
                continue
            since_s = last_s[row]
            age = bisect_left(_EDGES_S, time_s - since_s)
            rank = current[end] = (value_of(kind, age) * worth[row], when, end)
            heappush(ranks, rank)
            if age < _LAST_AGE:
                due_s = since_s + _EDGES_S[age]
                heappush(dues, (due_s - 1e-12 * abs(due_s), rank))
        queues.changed.clear()

    def _rank_all(self, time_s: float) -> None:
        history = self.history
        kinds, first, last = self.queues.ends(history.kinds.count)
        has_last = last != NO_ROW
        rows = np.concatenate((first, last[has_last]))
        kinds = np.concatenate((kinds, kinds[has_last]))
        ends = 2 * kinds
        ends[len(first) :] += 1
        last_s = np.frombuffer(history.last_s)[rows]
        places = EDGES_S.searchsorted(time_s - last_s)
        due_s = last_s + _ENDS_S[places]
        places += kinds * AGE_BINS
        values = history.table.values.reshape(-1)[places]
        values *= np.frombuffer(self._worth, np.float32)[rows]
        used = np.frombuffer(self.used, np.uint64)[rows]
        self._ranks = list(zip(values.tolist(), used.tolist(), ends.tolist(), strict=True))
        self._current = [_NOBODY] * (2 * history.kinds.count)
        for rank in self._ranks:
            self._current[rank[2]] = rank
        self._due = [
            (at_s - 1e-12 * abs(at_s), rank)
            for at_s, rank in zip(due_s.tolist(), self._ranks, strict=True)
            if at_s < np.inf
        ]
        heapify(self._ranks)
        heapify(self._due)

    def least(self) -> Rank | None:
        """Return the end that promises least; None when all were taken."""
        ranks, current = self._ranks, self._current
        while ranks:
            rank = ranks[0]
            if current[rank[2]] is rank:
                return rank
            heappop(ranks)
        return None

    def take(self) -> Rank:
        """Take out what ``least`` just returned, which counts no more until ``bring_up``."""
        rank = heappop(self._ranks)
        self._current[rank[2]] = _NOBODY
        self.queues.changed.add(rank[2])
        return rank

    def promise(self, row: int, time_s: float) -> float:
        """Return what a chunk promises at a time of the AccessHistory's clock."""
        history = self.history
        age = bisect_left(_EDGES_S, time_s - history.last_s[row])
        return history.table.values.item(history.classes[row], age) * self._worth[row]


class VictimCursor:
    """What to evict, one after the other, as far as it is read. Changes nothing.

    What lies behind a queue's end that was taken is ranked with the next call, as most often it is
    the taken one's parent that goes next.
    """

    def __init__(
        self,
        ranks: ClassRanking,
        exposed_by: Callable[[int, dict[int, int]], int],
        time_s: float,
        *,
        is_lru: bool,
    ) -> None:
        """*exposed_by* returns the parent whose last child a row was, of those not named yet."""
        self._ranks = ranks
        self._queues, self._used = ranks.queues, ranks.used
        self._exposed_by = exposed_by
        self._time_s = time_s
        self._left: dict[int, int] = {}
        """Children not yet named, of parents that have lost some."""
        self._opened: dict[int, QueueCursor] = {}
        self._taken: set[int] = set()
        """Rows of the queues that were taken."""
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
        """Return what to evict next, which is not named again; NO_ROW where nothing is left."""
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
            if queue.exposed and queue.exposed[-(end & 1)][1] == row:
                del queue.exposed[-(end & 1)]
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
        """Return what to evict when *row* is gone, whose parent may be a candidate then."""
        parent = self._exposed_by(row, self._left)
        if parent:
            kind = self._ranks.history.classes[parent]
            queue = self._open(kind)
            insort(queue.exposed, (self._used[parent], parent))
            if self._first(queue) == parent:
                self._rank(2 * kind)
            if self._last(queue) == parent:
                self._rank(2 * kind + 1)
        return self.take()

    def fall_back(self) -> None:
        """Name the rest by their last use only."""
        self.is_lru = True
        kinds, rows, _ = self._queues.ends(MAX_CLASSES)
        used = np.frombuffer(self._used, np.uint64)[rows].tolist()
        self._ahead = [
            (0.0, when, 2 * kind)
            for kind, when in zip(kinds.tolist(), used, strict=True)
            if kind not in self._opened
        ]
        heapq.heapify(self._ahead)
        for kind in self._opened:
            self._rank(2 * kind)

    def _open(self, kind: int) -> QueueCursor:
        queue = self._opened.get(kind)
        if queue is None:
            queue = self._opened[kind] = QueueCursor(self._queues, kind)
        return queue

    def _first(self, queue: QueueCursor) -> int:
        queue.skip(self._taken)
        first, exposed = queue.first, queue.exposed
        if exposed and (not first or exposed[0][0] < self._used[first]):
            return exposed[0][1]
        return first

    def _last(self, queue: QueueCursor) -> int:
        queue.skip_back(self._taken)
        last, exposed = queue.last, queue.exposed
        if exposed and (not last or exposed[-1][0] > self._used[last]):
            return exposed[-1][1]
        return last

    def _rank(self, end: int) -> None:
        if self.is_lru and end & 1:
            return
        queue = self._open(end >> 1)
        row = self._last(queue) if end & 1 else self._first(queue)
        if row:
            promise = 0.0 if self.is_lru else self._ranks.promise(row, self._time_s)
            heapq.heappush(self._ahead, (promise, self._used[row], end))


class HitDensityEviction(LruEviction):
    """Evict the leaf whose hits per second of residency, by class and age, are fewest a byte.

    The table of the AccessHistory has what a chunk of a class promises at an age; here that is
    times its worth by byte: tokens. Leaves of a class are queued by their last use, and both ends
    of each queue are candidates: O(classes) for the first victim, O(log) of them for each that
    follows. Where two promise the same, the one used longest ago goes, so what knows nothing yet
    is leaf-LRU.

    Ours, after LHD (Beckmann et al., NSDI 2018), with the tree, the queues and what is
    remembered of evicted chunks added. A decision that takes longer than 500 us on *clock* (none
    by default) ends in LRU order, and counts in ``fallbacks``. 35 bytes a row.
    """

    def __init__(self, history: AccessHistory, clock: Callable[[], float] | None = None) -> None:
        super().__init__(kinds=MAX_CLASSES)
        self._history = history
        self._clock = clock
        self._worth: array[float] = self._column("f")
        """By byte, up to a factor that is the same for all."""
        self._ranks = ClassRanking(history, self._queues, self._used, self._worth)
        self.fallbacks = 0
        self._guard = LruSafeguard()
        self._is_full = False
        history.on_hint.append(self._requeue)
        history.on_refresh.append(self._compare)

    @override
    def _extend(self, count: int) -> None:
        self._history.reach(len(self._used) - 1)

    # --- events

    @override
    def _came(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._came(rows, size_bytes, now_s)
        np.frombuffer(self._worth, np.float32)[rows] = 1.0 / max(size_bytes, 1)
        last = int(rows[-1])
        parent = self._parents[last]
        if self._history.is_partial(last) and self._here[parent]:
            self._worth[last] = self._worth[parent]  # fewer tokens, and fewer bytes

    @override
    def _kind(self, row: int) -> int:
        return self._history.classes[row]

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        self._guard.hits += len(rows)
        super()._use(rows, now_s)

    def _compare(self, report: RefreshReport) -> None:
        """Hold what was hit since the last refresh against what LRU would have hit."""
        mine = np.frombuffer(self._used, np.uint64).take(report.rows, mode="clip") > 0
        self._guard.judge(report, mine)
        if self._is_full:
            count = len(self) / self._guard.share
            self._guard.lru_age_s = self._history.table.recency_s(report.time_s, count)

    # --- questions

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._is_full = True
        choice = VictimCursor(
            self._ranks, self._exposed_by, self._history.time_s(now_s), is_lru=self._guard.is_active
        )
        return self._named(choice, keep)

    def _named(self, choice: VictimCursor, keep: Callable[[int], bool]) -> Iterator[int]:
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
