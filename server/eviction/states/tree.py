"""The tree of token sequences with state checkpoints: what a hybrid model may start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.states.children import Children
from kvstore.server.eviction.states.columns import (
    MOST_HITS,
    MOST_TURNS,
    NO_SLOT,
    ROOT,
    HeldColumns,
    NodeColumns,
)
from kvstore.server.eviction.states.hybrid_model import HybridModel

Tokens = NDArray[np.int32]


class Node:
    """A position in some sequence: the end of an edge of tokens, with a state or without.

    What is known of it is in the columns of its tree; two of the same position are equal.
    """

    __slots__ = ("_tree", "number")

    def __init__(self, tree: CheckpointTree, number: int) -> None:
        self._tree = tree
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other.number == self.number and other._tree is self._tree

    def __hash__(self) -> int:
        return self.number

    @property
    def depth(self) -> int:
        """Tokens from the start of the sequence."""
        return self._tree.known.depths[self.number]

    @property
    def edge(self) -> Tokens:
        """The tokens from the parent to here; not to be written to."""
        return np.frombuffer(self._tree.known.edges[self.number], np.int32)

    @property
    def parent(self) -> Node | None:
        """The position before; None for the root, and for one that was forgotten."""
        is_forgotten = not self._tree.known.edges[self.number]
        return None if is_forgotten else Node(self._tree, self._tree.children.parents[self.number])

    @property
    def children(self) -> int:
        """How many edges go on from here."""
        return self._tree.children.counts[self.number]

    @property
    def slot(self) -> int:
        """Where its state is in HeldColumns; NO_SLOT where there is none."""
        return self._tree.known.slots[self.number]

    @property
    def held(self) -> bool:
        """Whether the state at this position is resident."""
        return self._tree.known.slots[self.number] != NO_SLOT

    @property
    def below(self) -> int:
        """Resident states here and further down."""
        return self._tree.known.below[self.number]

    @property
    def hits(self) -> int:
        """How often a request ran through, up to 65,535."""
        return self._tree.known.hits[self.number]

    def hit(self) -> None:
        """Count a request that runs through."""
        known = self._tree.known
        known.hits[self.number] = min(known.hits[self.number] + 1, MOST_HITS)

    @property
    def turn(self) -> int:
        """The turn of the conversation that ended here, from 0 up to 255."""
        return self._tree.known.turns[self.number]

    @property
    def ends(self) -> bool:
        """Whether a request ended here, with its last decoded token."""
        return self._tree.known.ends[self.number] == 1

    def end(self, turn: int) -> None:
        """Take note that a request ended here, the *turn*-th of its conversation."""
        known = self._tree.known
        known.turns[self.number], known.ends[self.number] = min(turn, MOST_TURNS), 1

    def up(self) -> Iterator[Node]:
        """Yield the node and its ancestors, without the root."""
        for number in self._tree.path_up(self.number):
            yield Node(self._tree, number)


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
    Memory: some 130 bytes a node with its ghost's place, 40 more a state, and the tokens of edges.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self.known = NodeColumns()
        self.held = HeldColumns()
        self.children = Children()
        self.root = Node(self, ROOT)
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
        number, at, end = ROOT, 0, len(tokens)
        edges, whole = self.known.edges, _bytes_of(tokens)
        while at < end:
            child = self.children.find(number, int(tokens[at]))
            if not child:
                break
            edge = edges[child]
            if not whole.startswith(edge, 4 * at):
                known = np.frombuffer(edge, np.int32)
                return Match(path, Node(self, child), _shared(known, tokens[at : at + len(known)]))
            path.append(Node(self, child))
            number = child
            at += len(edge) // 4
        return Match(path, None, 0)

    def path_up(self, number: int) -> Iterator[int]:
        """Yield a position and those before it, without the root."""
        parents = self.children.parents
        while number:
            yield number
            number = parents[number]

    def state(self, slot: int) -> Node:
        """Return the position of the state in a slot."""
        return Node(self, int(self.held.numbers[slot]))

    def bytes_alone(self, node: Node) -> int:
        """Return what a state would take if there were no other."""
        return self.model.state_bytes + node.depth * self.model.kv_bytes_per_token

    def pinned_bytes(self, also: Node) -> int:
        """Return what would be left if all went that may, and *also* had a state."""
        held = self.held
        ends = {also.number, *held.numbers[(held.ticks > 0) & (held.pins > 0)].tolist()}
        kept: set[int] = set()
        for end in ends:
            for number in self.path_up(end):
                if number in kept:
                    break
                kept.add(number)
        tokens = sum(map(self._edge_tokens, kept))
        return len(ends) * self.model.state_bytes + tokens * self.model.kv_bytes_per_token

    def _edge_tokens(self, number: int) -> int:
        return len(self.known.edges[number]) // 4

    def __iter__(self) -> Iterator[Node]:
        """Yield every node but the root; the tree may not change meanwhile."""
        left = list(self.children.of(ROOT))
        while left:
            number = left.pop()
            left.extend(self.children.of(number))
            yield Node(self, number)

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
        leaves = match.path[-1].number if match.path else ROOT
        if match.into is not None:
            leaves = self._split(match.into.number, match.shared)
        depth = self.known.depths[leaves]
        if depth == len(tokens):
            return Node(self, leaves), Node(self, leaves)
        return Node(self, leaves), Node(self, self._append(leaves, tokens[depth:]))

    def _add(self, depth: int, edge: bytes) -> int:
        number = self.known.add(depth, edge)
        self.children.reach(number + 1)
        self.nodes += 1
        return number

    def _split(self, child: int, shared: int) -> int:
        known, children = self.known, self.children
        above, edge = children.parents[child], known.edges[child]
        number = self._add(known.depths[above] + shared, edge[: 4 * shared])
        known.edges[child] = edge[4 * shared :]
        children.unlink(child)
        children.link(number, above, _first_of(edge))
        children.link(child, number, _first_of(known.edges[child]))
        known.below[number] = known.below[child]
        known.slots_below[number] = known.slots_below[child]
        return number

    def _append(self, above: int, tokens: Tokens) -> int:
        number = self._add(self.known.depths[above] + len(tokens), _bytes_of(tokens))
        self.children.link(number, above, int(tokens[0]))
        self.tokens += len(tokens)
        return number

    def forget(self, node: Node) -> None:
        """Take out a node without a state and with at most one child, which takes its edge."""
        known, children, number = self.known, self.children, node.number
        assert number != ROOT, "the root stays"
        assert not node.held, "a resident state is not forgotten"
        above, edge = children.parents[number], known.edges[number]
        child = next(children.of(number), ROOT)
        children.unlink(number)
        if child:
            children.unlink(child)
            known.edges[child] = edge + known.edges[child]
            children.link(child, above, _first_of(edge))
        else:
            self.tokens -= len(edge) // 4
        known.forget(number)
        self.nodes -= 1

    # --- states

    def hold(self, node: Node) -> None:
        """Let the state at *node*, which has none, be resident, and KV of all its path."""
        known, held, number = self.known, self.held, node.number
        below, slots = known.below, known.slots
        path = list(self.path_up(number))
        above = next((one for one in path if below[one]), ROOT)
        shrunk = known.slots_below[above] if below[above] == 1 else NO_SLOT
        slot = slots[number] = held.add(number, known.depths[number])
        kept = 0
        for one in path:
            if not below[one]:
                kept += self._edge_tokens(one)
                self._count_branch(one, 1)
            below[one] += 1
            known.slots_below[one] ^= slot
        self._keep_tokens(kept)
        self.size_bytes += self.model.state_bytes
        nearest = next((slots[one] for one in path[1:] if slots[one] != NO_SLOT), NO_SLOT)
        held.hang(np.array([slot]), nearest)
        if below[number] > 1:
            held.hang(np.array(self._next_held(number), np.int64), slot)
        held.branches[slot] = sum(1 for child in self.children.of(number) if below[child])
        self._weigh(slot)
        if shrunk != NO_SLOT:
            self._weigh(shrunk)

    def drop(self, node: Node) -> None:
        """Give up the state at *node*, and KV that no other state needs. It becomes a ghost."""
        known, number = self.known, node.number
        below, slot = known.below, known.slots[number]
        known.slots[number] = NO_SLOT
        self.held.remove(slot)
        path = list(self.path_up(number))
        kept = 0
        for one in path:
            below[one] -= 1
            known.slots_below[one] ^= slot
            if not below[one]:
                kept -= self._edge_tokens(one)
                self._count_branch(one, -1)
        self._keep_tokens(kept)
        self.size_bytes -= self.model.state_bytes
        above = next((one for one in path if below[one]), ROOT)
        if below[above] == 1:
            self._weigh(known.slots_below[above])

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

    def _count_branch(self, child: int, count: int) -> None:
        slot = self.known.slots[self.children.parents[child]]
        if slot != NO_SLOT:
            self.held.branches[slot] += count

    def _weigh(self, slot: int) -> None:
        known, number = self.known, int(self.held.numbers[slot])
        tokens = 0
        for one in self.path_up(number):
            if known.below[one] > 1 or (one != number and known.slots[one] != NO_SLOT):
                break
            tokens += self._edge_tokens(one)
        freed = self.model.state_bytes + tokens * self.model.kv_bytes_per_token
        self.held.freed[slot] = freed

    def _next_held(self, number: int) -> Sequence[int]:
        """The slots of the nearest states below a position."""
        below, slots = self.known.below, self.known.slots
        found: list[int] = []
        left = [child for child in self.children.of(number) if below[child]]
        while left:
            one = left.pop()
            if slots[one] != NO_SLOT:
                found.append(slots[one])
            else:
                left.extend(child for child in self.children.of(one) if below[child])
        return found


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype(np.int32, copy=False).tobytes()


def _first_of(edge: bytes) -> int:
    return int(np.frombuffer(edge, np.int32, 1)[0])


def _shared(edge: Tokens, tokens: Tokens) -> int:
    """Return how many tokens are the same from the start."""
    if len(edge) != len(tokens):
        edge = edge[: len(tokens)]
    differs = edge != tokens
    first = int(differs.argmax())
    return first if differs[first] else len(tokens)
