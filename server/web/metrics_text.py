"""The metrics as Prometheus reads them. Every series is there from the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.server.telemetry.flows import BOUNDS_S, OTHERS
from kvstore.server.telemetry.metrics import COUNTERS, Counters, Gauge

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
