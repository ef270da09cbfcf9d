"""Builds a store from the settings: tiers, policies, catalog and moves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import structlog

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import Accuracy
from kvstore.server.cluster.refill import attach_refills
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.eviction.quotas import (
    NO_QUOTA,
    MissRatioCurve,
    PartitionedEviction,
    PartitionTable,
    Quota,
)
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.index.holds import Leases
from kvstore.server.index.known_models import KnownModels
from kvstore.server.security.key_files import WatchedFile, parse_encryption_keys
from kvstore.server.settings.rules import GpuConfig, auto_accuracy, is_auto
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import DIRECTORY, format_size
from kvstore.server.store.store import Store
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import ADMISSIONS
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.codec_choice import QUEUE
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import LOSSLESS, TierCodec, Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:  # their files load torch, and gRPC's client
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.tiers.gpu import GpuTier

PIN_LIMIT_PERCENT = 50
LOADS_AT_ONCE = {"gpu": 1, "disk": 2, "peer": 4, "redis": 3}
"""Loading threads per tier: one reads while another verifies."""
FINDS_AT_ONCE = {"peer": 2, "redis": 1}

Clock = Callable[[], float]

logger = structlog.get_logger(__name__)


def open_tiers(config: Settings, counters: Counters, clock: Clock, opened: ExitStack) -> list[Tier]:
    """Return the configured tiers, fastest first; *opened* closes them."""
    hidden = hiding(config)
    tiers: list[Tier] = []

    def add(tier: Tier) -> None:
        tiers.append(opened.enter_context(closing(tier)))

    register = None
    if "gpu" in config.tiers:
        gpu = open_gpu_tier(config.gpu)
        add(gpu)
        register = gpu.device.register
    add(CpuTier(config.cpu_size, config.cpu_slab_bytes, register))
    if "disk" in config.tiers:
        from kvstore.tiers.disk import DiskTier, file_bytes_for

        folders = [(one.path, one.capacity_bytes) for one in config.disk]
        file_bytes = file_bytes_for(sum(size for _, size in folders), config.max_frame_bytes)
        disk = DiskTier(*folders, file_bytes=file_bytes, is_direct=config.disk_direct)
        add(hidden(disk))
    if config.peers:
        add(_open_peer_tier(config, counters, clock))
    if "redis" in config.tiers:
        from kvstore.tiers.redis import RedisTier

        tier = RedisTier(
            config.redis_access(config.redis_url or ""),
            config.redis_size,
            timeout_ms=config.redis_timeout_ms,
            connections=config.limits.redis_connections,
            prefix=config.redis_prefix,
        )
        add(hidden(tier))
    return tiers


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


def _open_peer_tier(config: Settings, counters: Counters, clock: Clock) -> PeerTier:
    """Return the peer tier. Raises InvalidRequestError if a key would be sent in plain text."""
    from kvstore.server.cluster.peer_connections import dial_peer, key_metadata
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.cluster.peers import Peers

    addresses = [name for name in config.peers or () if name != DIRECTORY]
    for address in addresses:
        key_metadata(config, address)
    peers = Peers(addresses, config.limits, partial(dial_peer, config), counters, clock)
    return PeerTier(peers, counters, clock)


def hiding(config: Settings) -> Callable[[Tier], Tier]:
    """Return a function that encrypts a tier, or returns it as it is without keys; a changed key
    file is reloaded. Raises InvalidRequestError for an unusable one.
    """
    path = config.encryption_keys
    if path is None:
        return lambda tier: tier
    from kvstore.tiers.encrypted import EncryptedTier, KeyRing

    def by_epoch(data: bytes) -> dict[int, bytes]:
        if not (rows := parse_encryption_keys(data)):
            fix = "has no key; make one with kvstore keys new"
            raise InvalidRequestError("encryption_keys", len(data), fix)
        return {epoch: row.key for epoch, row in rows.items()}

    file = WatchedFile((path,), by_epoch)

    def now() -> Mapping[int, bytes]:
        file.refresh()
        return file.value

    keys = KeyRing(now, os.urandom)
    return lambda tier: EncryptedTier(tier, keys)


def make_policies(
    config: Settings, capacities: Mapping[str, int], clock: Clock | None = None
) -> tuple[ChunkMetadata, dict[str, EvictionPolicy]]:
    """Return the metadata that all policies rank by, and the policy of each tier.

    *capacities* are in bytes by tier; *clock* limits the time of decisions. Raises
    InvalidRequestError when guarantees exceed the capacity of a tier.
    """
    # Nothing is evicted from a tier without a size.
    names = {tier: config.policy[tier] if size else "lru" for tier, size in capacities.items()}
    terms = config.category_terms
    categories = {rule.category: Quota(rule.quota) for rule in terms if rule.quota}
    limited = [rule.tenant for rule in config.tenant_limits if rule.chunks]
    tenants = dict.fromkeys([*(rule.tenant for rule in config.tenant_quotas), *limited])
    metadata = ChunkMetadata(
        partitions=PartitionTable(tuple(tenants), tuple(categories)),
        category_ttls_s={rule.category: float(rule.ttl_s) for rule in terms if rule.ttl_s},
        evicted_limit=config.limits.ghost_limit,
        what_ifs={tier: MissRatioCurve(size) for tier, size in capacities.items() if size},
        policy_names=names,
    )
    looks_ahead = any(ADMISSIONS[rule].looks_ahead for rule in config.write.values())
    if looks_ahead or any(config.write_budget.values()):
        metadata.forecast = ReuseForecast(metadata.history)
    by_tier: dict[str, EvictionPolicy] = {}
    for tier, size_bytes in capacities.items():
        make = partial(make_policy, names[tier], metadata.history, clock)
        if size_bytes and (tenants or categories):
            quotas = metadata.partitions.quotas(_by_tenant(config, tier), categories)
            if sum(quota.guaranteed_bytes for quota in quotas) > size_bytes:
                fix = f"guarantee at most the {format_size(size_bytes)} of tier {tier!r}"
                given = ",".join(map(str, config.tenant_quotas))
                raise InvalidRequestError("tenant_quotas", given, fix)
            of = metadata.hints.partitions.__getitem__
            by_tier[tier] = PartitionedEviction(make, of, quotas, size_bytes)
        else:
            by_tier[tier] = make()
    return metadata, by_tier


def _by_tenant(config: Settings, tier: str) -> dict[str, Quota]:
    """Return the quotas of tenants on *tier*: a rule for this tier overrides one for all."""
    rules = sorted(config.tenant_quotas, key=lambda rule: rule.tier != "")
    of_tier = (rule for rule in rules if rule.tier in ("", tier))
    quotas = {rule.tenant: Quota(rule.quota, rule.guaranteed) for rule in of_tier}
    for limit in config.tenant_limits:
        if limit.chunks:
            quota = quotas.get(limit.tenant, NO_QUOTA)
            quotas[limit.tenant] = replace(quota, limit_chunks=limit.chunks)
    return quotas


def build_store(
    config: Settings,
    clock: Clock,
    counters: Counters,
    opened: ExitStack,
    new_id: Callable[[], int],
) -> Store:
    """Open the configured tiers, which *opened* closes, and return a store over them. *new_id*
    returns unpredictable numbers below 2^64.
    """
    tiers = open_tiers(config, counters, clock, opened)
    capacities = {tier.name: tier.capacity_bytes for tier in tiers}
    metadata, policies = make_policies(config, capacities, time.perf_counter)
    models = KnownModels()
    slots = [_slot(config, tier, policies[tier.name], clock, models) for tier in tiers]
    queues = {"store-cpu": 1, QUEUE: 1} if "gpu" in config.tiers else {QUEUE: 1}
    for tier in tiers:
        name = tier.name
        if tier.write_error:
            logger.warning("tier is down at start", tier=name, reason=tier.write_error)
        if name != "cpu":
            queues |= {f"load-{name}": LOADS_AT_ONCE[name], f"store-{name}": 1}
        if tier.shared:
            queues[f"ask-{name}"] = FINDS_AT_ONCE[name]
    counters.add("dropped_rows", sum(tier.dropped_rows for tier in tiers))
    limits = config.limits
    leases = Leases(limits.max_leases_per_session, new_id)
    pin_limit_bytes = config.cpu_size * PIN_LIMIT_PERCENT // 100
    catalog = Catalog(policies, leases, pin_limit_bytes, clock, metadata)
    expect = {f"load-{tier.name}": cast("Any", tier.expect) for tier in tiers}
    work_queue = WorkQueue(queues, limits.mover_queue, clock, batch_parallelism(), expect)
    opened.callback(work_queue.close)
    move_timeout_ms = max(config.default_deadline_ms, config.redis_timeout_ms)
    moves = Moves(Tiers(slots), catalog, work_queue, counters, clock, move_timeout_ms)
    store = Store(moves, config, new_id)
    attach_refills(store)
    store.models = models
    return store


def _slot(
    config: Settings, tier: Tier, policy: EvictionPolicy, clock: Clock, models: KnownModels
) -> TierSlot:
    failures, retry_ms = config.limits.breaker_failures, config.limits.breaker_retry_ms
    breaker = Breaker(f"tier {tier.name}", failures, retry_ms, clock)
    name = config.codecs[tier.name]
    by_tenant = {rule.tenant: rule.codec for rule in config.tenant_codecs if rule.tier == tier.name}
    encoder = TierCodec(LOSSLESS if is_auto(name) else name, by_tenant, models.terms_of)
    if is_auto(name):
        encoder.name = f"{name}, measuring"
        # If it may choose a lossy codec, it offers no durable puts before it has chosen.
        encoder.is_exact &= auto_accuracy(name) is Accuracy.exact
    rule = config.write.get(tier.name)
    return TierSlot(
        tier, encoder, policy, breaker, clock, ADMISSIONS[rule] if rule else None,
        is_exclusive=tier.name == "disk" and config.disk_copies == "exclusive",
    )  # fmt: skip


def batch_parallelism() -> dict[str, int]:
    """Return how many threads may load from one peer, by queue: more than cores slow all down."""
    return {"load-peer": len(os.sched_getaffinity(0))}
