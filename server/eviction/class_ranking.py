"""What the ends of queues promise, kept up to date as queues and ages change."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heapify, heappop, heappush

import numpy as np

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import History
from kvstore.server.eviction.queues import ClassQueues
from kvstore.server.eviction.reuse_statistics import AGE_BINS, EDGES_S

Rank = tuple[float, int, int]
"""What an end of a queue promises, when it was used, and which end of which class it is: twice
the class, and one more for the last."""

_EDGES_S: list[float] = EDGES_S.tolist()
_ENDS_S = np.append(EDGES_S, np.inf)
_STALE_SHARE, _STALE_LEAST = 4, 256
_LAST_AGE = AGE_BINS - 1
_NOBODY: Rank = (0.0, 0, 0)


class QueueRanks:
    """The first and last of each queue, those that promise the least first.

    A promise is the table's value of the class at the age, times the worth of the row. It stays
    as it is until another row comes to that end, the row's age comes to the next bin, or the
    table is worked out anew; so a decision ranks those few ends again and not all: O(log) of the
    classes for each. After a refresh of the table all are ranked at once. What is ranked is the
    same as if all were ranked for every decision. 200 bytes an end. Not thread-safe.
    """

    def __init__(
        self, history: History, queues: ClassQueues, used: array[int], worth: array[float]
    ) -> None:
        self._history = history
        self._queues = queues
        self._used, self._worth = used, worth
        self._current: list[Rank] = []
        """By end: what counts of the two heaps; the rest of them is stale."""
        self._ranks: list[Rank] = []
        self._due: list[tuple[float, Rank]] = []
        """When the next bin begins for whom; a little early rather than late."""
        self._version = -1

    def bring_up(self, time_s: float) -> None:
        """Rank what has changed until now. *time_s* is on the History's clock."""
        table, changed = self._history.table, self._queues.changed
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
        self.rank_changed(time_s)

    def rank_changed(self, time_s: float) -> None:
        """Rank the ends that changed, where the last ``bring_up`` was of this time."""
        current, used, worth = self._current, self._used, self._worth
        queues, history = self._queues, self._history
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
                heappush(dues, (due_s - 1e-12 * abs(due_s), rank))  # as ``_early``
        queues.changed.clear()

    def _rank_all(self, time_s: float) -> None:
        history = self._history
        kinds, first, last = self._queues.ends(history.kinds.count)
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
        used = np.frombuffer(self._used, np.uint64)[rows]
        self._ranks = list(zip(values.tolist(), used.tolist(), ends.tolist(), strict=True))
        self._current = [_NOBODY] * (2 * history.kinds.count)
        for rank in self._ranks:
            self._current[rank[2]] = rank
        self._due = [
            (_early(at_s), rank)
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
        """Return what ``least`` just did, which counts no more until ``bring_up``."""
        rank = heappop(self._ranks)
        self._current[rank[2]] = _NOBODY
        self._queues.changed.add(rank[2])
        return rank


def _early(time_s: float) -> float:
    """Return a time that is not after *time_s*, however that was rounded."""
    return time_s - 1e-12 * abs(time_s)
