"""Evict what promises the fewest hits per second and byte, as learnt from what is remembered."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.eviction.access_history import History, Report
from kvstore.server.eviction.chunk_classes import MAX_CLASSES
from kvstore.server.eviction.class_ranking import QueueRanks
from kvstore.server.eviction.leaf_tree import FEW, LeafFirstEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues
from kvstore.server.eviction.reuse_statistics import EDGES_S
from kvstore.server.eviction.victim_cursor import VictimChoice

BUDGET = 0.005
"""Hits that may be lost to LRU, as a share of what is asked for. What a change back to LRU finds
gone is lost besides, and not known before: so there is nothing on top of that share. A smaller
share is used up by less than one prompt of a small cache, and then nothing more is learnt."""

WARM_REQUESTS = 100
"""Requests from which to learn before anything is done otherwise than LRU does it."""

WINDOW_CHUNKS = 1 << 18
"""Of what was asked for before these, half is forgotten."""


class RegretGuard:
    """Counts the hits of a policy and those that LRU would have had, and says who is ahead.

    LRU holds the chunks that were asked for last. So a chunk would have been hit if it had waited
    no longer than the one that is just among them: its stack distance (Mattson, Gecsei, Slutz
    and Traiger, IBM Systems Journal 9(2), 1970), with the counts of those who wait for a stack.
    While the policy is behind by more than the budget it is to do as LRU does, which costs no
    more hits, until the budget has grown by what was asked for since.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Chunks that were here when asked for, since the last ``judge``."""
        self.lru_age_s = np.inf
        """How long a chunk may have waited for LRU to have it still."""
        self.share = 1.0
        """How much of what is asked for and known was ever here."""
        self.prefers_lru = True
        self._requests = 0.0
        self._is_warm = False
        """Whether there was something to learn from."""
        self._asked = 0.0
        self._behind = 0.0

    def judge(self, report: Report, mine: NDArray[np.bool_]) -> None:
        """Take note of what was asked for since the last call, and of it what was ever here."""
        if len(mine):
            self.share += 0.1 * (max(float(mine.mean()), 0.01) - self.share)
        lru_hits = int(np.count_nonzero(report.ages_s[mine] <= self.lru_age_s))
        self._asked += report.chunks * self.share
        self._requests += report.requests
        if not self.prefers_lru:  # else the difference is no policy's doing
            self._behind += lru_hits - self.hits
        self.hits = 0
        if self._asked > WINDOW_CHUNKS:
            self._asked /= 2
            self._behind /= 2
            self._requests /= 2
        self._is_warm = self._is_warm or self._requests >= WARM_REQUESTS
        self.prefers_lru = not self._is_warm or self._behind > BUDGET * self._asked


CAP_S = 500e-6
"""How long one decision may take, before those after it are made as LRU makes them."""

_EDGES_S: list[float] = EDGES_S.tolist()


class HitDensityEviction(LeafFirstEviction):
    """Evict the leaf whose hits per second of residency, by class and age, are fewest a byte.

    The table of the History says what a chunk of a class promises at an age; what it promises
    here is that times its worth by byte: tokens. Leaves of
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
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self._history = history
        self._clock = clock
        self._used = array("Q", [0])
        """When each chunk was last used, as the number of the use."""
        self._worth = array("f", [0.0])
        """By byte, up to a factor that is the same for all."""
        self._queues = ClassQueues(self._used, MAX_CLASSES)
        self._ranks = QueueRanks(history, self._queues, self._used, self._worth)
        self._see()
        self._tick = 0
        self.fallbacks = 0
        self._guard = RegretGuard()
        self._is_full = False
        history.followers.append(self._requeue)
        history.watchers.append(self._compare)

    def _see(self) -> None:
        """Look at the columns as numpy does; they cannot grow until this is given up."""
        self._used_seen = np.frombuffer(self._used, np.uint64)
        self._worth_seen = np.frombuffer(self._worth, np.float32)

    @override
    def _extend(self, count: int) -> None:
        del self._used_seen, self._worth_seen
        for column in (self._used, self._worth):
            column.frombytes(bytes(count * column.itemsize))
        self._see()
        self._queues.extend(count)
        self._history.reach(len(self._used) - 1)

    # --- events

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._used[row] = self._tick
        self._worth[row] = self._worth_of(row, max(size_bytes, 1))

    def _worth_of(self, row: int, size_bytes: int) -> float:
        parent = self._parents[row]
        if self._history.is_partial(row) and self._here[parent]:
            return self._worth[parent]  # fewer tokens, and fewer bytes
        return 1.0 / size_bytes

    @override
    def _came_chain(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        size_bytes = max(size_bytes, 1)
        worth = 1.0 / size_bytes
        if len(rows) < FEW:
            used, worths = self._used, self._worth
            for tick, row in enumerate(rows.tolist(), self._tick + 1):
                used[row] = tick
                worths[row] = worth
        else:
            self._stamp(rows)
            self._worth_seen[rows] = worth
        self._tick += len(rows)
        last = int(rows[-1])
        self._worth[last] = self._worth_of(last, size_bytes)

    def _stamp(self, rows: Rows) -> None:
        self._used_seen[rows] = np.arange(self._tick + 1, self._tick + 1 + len(rows))

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        if len(rows) != 1:
            super().touch(rows, now_s)
            return
        # Of most prompts only what begins them all is here.
        row = rows.item(0)
        if row >= len(self._here) or not self._here[row]:
            return
        self._guard.hits += 1
        if not self._children[row]:
            self._queues.remove(row)
            self._queues.append(row, self._history.classes[row])
        self._tick += 1
        self._used[row] = self._tick

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
        mine = self._used_seen.take(report.rows, mode="clip") > 0
        self._guard.judge(report, mine)
        if self._is_full:
            count = len(self) / self._guard.share
            self._guard.lru_age_s = self._history.table.recency_s(report.time_s, count)

    # --- questions

    def promise(self, row: int, time_s: float) -> float:
        """Return what a chunk here promises at a time of the History's clock."""
        history = self._history
        age = bisect_left(_EDGES_S, time_s - history.last_s[row])
        return history.table.values.item(history.classes[row], age) * self._worth[row]

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._is_full = True
        choice = VictimChoice(self, self._history.time_s(now_s), is_lru=self._guard.prefers_lru)
        return self._named(choice, keep)

    def _named(self, choice: VictimChoice, keep: Callable[[int], bool]) -> Iterator[int]:
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
