"""Evict what promises the fewest hits per second and byte, as learnt from what is remembered."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import MAX_CLASSES, AccessHistory, RefreshReport
from kvstore.server.eviction.lru import LeafCursor, LruEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.reuse_statistics import EDGES_S, bins_of

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


_EDGES_S: list[float] = EDGES_S.tolist()


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


class VictimCursor:
    """What *policy* evicts, one after the other, as far as it is read. Changes nothing.

    Of the first and last of each queue the one that promises the least goes, of equals the one
    used longest ago. A promise is the table's value of the class at the age, times the worth of
    the row. An end is twice the class, and one more for the last. What lies behind one that was
    taken is ranked with the next call, as most often it is the taken one's parent that goes next.
    """

    def __init__(self, policy: HitDensityEviction, time_s: float, *, is_lru: bool) -> None:
        """*time_s* is on the AccessHistory's clock."""
        self._policy, self._time_s, self.is_lru = policy, time_s, is_lru
        self._cursors: dict[int, LeafCursor] = {}
        """By end."""
        self._taken: set[int] = set()
        self._due: set[int] = set()
        """Ends that may be another row."""
        history, rows = policy._history, policy._queues.ends(policy._history.kinds.count)
        values = np.zeros(len(rows))
        if not is_lru:
            ages = bins_of(time_s - history.last_s[rows])
            values = history.table.values[history.classes[rows], ages]
            values *= np.frombuffer(policy._worth, np.float32)[rows]
        self._ranks = np.empty(len(rows), np.complex128)
        """By end: what it promises, inf for nothing left, and when it was used: numpy compares
        complex numbers by one after the other."""
        self._ranks.real = np.where(rows > 0, values, np.inf)
        self._ranks.imag = np.frombuffer(policy._used, np.uint64)[rows]
        if is_lru:
            self.fall_back()

    def _rank(self, end: int) -> None:
        policy, history, row = self._policy, self._policy._history, self._first(end)
        value = 0.0
        if not row or (self.is_lru and end & 1):
            value = math.inf
        elif not self.is_lru:
            age = bisect_left(_EDGES_S, self._time_s - history.last_s.item(row))
            value = history.table.values.item(history.classes.item(row), age) * policy._worth[row]
        self._ranks[end] = complex(value, policy._used[row])

    def take(self) -> int:
        """Return what to evict next, which is not named again; NO_ROW where nothing is left."""
        while True:
            for end in self._due:
                self._rank(end)
            end = int(self._ranks.argmin())
            rank = self._ranks.item(end)
            if rank.real == math.inf:
                return NO_ROW
            self._due = {end}
            row = self._first(end)
            if self._policy._used[row] == rank.imag:  # else it was taken from the other end
                self._taken.add(row)
                return row

    def expose(self, row: int) -> None:
        """Let a parent be a candidate, whose children were all named."""
        kind = self._policy._kind(row)
        for end in (2 * kind, 2 * kind + 1):
            self._cursor(end).add(row)
            self._due.add(end)

    def fall_back(self) -> None:
        """Name the rest by their last use only."""
        self.is_lru = True
        values = self._ranks.real
        values[values < np.inf] = 0.0
        values[1::2] = np.inf
        self._due = {end & ~1 for end in self._cursors}

    def _cursor(self, end: int) -> LeafCursor:
        cursor = self._cursors.get(end)
        if cursor is None:
            queues, used = self._policy._queues, self._policy._used
            if end & 1:
                walk = queues.walk_back(end >> 1)
                cursor = LeafCursor(walk, lambda row: -used[row])
            else:
                cursor = LeafCursor(queues.walk(end >> 1), used.__getitem__)
            self._cursors[end] = cursor
        return cursor

    def _first(self, end: int) -> int:
        """Return the row that is left at an end; NO_ROW where there is none."""
        cursor = self._cursor(end)
        while (row := cursor.first) in self._taken:
            cursor.take()
        return row


class HitDensityEviction(LruEviction):
    """Evict the leaf whose hits per second of residency, by class and age, are fewest a byte.

    The table of the AccessHistory has what a chunk of a class promises at an age; here that is
    times its worth by byte: tokens. Leaves of a class are queued by their last use, and both ends
    of each queue are candidates: a victim costs numpy a look at them all. Where two promise the
    same, the one used longest ago goes, so what knows nothing yet is leaf-LRU.

    Ours, after LHD (Beckmann et al., NSDI 2018), with the tree, the queues and what is
    remembered of evicted chunks added. A decision that takes longer than 500 us on *clock* (none
    by default) ends in LRU order, and counts in ``fallbacks``. 31 bytes a row.
    """

    def __init__(self, history: AccessHistory, clock: Callable[[], float] | None = None) -> None:
        super().__init__(kinds=MAX_CLASSES)
        self._history = history
        self._clock = clock
        self._worth: array[float] = self._columns.add("f")
        """By byte, up to a factor that is the same for all."""
        self.fallbacks = 0
        self._guard = LruSafeguard()
        self._is_full = False
        history.on_hint.append(self._requeue)
        history.on_refresh.append(self._compare)

    @override
    def _extend(self, rows: int) -> None:
        self._history.reach(rows - 1)

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
        return self._history.classes.item(row)

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
            self._guard.lru_age_s = self._history.table.waiting.age_s(report.time_s, count)

    # --- questions

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        self._is_full = True
        is_lru = self._guard.is_active
        choice = VictimCursor(self, self._history.time_s(now_s), is_lru=is_lru)
        clock = self._clock
        started_s = clock() if clock else 0.0
        orphaned: dict[int, int] = {}
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
            parent = self._exposed_by(row, orphaned)
            if parent and self._is_next(row, parent):
                row = parent
                continue
            if parent:
                choice.expose(parent)
            row = choice.take()

    def _is_next(self, row: int, parent: int) -> bool:
        """Whether *parent* promises what *row* does, and nothing was used in between."""
        used, worth = self._used, self._worth
        classes, last_s = self._history.classes.item, self._history.last_s.item
        return (
            -2 < used[parent] - used[row] < 2
            and classes(parent) == classes(row)
            and last_s(parent) == last_s(row)
            and worth[parent] == worth[row]
        )
