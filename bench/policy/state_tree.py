"""The tree of token sequences with state checkpoints of a hybrid model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class HybridModel(NamedTuple):
    """The recurrent (Mamba2) and attention layers of a model without grouped heads.

    Sizes are those of Marconi (Pan et al., MLSys 2025, section 5 and appendix), two bytes a number:
    KV grows with the tokens, a recurrent state has one size and belongs to one position.
    """

    state_layers: int
    attention_layers: int
    width: int
    """Hidden size, D."""
    state_width: int
    """States a channel has, N."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: the states and convolution windows of all recurrent layers."""
        window = 2 * (self.width + self.state_width) * 4  # expanded twice, four tokens
        return self.state_layers * (self.width * self.state_width + window) * 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all attention layers."""
        return self.attention_layers * 2 * self.width * 2


HYBRID_7B = HybridModel(24, 4, 4096, 128)
"""NVIDIA's attention-Mamba2 hybrid of 7 B, as in Marconi's evaluation."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A position in a sequence: the end of an edge of tokens, with a state or without."""

    parent: Node | None
    """None for the root and for removed nodes."""
    edge: bytes
    """The tokens from the parent to here, int32 each."""
    depth: int
    """Tokens from the start of the sequence."""
    children: tuple[Node, ...] = ()
    """Ordered by their edges, which begin with different tokens."""
    below: int = 0
    """Resident states here and below; while there are any, KV of the edge is kept."""
    tick: int = 0
    """The last request along this node."""
    queued: int = 0
    """The tick in the queue of Ghosts; 0 if not queued."""
    hits: int = 0
    """Requests that started from it, or would have with its state."""
    next_turn: int = 0
    """The next turn of a conversation that ended here, else 0."""
    last_s: float | None = None
    """When a request last used or stored the state here; None if there never was one."""
    kind: int = 0
    """Its class at the last request."""
    used: int = 0
    """The last request that used its state; 0 without one."""
    marginal: int = 0
    """Tokens from the nearest resident state above to this one."""
    alone: int = 0
    """Tokens of edges whose KV only this state needs."""

    @property
    def held(self) -> bool:
        """Whether the state at this position is resident."""
        return self.used > 0

    def __lt__(self, other: Node) -> bool:
        """Order by the queued tick, then deeper first, as upper nodes may be shared."""
        return (self.queued, -self.depth) < (other.queued, -other.depth)

    def path_up(self) -> Iterator[Node]:
        """Yield the node and those above it, without the root."""
        one = self
        while one.parent is not None:
            yield one
            one = one.parent


class Match(NamedTuple):
    """The known prefix of a sequence: whole edges, then a part of one."""

    path: list[Node]
    """Nodes whose edges match entirely, from the root."""
    into: Node | None
    """The child of which only the first *shared* tokens match."""
    shared: int


