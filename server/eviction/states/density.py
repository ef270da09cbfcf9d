"""Hit density over states: what a byte of a resident state is worth, learnt from all askings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.eviction.reuse_statistics import DensityTable, bins_of
from kvstore.server.eviction.states.columns import Slots
from kvstore.server.eviction.states.prior import asked_before, forgotten_before
from kvstore.server.eviction.states.ranks import CheckpointRank, Scores
from kvstore.server.eviction.states.tree import CheckpointTree, Node

STATE_CLASSES = 21

_STRENGTH = 20.0
"""Far fewer states than chunks are seen, so a class counts for itself sooner."""

_REFRESH_REQUESTS = 20
_TURNS = (0, 1, 2, 3, 3, 3, 4)
_ONE_CHILD, _BRANCH = 5, 6
_HITS = 3


def state_class(node: Node) -> int:
    """Return the class of a position, below STATE_CLASSES.

    The end of a sequence is classed by its turn (0, 1, 2, 3 to 5, more), another position by
    whether sequences part there; each by how often it was asked for (0, 1, more).
    """
    if children := node.children:
        kind = _ONE_CHILD if children == 1 else _BRANCH
    else:
        kind = _TURNS[min(node.turn, len(_TURNS) - 1)]
    return kind * _HITS + min(node.hits, _HITS - 1)


class HitDensityRank(CheckpointRank):
    """Evict the state whose bytes promise the fewest tokens of hits for each second they stay.

    ``hits a second (class, age) x tokens that only this state saves / bytes that go with it``:
    the table is our DensityTable, of states that were evicted as of those that were not. A
    state that has just been made goes at once when all others are worth more. *warm* starts
    from the counts of ``prior``; else all classes are alike at first.
    """

    spares_new = False

    def __init__(self, tree: CheckpointTree, warm: bool = True) -> None:
        super().__init__(tree)
        self.table = DensityTable(np.zeros(STATE_CLASSES, np.intp), _STRENGTH)
        if warm:
            self.table.learned(asked_before(), forgotten_before())
            self.table.refresh(0.0, STATE_CLASSES)
        self._fresh: list[Node] = []
        """Nodes that begin to wait with this request, whose class is not known yet."""
        self._requests = 0

    @override
    def asked(self, node: Node, now_s: float) -> None:
        classes, last_s = self._waits(node)
        self.table.asked(classes, last_s, now_s)
        self._fresh.append(node)

    @override
    def used(self, node: Node, path: Sequence[Node]) -> None:
        self.tree.use(node)

    @override
    def kept(self, node: Node, now_s: float) -> None:
        self.tree.use(node)
        if node in self._fresh:
            return
        if self.tree.known.ever[node.number]:
            # It was not asked for, but is as new as if it had been.
            self.table.forgotten(*self._waits(node), now_s)
        self._fresh.append(node)

    @override
    def walked(self, path: Sequence[Node], now_s: float) -> None:
        known, came = self.tree.known, []
        for node in path:
            number, kind = node.number, state_class(node)
            if node in self._fresh:
                came.append(kind)
            elif known.ever[number] and known.classes[number] != kind:
                classes, last_s = self._waits(node)
                self.table.moved(classes, np.array([kind], np.uint16), last_s, now_s)
            known.classes[number] = kind
        self._fresh.clear()
        if came:
            self.table.wait(np.array(came, np.uint16), now_s)

    @override
    def forgot(self, node: Node, now_s: float) -> None:
        if self.tree.known.ever[node.number]:
            self.table.forgotten(*self._waits(node), now_s)

    def _waits(self, node: Node) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
        known, at = self.tree.known, slice(node.number, node.number + 1)
        return known.classes[at].copy(), known.last_s[at].copy()

    @override
    def answered(self, now_s: float) -> None:
        self._requests += 1
        if self._requests % _REFRESH_REQUESTS == 0:
            self.table.refresh(now_s, STATE_CLASSES)

    @override
    def scores(self, slots: Slots, now_s: float) -> Scores:
        held, known = self.tree.held, self.tree.known
        numbers = held.numbers[slots]
        bins = bins_of(now_s - known.last_s[numbers])
        density: Scores = self.table.values[known.classes[numbers], bins]
        return density * held.marginal[slots] / held.freed[slots]
