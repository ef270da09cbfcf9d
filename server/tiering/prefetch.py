"""Prefetch: chains that were just found and leased are loaded before their get."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import ChunkKey
from kvstore.server.security.sessions import Session
from kvstore.server.tiering.admission import remember
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.work_queue import Ticket

REMEMBERED = 4096
"""Prefetched chunks remembered until their get, the latest."""
LEAST_USED = 0.5
"""Below this share of prefetches that are read, most lookups prefetch nothing."""
_PROBES = 16
"""One lookup in this many still prefetches then, to detect a change."""
_WEIGHT = 1 / 64
_FULLEST = 0.5
"""A fuller load queue is left to gets."""


class Prefetch:
    """Loads chunks ahead of gets. Thread-safe.

    Loads what the get would load, earlier: not for readers of files in place, nor chunks that they
    read from peers. At most *limit_bytes* are in flight; 0 turns it off. The victim buffer and
    its prefetcher follow LSM-GNN (arXiv 2407.15264).
    """

    def __init__(self, moves: Moves, limit_bytes: int) -> None:
        self._moves = moves
        self._counters = moves.counters
        self._limit_bytes = limit_bytes
        self._under_way: list[tuple[Ticket, int]] = []
        self.awaited: OrderedDict[ChunkKey, None] = OrderedDict()
        """Prefetched chunks that no get has read yet."""
        self._used_share = 1.0
        self._lookups = 0
        self.by_lease: dict[int, list[Ticket]] = {}
        """Loads of each lease until it ends; bounded by the number of leases."""
        self._lock = threading.Lock()  # guards the five above

    def found(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        sources: NDArray[np.uint8],
        sizes: NDArray[np.int64],
        lease_id: int,
    ) -> None:
        """Prefetch *keys* that a session leased; *sources* are indices of their slots."""
        lower = np.flatnonzero(sources) if self._limit_bytes else sources[:0]
        if not len(lower) or (session.is_attached and self._moves.tiers.file_backed is not None):
            return
        moves = self._moves
        with self._lock:
            self._lookups += 1
            if self._used_share < LEAST_USED and self._lookups % _PROBES:
                return
            self._under_way = [(one, size) for one, size in self._under_way if not one.done]
            left_bytes = self._limit_bytes - sum(size for _, size in self._under_way)
        begun: list[Ticket] = []
        for at in lower.tolist():
            key, size_bytes = keys[at], int(sizes[at])
            left_bytes -= size_bytes
            slot = moves.tiers.sources[int(sources[at])]
            if slot not in moves.tiers.lower:
                continue
            if slot.tier.peer_place(key, session.reads_from) is not None:
                continue
            if left_bytes < 0 or moves.work_queue.fullness(f"load-{slot.name}") > _FULLEST:
                break
            ticket = moves.load(key, slot, session.tenant, claimed=True)
            if ticket is None:
                break
            begun.append(ticket)
            self._counters.add("prefetched_chunks")
            with self._lock:
                self._under_way.append((ticket, size_bytes))
                if remember(self.awaited, key, None, REMEMBERED):
                    self._used_share -= _WEIGHT * self._used_share
        if begun:
            with self._lock:
                self.by_lease[lease_id] = begun

    def dropped(self, lease_id: int) -> None:
        """Cancel the loads of a lease that ended, unless a get waits for them."""
        with self._lock:
            tickets = self.by_lease.pop(lease_id, [])
        self._moves.unclaim_loads(tickets)

    def sweep(self, live: Container[int]) -> None:
        """Cancel the loads of leases that expired. Called at each tick."""
        for lease_id in list(self.by_lease):
            if lease_id not in live:
                self.dropped(lease_id)

    def was_read(self, key: ChunkKey) -> None:
        """Record that a get delivered a prefetched chunk."""
        with self._lock:
            if self.awaited.pop(key, self) is None:
                self._used_share += _WEIGHT * (1.0 - self._used_share)
                self._counters.add("prefetch_used_chunks")
