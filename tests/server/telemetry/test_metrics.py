"""Counters, and what Prometheus gets to see of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.server.telemetry.metrics import COUNTERS, TIMED, Counters, Gauge
from kvstore.server.web.gauges import MetricsText

GAUGES: list[Gauge] = [
    ("sessions", "open sessions", "", 3.0),
    ("tier_used_bytes", "bytes taken", "cpu", 4096.0),
    ("tier_used_bytes", "bytes taken", "disk", 12.0),
]


@pytest.fixture
def counters() -> Counters:
    return Counters()


def scrape(counters: Counters) -> list[str]:
    return MetricsText(counters, lambda: GAUGES, ("cpu", "disk")).text().decode().splitlines()


def test_an_unknown_name_is_a_mistake_of_ours(counters: Counters) -> None:
    with pytest.raises(KeyError):
        counters.add("look_ups")


def test_threads_lose_no_count(counters: Counters) -> None:
    def count_up(_: int) -> None:
        for _ in range(500):
            counters.add("get_chunks")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count_up, range(8)))
    assert counters["get_chunks"] == 4_000


def test_every_series_is_served_from_the_start(counters: Counters) -> None:
    lines = scrape(counters)
    for name in COUNTERS:
        assert f"kvstore_{name}_total 0.0" in lines
    assert 'kvstore_tier_found_chunks_total{tier="disk"} 0.0' in lines
    assert 'kvstore_flow_chunks_total{source="cpu",target="disk"} 0.0' in lines
    assert 'kvstore_tenant_ready_chunks_total{tenant="others"} 0.0' in lines
    for method in TIMED:
        assert f'kvstore_call_seconds_count{{method="{method}"}} 0.0' in lines


def test_counters_and_gauges_are_served_as_they_stand(counters: Counters) -> None:
    counters.add("get_bytes", 7)
    counters.note_move("disk", "cpu", 40)
    counters.note_call("Get", 0.003)
    lines = scrape(counters)
    assert "kvstore_get_bytes_total 7.0" in lines
    assert "kvstore_sessions 3.0" in lines
    assert 'kvstore_tier_used_bytes{tier="cpu"} 4096.0' in lines
    assert 'kvstore_tier_used_bytes{tier="disk"} 12.0' in lines
    assert 'kvstore_flow_bytes_total{source="disk",target="cpu"} 40.0' in lines
    assert 'kvstore_call_seconds_bucket{le="0.002",method="Get"} 0.0' in lines
    assert 'kvstore_call_seconds_bucket{le="0.005",method="Get"} 1.0' in lines
    assert 'kvstore_call_seconds_sum{method="Get"} 0.003' in lines
