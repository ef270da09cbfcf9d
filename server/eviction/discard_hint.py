"""What an engine labels as of no more use goes first, leaves of the prefix tree first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import chain

from typing_extensions import override

from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.leaf_tree import LeafFirstEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.queues import ClassQueues

DISCARD = 1
"""The reuse hint that says a chunk is of no more use."""

_DISCARDED, _OTHERS = 0, 1
_TICK_BITS = 56


class DiscardHintEviction(LeafFirstEviction):
    """Evict the leaf used longest ago of those that are labelled "discard", else of the others.

    "Paging with succinct predictions" (Antoniadis et al., arXiv 2210.02775): one bit
    of prediction a request, and evict a page with a 1 if there is one. The bit here is the reuse
    hint of the AccessHistory; no hint, or "keep", is a 0. Ours departs from the paper in that among
    equals LRU decides, and that only leaves are candidates: a parent labelled "discard" waits
    for all that continues it.

    **Not robust.** It does whatever the bit says: where half of the bits are wrong it is far
    below LRU. For hints whose truth is not known use ``hit_density``, where the hint is a class
    whose reliability is learnt.

    Every event costs O(1), or O(log n) of the leaves that came into their queue late. 31 bytes
    a row.
    """

    def __init__(self, history: AccessHistory) -> None:
        super().__init__()
        self._history = history
        self._ranks: array[int] = self._column("Q")
        """The queue of each chunk, then when it was used, in one number."""
        self._queues = ClassQueues(self._ranks, 2)
        self._columns += self._queues.columns
        self._tick = 0
        history.on_hint.append(self._requeue)

    @override
    def _came(self, row: int, size_bytes: int, now_s: float) -> None:
        self._tick += 1
        self._ranks[row] = self._queue(row) << _TICK_BITS | self._tick

    def _queue(self, row: int) -> int:
        return _DISCARDED if self._history.reuse_of(row) == DISCARD else _OTHERS

    @override
    def _add_leaf(self, row: int, *, is_new: bool) -> None:
        self._queues.place(row, self._ranks[row] >> _TICK_BITS)

    @override
    def _drop_leaf(self, row: int) -> None:
        self._queues.remove(row)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        # From the last to the first: what begins a chain is to go after what ends it.
        for row in rows.tolist()[::-1]:
            self._tick += 1
            self._rank(row, self._tick)

    def _requeue(self, rows: Rows) -> None:
        """Follow hints that changed; the time of the last use stays."""
        for row in rows[rows < len(self._here)].tolist():
            if self._here[row]:
                self._rank(row, self._ranks[row] & ((1 << _TICK_BITS) - 1))

    def _rank(self, row: int, tick: int) -> None:
        is_leaf = self._is_leaf(row)
        if is_leaf:
            self._queues.remove(row)
        self._ranks[row] = self._queue(row) << _TICK_BITS | tick
        if is_leaf:
            self._add_leaf(row, is_new=False)

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        leaves = chain(self._queues.walk(_DISCARDED), self._queues.walk(_OTHERS))
        return self._name(leaves, self._ranks.__getitem__, keep)
