"""Prefetch: chains that were just found and leased come to memory before their get asks."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import ChunkKey
from kvstore.server.mover import Ticket
from kvstore.server.sessions import Session
from kvstore.server.transfer import Transfers

REMEMBERED = 4096
"""Chunks loaded ahead whose get is awaited; of the oldest beyond them none is expected."""
LEAST_USED = 0.5
"""Below this share of loads that are read, most lookups are followed by none."""
_PROBES = 16
"""Then one lookup in so many is, to see whether that has changed."""
_WEIGHT = 1 / 64
_FULLEST = 0.5
"""A lane of loads that is fuller belongs to the gets."""


class Prefetch:
    """Loads ahead of gets. Thread-safe.

    Only for readers that do not read files in place: for those the loads are the ones that the
    get would begin with, earlier. At most *limit_bytes* are under way; 0: none. A victim of GPU
    memory is in CPU memory already, pinned, so what is loaded is what lies below (the victim
    buffer and its prefetcher are those of LSM-GNN, arXiv 2407.15264).
    """

    def __init__(self, transfers: Transfers, limit_bytes: int) -> None:
        self._transfers = transfers
        self._counters = transfers.counters
        self._limit_bytes = limit_bytes
        self._under_way: list[tuple[Ticket, int]] = []
        self._awaited: dict[ChunkKey, None] = {}
        self._used_share = 1.0
        self._lookups = 0
        self._lock = threading.Lock()  # guards the four above

    def found(
        self,
        session: Session,
        keys: Iterable[ChunkKey],
        sources: NDArray[np.uint8],
        sizes: NDArray[np.int64],
    ) -> None:
        """A session leased *keys*, each from the shelf of this place among the sources."""
        lower = np.flatnonzero(sources) if self._limit_bytes else sources[:0]
        if not len(lower) or (session.is_attached and self._transfers.filed is not None):
            return
        chain = list(keys)
        with self._lock:
            self._lookups += 1
            if self._used_share < LEAST_USED and self._lookups % _PROBES:
                return
            self._under_way = [(one, size) for one, size in self._under_way if not one.done]
            left_bytes = self._limit_bytes - sum(size for _, size in self._under_way)
        for at in lower.tolist():
            left_bytes -= int(sizes[at])
            if left_bytes < 0 or not self._begin(session, chain[at], int(sources[at]), sizes[at]):
                break

    def _begin(self, session: Session, key: ChunkKey, source: int, size: np.int64) -> bool:
        shelf = self._transfers.sources[source]
        if shelf not in self._transfers.lower_shelves():
            return True
        if self._transfers.mover.fullness(f"load-{shelf.name}") > _FULLEST:
            return False
        ticket = self._transfers.load(key, shelf, session.tenant)
        if ticket is None:
            return False
        self._counters.add("prefetched_chunks")
        with self._lock:
            self._under_way.append((ticket, int(size)))
            self._awaited[key] = None
            if len(self._awaited) > REMEMBERED:
                del self._awaited[next(iter(self._awaited))]
                self._used_share -= _WEIGHT * self._used_share
        return True

    def was_read(self, key: ChunkKey) -> None:
        """A get delivered a chunk."""
        if key in self._awaited:
            with self._lock:
                if self._awaited.pop(key, self) is None:
                    self._used_share += _WEIGHT * (1.0 - self._used_share)
                    self._counters.add("prefetch_used_chunks")
