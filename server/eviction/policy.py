"""The eviction interface: what happened on one tier goes in, what to evict comes out; by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import spare_rows
from kvstore.proto.types import policy_instead_of

if TYPE_CHECKING:  # it imports this module
    from kvstore.server.eviction.access_history import AccessHistory

Rows = NDArray[np.intp]
"""Numbers that a RadixIndex gives its chunks. Shape: (chunks,)."""


class Columns:
    """Arrays by row, which grow together, with zeros. Their last place is always empty."""

    def __init__(self) -> None:
        self.arrays: list[array[Any]] = []
        self.rows = 1

    def add(self, typecode: str) -> array[Any]:
        """Return a new column."""
        self.arrays.append(array(typecode, [0]) * self.rows)
        return self.arrays[-1]

    def reach(self, row: int) -> bool:
        """Let there be a place for *row*; False if there was."""
        if row + 1 < self.rows:
            return False
        count = row + 1 - self.rows + spare_rows(row)
        self.rows += count
        for column in self.arrays:
            column.frombytes(bytes(count * column.itemsize))
        return True


class EvictionPolicy(ABC):
    """What to evict from one tier.

    A policy sees chunks as their rows in the ChunkIndex, their sizes and the times of events,
    never a tier or a clock; what is remembered of a row beyond that is in the AccessHistory it was
    made with. Its caller holds a lock, and keeps the row of a chunk's parent for as long as the
    chunk is known. ``victims`` changes nothing. ``now_s`` is in seconds on a clock of the caller's
    that may jump, either way.
    """

    @abstractmethod
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        """Take note of a chunk that was sealed on the tier; *parent* is NO_ROW or its parent's.

        The parent may be unknown here, and stay so. *size_bytes* is what the tier gives it.
        """

    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        """Insert chunks of one size, each of which continues the one before, from *parent* on."""
        for row in rows.tolist():
            self.insert(row, parent, size_bytes, now_s)
            parent = row

    @abstractmethod
    def touch(self, rows: Rows, now_s: float) -> None:
        """Take note that a chain was used, its first chunk first. Unknown rows are skipped."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget a chunk. Unknown rows are ignored."""

    @abstractmethod
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """Yield what to evict, in order, until nothing is left that may go.

        *keep* says which chunks cannot go now (leased, pinned, on their way out). A chunk comes
        after all that continue it. Nothing may change before the iterator is dropped.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Chunks known."""


_PLACES = {  # of each of proto's POLICIES
    "lru": "lru:LruEviction",
    "marconi": "marconi:MarconiEviction",
    "hit_density": "hit_density:HitDensityEviction",
    "discard_hint": "lru:DiscardHintEviction",
    "learned": "learned:LearnedEviction",
}


def make_policy(
    name: str, history: AccessHistory, clock: Callable[[], float] | None = None
) -> EvictionPolicy:
    """Return a new policy, which ranks by *history*; each is loaded when first used.

    Decisions that take long by *clock*, in seconds, end in the order of LRU; without one none
    does, and they are the same in every run. Raises InvalidRequestError.
    """
    if name not in _PLACES:
        raise InvalidRequestError("policy", name, policy_instead_of(name))
    module, noun = _PLACES[name].split(":")
    kind = getattr(import_module(f"kvstore.server.eviction.{module}"), noun)
    timed = {"clock": clock} if name in ("hit_density", "learned") else {}
    policy: EvictionPolicy = kind() if name == "lru" else kind(history, **timed)
    return policy
