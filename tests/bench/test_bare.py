"""The bare loops: what they move is there afterwards, and their other processes end with them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench.lib.bare import (
    KINDS,
    PART_BYTES,
    RING_BYTES,
    STEP_BYTES,
    bare_read,
    looked_at,
    raw_zmq,
    relayed,
    ring_put,
    steps_of,
    straight,
    summed_get,
)
from bench.lib.report import Report
from bench.peer_nodes import HitTimes, PeerTimes, add


def test_a_ring_takes_more_than_it_holds_and_its_reader_ends() -> None:
    before = len(psutil.Process().children())
    data = np.zeros(RING_BYTES + 2 * STEP_BYTES, np.uint8)
    with ring_put(steps_of([data])) as put:
        put()
        put()
        assert len(psutil.Process().children()) == before + 1
    assert len(psutil.Process().children()) == before


def test_reads_fill_every_step_with_what_the_file_has(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * STEP_BYTES + 100, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for threads, summed in ((2, True), (3, False)):
            out = np.zeros_like(data)
            with bare_read(descriptor, steps_of([out]), threads, summed=summed) as read:
                read()
            assert np.array_equal(out, data)
    finally:
        os.close(descriptor)


def test_a_get_without_a_store_fills_every_step() -> None:
    out = np.zeros(2 * STEP_BYTES + 64, np.uint8)
    with summed_get(steps_of([out])) as get, looked_at(2, 128, 256) as look:
        get()
        look()
        look()
    assert out.all()


@pytest.mark.parametrize("kind", [*KINDS, "raw", "straight"])
def test_a_bare_transfer_ends_when_all_has_come_and_can_be_repeated(kind: str) -> None:
    size = 2 * PART_BYTES + 1
    ways = {"raw": raw_zmq, "straight": straight}
    with ways[kind](size) if kind in ways else relayed(kind, size) as bring:
        assert [bring() for _ in range(2)] == [size] * 2


def test_the_report_of_other_nodes_has_the_ratios_and_the_lookups() -> None:
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
