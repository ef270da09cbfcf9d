"""The tree of token sequences with state checkpoints: what a hybrid model may start from.

What is known of its positions is in columns, so that a whole tree is scored at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import spare_rows

Tokens = NDArray[np.int32]
Slots = NDArray[np.intp]

NO_SLOT = -1
ROOT = 0
"""The number of the root, which has no parent."""

_FIRST_ROWS = 64
_TOKEN_MASK = 0xFFFFFFFF
_PARENT_FACTOR, _TOKEN_FACTOR = 0x9E3779B1, 0x85EBCA6B
_SHIFT = 15
_MOST_HITS, _MOST_TURNS = 0xFFFF, 0xFF


@dataclass(frozen=True)
class HybridModel:
    """A stack of recurrent (Mamba2), attention and MLP layers, without grouped heads.

    The formulas are those of Marconi (Pan et al., MLSys 2025, section 5 and appendix): KV grows
    with the tokens, a recurrent state is of one size and is of exactly one position.
    """

    name: str
    state_layers: int
    attention_layers: int
    mlp_layers: int
    width: int
    """Hidden size, D."""
    state_width: int
    """States a channel has, N."""
    element_bytes: int = 2
    conv_kernel: int = 4
    expand: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value < 1:
                raise InvalidRequestError(field.name, value, "at least 1")

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: the states and convolution windows of all recurrent layers."""
        window = self.expand * (self.width + self.state_width) * self.conv_kernel
        return self.state_layers * (self.width * self.state_width + window) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all attention layers."""
        return self.attention_layers * 2 * self.width * self.element_bytes

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a prefill that grow with its tokens."""
        wide = self.width * self.width
        recurrent = 12 * wide + 16 * self.width * self.state_width + 10 * self.width
        return (
            self.state_layers * recurrent
            + self.attention_layers * 8 * wide
            + self.mlp_layers * 16 * wide
        )

    @property
    def flops_per_token_squared(self) -> int:
        """FLOPs of a prefill that grow with the square of its tokens: attention's."""
        return self.attention_layers * 4 * self.width

    def flops(self, tokens: int) -> int:
        """FLOPs of a prefill of *tokens* tokens; exact, so that sums are in any order."""
        return (self.flops_per_token + self.flops_per_token_squared * tokens) * tokens


HYBRID_7B = HybridModel("hybrid-7b", 24, 4, 28, 4096, 128)
"""NVIDIA's attention-Mamba2 hybrid of 7 B, as in Marconi's evaluation."""


class _Columns:
    """Columns of one length with a list of free places; all grow by a sixteenth, with zeros."""

    def __init__(self) -> None:
        self._free = array("I")
        self._end = 0
        self._length = _FIRST_ROWS

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        if self._end > self._length:
            count = spare_rows(self._length)
            self._length += count
            for name, column in list(vars(self).items()):
                if isinstance(column, np.ndarray):
                    setattr(self, name, np.concatenate([column, np.zeros(count, column.dtype)]))
                elif isinstance(column, array) and name not in ("_free", "_buckets"):
                    column.frombytes(bytes(count * column.itemsize))
        return self._end - 1


def _zeros(typecode: str) -> array[int]:
    return array(typecode, [0]) * _FIRST_ROWS


