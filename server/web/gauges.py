"""The levels that the metrics page and the status show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from kvstore.proto.blend import GateView
from kvstore.server.eviction.quotas import PartitionUse, PolicyReport, Quota
from kvstore.server.store.store import Store
from kvstore.server.telemetry.metrics import Gauge

if TYPE_CHECKING:
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.cluster.peer_tier import PeerTier

SHOWN_GATES = 64
"""Gates on the metrics page, those used last; the status shows all."""


def _policy(tier: str, report: PolicyReport) -> list[Gauge]:
    named = {"tier": tier, "policy": report.name}
    rows: list[Gauge] = [
        ("tier_policy", "1 for the policy that says whom to evict", named, 1.0),
        ("tier_policy_fallbacks", "rankings that took too long", tier, report.fallbacks),
    ]
    for scale, ratio in (report.curve or {1.0: math.nan}).items():
        labels = {"tier": tier, "scale": f"{scale:g}"}
        rows.append(("what_if_hit_ratio", "hit ratio at so many times the size", labels, ratio))
    for one in report.partitions or [PartitionUse("others", 0, Quota())]:
        labels = {"tier": tier, "partition": one.name}
        rows += [
            ("partition_used_bytes", "bytes of a tenant or category", labels, one.used_bytes),
            ("partition_quota_bytes", "its quota, 0 for none", labels, one.quota.limit_bytes),
        ]
    return rows


def _gates(store: Store) -> list[Gauge]:
    rows: list[Gauge] = []
    views = store.blends.gates.views()[-SHOWN_GATES:]
    for one in views or [GateView(is_open=False, ratio=math.nan)]:
        labels = {"model": one.model, "tag": one.tag}
        rows += [
            ("blend_gate_open", "1 while variants are given out", labels, float(one.is_open)),
            ("blend_gate_ratio", "share of tokens to recompute, at least", labels, one.ratio),
            ("blend_gate_shadows", "comparisons since it changed", labels, one.shadows),
        ]
    return rows


def _peers(store: Store) -> list[Gauge]:
    slot = store.tiers.remote
    known = cast("PeerTier", slot.tier).peers.known() if slot is not None else []
    return [
        ("peers_known", "other servers whose memory may be read", "", len(known)),
        ("peers_up", "those that answer", "", sum(peer.is_up for peer in known)),
    ]


def _directory(directory: Directory | None) -> list[Gauge]:
    if directory is None:
        levels = (0, 0, 0, 0)
    else:
        seen = directory.report()
        levels = (len(seen.nodes), seen.announced, seen.waiting, int(seen.is_up))
    nodes, announced, waiting, is_up = levels
    return [
        ("directory_up", "1 while this node is in the directory", "", is_up),
        ("directory_nodes", "other nodes that live", "", nodes),
        ("directory_chunks", "chunks that this node names in the directory", "", announced),
        ("directory_waiting_words", "entries still to be written", "", waiting),
    ]


def gauges(store: Store, session_count: int, directory: Directory | None = None) -> list[Gauge]:
    """Return every level as it is now: its name, what it is, its label and its value."""
    catalog = store.catalog
    rows: list[Gauge] = [
        ("sessions", "open sessions", "", session_count),
        ("leases", "live leases", "", catalog.lease_count()),
        ("known_chunks", "chunks in the index", "", len(catalog)),
        ("ghost_chunks", "evicted chunks that policies remember", "", catalog.evicted_count()),
    ]
    contents, variants, left_out, priority_bytes = store.blends.contents.counts()
    gates = store.blends.gates.open_count()
    rows += [
        ("blend_contents", "contents that blending finds chunks by", "", contents),
        ("blend_variants", "chunks with these contents", "", variants),
        ("blend_left_out", "chunks not taken in, contents being at their limit", "", left_out),
        ("blend_priority_bytes", "what is known of their tokens", "", priority_bytes),
        ("blend_open_gates", "models and tags whose variants are given", "", gates),
        *_gates(store),
        *_directory(directory),
        *_peers(store),
    ]
    for tier, (a_day, left) in store.moves.placement.budgets().items() or [("", (0, 0.0))]:
        rows += [
            ("write_budget_bytes", "bytes a day that the tier may write, 0 for all", tier, a_day),
            ("write_budget_left_bytes", "what it may write now; less than 0 is debt", tier, left),
        ]
    for status in store.slot_statuses():
        name, stats = status.name, status.stats
        rows += [
            ("tier_capacity_bytes", "size of the tier", name, stats.capacity_bytes),
            ("tier_used_bytes", "bytes taken, slack included", name, stats.used_bytes),
            ("tier_chunks", "chunks on the tier", name, stats.chunks),
            ("tier_up", "0 while the tier is left alone", name, float(not status.reason)),
            ("tier_load_bytes_per_second", "mean speed of loads", name, status.load_bytes_per_s),
            ("tier_codec", "number of the codec in frames", name, status.codec_id),
            *_policy(name, catalog.eviction.policy_report(name)),
        ]
    return rows
