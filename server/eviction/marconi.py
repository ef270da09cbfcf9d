"""Recency and FLOPs per byte in one score, leaves of the prefix tree first."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import filterfalse

import numpy as np
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import History
from kvstore.server.eviction.alpha_tuner import AlphaTuner, TunerTerms
from kvstore.server.eviction.flop_density import LEAST_DENSITY, MOST_DENSITY, FlopDensity
from kvstore.server.eviction.leaf_tree import LeafFirstEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues
from kvstore.server.eviction.row_heap import RowHeap

_STEPS = 8
"""Classes of efficiency a doubling."""

_MIDDLE = int(math.log2(MOST_DENSITY)) * _STEPS
EFFICIENCIES: list[float] = [2.0 ** ((kind - _MIDDLE) / _STEPS) for kind in range(2 * _MIDDLE + 1)]
"""FLOPs a byte of each class, as multiples of the mean."""

assert EFFICIENCIES[0] == LEAST_DENSITY, "the classes reach as far as densities do"

DEFAULT_TERMS = TunerTerms()


def efficiency_class(density: float) -> int:
    """Return the class that is nearest to a density, which is within its bounds."""
    return round(math.log2(density) * _STEPS) + _MIDDLE


class _Newest:
    """What a heap orders by whose first row is the one used last."""

    def __init__(self, used: array[int]) -> None:
        self._used = used

    def __getitem__(self, row: int) -> int:
        return -self._used[row]


class _Candidates:
    """The leaves that may go, by class of efficiency, while victims are named."""

    def __init__(
        self, queues: Mapping[int, Iterator[int]], newest: Iterator[int], used: array[int]
    ) -> None:
        """*queues*: by class, those used longest ago first; *newest*: all, the other way."""
        self._queues = queues
        self._newest = newest
        self._used = used
        self._next = {kind: next(queue, NO_ROW) for kind, queue in queues.items()}
        self._bared: dict[int, list[tuple[int, int]]] = {}
        self._bared_newest: list[tuple[int, int]] = []
        self._top = next(newest, NO_ROW)
        self._named: set[int] = set()
        self.heads = {kind: row for kind, row in self._next.items() if row}
        """The one used longest ago of each class that has any."""

    def add(self, row: int, kind: int) -> None:
        """Let a parent whose children were all named be a candidate."""
        heapq.heappush(self._bared.setdefault(kind, []), (self._used[row], row))
        heapq.heappush(self._bared_newest, (-self._used[row], row))
        self._settle(kind)

    def take(self, kind: int) -> int:
        """Take out the head of a class and return it."""
        row = self.heads[kind]
        self._named.add(row)
        if row == self._next.get(kind):
            self._next[kind] = next(self._queues[kind], NO_ROW)
        else:
            heapq.heappop(self._bared[kind])
        self._settle(kind)
        return row

    def _settle(self, kind: int) -> None:
        row, bared = self._next.get(kind, NO_ROW), self._bared.get(kind)
        if bared and (not row or bared[0][0] < self._used[row]):
            row = bared[0][1]
        if row:
            self.heads[kind] = row
        else:
            self.heads.pop(kind, None)

    def newest_used(self) -> int:
        """Return when the candidate that was used last was; there must be one."""
        while self._top in self._named:
            self._top = next(self._newest, NO_ROW)
        while self._bared_newest and self._bared_newest[0][1] in self._named:
            heapq.heappop(self._bared_newest)
        used = -self._bared_newest[0][0] if self._bared_newest else 0
        return max(used, self._used[self._top])


class ScoredEviction(LeafFirstEviction):
    """Evict the leaf of the least score, for an alpha that is given: see MarconiEviction."""

    def __init__(self, kind_of: Callable[[int, int], int], alpha: float) -> None:
        """*kind_of* returns the class of efficiency of a row that takes so many bytes."""
        super().__init__()
        if not 0.0 <= alpha < math.inf:
            raise InvalidRequestError("alpha", alpha, "a number, not negative")
        self.alpha = alpha
        self._kind_of = kind_of
        self._used = array("Q", [0])
        self._sizes = array("Q", [0])
        self._kinds = array("B", [0])
        self._queues = ClassQueues(self._used, len(EFFICIENCIES))
        self._newest = RowHeap(_Newest(self._used))
        self._lengths = array("I", bytes(4 * len(EFFICIENCIES)))
        self._occupied: list[int] = []
        """Classes with at least one leaf, in order."""
        self._tick = 0

    @override
    def _extend(self, count: int) -> None:
        for column in (self._used, self._sizes, self._kinds):
            column.frombytes(bytes(count * column.itemsize))
        self._queues.extend(count)
        self._newest.extend(count)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._used[row] = self._tick
        self._sizes[row] = size_bytes
        self._kinds[row] = self._kind_of(row, size_bytes)

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        kind = self._kinds[row]
        self._queues.place(row, kind)
        self._newest.push(row)
        if not self._lengths[kind]:
            insort(self._occupied, kind)
        self._lengths[kind] += 1

    @override
    def _drop_leaf(self, row: int) -> None:
        kind = self._kinds[row]
        self._queues.remove(row)
        self._newest.remove(row)
        self._lengths[kind] -= 1
        if not self._lengths[kind]:
            self._occupied.remove(kind)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        # A row that is named twice was used when it is named last here.
        leaves = [row for row in dict.fromkeys(rows.tolist()) if row in self._newest]
        for row in leaves:
            self._drop_leaf(row)
        used = np.frombuffer(self._used, np.uint64)
        used[rows] = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        self._tick += len(rows)
        for row in leaves:
            self._add_leaf(row, is_new=False)

    def _recency(self, used: int) -> float:
        """Return how recent a use is, before it is normalised: Marconi's 1 / (now - last)."""
        return 1.0 / (self._tick + 1 - used)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        queues = {kind: filterfalse(keep, self._queues.walk(kind)) for kind in self._occupied}
        left = _Candidates(queues, filterfalse(keep, self._newest.sorted()), self._used)
        orphaned: dict[int, int] = {}
        while left.heads:
            row = left.take(self._least(left.heads, left.newest_used()))
            yield row
            parent = self._bared_by(row, orphaned)
            if parent and not keep(parent):
                left.add(parent, self._kinds[parent])

    def _least(self, heads: dict[int, int], newest_used: int) -> int:
        """Return the class whose head has the least score of all candidates.

        Within a class the efficiency is the same, so its head, the oldest, has its least score.
        """
        used = self._used
        oldest_used = min([used[row] for row in heads.values()])
        low, high = self._recency(oldest_used), self._recency(newest_used)
        worst, best = EFFICIENCIES[min(heads)], EFFICIENCIES[max(heads)]
        ranks = []
        for kind, row in heads.items():
            recency = (self._recency(used[row]) - low) / (high - low) if high > low else 1.0
            efficiency = (EFFICIENCIES[kind] - worst) / (best - worst) if best > worst else 1.0
            ranks.append((recency + self.alpha * efficiency, used[row], kind))
        return min(ranks)[2]


