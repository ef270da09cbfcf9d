"""Counters, and what Prometheus gets to see of them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.server.metrics import COUNTERS, Counters, Gauge, start_metrics_server

GAUGES: list[Gauge] = [
    ("sessions", "open sessions", "", 3.0),
    ("tier_used_bytes", "bytes taken", "cpu", 4096.0),
    ("tier_used_bytes", "bytes taken", "disk", 12.0),
]


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def port(counters: Counters) -> Iterator[int]:
    stop, port = start_metrics_server("127.0.0.1", 0, counters, lambda: GAUGES)
    yield port
    stop()


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text: str = reply.read().decode()
    return text.splitlines()


def test_every_counter_starts_at_zero(counters: Counters) -> None:
    assert counters.snapshot() == dict.fromkeys(COUNTERS, 0)


def test_a_counter_counts_and_a_snapshot_stands_still(counters: Counters) -> None:
    counters.add("lookups")
    before = counters.snapshot()
    counters.add("lookups", 5)
    assert (before["lookups"], counters["lookups"]) == (1, 6)


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


def test_every_series_is_served_from_the_start(port: int) -> None:
    lines = scrape(port)
    for name in COUNTERS:
        assert f"kvstore_{name}_total 0.0" in lines


def test_counters_and_gauges_are_served_as_they_stand(counters: Counters, port: int) -> None:
    counters.add("get_bytes", 7)
    lines = scrape(port)
    assert "kvstore_get_bytes_total 7.0" in lines
    assert "kvstore_sessions 3.0" in lines
    assert 'kvstore_tier_used_bytes{tier="cpu"} 4096.0' in lines
    assert 'kvstore_tier_used_bytes{tier="disk"} 12.0' in lines


def test_a_stopped_server_frees_its_port(counters: Counters) -> None:
    stop, port = start_metrics_server("127.0.0.1", 0, counters, list)
    stop()
    stop, again = start_metrics_server("127.0.0.1", port, counters, list)
    assert again == port
    stop()
