"""Greedy dual size frequency, leaves of the prefix tree first."""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.policy.flop_density import FlopDensity
from kvstore.server.policy.heaped import HeapedEviction
from kvstore.server.policy.history import History
from kvstore.server.policy.radix import Rows

_ONE = 1 << 16
"""Priorities are whole numbers of 65536ths, so that sums are in any order the same."""

_MOST_USES = 0xFFFF
_TICK_BITS = 48


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

    Every event costs O(log n) of the leaves. 27 bytes a row, and 40 more of one that was here.
    """

    ranks_by_history: ClassVar[bool] = False

    def __init__(self, history: History, *, weighs_flops: bool = True) -> None:
        self._keys: list[int] = [0]
        """The priority of each row, then when it was used, in one number: what orders the heap."""
        super().__init__(self._keys)
        self._densities_of = FlopDensity(history) if weighs_flops else None
        self._uses = array("H", [0])
        self._densities = array("f", [0.0])
        self._clock = 0

    @property
    @override
    def ranks_by_flops(self) -> bool:
        return self._densities_of is not None

    @override
    def _extend(self, count: int) -> None:
        self._keys.extend(repeat(0, count))
        for column in (self._uses, self._densities):
            column.frombytes(bytes(count * column.itemsize))
        super()._extend(count)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._came_chain(np.array([row], np.intp), size_bytes, now_s)

    @override
    def _came_chain(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        known = self._densities_of
        found = known.of_all(rows, size_bytes) if known else np.ones(len(rows))
        # As the column keeps them, so that a use later gains by the same.
        densities = found.astype(np.float32)
        np.frombuffer(self._densities, np.float32)[rows] = densities
        np.frombuffer(self._uses, np.uint16)[rows] = 1
        self._set_keys(rows, densities)

    @override
    def _rank(self, rows: Rows) -> None:
        uses = np.frombuffer(self._uses, np.uint16)
        found = np.minimum(uses[rows], _MOST_USES - 1) + 1
        uses[rows] = found
        self._set_keys(
            rows, found * np.frombuffer(self._densities, np.float32)[rows].astype(np.float64)
        )

    def _set_keys(self, rows: Rows, gains: NDArray[np.floating[Any]]) -> None:
        """Let the priorities of *rows* be the clock and what each gained; used one by one."""
        keys, clock, tick = self._keys, self._clock, self._tick
        gained = (gains * np.float64(_ONE)).astype(np.int64).tolist()
        for row, gain in zip(rows.tolist(), gained, strict=True):
            tick += 1
            keys[row] = (clock + gain) << _TICK_BITS | tick
        self._tick = tick

    @override
    def _gone(self, row: int) -> None:
        least = self._keys[row] >> _TICK_BITS
        self._keys[row] = 0  # the number is given back
        if least <= self._clock:
            return
        if len(self._leaves):
            least = min(least, self._keys[self._leaves.first()] >> _TICK_BITS)
        self._clock = max(self._clock, least)
