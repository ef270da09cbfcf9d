"""What the parts of a Catalog share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.index.access_log import AccessLog
from kvstore.server.index.chunk_index import ChunkIndex
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Holds, Leases


class CatalogListener(Protocol):
    """Is called as copies come and go, under the catalog's lock. Never blocks."""

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None) -> None:
        """Copies became visible on *tier*; *put_info* says where one came from, if it was put."""

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
            metadata.forecast,
        )
        self.index = ChunkIndex(
            list(policies), metadata.evicted_limit, self._forget_evicted, metadata.hints.columns
        )
        self.holds = Holds(leases, pin_limit_bytes)
        self.lock = threading.Lock()
        self.news = threading.Event()
        """Set when the access_log has something to apply."""

    def _forget_evicted(self, rows: Rows) -> None:
        self.access_log.apply_all()
        self.metadata.history.forget_all(rows)
        for row in rows.tolist():
            self.metadata.hints.forget(row)