class NodeColumns(_Columns):
    """What is known of every position, by ``Node.number``, and which is below which.

    The first is the root's. What is read of single positions are arrays, which are quicker at
    that than numpy's. The children of one parent are linked both ways.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_s = np.zeros(_FIRST_ROWS)
        """When a request last used the position, or stored it."""
        self.classes = np.zeros(_FIRST_ROWS, np.uint16)
        self.ever = np.zeros(_FIRST_ROWS, np.bool_)
        """Whether it had a state once: only then do its classes and ages mean anything."""
        self.depths = _zeros("I")
        self.slots = _zeros("i")
        """Where its state is in HeldColumns; NO_SLOT where there is none."""
        self.below = _zeros("I")
        """Resident states here and further down: KV of the edge is kept for them."""
        self.slots_below = _zeros("I")
        """Their slots, one xor the other, which names the only one where there is one."""
        self.ticks = _zeros("Q")
        self.hits, self.turns = _zeros("H"), _zeros("B")
        self.ends = _zeros("B")
        """1 where a request ended, with its last decoded token."""
        self.parents, self.counts = _zeros("I"), _zeros("I")
        """The parent of each, and how many children it has."""
        self._first, self._next, self._before = _zeros("I"), _zeros("I"), _zeros("I")
        """The first child of each, and its siblings on both sides."""
        self._chained = _zeros("I")
        """Links among those of one bucket."""
        self._buckets = array("I", [0]) * _FIRST_ROWS
        """By a hash of parent and first token: a dictionary takes 90 bytes a node more."""
        self._linked = 0
        self.edges: list[bytes] = []
        """The tokens from the parent to here, int32 each."""
        self.add(0, b"")

    def add(self, depth: int, edge: bytes) -> int:
        """Return the number of a position that is new, without a parent."""
        number = self._take()
        if number == len(self.edges):
            self.edges.append(edge)
            self.slots[number] = NO_SLOT
        else:
            self.edges[number] = edge
            self.ticks[number] = self.hits[number] = self.turns[number] = self.ends[number] = 0
            self.below[number] = self.slots_below[number] = 0
        self.depths[number] = depth
        return number

    def forget(self, number: int) -> None:
        """Give a number back; nothing holds a state there, and nothing links to it."""
        self.ever[number] = False
        self.edges[number] = b""
        self._free.append(number)

    # --- children

    def find(self, parent: int, token: int) -> int:
        """Return the child of *parent* whose edge begins with *token*; ROOT without one."""
        token &= _TOKEN_MASK
        at = self._buckets[self._bucket(parent, token)]
        while at and not (self.parents[at] == parent and self._token(at) == token):
            at = self._chained[at]
        return at

    def children(self, parent: int) -> Iterator[int]:
        """Yield the children of *parent*; nothing may change before this is dropped."""
        at = self._first[parent]
        while at:
            yield at
            at = self._next[at]

    def _token(self, number: int) -> int:
        return int.from_bytes(self.edges[number][:4], "little")

    def _bucket(self, parent: int, token: int) -> int:
        mixed = parent * _PARENT_FACTOR ^ token * _TOKEN_FACTOR
        return mixed >> _SHIFT & (len(self._buckets) - 1)

    def _chain(self, number: int) -> None:
        bucket = self._bucket(self.parents[number], self._token(number))
        self._chained[number] = self._buckets[bucket]
        self._buckets[bucket] = number

    def link(self, number: int, parent: int) -> None:
        """Let *number*, which has no parent, be a child of *parent*."""
        self._linked += 1
        if self._linked > len(self._buckets):
            before, chained = self._buckets, self._chained
            self._buckets = array("I", bytes(8 * len(before)))
            for other in before:
                while other:
                    after = chained[other]
                    self._chain(other)
                    other = after
        self.parents[number] = parent
        self._chain(number)
        first = self._first[parent]
        self._next[number], self._before[number] = first, ROOT
        if first:
            self._before[first] = number
        self._first[parent] = number
        self.counts[parent] += 1

    def unlink(self, number: int) -> None:
        """Let *number* have no parent; its edge begins as it did when it was linked."""
        parent, chained = self.parents[number], self._chained
        bucket = self._bucket(parent, self._token(number))
        at = self._buckets[bucket]
        if at == number:
            self._buckets[bucket] = chained[number]
        else:
            while chained[at] != number:
                at = chained[at]
            chained[at] = chained[number]
        following, before = self._next[number], self._before[number]
        if before:
            self._next[before] = following
        else:
            self._first[parent] = following
        if following:
            self._before[following] = before
        self.parents[number] = ROOT
        self.counts[parent] -= 1
        self._linked -= 1


class HeldColumns(_Columns):
    """What ranks score resident states by, by slot. 40 bytes a state."""

    def __init__(self) -> None:
        super().__init__()
        self.depths = np.zeros(_FIRST_ROWS, np.int32)
        self.marginal = np.zeros(_FIRST_ROWS, np.int32)
        """Tokens from the nearest resident state above to this one."""
        self.above = np.zeros(_FIRST_ROWS, np.int32)
        """The slot of that state; NO_SLOT where there is none."""
        self.freed = np.zeros(_FIRST_ROWS, np.int64)
        """Bytes that go with the state: its own, and KV that no other state needs."""
        self.branches = np.zeros(_FIRST_ROWS, np.int32)
        """Child subtrees with a resident state."""
        self.ticks = np.zeros(_FIRST_ROWS, np.int64)
        """The order of use; 0 for slots that are free."""
        self.numbers = np.zeros(_FIRST_ROWS, np.int32)
        """The position of each."""
        self.pins = np.zeros(_FIRST_ROWS, np.int32)

    def add(self, number: int, depth: int) -> int:
        """Return the slot of a state that came to a position."""
        slot = self._take()
        self.depths[slot] = depth
        self.numbers[slot] = number
        self.ticks[slot] = 1
        self.pins[slot] = 0
        return slot

    def remove(self, slot: int) -> None:
        """Let a slot go; what had its nearest state there has it one further up."""
        above = int(self.above[slot])
        below = np.flatnonzero((self.above == slot) & (self.ticks > 0))
        self.hang(below, above)
        self.ticks[slot] = 0
        self._free.append(slot)

    def hang(self, slots: Slots, above: int) -> None:
        """Let the nearest state above *slots* be *above*."""
        self.above[slots] = above
        self.marginal[slots] = self.depths[slots] - (self.depths[above] if above >= 0 else 0)

    def evictable(self) -> Slots:
        """Return the slots of states that are not pinned, ascending."""
        return np.flatnonzero((self.ticks > 0) & (self.pins == 0))

    def __len__(self) -> int:
        return self._end - len(self._free)


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
    def children(self) -> int:
        """How many edges go on from here."""
        return self._tree.known.counts[self.number]

    @property
    def slot(self) -> int:
        """Where its state is in HeldColumns; NO_SLOT where there is none."""
        return self._tree.known.slots[self.number]

    @property
    def held(self) -> bool:
        """Whether the state at this position is resident."""
        return self._tree.known.slots[self.number] != NO_SLOT

    @property
    def hits(self) -> int:
        """How often a request ran through, up to 65,535."""
        return self._tree.known.hits[self.number]

    def hit(self) -> None:
        """Count a request that runs through."""
        known = self._tree.known
        known.hits[self.number] = min(known.hits[self.number] + 1, _MOST_HITS)

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
        known.turns[self.number], known.ends[self.number] = min(turn, _MOST_TURNS), 1


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
    recurrent state is of one position, so a prompt can start only from a node that matches
    entirely and whose state is resident (Marconi, section 4.1). Nodes without a state are
    *ghosts*: they keep what was seen. Not thread-safe: the owner locks.

    ``size_bytes`` = states x state_bytes + tokens of edges with KV x kv_bytes_per_token, always.
    Memory: some 130 bytes a node with its ghost's place, 40 more a state, and the tokens of edges.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model
        self.known = NodeColumns()
        self.held = HeldColumns()
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
            child = self.known.find(number, int(tokens[at]))
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
        parents = self.known.parents
        while number:
            yield number
            number = parents[number]

    def state(self, slot: int) -> Node:
        """Return the position of the state in a slot."""
        return Node(self, int(self.held.numbers[slot]))

    def least_bytes(self, also: Node) -> int:
        """Return what would be left if all went that is not pinned, and *also* had a state."""
        if not self.pinned:
            return self.model.state_bytes + also.depth * self.model.kv_bytes_per_token
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

    # --- sequences

    def next_tick(self) -> int:
        """Return the number of the next event: what orders uses, whatever clocks do."""
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
        end = self.known.add(len(tokens), _bytes_of(tokens[depth:]))
        self.known.link(end, leaves)
        self.nodes += 1
        self.tokens += len(tokens) - depth
        return Node(self, leaves), Node(self, end)

    def _split(self, child: int, shared: int) -> int:
        known = self.known
        above, edge = known.parents[child], known.edges[child]
        number = known.add(known.depths[above] + shared, edge[: 4 * shared])
        self.nodes += 1
        known.unlink(child)
        known.edges[child] = edge[4 * shared :]
        known.link(number, above)
        known.link(child, number)
        known.below[number] = known.below[child]
        known.slots_below[number] = known.slots_below[child]
        return number

    def forget(self, node: Node) -> None:
        """Take out a node without a state and with at most one child, which takes its edge."""
        known, number = self.known, node.number
        assert number != ROOT, "the root stays"
        assert not node.held, "a resident state is not forgotten"
        above, edge = known.parents[number], known.edges[number]
        child = next(known.children(number), ROOT)
        known.unlink(number)
        if child:
            known.unlink(child)
            known.edges[child] = edge + known.edges[child]
            known.link(child, above)
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
        self._count(path, slot, 1)
        nearest = next((slots[one] for one in path[1:] if slots[one] != NO_SLOT), NO_SLOT)
        held.hang(np.array([slot]), nearest)
        if below[number] > 1:
            held.hang(np.array(self._next_held(number), np.int64), slot)
        held.branches[slot] = sum(1 for child in self.known.children(number) if below[child])
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
        self._count(path, slot, -1)
        above = next((one for one in path if below[one]), ROOT)
        if below[above] == 1:
            self._weigh(known.slots_below[above])

    def _count(self, path: Sequence[int], slot: int, change: int) -> None:
        """Count the state of a slot, which came to the first of *path* (1) or went (-1)."""
        known, model, tokens = self.known, self.model, 0
        for one in path:
            before = known.below[one]
            known.below[one] = before + change
            known.slots_below[one] ^= slot
            if not before or not known.below[one]:
                tokens += self._edge_tokens(one)
                above = known.slots[known.parents[one]]
                if above != NO_SLOT:
                    self.held.branches[above] += change
        self.kept_tokens += change * tokens
        self.size_bytes += change * (model.state_bytes + tokens * model.kv_bytes_per_token)

    def use(self, node: Node) -> None:
        """Take note that a resident state was used just now."""
        self.held.ticks[node.slot] = self._tick + 1

    def pin(self, node: Node, count: int = 1) -> None:
        """Lease a resident state (*count* -1: give the lease back); it is not evicted before."""
        assert node.held, "only a resident state is leased"
        self.held.pins[node.slot] += count
        self.pinned += count

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
        left = [child for child in self.known.children(number) if below[child]]
        while left:
            one = left.pop()
            if slots[one] != NO_SLOT:
                found.append(slots[one])
            else:
                left.extend(child for child in self.known.children(one) if below[child])
        return found


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype(np.int32, copy=False).tobytes()


def _shared(edge: Tokens, tokens: Tokens) -> int:
    """Return how many tokens are the same from the start."""
    if len(edge) != len(tokens):
        edge = edge[: len(tokens)]
    differs = edge != tokens
    first = int(differs.argmax())
    return first if differs[first] else len(tokens)
