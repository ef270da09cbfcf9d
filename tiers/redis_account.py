"""What one process knows of the shared Redis: the chunks it answers for, and their bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvstore.proto.types import ChunkKey
from kvstore.tiers.base import TierStats
from kvstore.tiers.redis_manifest import Manifest

MAX_PEER_MANIFESTS = 4096
"""Manifests of chunks not counted here, kept to save a round trip."""


class RedisAccount:
    """Bytes reserved and sealed, against a capacity. Thread-safe; never does I/O.

    A chunk is counted from its sealing, or a listing, until it is noticed to be gone.
    ``allocated`` is the tier's rule of what a frame takes.
    """

    def __init__(self, capacity_bytes: int, allocated: Callable[[int], int]) -> None:
        self._capacity_bytes = capacity_bytes
        self._allocated = allocated
        self._lock = threading.Lock()
        self._chunks: dict[ChunkKey, Manifest] = {}
        self._peers: OrderedDict[ChunkKey, Manifest] = OrderedDict()
        self._used_bytes = 0
        self._reservations = 0

    def stats(self) -> TierStats:
        """Count everything."""
        with self._lock:
            return TierStats(
                self._capacity_bytes, self._used_bytes, len(self._chunks), self._reservations
            )

    def reserve(self, need_bytes: int) -> bool:
        """Take *need_bytes*, or return False."""
        with self._lock:
            if self._used_bytes + need_bytes > self._capacity_bytes:
                return False
            self._used_bytes += need_bytes
            self._reservations += 1
            return True

    def settle(self, reserved_bytes: int, sealed: Manifest | None) -> None:
        """End a reservation, counting the chunk that came of it."""
        with self._lock:
            self._reservations -= 1
            self._used_bytes -= reserved_bytes
            if sealed is not None:
                self._count(sealed)

    def known(self, key: ChunkKey) -> Manifest | None:
        """Return the manifest last seen under *key*."""
        with self._lock:
            return self._chunks.get(key) or self._peers.get(key)

    def counted(self, keys: Sequence[ChunkKey]) -> list[Manifest | None]:
        """Return the manifests counted for *keys*. Ask before a read that may prove them gone."""
        with self._lock:
            return [self._chunks.get(key) for key in keys]

    def everything(self) -> dict[ChunkKey, Manifest]:
        """Return a copy of all that is counted."""
        with self._lock:
            return dict(self._chunks)

    def note(
        self,
        keys: Sequence[ChunkKey],
        before: Sequence[Manifest | None],
        found: Sequence[Manifest | None],
    ) -> None:
        """Take in a read: what *keys* were counted as *before* it, and what it *found*.

        What this process sealed meanwhile stays counted.
        """
        with self._lock:
            for key, old, new in zip(keys, before, found, strict=True):
                if old is not None and old != new and self._chunks.get(key) is old:
                    self._discount(key)
                self._peers.pop(key, None)
                if new is not None and key not in self._chunks:
                    self._peers[key] = new
                    if len(self._peers) > MAX_PEER_MANIFESTS:
                        self._peers.popitem(last=False)

    def forget(self, key: ChunkKey, gone: Sequence[Manifest | None]) -> None:
        """Stop counting *key* if what is counted is one of *gone*."""
        with self._lock:
            if self._chunks.get(key) in gone:
                self._discount(key)
            self._peers.pop(key, None)

    def reconcile(
        self, before: Mapping[ChunkKey, Manifest], found: Mapping[ChunkKey, Manifest]
    ) -> None:
        """Take in a listing: count all it *found*, and of *before* only that."""
        with self._lock:
            for key, old in before.items():
                if key not in found and self._chunks.get(key) is old:
                    self._discount(key)
            for key, new in found.items():
                if self._chunks.get(key) in (None, before.get(key)):
                    self._count(new)

    def _count(self, manifest: Manifest) -> None:
        key = manifest.info.key
        self._discount(key)
        self._peers.pop(key, None)
        self._chunks[key] = manifest
        self._used_bytes += self._allocated(manifest.info.size_bytes)

    def _discount(self, key: ChunkKey) -> None:
        gone = self._chunks.pop(key, None)
        if gone is not None:
            self._used_bytes -= self._allocated(gone.info.size_bytes)
