"""How much is remembered of sequences that have no state: the oldest go first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import spare_rows
from kvstore.server.eviction.queues import RowHeap
from kvstore.server.eviction.states.columns import ROOT
from kvstore.server.eviction.states.hybrid_model import HybridModel
from kvstore.server.eviction.states.tree import CheckpointTree, Node

TOKENS_PER_KEPT = 16
"""Tokens remembered for each one that the capacity has KV for: 64 bytes beside 65,536."""

NODES_PER_STATE = 64
"""Nodes remembered for each state that the capacity has room for: 130 bytes each beside 26.8 MB."""

GHOST_NODES = 1 << 18
"""The same, whatever the capacity."""

_DEPTH_BITS = 24
_MOST_DEPTH = (1 << _DEPTH_BITS) - 1
"""Deeper ones count as this deep, where it matters who of one request goes first."""


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
    are fewer of those than there are leaves. Each ghost has at most one entry in the queue, which
    is a heap of numbers: 16 bytes a node.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self.limits = limits
        self._ages = array("Q", [0])
        """What each node was queued by: its tick then, and of one tick the deeper first."""
        self._queue = RowHeap(self._ages)

    def touch(self, nodes: Iterable[Node], tick: int) -> None:
        """Take note that *nodes* were used just now."""
        ticks = self._tree.known.ticks
        for node in nodes:
            ticks[node.number] = tick
            self.enter(node)

    def enter(self, node: Node) -> None:
        """Take note of a node that may have no state any more; its age is what it was."""
        if node.number != ROOT and not node.held:
            self._enter(node.number)

    def _enter(self, number: int) -> None:
        if number >= len(self._ages):
            count = number + 1 - len(self._ages) + spare_rows(number)
            self._ages.frombytes(bytes(count * self._ages.itemsize))
            self._queue.extend(count)
        if number not in self._queue:
            known = self._tree.known
            # Of one age the deeper goes first: what is above may be shared.
            rise = _MOST_DEPTH - min(known.depths[number], _MOST_DEPTH)
            self._ages[number] = known.ticks[number] << _DEPTH_BITS | rise
            self._queue.push(number)

    def trim(self, forgot: Callable[[Node], None]) -> None:
        """Forget the oldest until the limits hold, or nothing more can be forgotten.

        *forgot* is told of each just before.
        """
        tree, queue = self._tree, self._queue
        while len(queue) and self._is_over():
            number = queue.first()
            queue.remove(number)
            node = Node(tree, number)
            if node.held or node.children > 1:
                continue
            if self._ages[number] >> _DEPTH_BITS != tree.known.ticks[number]:
                self._enter(number)
                continue
            above = Node(tree, tree.children.parents[number])
            forgot(node)
            tree.forget(node)
            self.enter(above)

    def _is_over(self) -> bool:
        tree, limits = self._tree, self.limits
        ghosts = tree.nodes - len(tree.held)
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens

    def __len__(self) -> int:
        """Entries in the queue, those included that turned out to be no ghosts."""
        return len(self._queue)
