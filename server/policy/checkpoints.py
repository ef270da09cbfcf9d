"""The tree of token sequences with state checkpoints: what a hybrid model may start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.server.policy.checkpoint_columns import NO_SLOT, HeldColumns, KnownColumns
from kvstore.server.policy.hybrid_model import HybridModel

Tokens = NDArray[np.int32]

_NO_TOKENS: Tokens = np.zeros(0, np.int32)


class Node:
    """A position in some sequence: the end of an edge of tokens, with a state or without."""

    __slots__ = (
        "below",
        "children",
        "depth",
        "edge",
        "ends",
        "hits",
        "number",
        "parent",
        "queued",
        "slot",
        "slot_sum",
        "tick",
        "turn",
    )

    def __init__(self, edge: Tokens, parent: Node | None, depth: int, number: int) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, Node] = {}
        """By the first token of the child's edge."""
        self.depth = depth
        self.number = number
        self.slot = NO_SLOT
        """Where its state is in HeldColumns; NO_SLOT where there is none."""
        self.below = 0
        """Resident states here and further down: KV of the edge is kept for them."""
        self.slot_sum = 0
        """Sum of their slots, which names the only one where there is one."""
        self.tick = 0
        self.queued = False
        """Whether the queue of ghosts has it."""
        self.hits = 0
        self.turn = 0
        self.ends = False
        """Whether a request ended here, with its last decoded token."""

    @property
    def held(self) -> bool:
        """Whether the state at this position is resident."""
        return self.slot != NO_SLOT

    def up(self) -> Iterator[Node]:
        """Yield the node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Match:
    """How far a sequence is known: whole edges, and then a part of one."""

    path: list[Node]
    """Nodes whose edges match entirely, from the first."""
    into: Node | None
    """The child that matches only for its first *shared* tokens."""
    shared: int


class CheckpointTree:
    """Sequences of tokens, the positions in them that have states, and exact sizes.

    KV lies on edges: an edge has it while a resident state lies at its end or further down. A
    recurrent state stands for one position, so a prompt can start only from a node that matches
    entirely and whose state is resident (Marconi, section 4.1). Nodes without a state are
    *ghosts*: they say what was seen. Not thread-safe: the owner locks.

    ``size_bytes`` = states x state_bytes + tokens of edges with KV x kv_bytes_per_token, always.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self.root = Node(_NO_TOKENS, None, 0, NO_SLOT)
        self.known = KnownColumns()
        self.held = HeldColumns()
        self.size_bytes = 0
        self.nodes = 0
        """Nodes without the root."""
        self.tokens = 0
        """Tokens of all edges: four bytes each."""
        self.kept_tokens = 0
        """Those of edges with KV."""
        self.pinned = 0
        """Leases on states."""
        self._tick = 0

    # --- questions

    def match(self, tokens: Tokens) -> Match:
        """Return how far *tokens* [n] is known."""
        path: list[Node] = []
        node, at, end = self.root, 0, len(tokens)
        while at < end:
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            shared = _shared(child.edge, tokens[at : at + len(child.edge)])
            if shared < len(child.edge):
                return Match(path, child, shared)
            path.append(child)
            node = child
            at += shared
        return Match(path, None, 0)

    def bytes_alone(self, node: Node) -> int:
        """Return what a state would take if there were no other."""
        return self.model.state_bytes + node.depth * self.model.kv_bytes_per_token

    def pinned_bytes(self, also: Node) -> int:
        """Return what would be left if all went that may, and *also* had a state."""
        held = self.held
        pinned = np.flatnonzero((held.ticks > 0) & (held.pins > 0))
        ends = [held.node(slot) for slot in pinned.tolist()]
        states = len(ends) + (also not in ends)
        kept: dict[int, Node] = {}
        for end in (*ends, also):
            for node in end.up():
                if node.number in kept:
                    break
                kept[node.number] = node
        tokens = sum(len(node.edge) for node in kept.values())
        return states * self.model.state_bytes + tokens * self.model.kv_bytes_per_token

    def __iter__(self) -> Iterator[Node]:
        """Yield every node but the root; the tree may not change meanwhile."""
        left = list(self.root.children.values())
        while left:
            node = left.pop()
            left.extend(node.children.values())
            yield node

    # --- sequences

    def next_tick(self) -> int:
        """Return the number of the next event: what orders uses, whatever clocks say."""
        self._tick += 1
        return self._tick

    def extend(self, match: Match, tokens: Tokens) -> tuple[Node, Node]:
        """Make *tokens*, which *match* is of, known as a whole.

        Returns where they leave what was known (the end of *match*, split off where it lay
        inside an edge), and the node they end at; one node where all was known.
        """
        leaves = match.path[-1] if match.path else self.root
        if match.into is not None:
            leaves = self._split(match.into, match.shared)
        if leaves.depth == len(tokens):
            return leaves, leaves
        return leaves, self._append(leaves, tokens[leaves.depth :])

    def _split(self, child: Node, shared: int) -> Node:
        above = child.parent
        assert above is not None, "the root has no edge"
        node = Node(child.edge[:shared].copy(), above, above.depth + shared, self.known.add())
        child.edge = child.edge[shared:].copy()  # a view would keep the whole alive
        child.parent = node
        node.children[int(child.edge[0])] = child
        above.children[int(node.edge[0])] = node
        node.below, node.slot_sum = child.below, child.slot_sum
        self.nodes += 1
        return node

    def _append(self, above: Node, tokens: Tokens) -> Node:
        node = Node(tokens.copy(), above, above.depth + len(tokens), self.known.add())
        above.children[int(tokens[0])] = node
        self.nodes += 1
        self.tokens += len(tokens)
        return node

    def forget(self, node: Node) -> None:
        """Take out a node without a state and with at most one child, which takes its edge."""
        above = node.parent
        assert above is not None, "the root stays"
        assert not node.held, "a resident state is not forgotten"
        first = int(node.edge[0])
        if node.children:
            (child,) = node.children.values()
            child.edge = np.concatenate([node.edge, child.edge])
            child.parent = above
            above.children[first] = child
        else:
            del above.children[first]
            self.tokens -= len(node.edge)
        node.parent = None
        self.known.forget(node.number)
        self.nodes -= 1

    # --- states

    def hold(self, node: Node) -> None:
        """Let the state at *node*, which has none, be resident, and KV of all its path."""
        above = next((one for one in node.up() if one.below), None)
        shrunk = self._only(above) if above is not None and above.below == 1 else NO_SLOT
        held = self.held
        slot = node.slot = held.add(node)
        kept = 0
        for one in node.up():
            if not one.below:
                kept += len(one.edge)
                self._count_branch(one, 1)
            one.below += 1
            one.slot_sum += slot
        self._keep_tokens(kept)
        self.size_bytes += self.model.state_bytes
        nearest = next((one.slot for one in node.up() if one is not node and one.held), NO_SLOT)
        held.hang(np.array([slot]), nearest)
        if node.below > 1:
            held.hang(np.array(self._next_held(node), np.int64), slot)
        held.branches[slot] = sum(1 for child in node.children.values() if child.below)
        self._weigh(slot)
        if shrunk != NO_SLOT:
            self._weigh(shrunk)

    def drop(self, node: Node) -> None:
        """Give up the state at *node*, and KV that no other state needs. It becomes a ghost."""
        slot = node.slot
        node.slot = NO_SLOT
        self.held.remove(slot)
        kept = 0
        for one in node.up():
            one.below -= 1
            one.slot_sum -= slot
            if not one.below:
                kept -= len(one.edge)
                self._count_branch(one, -1)
        self._keep_tokens(kept)
        self.size_bytes -= self.model.state_bytes
        above = next((one for one in node.up() if one.below), None)
        if above is not None and above.below == 1:
            self._weigh(self._only(above))

    def use(self, node: Node) -> None:
        """Take note that a resident state was used just now."""
        self.held.ticks[node.slot] = self._tick + 1

    def pin(self, node: Node, count: int = 1) -> None:
        """Lease a resident state (*count* -1: give the lease back); it is not evicted before."""
        assert node.held, "only a resident state is leased"
        self.held.pins[node.slot] += count
        self.pinned += count

    def _keep_tokens(self, count: int) -> None:
        self.kept_tokens += count
        self.size_bytes += count * self.model.kv_bytes_per_token

    def _count_branch(self, child: Node, count: int) -> None:
        above = child.parent
        if above is not None and above.held:
            self.held.branches[above.slot] += count

    def _only(self, node: Node) -> int:
        """The slot of the one state at *node* or below it."""
        return node.slot_sum

    def _weigh(self, slot: int) -> None:
        node = self.held.node(slot)
        tokens = 0
        for one in node.up():
            if one.below > 1 or (one.held and one is not node):
                break
            tokens += len(one.edge)
        freed = self.model.state_bytes + tokens * self.model.kv_bytes_per_token
        self.held.freed[slot] = freed

    def _next_held(self, node: Node) -> list[int]:
        """The slots of the nearest states below *node*."""
        found: list[int] = []
        left = [child for child in node.children.values() if child.below]
        while left:
            one = left.pop()
            if one.held:
                found.append(one.slot)
            else:
                left.extend(child for child in one.children.values() if child.below)
        return found


def _shared(edge: Tokens, tokens: Tokens) -> int:
    """Return how many tokens are the same from the start."""
    if len(edge) != len(tokens):
        edge = edge[: len(tokens)]
    differs = edge != tokens
    first = int(differs.argmax())
    return first if differs[first] else len(tokens)
