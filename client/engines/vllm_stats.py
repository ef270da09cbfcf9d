"""What the vLLM connector counts, as vLLM logs and exports it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, summed over ranks and time."""

    def reset(self) -> None:
        """Begin again from nothing."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of *other*."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter, ``vllm:kvstore_events_total``, whose label ``event`` is the name of a count."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name="vllm:kvstore_events",
            documentation="What the connector of kvstore counted.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._events.labels(*values, name).inc(count)
