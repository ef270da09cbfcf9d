"""What the parts of a Catalog share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.index.access_log import Journal
from kvstore.server.index.chunk_index import RadixIndex
from kvstore.server.index.chunk_metadata import Knowledge, Origin
from kvstore.server.index.holds import Holds
from kvstore.server.index.leases import LeaseTable


class CatalogListener(Protocol):
    """Hears of copies as they come and go, under the catalog's lock. Never blocks."""

    def covers(self, tier: str) -> bool:
        """Whether it wants to know of *tier*; of others it may be told all the same."""

    def stored(self, tier: str, info: ChunkInfo, origin: Origin | None) -> None:
        """A copy became visible on *tier*; *origin* says where it came from, if it was put."""

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """A copy is gone from *tier*; *is_last*: no tier has one."""


class CatalogState:
    """The index, what is known of its chunks, the policies, and who holds what.

    ``lock`` guards all of it; it is held for dictionary operations only. Rows are never kept
    past it: a row may be another chunk's as soon as it is let go.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        leases: LeaseTable,
        pin_limit_bytes: int,
        clock: Callable[[], float],
        knowledge: Knowledge,
    ) -> None:
        self.policies = policies
        self.clock = clock
        self.knowledge = knowledge
        self.journal = Journal(
            knowledge.history,
            list(policies.values()),
            [knowledge.what_ifs.get(tier) for tier in policies],
        )
        self.journal.forecast = knowledge.forecast
        self.index = RadixIndex(list(policies), knowledge.ghost_limit, self._forget_ghosts)
        self.holds = Holds(leases, pin_limit_bytes)
        self.lock = threading.Lock()
        self.news = threading.Event()
        """Set when the journal has something to tell the policies."""

    def _forget_ghosts(self, rows: Rows) -> None:
        self.journal.settle()
        self.knowledge.history.forget_all(rows)
        for row in rows.tolist():
            self.knowledge.hints.forget(row)

    def any_size(self, row: int) -> int:
        """Return the size of a chunk's frame on the fastest tier that has it."""
        return self.index.size_bytes(self.index.holders(row)[0], row)
