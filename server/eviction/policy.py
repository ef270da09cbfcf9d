"""The interface of eviction policies: events of one tier in, victims out; policies by name."""

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
"""Row numbers of chunks in the ChunkIndex. Shape: (chunks,)."""


class Columns:
    """Arrays by row that grow together, filled with zeros. Their last place is always empty."""

    def __init__(self) -> None:
        self.arrays: list[array[Any]] = []
        self.rows = 1

    def add(self, typecode: str) -> array[Any]:
        """Return a new column."""
        self.arrays.append(array(typecode, [0]) * self.rows)
        return self.arrays[-1]

    def reach(self, row: int) -> bool:
        """Grow the columns to include *row*; return whether they grew."""
        if row + 1 < self.rows:
            return False
        count = row + 1 - self.rows + spare_rows(row)
        self.rows += count
        for column in self.arrays:
            column.frombytes(bytes(count * column.itemsize))
        return True


class EvictionPolicy(ABC):
    """Chooses the victims of one tier.

    A policy gets rows of the ChunkIndex, sizes and times of events, but neither the tier nor a
    clock; further statistics of a row are in its AccessHistory. The caller holds a lock, and keeps
    the row of a chunk's parent while the chunk is known. ``victims`` changes nothing. ``now_s`` is
    in seconds on the caller's clock, which may jump either way.
    """

    @abstractmethod
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        """Add a chunk that was sealed on the tier; *parent* is the row of its parent, or NO_ROW.

        The parent may be unknown here, and stay so. *size_bytes* is the size on the tier.
        """

    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        """Insert a chain of chunks of one size that continues *parent*."""
        for row in rows.tolist():
            self.insert(row, parent, size_bytes, now_s)
            parent = row

    @abstractmethod
    def touch(self, rows: Rows, now_s: float) -> None:
        """Record the use of a chain, in order. Unknown rows are skipped."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Forget a chunk. Unknown rows are ignored."""

    @abstractmethod
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """Yield all possible victims in order.

        Chunks for which *keep* is true cannot be evicted now (leased, pinned, being evicted). A
        chunk follows all that continue it. Nothing may change before the iterator is dropped.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of chunks."""


_PLACES = {  # of proto's POLICIES
    "lru": "lru:LruEviction",
    "marconi": "marconi:MarconiEviction",
    "hit_density": "hit_density:HitDensityEviction",
    "discard_hint": "lru:DiscardHintEviction",
    "learned": "learned:LearnedEviction",
}


def make_policy(
    name: str, history: AccessHistory, clock: Callable[[], float] | None = None
) -> EvictionPolicy:
    """Return a new policy that ranks by *history*; its module is loaded on first use.

    Decisions that take too long on *clock*, in seconds, end in LRU order; without a clock decisions
    are deterministic. Raises InvalidRequestError.
    """
    if name not in _PLACES:
        raise InvalidRequestError("policy", name, policy_instead_of(name))
    module, noun = _PLACES[name].split(":")
    kind = getattr(import_module(f"kvstore.server.eviction.{module}"), noun)
    timed = {"clock": clock} if name in ("hit_density", "learned") else {}
    policy: EvictionPolicy = kind() if name == "lru" else kind(history, **timed)
    return policy