class MarconiEviction(ScoredEviction):
    """Evict the leaf with the least norm(1 / (now - last use)) + alpha x norm(FLOPs / byte).

    Marconi (Pan et al., "Marconi: prefix caching for the era of hybrid LLMs", MLSys 2025,
    equations 1 and 2); both terms are normalised to 0..1 over the candidates, anew
    for every victim. Alpha begins at 0 and is set once by ``AlphaTuner``, or is given.

    Ours departs in four ways. Candidates are leaves alone: a chunk has no state beside its KV
    that could be dropped without what continues it. Times are numbers of uses, one for every
    chunk of a chain, and a use refreshes the whole path. Efficiencies are rounded to 8 classes a
    doubling, within 1/64 and 64 times their mean, so that only the oldest leaf of each class
    needs a score. What costs no known FLOPs counts as the mean.

    Every event costs O(log n) of the leaves, a victim that of the classes in use as well. 48
    bytes a row, and what the tuner records.
    """

    def __init__(
        self, history: History, alpha: float | None = None, terms: TunerTerms = DEFAULT_TERMS
    ) -> None:
        """Tune alpha by *terms* if it is None. Raises InvalidRequestError."""
        density = FlopDensity(history)

        def kind_of(row: int, size_bytes: int) -> int:
            return efficiency_class(density.of(row, size_bytes))

        super().__init__(kind_of, 0.0 if alpha is None else alpha)
        self._bytes = 0
        self._tuner: AlphaTuner | None = None
        if alpha is None:
            self._tuner = AlphaTuner(_make_shadow, EFFICIENCIES, terms)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        super()._came(row, size_bytes, now_s)
        self._bytes += size_bytes
        if self._tuner is not None:
            self._tuner.stored(self._parents[row], row, size_bytes, self._kinds[row])

    @override
    def _gone(self, row: int) -> None:
        if self._tuner is not None:
            self._tuner.evicting(self._bytes)
        self._bytes -= self._sizes[row]

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        super().touch(rows, now_s)
        if self._tuner is None:
            return
        here = [row for row in rows.tolist() if row < len(self._here) and self._here[row]]
        self._tuner.asked([(row, self._sizes[row], self._kinds[row]) for row in here])
        if self._tuner.alpha is not None:
            self.alpha = self._tuner.alpha
            self._tuner = None


def _make_shadow(kinds: Sequence[int], alpha: float) -> ScoredEviction:
    return ScoredEviction(lambda row, _: kinds[row], alpha)
