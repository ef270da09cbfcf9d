"""Puts a store together from the settings: tiers, policies, catalog and moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.refill import attach_refills
from kvstore.server.cluster.setup import with_peers
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.eviction.quotas import (
    NO_QUOTA,
    MissRatioCurve,
    PartitionedEviction,
    PartitionTable,
    Quota,
)
from kvstore.server.eviction.registry import make_policy
from kvstore.server.eviction.reuse_estimate import ReuseForecast
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.index.holds import Leases
from kvstore.server.index.known_models import KnownModels
from kvstore.server.security.encryption_keys import parse_encryption_keys
from kvstore.server.security.watched_file import WatchedFile
from kvstore.server.settings.rules import GpuConfig, is_auto
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import format_size
from kvstore.server.store.store import Store, StoreLimits
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import make_admission
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.codec_choice import QUEUE
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import LOSSLESS, TierCodec, Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:  # its file loads torch
    from kvstore.tiers.gpu import GpuTier


def open_tiers(config: Settings, closers: list[Callable[[], object]]) -> list[Tier]:
    """Return the configured tiers, fastest first; *closers* learns how to close them."""
    tiers: list[Tier] = []
    hidden = hiding(config)
    register = None
    if "gpu" in config.tiers:
        gpu = open_gpu_tier(config.gpu)
        tiers.append(gpu)
        closers.append(gpu.close)
        register = gpu.device.register
    tiers.append(CpuTier(config.cpu_size, config.cpu_slab_bytes, register))
    closers.append(tiers[-1].close)
    if "disk" in config.tiers:
        tiers.append(hidden(_open_disk_tier(config)))
        closers.append(tiers[-1].close)
    if "redis" in config.tiers:
        from kvstore.tiers.redis import RedisTier

        tier = RedisTier(
            config.redis_access(config.redis_url or ""),
            config.redis_size,
            timeout_ms=config.redis_timeout_ms,
            connections=config.limits.redis_connections,
            prefix=config.redis_prefix,
        )
        tiers.append(hidden(tier))
        closers.append(tiers[-1].close)
    return tiers


def _open_disk_tier(config: Settings) -> Tier:
    from kvstore.tiers.disk import DiskOptions, DiskTier
    from kvstore.tiers.disk_files import DiskConfig

    options = DiskOptions(
        tuple(DiskConfig(folder.path, folder.capacity_bytes) for folder in config.disk.others),
        is_direct=config.disk_direct,
        largest_frame_bytes=config.max_frame_bytes,
    )
    return DiskTier(config.disk.path, config.disk.capacity_bytes, options=options)


def open_gpu_tier(config: GpuConfig) -> GpuTier:
    """Return the gpu tier on its CUDA device. Raises TierUnavailableError with the fix."""
    try:
        import torch

        from kvstore.proto.device import open_device
        from kvstore.tiers.gpu import GpuTier
    except ImportError as error:
        fix = "install kvstore-server[gpu], or start without gpu"
        raise TierUnavailableError("gpu", f"needs torch and cupy ({error}): {fix}") from None
    return GpuTier(config.capacity_bytes, open_device(torch.device("cuda", config.device)))


def hiding(config: Settings) -> Callable[[Tier], Tier]:
    """Return what encrypts a tier; without keys it leaves tiers as they are.

    The file of keys is looked at again with each frame. Raises InvalidRequestError for one that
    cannot be used.
    """
    path = config.encryption_keys
    if path is None:
        return lambda tier: tier
    from kvstore.tiers.encrypted import EncryptedTier, KeyRing

    file = WatchedFile((path,), _by_epoch)

    def now() -> Mapping[int, bytes]:
        file.refresh()
        return file.value

    keys = KeyRing(now, os.urandom)
    return lambda tier: EncryptedTier(tier, keys)


def _by_epoch(data: bytes) -> dict[int, bytes]:
    rows = parse_encryption_keys(data)
    if not rows:
        fix = "has no key; make one with kvstore keys new"
        raise InvalidRequestError("encryption_keys", len(data), fix)
    return {epoch: row.key for epoch, row in rows.items()}


class Policies:
    """The eviction policy of each tier, and the metadata that all of them rank by."""

    def __init__(
        self,
        config: Settings,
        capacities: Mapping[str, int],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """*capacities* has the bytes of each tier that is used; *clock* ends long decisions.

        Raises InvalidRequestError when more of a tier is guaranteed than it has.
        """
        self._names = config.policy
        self._capacities = capacities
        self._clock = clock
        self._quotas = config.tenant_quotas
        terms = config.category_terms
        self._categories = {rule.category: Quota(rule.quota) for rule in terms if rule.quota}
        self._chunks = {rule.tenant: rule.chunks for rule in config.tenant_limits if rule.chunks}
        tenants = dict.fromkeys([*(rule.tenant for rule in self._quotas), *self._chunks])
        self._has_quotas = bool(tenants or self._categories)
        partitions = PartitionTable(tuple(tenants), tuple(self._categories))
        self.metadata = ChunkMetadata(
            partitions=partitions,
            category_ttls_s={rule.category: float(rule.ttl_s) for rule in terms if rule.ttl_s},
            evicted_limit=config.limits.ghost_limit,
            what_ifs={tier: MissRatioCurve(size) for tier, size in capacities.items() if size},
            policy_names={tier: self.name(tier) for tier in capacities},
        )
        rules = config.write
        looks_ahead = any(make_admission(rule).looks_ahead for rule in rules.values())
        if looks_ahead or config.write_budgets:
            self.metadata.forecast = ReuseForecast(self.metadata.history)
        self.by_tier = {tier: self._policy(tier) for tier in capacities}

    def name(self, tier: str) -> str:
        """Return the name of a tier's policy; nothing is evicted from one without a size."""
        return self._names[tier] if self._capacities[tier] else "lru"

    def _policy(self, tier: str) -> EvictionPolicy:
        partitions = self.metadata.partitions
        if not self._has_quotas or not self._capacities[tier]:
            return self._plain(tier)
        # What is said of this tier comes last, and wins.
        rules = sorted(self._quotas, key=lambda rule: rule.tier != "")
        by_tenant = {
            rule.tenant: Quota(rule.quota, rule.guaranteed)
            for rule in rules
            if rule.tier in ("", tier)
        }
        for tenant, chunks in self._chunks.items():
            by_tenant[tenant] = replace(by_tenant.get(tenant, NO_QUOTA), limit_chunks=chunks)
        quotas = partitions.quotas(by_tenant, self._categories)
        self._check(tier, quotas)
        return PartitionedEviction(
            lambda: self._plain(tier),
            self.metadata.hints.partitions.__getitem__,
            quotas,
            self._capacities[tier],
        )

    def _check(self, tier: str, quotas: tuple[Quota, ...]) -> None:
        sure = sum(quota.guaranteed_bytes for quota in quotas)
        if sure > self._capacities[tier]:
            fix = f"guarantee at most the {format_size(self._capacities[tier])} of tier {tier!r}"
            raise InvalidRequestError("tenant_quotas", ",".join(map(str, self._quotas)), fix)

    def _plain(self, tier: str) -> EvictionPolicy:
        return make_policy(self.name(tier), self.metadata.history, self._clock)


