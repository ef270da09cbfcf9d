"""Columns over the nodes of a CheckpointTree, so that a whole tree is scored at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvstore.server.policy.checkpoints import Node

Slots = NDArray[np.intp]

NO_SLOT = -1
_FIRST_ROWS = 64


class _Columns:
    """Columns of one length with a list of free places; each grows by doubling."""

    _names: Sequence[str] = ()

    def __init__(self) -> None:
        self._free: list[int] = []
        self._end = 0

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._end += 1
        length = len(getattr(self, self._names[0]))
        if self._end > length:
            for name in self._names:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        return self._end - 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(getattr(self, name).nbytes for name in self._names)


class KnownColumns(_Columns):
    """What is remembered of every node that ever had a state, by ``Node.number``."""

    _names = ("last_s", "classes", "ever")

    def __init__(self) -> None:
        super().__init__()
        self.last_s = np.zeros(_FIRST_ROWS)
        """When a request last used the position, or stored it."""
        self.classes = np.zeros(_FIRST_ROWS, np.uint16)
        self.ever = np.zeros(_FIRST_ROWS, np.bool_)
        """Whether it had a state once: only then do its classes and ages mean anything."""

    def add(self) -> int:
        """Return the number of a node that is new."""
        return self._take()

    def forget(self, number: int) -> None:
        """Give a number back."""
        self.ever[number] = False
        self._free.append(number)


class HeldColumns(_Columns):
    """What ranks score resident states by, by ``Node.slot``."""

    _names = ("depths", "marginal", "above", "freed", "branches", "ticks", "numbers", "pins")

    def __init__(self) -> None:
        super().__init__()
        self.depths = np.zeros(_FIRST_ROWS, np.int64)
        self.marginal = np.zeros(_FIRST_ROWS, np.int64)
        """Tokens from the nearest resident state above to this one."""
        self.above = np.full(_FIRST_ROWS, NO_SLOT, np.int64)
        """The slot of that state; NO_SLOT where there is none."""
        self.freed = np.zeros(_FIRST_ROWS, np.int64)
        """Bytes that go with the state: its own, and KV that no other state needs."""
        self.branches = np.zeros(_FIRST_ROWS, np.int64)
        """Child subtrees with a resident state."""
        self.ticks = np.zeros(_FIRST_ROWS, np.int64)
        """The order of use; 0 for slots that are free."""
        self.numbers = np.zeros(_FIRST_ROWS, np.int64)
        self.pins = np.zeros(_FIRST_ROWS, np.int64)
        self.nodes: list[Node | None] = []

    def add(self, node: Node) -> int:
        """Return the slot of a state that came."""
        slot = self._take()
        if slot == len(self.nodes):
            self.nodes.append(node)
        else:
            self.nodes[slot] = node
        self.depths[slot] = node.depth
        self.numbers[slot] = node.number
        self.ticks[slot] = 1
        self.pins[slot] = 0
        return slot

    def remove(self, slot: int) -> None:
        """Let a slot go; what had its nearest state there has it one further up."""
        above = int(self.above[slot])
        below = np.flatnonzero((self.above == slot) & (self.ticks > 0))
        self.hang(below, above)
        self.ticks[slot] = 0
        self.nodes[slot] = None
        self._free.append(slot)

    def hang(self, slots: Slots, above: int) -> None:
        """Let the nearest state above *slots* be *above*."""
        self.above[slots] = above
        self.marginal[slots] = self.depths[slots] - (self.depths[above] if above >= 0 else 0)

    def node(self, slot: int) -> Node:
        """Return the node of a slot that is taken."""
        node = self.nodes[slot]
        assert node is not None, "a slot that is taken has a node"
        return node

    def evictable(self) -> Slots:
        """Return the slots of states that are not pinned, ascending."""
        return np.flatnonzero((self.ticks > 0) & (self.pins == 0))

    def __len__(self) -> int:
        return self._end - len(self._free)
