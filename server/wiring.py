"""Puts a store over the tiers that the configuration names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.refill import attach_refills
from kvstore.server.cluster.setup import with_peers
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.known_models import KnownModels
from kvstore.server.index.leases import Leases
from kvstore.server.settings.rules import is_auto
from kvstore.server.settings.settings import Settings
from kvstore.server.store.store import Store, StoreLimits
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import make_admission
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.codec_choice import QUEUE
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_codec import NamedCodec, TierCodec, lossless_codec
from kvstore.server.tiering.tier_slot import Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue
from kvstore.server.wiring_policies import Policies
from kvstore.server.wiring_tiers import open_tiers
from kvstore.tiers.base import Tier

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
        if tier.trouble:
            logger.warning("tier is down at start", tier=tier.name, reason=tier.trouble)
    counters.add("dropped_rows", sum(slot.tier.dropped_rows for slot in slots))
    queues = {"store-cpu": 1} if "gpu" in config.tiers else {}
    queues[QUEUE] = 1
    for slot in slots:
        if slot.name == "cpu":
            continue
        queues |= {f"load-{slot.name}": LOADS_AT_ONCE[slot.name], f"store-{slot.name}": 1}
        if slot.tier.shared:
            queues[f"ask-{slot.name}"] = QUESTIONS_AT_ONCE.get(slot.name, 1)
    leases = Leases(config.max_leases_per_session, new_id)
    pin_limit_bytes = config.cpu_size * PIN_LIMIT_PERCENT // 100
    catalog = Catalog(policies.by_tier, leases, pin_limit_bytes, clock, policies.metadata)
    expect = {f"load-{slot.name}": partial(_expect, slot.tier) for slot in slots}
    work_queue = WorkQueue(queues, config.mover_queue, clock, batch_parallelism(), expect)
    closers.append(work_queue.close)
    move_timeout_ms = max(config.default_deadline_ms, config.redis_timeout_ms)
    moves = Moves(Tiers.of(slots), catalog, work_queue, counters, clock, move_timeout_ms)
    limits = StoreLimits(
        lease_ttl_ms=config.lease_ttl_ms,
        max_reservations_per_session=config.max_reservations_per_session,
        load_headroom_percent=config.load_headroom_percent,
        bypass_bytes=config.max_frame_bytes,
        prefetch_bytes=config.prefetch_bytes,
        waiting_lookups=max(1, config.workers // WORKERS_PER_WAITER),
        blend=config.blend_terms,
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
    breaker = Breaker(f"tier {tier.name}", config.breaker_failures, config.breaker_retry_ms, clock)
    name = config.codecs[tier.name]
    is_open = is_auto(name)  # until it is measured
    codec = NamedCodec(f"{name}, measuring", lossless_codec()) if is_open else NamedCodec.of(name)
    others = [rule for rule in config.tenant_codecs if rule.tier == tier.name]
    by_tenant = {rule.tenant: NamedCodec.of(rule.codec) for rule in others}
    encoder = TierCodec(codec, by_tenant, models.terms_of)
    policy = policies.by_tier[tier.name]
    rule = config.write_rules.get(tier.name)
    return TierSlot(
        tier, codec.codec, policy, breaker, clock, encoder,
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
