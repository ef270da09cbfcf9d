"""Columns over the positions of a CheckpointTree, so that a whole tree is scored at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import spare_rows

Slots = NDArray[np.intp]

NO_SLOT = -1
ROOT = 0
"""The number of the root, which is the parent of none but the first positions."""

_FIRST_ROWS = 64
MOST_HITS, MOST_TURNS = 0xFFFF, 0xFF


class _Columns:
    """Columns of one length with a list of free places; each grows by a sixteenth."""

    _names: Sequence[str] = ()
    """Those that are numpy's."""

    def __init__(self) -> None:
        self._free = array("I")
        self._end = 0
        self._length = _FIRST_ROWS

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        if self._end > self._length:
            self._grow(spare_rows(self._length))
        return self._end - 1

    def _grow(self, count: int) -> None:
        self._length += count
        for name in self._names:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(count, column.dtype)]))


class NodeColumns(_Columns):
    """What is known of every position, by ``Node.number``; the first is the root's.

    What single positions are asked for are arrays, which are quicker at that than numpy's.
    """

    _names = ("last_s", "classes", "ever")

    def __init__(self) -> None:
        super().__init__()
        self.last_s = np.zeros(_FIRST_ROWS)
        """When a request last used the position, or stored it."""
        self.classes = np.zeros(_FIRST_ROWS, np.uint16)
        self.ever = np.zeros(_FIRST_ROWS, np.bool_)
        """Whether it had a state once: only then do its classes and ages mean anything."""
        self.depths = array("I", bytes(4 * _FIRST_ROWS))
        self.slots = array("i", [NO_SLOT]) * _FIRST_ROWS
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
        self.edges: list[bytes] = []
        """The tokens from the parent to here, int32 each."""
        self.add(0, b"")

    def _grow(self, count: int) -> None:
        super()._grow(count)
        self.slots.extend(array("i", [NO_SLOT]) * count)
        for column in (
            *(self.depths, self.below, self.slots_below),
            *(self.ticks, self.hits, self.turns, self.ends),
        ):
            column.frombytes(bytes(count * column.itemsize))

    def add(self, depth: int, edge: bytes) -> int:
        """Return the number of a position that is new."""
        number = self._take()
        if number == len(self.edges):
            self.edges.append(edge)
        else:
            self.edges[number] = edge
            self.ticks[number] = self.hits[number] = self.turns[number] = self.ends[number] = 0
            self.below[number] = self.slots_below[number] = 0
        self.depths[number] = depth
        return number

    def forget(self, number: int) -> None:
        """Give a number back; nothing holds a state there."""
        self.ever[number] = False
        self.edges[number] = b""
        self._free.append(number)


class HeldColumns(_Columns):
    """What ranks score resident states by, by slot. 40 bytes a state."""

    _names = ("depths", "marginal", "above", "freed", "branches", "ticks", "numbers", "pins")

    def __init__(self) -> None:
        super().__init__()
        self.depths = np.zeros(_FIRST_ROWS, np.int32)
        self.marginal = np.zeros(_FIRST_ROWS, np.int32)
        """Tokens from the nearest resident state above to this one."""
        self.above = np.full(_FIRST_ROWS, NO_SLOT, np.int32)
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
