"""The metrics page: counters and gauges of a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from typing import TYPE_CHECKING, cast

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.server.eviction.quotas import PartitionUse, PolicyReport, Quota
from kvstore.server.store.store import Store
from kvstore.server.telemetry.metrics import BOUNDS_S, COUNTERS, OTHERS, Counters, Gauge

if TYPE_CHECKING:
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.cluster.peer_tier import PeerTier

SHOWN_GATES = 64
"""Limit of gates on the metrics page, the latest used; the status shows all."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def gauges(store: Store, session_count: int, directory: Directory | None = None) -> Iterator[Gauge]:
    """Yield all gauges, each with at least one row, so that its name exists."""
    catalog = store.catalog
    yield ("sessions", "open sessions", "", session_count)
    yield ("leases", "live leases", "", len(catalog.leases))
    yield ("known_chunks", "chunks in the index", "", len(catalog))
    yield ("ghost_chunks", "evicted chunks in the ghost list", "", catalog.evicted_count())
    yield from _blending(store)
    seen = pb.Directory() if directory is None else directory.report()
    is_up = seen.standing == "known" and not seen.failure
    yield ("directory_up", "1 while this node is in the directory", "", float(is_up))
    yield ("directory_nodes", "other live nodes", "", len(seen.nodes))
    yield ("directory_chunks", "chunks that this node advertises", "", seen.announced)
    yield ("directory_waiting_words", "queued directory entries", "", seen.waiting)
    remote = store.tiers.remote
    peers = cast("PeerTier", remote.tier).peers.known() if remote is not None else []
    yield ("peers_known", "known peers", "", len(peers))
    yield ("peers_up", "peers that answer", "", sum(peer.is_up for peer in peers))
    for tier, (a_day, left) in store.moves.placement.budgets().items() or [("", (0, 0.0))]:
        yield ("write_budget_bytes", "write budget in bytes per day; 0: no limit", tier, a_day)
        yield ("write_budget_left_bytes", "bytes left to write now; negative: debt", tier, left)
    for name, slot in store.tiers.slots.items():
        stats = slot.tier.stats()
        yield ("tier_capacity_bytes", "capacity of the tier", name, stats.capacity_bytes)
        yield ("tier_used_bytes", "bytes in use, including slack", name, stats.used_bytes)
        yield ("tier_chunks", "chunks on the tier", name, stats.chunks)
        yield ("tier_up", "0 while the tier is degraded", name, float(not slot.reason))
        yield ("tier_load_bytes_per_second", "mean load throughput", name, slot.bytes_per_s)
        yield ("tier_codec", "codec id in frames", name, slot.encoder.codec_id)
        yield from _policy(name, catalog.eviction.policy_report(name))


def _blending(store: Store) -> Iterator[Gauge]:
    contents, variants, left_out, priority_bytes = store.blends.contents.counts()
    gates = store.blends.gates
    yield ("blend_contents", "contents in the blending index", "", contents)
    yield ("blend_variants", "chunks with these contents", "", variants)
    yield ("blend_left_out", "chunks not indexed, at the limit of contents", "", left_out)
    yield ("blend_priority_bytes", "bytes of token priorities", "", priority_bytes)
    views = gates.views()
    open_gates = sum(one.is_open for one in views)
    yield ("blend_open_gates", "open gates of models and tags", "", open_gates)
    for one in views[-SHOWN_GATES:] or [GateView(is_open=False, ratio=math.nan)]:
        labels = {"model": one.model, "tag": one.tag}
        yield ("blend_gate_open", "1 while the gate is open", labels, float(one.is_open))
        yield ("blend_gate_ratio", "least share of tokens to recompute", labels, one.ratio)
        yield ("blend_gate_shadows", "comparisons since its last change", labels, one.shadows)


def _policy(tier: str, report: PolicyReport) -> Iterator[Gauge]:
    named = {"tier": tier, "policy": report.name}
    yield ("tier_policy", "1 for the eviction policy in use", named, 1.0)
    yield ("tier_policy_fallbacks", "rankings that timed out to LRU", tier, report.fallbacks)
    for scale, ratio in (report.curve or {1.0: math.nan}).items():
        labels = {"tier": tier, "scale": f"{scale:g}"}
        yield ("what_if_hit_ratio", "estimated hit ratio at a multiple of the size", labels, ratio)
    for one in report.partitions or [PartitionUse("others", 0, Quota())]:
        labels = {"tier": tier, "partition": one.name}
        yield ("partition_used_bytes", "bytes of a tenant or category", labels, one.used_bytes)
        yield ("partition_quota_bytes", "its quota; 0: no limit", labels, one.quota.limit_bytes)


@dataclass(frozen=True)
class MetricsText(Collector):
    """Collects ``counters`` and ``gauges``; ``tiers`` are the names of the server's tiers."""

    counters: Counters
    gauges: Callable[[], Iterable[Gauge]]
    tiers: Sequence[str]

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families; called by prometheus_client."""
        yield from _families(CounterMetricFamily, self._counts())
        yield self._times()
        yield from _families(GaugeMetricFamily, self.gauges())

    def _counts(self) -> Iterator[Gauge]:
        for name, value in self.counters.snapshot().items():
            yield (name, COUNTERS[name], "", value)
        finds, tiers = self.counters.finds(), self.tiers
        for tier, found in (dict.fromkeys(tiers, 0) | finds.tiers).items():
            yield ("tier_found_chunks", "chunks that lookups found on this tier", tier, found)
        for tenant, wanted in (finds.asked or {OTHERS: 0}).items():
            labels, ready = {"tenant": tenant}, finds.ready.get(tenant, 0)
            yield ("tenant_lookup_chunks", "chunks requested by a tenant", labels, wanted)
            yield ("tenant_ready_chunks", "chunks found for a tenant", labels, ready)
        moved = dict.fromkeys(permutations(tiers, 2), (0, 0)) | self.counters.moves()
        for (source, target), (chunks, size_bytes) in moved.items():
            labels = {"source": source, "target": target}
            yield ("flow_chunks", "chunks copied between tiers", labels, chunks)
            yield ("flow_bytes", "bytes copied, as encoded on the target", labels, size_bytes)

    def _times(self) -> Metric:
        text = "latency of calls in the server, over gRPC and the Unix socket"
        family = HistogramMetricFamily("kvstore_call_seconds", text, labels=["method"])
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for method, times in self.counters.times().items():
            buckets = list(zip(bounds, accumulate(times.counts), strict=True))
            family.add_metric([method], buckets, times.total_s)
        return family


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily], rows: Iterable[Gauge]
) -> Iterable[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, text, where, level in rows:
        labels = ({"tier": where} if where else {}) if isinstance(where, str) else where
        if name not in families:
            families[name] = kind(f"kvstore_{name}", text, labels=list(labels))
        families[name].add_metric(list(labels.values()), level)
    return families.values()
