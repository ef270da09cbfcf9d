"""ReservedRoom: what each partition was given room for and has not filled yet.

The index counts a chunk when it is there. Who reserves and never commits would have a quota's
worth of chunks beside as much room as he likes.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvstore.tiers.base import Reservation


class Waiting(NamedTuple):
    """Room of one partition for chunks to come."""

    size_bytes: int
    chunks: int


NOTHING = Waiting(0, 0)


class ReservedRoom:
    """Room by partition, from its reservation until it is filled or given back. Thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        """Partitions by the id of a reservation."""
        self._waiting: dict[int, Waiting] = {}
        self._lock = threading.Lock()  # guards both

    def note(self, reservation: Reservation, partition: int) -> None:
        """Count a reservation as the partition's."""
        with self._lock:
            self._owners[id(reservation)] = partition
            self._add(partition, reservation.info.size_bytes, 1)

    def forget(self, reservation: Reservation) -> None:
        """Count it no longer. Idempotent."""
        with self._lock:
            partition = self._owners.pop(id(reservation), None)
            if partition is not None:
                self._add(partition, -reservation.info.size_bytes, -1)

    def of(self, partition: int) -> Waiting:
        """Return what is reserved for the partition."""
        return self._waiting.get(partition, NOTHING)

    def _add(self, partition: int, size_bytes: int, chunks: int) -> None:
        before = self._waiting.pop(partition, NOTHING)
        after = Waiting(before.size_bytes + size_bytes, before.chunks + chunks)
        if after != NOTHING:
            self._waiting[partition] = after
