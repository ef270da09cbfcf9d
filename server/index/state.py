"""What the parts of a Catalog share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.index.access_log import AccessLog
from kvstore.server.index.chunk_index import ChunkIndex
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Holds, Leases


class CatalogListener(Protocol):
    """Hears of copies as they come and go, under the catalog's lock. Never blocks."""

    def covers(self, tier: str) -> bool:
        """Whether it wants to know of *tier*; of others it may be told all the same."""

    def stored(self, tier: str, info: ChunkInfo, put_info: PutInfo | None) -> None:
        """A copy became visible on *tier*; *put_info* says where it came from, if it was put."""

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
        leases: Leases,
        pin_limit_bytes: int,
        clock: Callable[[], float],
        metadata: ChunkMetadata,
    ) -> None:
        self.policies = policies
        self.clock = clock
        self.metadata = metadata
        self.access_log = AccessLog(
            metadata.history,
            list(policies.values()),
            [metadata.what_ifs.get(tier) for tier in policies],
        )
        self.access_log.forecast = metadata.forecast
        self.index = ChunkIndex(list(policies), metadata.evicted_limit, self._forget_evicted)
        self.holds = Holds(leases, pin_limit_bytes)
        self.lock = threading.Lock()
        self.news = threading.Event()
        """Set when the access_log has something to tell the policies."""

    def _forget_evicted(self, rows: Rows) -> None:
        self.access_log.apply_all()
        self.metadata.history.forget_all(rows)
        for row in rows.tolist():
            self.metadata.hints.forget(row)

    def any_size(self, row: int) -> int:
        """Return the size of a chunk's frame on the fastest tier that has it."""
        return self.index.size_bytes(self.index.holders(row)[0], row)