logger = structlog.get_logger(__name__)

PIN_LIMIT_PERCENT = 50
WORKERS_PER_WAITER = 4
"""One of so many threads may wait in a lookup for chunks that are about to come."""
LOADS_AT_ONCE = {"gpu": 1, "disk": 2, "peer": 4, "redis": 3}
"""Loading threads of each tier: one reads while the other verifies what it read."""
QUESTIONS_AT_ONCE = {"peer": 2}

Clock = Callable[[], float]


def build_store(
    config: Settings,
    clock: Clock,
    counters: Counters,
    closers: list[Callable[[], object]],
    models: KnownModels,
    new_id: Callable[[], int],
) -> Store:
    """Open the configured tiers and put a store over them; *closers* learns how to close.

    *new_id* returns unpredictable numbers below 2^64.
    """
    tiers = with_peers(open_tiers(config, closers), config, counters, clock)
    closers += [tier.close for tier in tiers if tier.read_only]
    capacities = {tier.name: tier.capacity_bytes for tier in tiers}
    policies = Policies(config, capacities, time.perf_counter)
    slots = [_slot(config, tier, policies, clock, models) for tier in tiers]
    for tier in tiers:
        if tier.write_error:
            logger.warning("tier is down at start", tier=tier.name, reason=tier.write_error)
    counters.add("dropped_rows", sum(slot.tier.dropped_rows for slot in slots))
    queues = {"store-cpu": 1} if "gpu" in config.tiers else {}
    queues[QUEUE] = 1
    for slot in slots:
        if slot.name == "cpu":
            continue
        queues |= {f"load-{slot.name}": LOADS_AT_ONCE[slot.name], f"store-{slot.name}": 1}
        if slot.tier.shared:
            queues[f"ask-{slot.name}"] = QUESTIONS_AT_ONCE.get(slot.name, 1)
    leases = Leases(config.limits.max_leases_per_session, new_id)
    pin_limit_bytes = config.cpu_size * PIN_LIMIT_PERCENT // 100
    catalog = Catalog(policies.by_tier, leases, pin_limit_bytes, clock, policies.metadata)
    expect = {f"load-{slot.name}": partial(_expect, slot.tier) for slot in slots}
    work_queue = WorkQueue(queues, config.limits.mover_queue, clock, batch_parallelism(), expect)
    closers.append(work_queue.close)
    move_timeout_ms = max(config.default_deadline_ms, config.redis_timeout_ms)
    moves = Moves(Tiers(slots), catalog, work_queue, counters, clock, move_timeout_ms)
    limits = StoreLimits(
        lease_ttl_ms=config.lease_ttl_ms,
        max_reservations_per_session=config.limits.max_reservations_per_session,
        load_headroom_percent=config.limits.load_headroom_percent,
        bypass_bytes=config.max_frame_bytes,
        prefetch_bytes=config.limits.prefetch_bytes,
        waiting_lookups=max(1, config.workers // WORKERS_PER_WAITER),
        blend=config.blend_terms,
        blend_contents=config.blend_contents,
        state_admission=config.state_admission,
        write_budgets=config.write_budgets,
    )
    store = Store(moves, limits, new_id)
    attach_refills(store)
    store.importance = models.importance
    return store


def _slot(
    config: Settings, tier: Tier, policies: Policies, clock: Clock, models: KnownModels
) -> TierSlot:
    breaker = Breaker(
        f"tier {tier.name}", config.limits.breaker_failures, config.limits.breaker_retry_ms, clock
    )
    name = config.codecs[tier.name]
    by_tenant = {rule.tenant: rule.codec for rule in config.tenant_codecs if rule.tier == tier.name}
    encoder = TierCodec(LOSSLESS if is_auto(name) else name, by_tenant, models.terms_of)
    if is_auto(name):
        encoder.name = f"{name}, measuring"
    rule = config.write.get(tier.name)
    return TierSlot(
        tier, encoder, policies.by_tier[tier.name], breaker, clock,
        make_admission(rule) if rule else None,
        is_exclusive=tier.name == "disk" and config.disk_copies == "exclusive",
    )  # fmt: skip


def _expect(tier: Tier, names: Sequence[bytes]) -> None:
    tier.expect([ChunkKey(name) for name in names])


def batch_parallelism() -> dict[str, int]:
    """Return how many threads share chunks that one server is asked for in a row, by queue.

    Of more than there are cores for, all would be late.
    """
    return {"load-peer": len(os.sched_getaffinity(0))}
