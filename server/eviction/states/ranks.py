"""Which resident state goes next: by recency, or by what is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.eviction.reuse_statistics import AGE_BINS, DensityTable, bins_of
from kvstore.server.eviction.states.tree import CheckpointTree, Node

Scores = NDArray[np.float64]


class LruRank:
    """The order in which the states of one tree are evicted: the smallest score first.

    Here that is the state that was started from or made longest ago; one that two branches need
    stays. These are Marconi's candidates (section 4.3: at most one child) with recency alone.
    Each request calls the hooks in the order they have here. Times never go back.
    """

    spares_new = True
    """Whether the state a request ended with stays while any other can go."""

    def __init__(self, tree: CheckpointTree) -> None:
        self.tree = tree

    def served(
        self, path: Sequence[Node], asked: Node | None, kept: Sequence[Node], now_s: float
    ) -> None:
        """A request ran through *path*, its new nodes included: *asked* had a state once and
        counts as its hit, those of *kept* have one now. Their ``last_s`` are those of before.
        """

    def forgot(self, node: Node, now_s: float) -> None:
        """A position without a state is not remembered any longer."""

    def answered(self, now_s: float) -> None:
        """The request is done."""

    def victim(self, spared: Node | None, now_s: float) -> Node | None:
        """Return whose state goes next, of equal scores the oldest; None if none may."""
        nodes = [node for node in self.tree.held() if node is not spared]
        if not nodes:
            return None
        nodes = self.candidates(nodes)
        scores = self.scores(nodes, now_s)
        equal = np.flatnonzero(scores == scores.min())
        return min((nodes[at] for at in equal.tolist()), key=lambda node: node.used)

    def candidates(self, nodes: list[Node]) -> list[Node]:
        """Return those of *nodes*, at least one, whose states may go now."""
        return [node for node in nodes if node.branches <= 1] or nodes

    def scores(self, nodes: Sequence[Node], now_s: float) -> Scores:
        """Return what each state is worth, to be compared among each other only."""
        return np.array([node.used for node in nodes], np.float64)


class LeafLruRank(LruRank):
    """Leaves only, and a use counts for the whole path: SGLang+ of Marconi's evaluation.

    The leaf-LRU of RadixAttention (Zheng et al., arXiv 2312.07104, section 3.1) over states.
    """

    @override
    def served(
        self, path: Sequence[Node], asked: Node | None, kept: Sequence[Node], now_s: float
    ) -> None:
        for node in path:
            if node.held:
                node.used = self.tree.tick

    @override
    def candidates(self, nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if not node.branches] or nodes


STATE_CLASSES = 21

PRIOR = Path(__file__).with_name("prior.txt")
"""What hit density starts from: counts of other runs, as ``read_prior`` returns them.

Learnt by ``python -m bench.policy --learn`` on the token traces in data/traces named dev_*
(all our own, synthetic but for one cut from Mooncake's conversation trace, Apache-2.0): the counts
that a rank without a prior had at the end of each trace, the mean over three capacities, summed
over six traces and times 0.3, so that what is seen outweighs them after some thousand requests.
"""

_STRENGTH = 20.0
"""Far fewer states than chunks are seen, so a class counts for itself sooner."""

_REFRESH_REQUESTS = 20
_TURNS = (0, 1, 2, 3, 3, 3, 4)
_ONE_CHILD, _BRANCH = 5, 6
_HITS = 3


def read_prior() -> NDArray[np.float64]:
    """Return states asked for again and not: (2, STATE_CLASSES, AGE_BINS)."""
    counts = np.array(PRIOR.read_text().split(), np.float64)
    return counts.reshape(2, STATE_CLASSES, AGE_BINS)


def state_class(node: Node) -> int:
    """Return the class of a position, below STATE_CLASSES.

    The end of a sequence is classed by its turn (0, 1, 2, 3 to 5, more), another position by
    whether sequences part there; each by how often it was asked for (0, 1, more).
    """
    if children := node.children:
        kind = _ONE_CHILD if len(children) == 1 else _BRANCH
    else:
        kind = _TURNS[min(max(node.next_turn - 1, 0), len(_TURNS) - 1)]
    return kind * _HITS + min(node.hits, _HITS - 1)


class HitDensityRank(LruRank):
    """Evict the state whose bytes promise the fewest tokens of hits for each second they stay.

    ``hits a second (class, age) x tokens that only this state saves / bytes that go with it``:
    the table is our DensityTable, of states that were evicted as of those that were not. A
    state that has just been made goes at once when all others are worth more. *warm* starts
    from the counts of PRIOR; else all classes are alike at first.
    """

    spares_new = False

    def __init__(self, tree: CheckpointTree, warm: bool = True) -> None:
        super().__init__(tree)
        self.table = DensityTable(np.zeros(STATE_CLASSES, np.intp), _STRENGTH)
        if warm:
            self.table.learned(*read_prior())
            self.table.refresh(0.0, STATE_CLASSES)
        self._requests = 0

    @override
    def served(
        self, path: Sequence[Node], asked: Node | None, kept: Sequence[Node], now_s: float
    ) -> None:
        if asked is not None:
            self.table.requested(*self._waits(asked), now_s)
        for node in kept:
            if node is not asked and node.last_s is not None:
                # It was not asked for, but is as new as if it had been.
                self.table.forgotten(*self._waits(node), now_s)
        came = []
        for node in path:
            kind = state_class(node)
            if node is asked or node in kept:
                came.append(kind)
            elif node.last_s is not None and node.kind != kind:
                classes, last_s = self._waits(node)
                self.table.moved(classes, np.array([kind], np.uint16), last_s, now_s)
            node.kind = kind
        if came:
            self.table.wait(np.array(came, np.uint16), now_s)

    @override
    def forgot(self, node: Node, now_s: float) -> None:
        if node.last_s is not None:
            self.table.forgotten(*self._waits(node), now_s)

    def _waits(self, node: Node) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
        return np.array([node.kind], np.uint16), np.array([node.last_s])

    @override
    def answered(self, now_s: float) -> None:
        self._requests += 1
        if self._requests % _REFRESH_REQUESTS == 0:
            self.table.refresh(now_s, STATE_CLASSES)

    @override
    def candidates(self, nodes: list[Node]) -> list[Node]:
        return nodes

    @override
    def scores(self, nodes: Sequence[Node], now_s: float) -> Scores:
        model = self.tree.model
        bins = bins_of(now_s - np.array([node.last_s for node in nodes]))
        density = self.table.values[[node.kind for node in nodes], bins]
        marginal, alone = np.array([(node.marginal, node.alone) for node in nodes]).T
        freed = model.state_bytes + model.kv_bytes_per_token * alone
        scores: Scores = density * marginal / freed
        return scores
