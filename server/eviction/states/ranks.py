"""Which resident state goes next: ranks by recency and by what a state saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.server.eviction.states.columns import Slots
from kvstore.server.eviction.states.tree import CheckpointTree, Node

Scores = NDArray[np.float64]


class CheckpointRank(ABC):
    """The order in which the states of one tree are given up: the smallest score first.

    Told of every request, in the order of the methods here. Times never go back.
    """

    spares_new = True
    """Whether the state a request ended with stays while any other can go."""

    def __init__(self, tree: CheckpointTree) -> None:
        self.tree = tree

    def asked(self, node: Node, now_s: float) -> None:  # noqa: B027 - most do not care
        """A request runs through a position that had a state once, and counts as its hit."""

    @abstractmethod
    def used(self, node: Node, path: Sequence[Node]) -> None:
        """A request starts from the state at *node*, the last of its *path* that has one."""

    @abstractmethod
    def kept(self, node: Node, now_s: float) -> None:
        """A request left the state at *node*, which may have been resident before."""

    def walked(self, path: Sequence[Node], now_s: float) -> None:  # noqa: B027
        """These are the nodes of the request, its new ones included."""

    def forgot(self, node: Node, now_s: float) -> None:  # noqa: B027
        """A position without a state is not remembered any longer."""

    def answered(self, now_s: float) -> None:  # noqa: B027
        """The request is done."""

    def victim(self, spared: Collection[int], now_s: float) -> Node | None:
        """Return whose state goes next; None if none may. Slots in *spared* stay.

        Of equal scores that goes which was used longest ago.
        """
        held = self.tree.held
        slots = held.evictable()
        if spared:
            slots = slots[~np.isin(slots, np.fromiter(spared, np.int64))]
        if not len(slots):
            return None
        slots = self.candidates(slots)
        scores = self.scores(slots, now_s)
        equal = slots[scores == scores.min()]
        return self.tree.state(int(equal[held.ticks[equal].argmin()]))

    def candidates(self, slots: Slots) -> Slots:
        """Return those of *slots*, at least one, that may go now."""
        return slots

    @abstractmethod
    def scores(self, slots: Slots, now_s: float) -> Scores:
        """Return what each state is worth, to be compared among each other only."""


class LruRank(CheckpointRank):
    """The state that was started from or made longest ago; one that two branches need stays.

    Marconi's candidates (section 4.3: at most one child) with recency alone.
    """

    @override
    def used(self, node: Node, path: Sequence[Node]) -> None:
        self.tree.use(node)

    @override
    def kept(self, node: Node, now_s: float) -> None:
        self.tree.use(node)

    @override
    def candidates(self, slots: Slots) -> Slots:
        narrow = slots[self.tree.held.branches[slots] <= 1]
        return narrow if len(narrow) else slots

    @override
    def scores(self, slots: Slots, now_s: float) -> Scores:
        return self.tree.held.ticks[slots].astype(np.float64)


class LeafLruRank(LruRank):
    """Leaves only, and a use counts for the whole path: SGLang+ of Marconi's evaluation.

    The leaf-LRU of RadixAttention (Zheng et al., arXiv 2312.07104, section 3.1) over states.
    """

    @override
    def walked(self, path: Sequence[Node], now_s: float) -> None:
        for node in path:
            if node.held:
                self.tree.use(node)

    @override
    def candidates(self, slots: Slots) -> Slots:
        leaves = slots[self.tree.held.branches[slots] == 0]
        return leaves if len(leaves) else slots


class MarconiRank(LruRank):
    """Recency + alpha x FLOPs saved per byte, each between 0 and 1 among the candidates.

    Marconi (Pan et al., MLSys 2025, section 4.3, equations 1 and 2): recency is 1 over the
    events since the last use, FLOPs are those from the nearest state above, bytes are a state
    and the KV of all tokens before it. Alpha 0 is ``LruRank``.
    """

    def __init__(self, tree: CheckpointTree, alpha: float = 0.0) -> None:
        super().__init__(tree)
        self.alpha = alpha

    @override
    def scores(self, slots: Slots, now_s: float) -> Scores:
        held, model = self.tree.held, self.tree.model
        depths = held.depths[slots].astype(np.float64)
        above = depths - held.marginal[slots]
        each, squared = model.flops_per_token, model.flops_per_token_squared
        flops = each * (depths - above) + squared * (depths**2 - above**2)
        size_bytes = model.state_bytes + model.kv_bytes_per_token * depths
        recency = 1.0 / (held.ticks.max() + 1 - held.ticks[slots])
        return _between(recency) + self.alpha * _between(flops / size_bytes)


def _between(values: Scores) -> Scores:
    """Return the values moved to 0 to 1; ones where all are equal."""
    least, most = values.min(), values.max()
    if most <= least:
        return np.ones(len(values))
    between: Scores = (values - least) / (most - least)
    return between
