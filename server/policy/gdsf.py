"""Greedy dual size frequency, leaves of the prefix tree first."""

from __future__ import annotations

from array import array

import numpy as np
from typing_extensions import override

from kvstore.server.policy.flop_density import FlopDensity
from kvstore.server.policy.heaped import HeapedEviction
from kvstore.server.policy.history import History
from kvstore.server.policy.radix import Rows

_ONE = 1 << 16
"""Priorities are whole numbers of 65536ths, so that sums are in any order the same."""

_MOST_USES = 0xFFFF


class _Keys:
    """What the heap orders by: the priority of a row, then when it was used."""

    def __init__(self, priorities: array[int], used: array[int]) -> None:
        self._priorities = priorities
        self._used = used

    def __getitem__(self, row: int) -> int:
        return self._priorities[row] << 64 | self._used[row]


class GdsfEviction(HeapedEviction):
    """Evict the leaf of the least priority: clock + uses x cost / size.

    Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching
    policy", HP Labs HPL-98-69, 1998. The clock is the priority of what was evicted last, so what
    is not used any more is overtaken by what comes.

    Ours departs in four ways. Only leaves are candidates. Cost / size is the prefill FLOPs that
    a byte saves, divided by the mean of all chunks seen, which keeps it near 1 in any unit; a
    chunk whose FLOPs are not known, and every one without *weighs_flops*, counts as 1: a full
    chunk costs its tokens, and tokens / size is the same for all of a model. Of equal priorities
    the one used longest ago goes. And the policy is not told why a chunk goes, so the clock
    moves to the least priority there is when one does: a deletion cannot push it ahead.

    Every event costs O(log n) of the leaves. 39 bytes a row.
    """

    def __init__(self, history: History, *, weighs_flops: bool = True) -> None:
        self._priorities = array("Q", [0])
        self._used = array("Q", [0])
        super().__init__(_Keys(self._priorities, self._used))
        self._density_of = FlopDensity(history).of if weighs_flops else _alike
        self._uses = array("H", [0])
        self._densities = array("f", [0.0])
        self._clock = 0

    @override
    def _extend(self, count: int) -> None:
        for column in (self._priorities, self._used, self._uses, self._densities):
            column.frombytes(bytes(count * column.itemsize))
        super()._extend(count)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._used[row] = self._tick
        self._uses[row] = 1
        self._densities[row] = self._density_of(row, size_bytes)
        self._priorities[row] = self._clock + int(self._densities[row] * _ONE)

    @override
    def _rank(self, rows: Rows) -> None:
        uses = np.frombuffer(self._uses, np.uint16)
        uses[rows] = np.minimum(uses[rows], _MOST_USES - 1) + 1
        gain = uses[rows] * np.frombuffer(self._densities, np.float32)[rows].astype(np.float64)
        priorities = np.frombuffer(self._priorities, np.uint64)
        priorities[rows] = self._clock + (gain * _ONE).astype(np.uint64)
        used = np.frombuffer(self._used, np.uint64)
        used[rows] = np.arange(self._tick + 1, self._tick + 1 + len(rows), dtype=np.uint64)
        self._tick += len(rows)

    @override
    def _gone(self, row: int) -> None:
        least = self._priorities[row]
        if len(self._leaves):
            least = min(least, self._priorities[self._leaves.first()])
        self._clock = max(self._clock, least)


def _alike(row: int, size_bytes: int) -> float:
    """Return the density of every chunk when FLOPs do not count."""
    return 1.0
