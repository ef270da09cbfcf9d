"""Evict the chunk with the fewest expected hits per second and byte, learnt from the history."""

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
"""Hits that may be lost against LRU, as a share of requested chunks. A switch back to LRU loses
further chunks, an unknown number, so nothing is added to that share. Less than one prompt of a
small cache uses up a smaller share, and then nothing more is learnt."""

WARM_REQUESTS = 100
"""Requests to learn from before the policy departs from LRU."""

WINDOW_CHUNKS = 1 << 18
"""After this many requested chunks, all earlier counts are halved."""

CAP_S = 500e-6
"""Time limit of a decision; after it the rest is chosen in LRU order."""


_EDGES_S: list[float] = EDGES_S.tolist()


class LruSafeguard:
    """Compares the hits of a policy with those that LRU would have had.

    LRU would have hit a chunk no older than the oldest that it holds: its stack distance (Mattson,
    Gecsei, Slutz and Traiger, IBM Systems Journal 9(2), 1970), with counts of waiting chunks in
    place of a stack. While the policy is behind by more than the budget it must act as LRU, which
    loses no more hits, until requests have increased the budget.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Requested chunks that were on the tier, since the last ``judge``."""
        self.lru_age_s = np.inf
        """Age of the oldest chunk that LRU would still have."""
        self.share = 1.0
        """Share of known requested chunks that were ever on this tier."""
        self.is_active = True
        self._requests = 0.0
        self._is_warm = False
        """Whether WARM_REQUESTS were seen."""
        self._asked = 0.0
        self._behind = 0.0

    def judge(self, report: RefreshReport, mine: NDArray[np.bool_]) -> None:
        """Record the requests since the last call; *mine* marks rows ever on this tier."""
        if len(mine):
            self.share += 0.1 * (max(float(mine.mean()), 0.01) - self.share)
        lru_hits = int(np.count_nonzero(report.ages_s[mine] <= self.lru_age_s))
        self._asked += report.chunks * self.share
        self._requests += report.requests
        if not self.is_active:  # else the policy did not cause the difference
            self._behind += lru_hits - self.hits
        self.hits = 0
        if self._asked > WINDOW_CHUNKS:
            self._asked /= 2
            self._behind /= 2
            self._requests /= 2
        self._is_warm = self._is_warm or self._requests >= WARM_REQUESTS
        self.is_active = not self._is_warm or self._behind > BUDGET * self._asked


class VictimCursor:
    """The victims of *policy* in order, computed lazily. Changes nothing.

    Of the first and last row of each queue the one of least value is next, of equals the least
    recently used. The value is the table's value of the class at the age, times the worth of the
    row. An end is twice the class, plus one for the last row. The row after a taken one is ranked
    in the next call, as usually the taken one's parent is next.
    """

    def __init__(self, policy: HitDensityEviction, time_s: float, *, is_lru: bool) -> None:
        """*time_s* is on the AccessHistory's clock."""
        self._policy, self._time_s, self.is_lru = policy, time_s, is_lru
        self._cursors: dict[int, LeafCursor] = {}
        """By end."""
        self._taken: set[int] = set()
        self._due: set[int] = set()
        """Ends to rank again."""
        history, rows = policy._history, policy._queues.ends(policy._history.kinds.count)
        values = np.zeros(len(rows))
        if not is_lru:
            ages = bins_of(time_s - history.last_s[rows])
            values = history.table.values[history.classes[rows], ages]
            values *= np.frombuffer(policy._worth, np.float32)[rows]
        self._ranks = np.empty(len(rows), np.complex128)
        """By end: its value, inf if empty, and its last use: numpy compares complex numbers by the
        real part first."""
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
        """Return the next victim, once; NO_ROW when none is left."""
        while True:
            for end in self._due:
                self._rank(end)
            end = int(self._ranks.argmin())
            rank = self._ranks.item(end)
            if rank.real == math.inf:
                return NO_ROW
            self._due = {end}
            row = self._first(end)
            if self._policy._used[row] == rank.imag:  # else taken from the other end
                self._taken.add(row)
                return row

    def expose(self, row: int) -> None:
        """Make a parent a candidate, once all its children were taken."""
        kind = self._policy._kind(row)
        for end in (2 * kind, 2 * kind + 1):
            self._cursor(end).add(row)
            self._due.add(end)

    def fall_back(self) -> None:
        """Rank the rest by their last use only."""
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
        """Return the row at an end; NO_ROW if there is none."""
        cursor = self._cursor(end)
        while (row := cursor.first) in self._taken:
            cursor.take()
        return row


class HitDensityEviction(LruEviction):
    """Evict the leaf with the fewest hits per second of residency and byte, by class and age.

    The table of the AccessHistory gives the value of a class at an age; it is multiplied by the
    worth of a byte of the chunk, its tokens per byte. Leaves of a class are queued by their last
    use, and both ends of each queue are candidates: numpy ranks them all for a victim. Of equals
    the least recently used is evicted, so an untrained policy is leaf-LRU.

    Ours, after LHD (Beckmann et al., NSDI 2018), with the tree, the queues and the history of
    evicted chunks added. A decision that takes longer than 500 us on *clock* (none by default)
    ends in LRU order, and counts in ``fallbacks``. 31 bytes a row.
    """

    def __init__(self, history: AccessHistory, clock: Callable[[], float] | None = None) -> None:
        super().__init__(kinds=MAX_CLASSES)
        self._history = history
        self._clock = clock
        self._worth: array[float] = self._columns.add("f")
        """Worth per byte, up to a factor common to all."""
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
    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._inserted(rows, size_bytes, now_s)
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
        """Compare the hits since the last refresh with those of LRU."""
        mine = np.frombuffer(self._used, np.uint64).take(report.rows, mode="clip") > 0
        self._guard.judge(report, mine)
        if self._is_full:
            count = len(self) / self._guard.share
            self._guard.lru_age_s = self._history.table.waiting.age_s(report.time_s, count)

    # --- queries

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
        """Whether *parent* has the value of *row*, and nothing was used in between."""
        used, worth = self._used, self._worth
        classes, last_s = self._history.classes.item, self._history.last_s.item
        return (
            -2 < used[parent] - used[row] < 2
            and classes(parent) == classes(row)
            and last_s(parent) == last_s(row)
            and worth[parent] == worth[row]
        )