class CheckpointTree:
    """Sequences of tokens, the positions in them that have states, and exact sizes.

    An edge has KV while there is a resident state at its end or below. A recurrent state belongs
    to one position, so a prompt can start only from a node that matches entirely and has a
    resident state (Marconi, section 4.1). Nodes without a state are *ghosts*. Not thread-safe.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self.root = Node(None, b"", 0)
        self.held: dict[Node, None] = {}
        """Nodes with a state, in insertion order."""
        self.nodes = 0
        """Number of nodes without the root."""
        self.tokens = 0
        """Tokens of all edges: four bytes each."""
        self.kept_tokens = 0
        """Tokens of edges with KV."""
        self.tick = 1
        """The number of the last request; orders uses."""

    # --- reading

    @property
    def size_bytes(self) -> int:
        """Bytes of the states and of their KV."""
        kv_bytes = self.kept_tokens * self.model.kv_bytes_per_token
        return len(self.held) * self.model.state_bytes + kv_bytes

    def match(self, tokens: Tokens) -> Match:
        """Return the known prefix of *tokens* [n]."""
        path: list[Node] = []
        node, whole = self.root, _bytes_of(tokens)
        while node.depth < len(tokens):
            at = 4 * node.depth
            child = _child(node, whole[at : at + 4])
            if child is None:
                break
            if not whole.startswith(child.edge, at):
                edge = np.frombuffer(child.edge, np.int32)
                return Match(path, child, _shared(edge, tokens[node.depth :]))
            path.append(child)
            node = child
        return Match(path, None, 0)

    # --- sequences

    def extend(self, match: Match, tokens: Tokens) -> tuple[Node, Node]:
        """Add all of *tokens*, whose known prefix is *match*.

        Returns the node at the end of *match* (an edge is split if necessary) and the node at the
        end of *tokens*; the same node if all were known.
        """
        fork = match.path[-1] if match.path else self.root
        if match.into is not None:
            fork = self._split(match.into, match.shared)
        if fork.depth == len(tokens):
            return fork, fork
        end = Node(fork, _bytes_of(tokens[fork.depth :]), len(tokens))
        _link(end, fork)
        self.nodes += 1
        self.tokens += len(tokens) - fork.depth
        return fork, end

    def _split(self, child: Node, shared: int) -> Node:
        above, edge = child.parent, child.edge
        assert above is not None, "the root has no edge"
        node = Node(above, edge[: 4 * shared], above.depth + shared)
        _link(node, above)
        child.edge = edge[4 * shared :]
        _link(child, node)
        node.below = child.below
        self.nodes += 1
        return node

    def forget(self, node: Node) -> None:
        """Remove a node without a state and with at most one child, which inherits its edge."""
        above = node.parent
        assert above is not None, "the root stays"
        assert not node.held, "a node with a resident state is not removed"
        if node.children:
            (child,) = node.children
            child.edge = node.edge + child.edge
            _link(child, above)
        else:
            above.children = tuple(child for child in above.children if child is not node)
            self.tokens -= len(node.edge) // 4
        self.nodes -= 1

    # --- states

    def hold(self, node: Node) -> None:
        """Make a state at *node* resident, which has none, and KV of its path."""
        alone = _only_state(node)
        self.held[node] = None
        node.used = self.tick
        self._count(node, 1)
        self._weigh([node, *_next_held(node), *alone])

    def drop(self, node: Node) -> None:
        """Drop the state at *node*, and KV that no other state needs. It becomes a ghost."""
        del self.held[node]
        node.used = 0
        self._count(node, -1)
        self._weigh([*_next_held(node), *_only_state(node)])

    def _count(self, node: Node, change: int) -> None:
        """Count a state added at *node* (1) or removed (-1)."""
        tokens = 0
        for one in node.path_up():
            before, one.below = one.below, one.below + change
            if not before or not one.below:
                tokens += len(one.edge) // 4
        self.kept_tokens += change * tokens

    def _weigh(self, nodes: Iterable[Node]) -> None:
        """Update ``marginal`` and ``alone`` of *nodes*."""
        for node in nodes:
            shared = node
            while shared.below == 1 and shared.parent:
                shared = shared.parent
            node.alone = node.depth - shared.depth
            above = next((one for one in node.path_up() if one.held and one is not node), self.root)
            node.marginal = node.depth - above.depth


_edge = attrgetter("edge")


def _child(node: Node, first: bytes) -> Node | None:
    """Return the child whose edge begins with the token *first*."""
    at = bisect_left(node.children, first, key=_edge)
    found = node.children[at : at + 1]
    return found[0] if found and found[0].edge.startswith(first) else None


def _link(node: Node, parent: Node) -> None:
    """Make *node* a child of *parent*, in place of one whose edge begins with the same token."""
    first, children = node.edge[:4], parent.children
    at = bisect_left(children, first, key=_edge)
    after = at + (_child(parent, first) is not None)
    parent.children = (*children[:at], node, *children[after:])
    node.parent = parent


def _next_held(node: Node) -> list[Node]:
    """Return the nearest nodes with a state below *node*."""
    found: list[Node] = []
    left = [child for child in node.children if child.below]
    while left:
        one = left.pop()
        if one.held:
            found.append(one)
        else:
            left.extend(child for child in one.children if child.below)
    return found


def _only_state(node: Node) -> list[Node]:
    """Return the state that alone needs the KV of edges from *node* up, if there is one."""
    above = next((one for one in node.path_up() if one.below), None)
    if above is None or above.below > 1:
        return []
    return [above] if above.held else _next_held(above)


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype(np.int32, copy=False).tobytes()


def _shared(edge: Tokens, tokens: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(len(edge), len(tokens))
    differs = edge[:length] != tokens[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
