"""A server's control path in the benchmark's process: the index, the policies, leases, lookups.

Chunks are noted as sealed and have no bytes: a lookup reads none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from bench.workload import MIB, TINY, redis_server
from kvstore.proto.types import (
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Match,
    Namespace,
)
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Leases
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.lookup import Lookup
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.prefetch import Prefetch
from kvstore.server.tiering.tier_slot import TierCodec, Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

PROMPT_CHUNKS = 512
FRAME_BYTES = 4096
SPACE = Namespace(bytes(16))
LAYOUT = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 1, 8, 256),))


class Control:
    """Lookups over *tiers*, from the fastest to the slowest, by one session."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        ids = count(1)
        slots = [_slot(tier) for tier in tiers]
        self.names = [slot.name for slot in slots]
        leases = Leases(16, lambda: next(ids))
        policies = {slot.name: slot.policy for slot in slots}
        self.catalog = Catalog(policies, leases, 1, time.monotonic)
        queues = {f"ask-{name}": 0 for name in self.names}
        work_queue = WorkQueue(queues, 16, time.monotonic)
        moves = Moves(Tiers(slots), self.catalog, work_queue, Counters(), time.monotonic, 1000)
        self._lookup = Lookup(moves, 30_000, Prefetch(moves, 0), None)
        sessions = SessionTable(1, 60_000, lambda _: b"salt", time.monotonic, os.urandom)
        self._session: Session = sessions.open(TINY, "bench")

    def add(self, info: ChunkInfo) -> None:
        """Let every tier have a copy."""
        for name in self.names:
            self.catalog.note_sealed(name, info)

    def look_up(self, keys: Sequence[ChunkKey]) -> Match:
        """Look *keys* up with a lease."""
        deadline = time.monotonic() + 1
        return self._lookup.lookup(
            self._session, keys, deadline, lease=True, min_accuracy=Accuracy.exact
        )

    def release(self, match: Match) -> None:
        """End the lease of a lookup."""
        self.catalog.release(match.lease_id, self._session.session_id)

    def evict(self, tier: str, chunks: int) -> int:
        """Choose and forget *chunks* victims of *tier* as making room does; return how many."""
        victims = self.catalog.eviction.claim_victims(tier, chunks * FRAME_BYTES, chunks)
        for key in victims:
            self.catalog.cast_out(tier, key, even_if_held=False)
            self.catalog.purged(tier, key)
        self.catalog.eviction.unclaim(victims)
        return len(victims)


def _slot(tier: Tier) -> TierSlot:
    breaker = Breaker("tier", 3, 1000, time.monotonic)
    return TierSlot(tier, TierCodec("raw"), LruEviction(), breaker, time.monotonic)


def prompts() -> Iterator[list[ChunkInfo]]:
    """Yield the chunks of one prompt after another."""
    while True:
        digests = os.urandom(16 * PROMPT_CHUNKS)
        infos, parent = [], ROOT
        for at in range(0, len(digests), 16):
            digest = ChainDigest(digests[at : at + 16])
            key = ChunkKey(SPACE + digest)
            infos.append(ChunkInfo(key, parent, LAYOUT, 0, FRAME_BYTES))
            parent = digest
        yield infos


@contextmanager
def cuda_free_tiers(folder: Path) -> Iterator[list[Tier]]:
    """Yield one tier of each kind, the gpu tier last and on the CPU: they stay empty."""
    from kvstore.proto.device import HostDevice
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.redis import RedisTier

    with ExitStack() as stack:
        port = stack.enter_context(redis_server(folder))
        tiers: list[Tier] = [
            CpuTier(4 * MIB, 4 * MIB),
            DiskTier((folder / "disk", 4 * MIB)),
            RedisTier(f"redis://127.0.0.1:{port}/0", 4 * MIB),
            GpuTier(4 * MIB, HostDevice()),
        ]
        for tier in tiers:
            stack.callback(tier.close)
        yield tiers
