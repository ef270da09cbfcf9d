"""Least recently used, leaves of the prefix tree first; or first what engines label to discard."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from typing_extensions import override

from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.leaf_tree import FEW, LeafFirstEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues


class LruEviction(LeafFirstEviction):
    """Evict the leaf that was used longest ago.

    Leaves are queued by their last use, all in one queue, or for a subclass by what ``_kind``
    returns, below *kinds*. Every event costs O(1), or O(log n) of the leaves that came into their
    queue late. 27 bytes a row, in columns.
    """

    def __init__(self, kinds: int = 1) -> None:
        super().__init__()
        self._used: array[int] = self._columns.add("Q")
        """When each chunk was last used, as the number of the use."""
        self._queues = ClassQueues(self._used, self._columns, kinds)
        self._tick = 0

    def _kind(self, row: int) -> int:
        """Return the queue that a leaf belongs in."""
        return 0

    def _requeue(self, rows: Rows) -> None:
        """The kinds of *rows* changed, which may be unknown here."""
        for row in rows[rows < len(self._here)].tolist():
            if self._is_leaf(row):
                self._queues.remove(row)
                self._queues.place(row, self._kind(row))

    @override
    def _came(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        self._stamp(rows)

    def _stamp(self, rows: Rows) -> None:
        """Number the uses of *rows*, the first first."""
        if len(rows) < FEW:
            used = self._used
            for tick, row in enumerate(rows.tolist(), self._tick + 1):
                used[row] = tick
        else:
            ticks = np.arange(self._tick + 1, self._tick + 1 + len(rows))
            np.frombuffer(self._used, np.uint64)[rows] = ticks
        self._tick += len(rows)

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        if is_new:
            self._queues.append(row, self._kind(row))
        else:
            self._queues.place(row, self._kind(row))

    @override
    def _drop_leaf(self, row: int) -> None:
        self._queues.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        rows = rows[::-1]
        if len(rows) < FEW:
            leaves = [row for row in rows.tolist() if not self._children[row]]
        else:
            leaves = rows[np.frombuffer(self._children, np.uint32)[rows] == 0].tolist()
        for row in leaves:
            self._queues.remove(row)
            self._queues.append(row, self._kind(row))
        self._stamp(rows)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        return self._name(self._queues.walk(), self._used.__getitem__, keep)


DISCARD = 1
"""The reuse hint of a chunk that is of no more use."""

_DISCARDED, _OTHERS = 0, 1
_TICK_BITS = 56


class DiscardHintEviction(LruEviction):
    """Evict the leaf used longest ago of those that are labelled "discard", else of the others.

    "Paging with succinct predictions" (Antoniadis et al., arXiv 2210.02775): one bit
    of prediction a request, and evict a page with a 1 if there is one. The bit here is the reuse
    hint of the AccessHistory; no hint, or "keep", is a 0. Ours departs from the paper in that among
    equals LRU decides, and that only leaves are candidates: a parent labelled "discard" waits
    for all that continues it.

    **Not robust.** It follows the bit: where half of the bits are wrong it is far below LRU. For
    hints whose truth is not known use ``hit_density``, where the hint is a class whose
    reliability is learnt. 27 bytes a row.
    """

    def __init__(self, history: AccessHistory) -> None:
        super().__init__(kinds=2)
        self._history = history
        history.on_hint.append(self._requeue)

    @override
    def _kind(self, row: int) -> int:
        return _DISCARDED if self._history.reuse_of(row) == DISCARD else _OTHERS

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        def rank(row: int) -> int:
            return self._kind(row) << _TICK_BITS | self._used[row]

        leaves = chain(self._queues.walk(_DISCARDED), self._queues.walk(_OTHERS))
        return self._name(leaves, rank, keep)
