"""bench.peer_nodes, without its servers: what it compares with, and what it reports."""

from __future__ import annotations

import pytest
from bench.peer_limits import KINDS, landing
from bench.peer_nodes import PART_BYTES, HitTimes, PeerTimes, add, raw_zmq
from bench.report import Report


def test_the_bare_transfer_ends_when_all_has_come_and_can_be_repeated() -> None:
    with raw_zmq(2 * PART_BYTES + 1) as receive:
        assert [receive() for _ in range(2)] == [2 * PART_BYTES + 1] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_bare_loop_brings_and_copies_all_and_can_be_repeated(kind: str) -> None:
    with landing(kind, 2 * PART_BYTES + 1) as bring:
        assert [bring() for _ in range(2)] == [2 * PART_BYTES + 1] * 2


def test_the_report_has_the_ratio_and_the_lookups() -> None:
    report = Report("peer_nodes")
    times = {"found": [0.001] * 99 + [0.5], "missed": [0.002] * 100, "directory_found": [0.003]}
    add(report, PeerTimes(HitTimes(1 << 20, 0.3, 0.4, 0.2), 1.25, 0.75, times))
    assert report.values["peer_hit_over_raw"] == 1.5
    assert report.values["peer_hit_by_way_over_raw"] == 2.0
    assert report.values["peer_hit_limit_over_raw"] == 0.75
    assert report.values["peer_hit_by_way_limit_over_raw"] == 1.25
    assert report.values["peer_lookup_directory_found_ms_p99"] == 3.0
    assert report.values["peer_lookup_found_ms_p50"] == 1.0
    assert report.values["peer_lookup_missed_ms_p99"] == 2.0
