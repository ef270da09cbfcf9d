"""Requests that are recorded, and what is counted: metrics as Prometheus gets to see them."""

from __future__ import annotations

import pytest
from blake3 import blake3
from simulation.clock import FakeClock

from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError
from kvstore.proto.types import KEY_BYTES, ChunkKey
from kvstore.server.telemetry import request_trace
from kvstore.server.telemetry.metrics import Counters, Gauge
from kvstore.server.telemetry.request_trace import IDLE_S, NAME_BYTES, RequestLog, check_local
from kvstore.server.web.gauges import MetricsText


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(KEY_BYTES, "big"))


def chain(*numbers: int) -> list[ChunkKey]:
    return [key(number) for number in numbers]


def names(text: bytes) -> list[bytes]:
    return [text[at : at + NAME_BYTES] for at in range(0, len(text), NAME_BYTES)]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock) -> RequestLog:
    return RequestLog(clock)


def test_nothing_is_kept_before_somebody_reads_and_a_second_reader_joins(log: RequestLog) -> None:
    log.note(chain(1, 2), 0, 0)
    first = log.read(0, 0)
    assert (first.lookups, first.last, first.lost) == ([], 0, 0)
    assert first.recording
    log.note(chain(1), 0, 0)
    second = log.read(0, 0)
    assert (second.recording, second.last) == (first.recording, 1)
    log.note(chain(2), 0, 0)
    assert len(log.read(second.recording, second.last).lookups) == 1
    page = log.read(first.recording, 1 << 40)  # what never was
    assert (page.lookups, page.last, page.lost) == ([], 2, 0)


def test_lookups_are_read_once_in_order_with_times_of_their_own(
    log: RequestLog, clock: FakeClock
) -> None:
    recording = log.read(0, 0).recording
    clock.advance(1.5)
    log.note(chain(1, 2), 1, 500)
    clock.advance(1.0)
    log.note([], 0, 0)
    page = log.read(recording, 0)
    assert [(one.at_s, len(one.names), one.ready, one.tokens) for one in page.lookups] == [
        (1.5, 16, 1, 500),
        (2.5, 0, 0, 0),
    ]
    assert (page.last, page.lost) == (2, 0)
    assert log.read(recording, page.last).lookups == []
    log.note(chain(3), 0, 0)
    later = log.read(recording, page.last)
    assert (len(later.lookups), later.last) == (1, 3)


def test_equal_chunks_have_equal_names_in_a_recording_and_others_in_the_next(
    log: RequestLog, clock: FakeClock
) -> None:
    seen = []
    for _ in range(2):
        recording = log.read(0, 0).recording
        log.note(chain(1, 2), 0, 0)
        log.note(chain(1, 3), 0, 0)
        one, other = (names(x.names) for x in log.read(recording, 0).lookups)
        assert one[0] == other[0]
        assert one[1] != other[1]
        seen.append(one[0])
        clock.advance(IDLE_S + 1)
    assert seen[0] != seen[1]
    assert blake3(key(1)).digest(NAME_BYTES) not in seen
    assert key(1)[-NAME_BYTES:] not in seen


def test_a_recording_that_nobody_reads_ends_and_leaves_nothing(
    log: RequestLog, clock: FakeClock
) -> None:
    recording = log.read(0, 0).recording
    log.note(chain(1), 0, 0)
    for _ in range(2):
        clock.advance(IDLE_S)
        assert len(log.read(recording, 0).lookups) == 1, "somebody reads it"
    clock.advance(IDLE_S + 1)
    log.note(chain(2), 0, 0)
    assert log._recording is None
    with pytest.raises(InvalidRequestError, match="begin another"):
        log.read(recording, 0)


def test_it_keeps_no_more_than_its_limits_and_says_what_was_lost(
    log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_trace, "LOG_LOOKUPS", 10)
    monkeypatch.setattr(request_trace, "LOG_CHUNKS", 25)
    recording = log.read(0, 0).recording
    for number in range(30):
        log.note(chain(number), 0, 0)
    page = log.read(recording, 5)
    assert (len(page.lookups), page.last, page.lost) == (10, 30, 15)
    for number in range(3):
        log.note(chain(*range(number, number + 10)), 0, 0)
    page = log.read(recording, 30)
    assert (len(page.lookups), page.last, page.lost) == (2, 33, 1)


def test_pages_are_cut_and_go_on_where_they_ended(
    log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_trace, "PAGE_LOOKUPS", 4)
    monkeypatch.setattr(request_trace, "PAGE_CHUNKS", 6)
    recording, after, sizes = log.read(0, 0).recording, 0, []
    for number in range(7):
        log.note(chain(number, 100), 0, 0)
    log.note(chain(*range(9)), 0, 0)
    for _ in range(5):
        page = log.read(recording, after)
        sizes.append(len(page.lookups))
        after = page.last
    assert sizes == [3, 3, 1, 1, 0]
    assert after == 8


def test_callers_on_the_host_may_read_and_no_others() -> None:
    for peer in ["unix:", "unix:/run/s", "ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5"]:
        check_local(peer)
    for peer in ["", "ipv4:10.0.0.7:5", "ipv6:%5B2001:db8::1%5D:5", "x:127.0.0.1"]:
        with pytest.raises(PermissionDeniedError, match="own host"):
            check_local(peer)


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
