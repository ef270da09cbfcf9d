"""What an engine labels as of no more use goes first, leaves of the prefix tree first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from typing_extensions import override

from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction

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
    reliability is learnt. 31 bytes a row.
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
