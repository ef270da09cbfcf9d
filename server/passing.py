"""Passing: chunks that came from a peer's memory for one reader, and go again once it has read.

Each chunk has room on some node; a second copy is worth the room it takes of others only where it
is asked for again. So while memory is nearly full the rule of the GPU's memory decides here, too:
the second read, and where copies are weighed their value. What is asked for often is then kept by
whoever asks, and the peer hears no more of it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from kvstore.proto.types import ChunkKey
from kvstore.server.policy.promotion import SecondRead
from kvstore.server.shelf import Shelf

if TYPE_CHECKING:
    from kvstore.server.transfer import Transfers

FULL_PERCENT = 90
"""Of CPU memory in use, from which on room is given up again."""
REMEMBERED_CHUNKS = 1 << 16
MAX_PASSING = 4096
"""Chunks that wait for their readers; of more, the oldest stay."""


class Passing:
    """Of chunks that come from *peers*. Thread-safe."""

    def __init__(self, transfers: Transfers, peers: Shelf) -> None:
        self._transfers = transfers
        self._peers = peers
        self._reads = SecondRead(REMEMBERED_CHUNKS)
        self._waiting: deque[ChunkKey] = deque(maxlen=MAX_PASSING)
        self._lock = threading.Lock()  # guards _reads

    def came(self, key: ChunkKey) -> None:
        """A chunk came into CPU memory from a peer."""
        if not self._is_kept(key):
            self._waiting.append(key)

    def _is_kept(self, key: ChunkKey) -> bool:
        transfers = self._transfers
        with self._lock:
            is_due = self._reads.is_due(key)
        stats = transfers.cpu_tier.stats()
        if 100 * stats.used_bytes < FULL_PERCENT * stats.capacity_bytes:
            return True
        return is_due and transfers.placement.promotes(key, self._peers, transfers.cpu)

    def leave(self) -> None:
        """Free what nobody reads any more and a peer has. Called at every tick."""
        transfers, catalog = self._transfers, self._transfers.catalog
        cpu, peers = transfers.cpu, self._peers
        for _ in range(len(self._waiting)):
            key = self._waiting.popleft()
            if catalog.leave(cpu.name, key, peers.name):
                transfers.counters.add("peer_passed_chunks")
                transfers.delete_from(cpu, key)
            elif {cpu.name, peers.name} <= set(catalog.holders(key)):
                self._waiting.append(key)
