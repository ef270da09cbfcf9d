"""How much is remembered of sequences that have no state: the oldest go first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.policy.checkpoints import CheckpointTree, Node
from kvstore.server.policy.hybrid_model import HybridModel

TOKENS_PER_KEPT = 16
"""Tokens remembered for each one that the capacity has KV for: 64 bytes beside 65,536."""

NODES_PER_STATE = 64
"""Nodes remembered for each state that the capacity has room for: 0.7 kB each beside 26.8 MB."""

GHOST_NODES = 1 << 18
"""The same, whatever the capacity."""


@dataclass(frozen=True)
class GhostLimits:
    """What may be remembered beyond resident states; 0 of anything is no ghosts at all.

    The ghosts of the reference are without limit. Tokens are what they cost: four bytes each.
    """

    nodes: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("nodes", "tokens"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(name, getattr(self, name), "at least 0")

    @classmethod
    def of(cls, model: HybridModel, capacity_bytes: int) -> GhostLimits:
        """Return the limits that go with a capacity."""
        nodes = NODES_PER_STATE * capacity_bytes // model.state_bytes
        tokens = TOKENS_PER_KEPT * capacity_bytes // model.kv_bytes_per_token
        return cls(min(nodes, GHOST_NODES), tokens)


NO_GHOSTS = GhostLimits(0, 0)


class Ghosts:
    """The nodes of a tree without a state, in the order of their last use.

    A node with two children or more stays whatever its age, as only it tells them apart; there
    are fewer of those than there are leaves. Each ghost has at most one entry in the queue.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self.limits = limits
        self._queue: list[tuple[int, int, int, Node]] = []

    def touch(self, nodes: Iterable[Node], tick: int) -> None:
        """Take note that nodes were walked over or made just now."""
        for node in nodes:
            node.tick = tick
            self.enter(node)

    def enter(self, node: Node) -> None:
        """Take note of a node that may have no state any more; its age is what it was."""
        if not (node.held or node.queued or node.parent is None):
            node.queued = True
            # Of one age the deeper goes first: what is above may be shared.
            heapq.heappush(self._queue, (node.tick, -node.depth, node.number, node))

    def trim(self, forgot: Callable[[Node], None]) -> None:
        """Forget the oldest until the limits hold, or nothing more can be forgotten.

        *forgot* is told of each just before.
        """
        while self._queue and self._is_over():
            tick, _, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.parent is None or node.held or len(node.children) > 1:
                continue
            if node.tick != tick:
                self.enter(node)
                continue
            above = node.parent
            forgot(node)
            self._tree.forget(node)
            self.enter(above)

    def _is_over(self) -> bool:
        tree, limits = self._tree, self.limits
        ghosts = tree.nodes - len(tree.held)
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens

    def __len__(self) -> int:
        """Entries in the queue, those included that turned out to be no ghosts."""
        return len(self._queue)
