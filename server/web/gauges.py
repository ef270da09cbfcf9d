"""The levels that the metrics page and the status show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.proto.blend import GateView
from kvstore.server.eviction.quotas import PartitionUse, PolicyReport, Quota
from kvstore.server.store.store import Store
from kvstore.server.telemetry.metrics import BOUNDS_S, COUNTERS, OTHERS, Counters, Gauge

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


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsText(Collector):
    """Collects *counters* and what *gauges* returns; *tiers* are the names of the server's."""

    def __init__(
        self,
        counters: Counters,
        gauges: Callable[[], Iterable[Gauge]],
        tiers: Sequence[str],
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._tiers = tiers
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield every family; called by the library."""
        for name, value in self._counters.snapshot().items():
            yield CounterMetricFamily(f"kvstore_{name}", COUNTERS[name], value=value)
        yield from self._finds()
        yield from self._flows()
        yield self._times()
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, where, level in self._gauges():
            labels = ({"tier": where} if where else {}) if isinstance(where, str) else where
            family = families.setdefault(
                name, GaugeMetricFamily(f"kvstore_{name}", text, labels=list(labels))
            )
            family.add_metric(list(labels.values()), level)
        yield from families.values()

    def _finds(self) -> Iterable[Metric]:
        finds = self._counters.finds.snapshot()
        tiers = dict.fromkeys(self._tiers, 0) | dict(finds.tiers)
        yield _counter("tier_found_chunks", "chunks that lookups found there first", "tier", tiers)
        asked, ready = (dict(by) or {OTHERS: 0} for by in (finds.asked, finds.ready))
        yield _counter("tenant_lookup_chunks", "chunks asked for by a tenant", "tenant", asked)
        yield _counter("tenant_ready_chunks", "those of them found ready", "tenant", ready)

    def _flows(self) -> Iterable[Metric]:
        moved = {
            (one, other): (0, 0) for one in self._tiers for other in self._tiers if one != other
        } | self._counters.flows.snapshot()
        labels = ["source", "target"]
        chunks = CounterMetricFamily("kvstore_flow_chunks", "chunks copied", labels=labels)
        sizes = CounterMetricFamily("kvstore_flow_bytes", "bytes of them there", labels=labels)
        for way, (count, size_bytes) in moved.items():
            chunks.add_metric(way, count)
            sizes.add_metric(way, size_bytes)
        yield chunks
        yield sizes

    def _times(self) -> Metric:
        text = "time of calls in the server, of those over gRPC and the socket"
        family = HistogramMetricFamily("kvstore_call_seconds", text, labels=["method"])
        for method, times in self._counters.times.snapshot().items():
            buckets, below = [], 0
            for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], times.counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric([method], buckets, times.total_s)
        return family


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvstore_{name}", text, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family
