"""Columns over the positions of a CheckpointTree, so that a whole tree is scored at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import spare_rows

Slots = NDArray[np.intp]

NO_SLOT = -1
ROOT = 0
"""The number of the root, which has no parent."""

_FIRST_ROWS = 64
_FIRST_BUCKETS = 64
_NO_COLUMNS = {"_free", "_buckets"}
_PARENT_FACTOR, _TOKEN_FACTOR = 0x9E3779B1, 0x85EBCA6B
_TOKEN_MASK = 0xFFFFFFFF
_SHIFT = 15


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
                elif isinstance(column, array) and name not in _NO_COLUMNS:
                    column.frombytes(bytes(count * column.itemsize))
        return self._end - 1


class NodeColumns(_Columns):
    """What is known of every position, by ``Node.number``, and which is below which.

    The first is the root's. What is read of single positions are arrays, which are quicker at
    that than numpy's. A child is found by its parent and the first token of its edge in a table
    of chains, in the mean in one or two steps; those of one parent are linked both ways.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_s = np.zeros(_FIRST_ROWS)
        """When a request last used the position, or stored it."""
        self.classes = np.zeros(_FIRST_ROWS, np.uint16)
        self.ever = np.zeros(_FIRST_ROWS, np.bool_)
        """Whether it had a state once: only then do its classes and ages mean anything."""
        self.depths = array("I", bytes(4 * _FIRST_ROWS))
        self.slots = array("i", bytes(4 * _FIRST_ROWS))
        """Where its state is in HeldColumns; NO_SLOT where there is none."""
        self.below = array("I", bytes(4 * _FIRST_ROWS))
        """Resident states here and further down: KV of the edge is kept for them."""
        self.slots_below = array("I", bytes(4 * _FIRST_ROWS))
        """Their slots, one xor the other, which names the only one where there is one."""
        self.ticks = array("Q", bytes(8 * _FIRST_ROWS))
        self.hits = array("H", bytes(2 * _FIRST_ROWS))
        self.turns = array("B", bytes(_FIRST_ROWS))
        self.ends = array("B", bytes(_FIRST_ROWS))
        """1 where a request ended, with its last decoded token."""
        self.parents = array("I", bytes(4 * _FIRST_ROWS))
        self.counts = array("I", bytes(4 * _FIRST_ROWS))
        """Children of each."""
        self._tokens = array("i", bytes(4 * _FIRST_ROWS))
        self._first = array("I", bytes(4 * _FIRST_ROWS))
        self._next = array("I", bytes(4 * _FIRST_ROWS))
        self._before = array("I", bytes(4 * _FIRST_ROWS))
        """Links among children of one parent."""
        self._chained = array("I", bytes(4 * _FIRST_ROWS))
        """Links among those of one bucket."""
        self._buckets = array("I", bytes(4 * _FIRST_BUCKETS))
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
        at = self._buckets[self._bucket(parent, token)]
        parents, tokens = self.parents, self._tokens
        while at and not (tokens[at] == token and parents[at] == parent):
            at = self._chained[at]
        return at

    def children(self, parent: int) -> Iterator[int]:
        """Yield the children of *parent*; nothing may change before this is dropped."""
        at = self._first[parent]
        while at:
            yield at
            at = self._next[at]

    def link(self, number: int, parent: int, token: int) -> None:
        """Let *number*, which has no parent, be a child of *parent*."""
        self._linked += 1
        if self._linked > len(self._buckets):
            self._widen()
        self.parents[number], self._tokens[number] = parent, token
        self._chain(number)
        first = self._first[parent]
        self._next[number], self._before[number] = first, ROOT
        if first:
            self._before[first] = number
        self._first[parent] = number
        self.counts[parent] += 1

    def unlink(self, number: int) -> None:
        """Let *number* have no parent."""
        parent = self.parents[number]
        bucket = self._bucket(parent, self._tokens[number])
        at = self._buckets[bucket]
        if at == number:
            self._buckets[bucket] = self._chained[number]
        else:
            while self._chained[at] != number:
                at = self._chained[at]
            self._chained[at] = self._chained[number]
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

    def _bucket(self, parent: int, token: int) -> int:
        mixed = parent * _PARENT_FACTOR ^ (token & _TOKEN_MASK) * _TOKEN_FACTOR
        return mixed >> _SHIFT & (len(self._buckets) - 1)

    def _chain(self, number: int) -> None:
        bucket = self._bucket(self.parents[number], self._tokens[number])
        self._chained[number] = self._buckets[bucket]
        self._buckets[bucket] = number

    def _widen(self) -> None:
        """Double the table."""
        before, chained = self._buckets, self._chained
        self._buckets = array("I", bytes(8 * len(before)))
        for number in before:
            while number:
                after = chained[number]
                self._chain(number)
                number = after


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
