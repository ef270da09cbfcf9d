"""Too many calls: the queue stays short, reads go first, late ones are not begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import grpc
import pytest
from conftest import ServerMaker
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import LocalServer, eventually
from helpers.prompts import SMALL, frame_of, store

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, KVStoreError, QuotaExceededError
from kvstore.server.api import load_shedding
from kvstore.server.api.load_shedding import (
    CALLS_PER_WORKER,
    LATE_S,
    WRITES_PER_WORKER,
    BoundedExecutor,
)


def look_up(wire: Wire, request: pb.LookupRequest, refused: list[QuotaExceededError]) -> None:
    """Look chunks up; add the error to *refused* where the server has too many calls."""
    try:
        wire.call("Lookup", request)
    except QuotaExceededError as error:
        refused.append(error)


@pytest.fixture
def busy(make_server: ServerMaker) -> LocalServer:
    """A server with one thread for reads and one for writes."""
    return make_server("--workers", "2", "--cpu", "16MiB")


def test_an_executor_counts_what_waits_and_not_what_runs() -> None:
    executor = BoundedExecutor("test", 1, 2)
    gate = threading.Event()
    first = executor.submit(gate.wait)
    assert eventually(lambda: not executor._queued_at)
    others = [executor.submit(int) for _ in range(2)]
    assert executor.is_full
    gate.set()
    assert [other.result(10) for other in others] == [0, 0]
    assert first.result(10)
    assert not executor.is_full
    executor.shutdown()


def test_an_executor_is_late_when_calls_waited_too_long_and_many_are_to_come() -> None:
    now = [0.0]
    executor = BoundedExecutor("test", 1, 100, lambda: now[0])
    gates = [threading.Event() for _ in range(3)]
    for gate in gates:
        executor.submit(gate.wait)
    last = executor.submit(int)
    assert eventually(lambda: len(executor._queued_at) == 3)
    now[0] += 2 * LATE_S
    assert not executor.is_late, "a thread that stands still says nothing of those that come"
    gates[0].set()
    assert eventually(lambda: len(executor._queued_at) == 2)
    assert executor.is_late
    gates[1].set()
    assert eventually(lambda: len(executor._queued_at) == 1)
    assert not executor.is_late, "what is next is soon begun"
    gates[2].set()
    last.result(10)
    executor.shutdown()


def test_puts_that_fill_their_queue_are_refused_and_lookups_go_on(busy: LocalServer) -> None:
    wire = wire_to(busy)
    frame = frame_of(wire.key(9), SMALL).tobytes()
    over = threading.Event()

    def endless() -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(
            session_id=wire.terms.session_id, frame_bytes=len(frame), data=frame[:1000]
        )
        over.wait(20)

    count = WRITES_PER_WORKER + 3
    outcomes: list[str] = []

    def put() -> None:
        try:
            wire.connection.upload("Put", endless(), 20_000, pb.PutResponse)
        except KVStoreError as error:
            outcomes.append(type(error).__name__)

    with ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            threads.submit(put)
        assert eventually(lambda: bool(outcomes))
        assert set(outcomes) == {"QuotaExceededError"}
        keys = b"".join(wire.key(seed)[16:] for seed in range(1, 33))
        for _ in range(20):
            assert wire.call("Lookup", pb.LookupRequest(digests=keys)).ready == 0
        over.set()
    assert busy.counter("shed_calls") >= 1


def test_probes_that_send_nothing_hold_up_no_refusal(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server("--workers", "2", "--cpu", "16MiB", "--health", "127.0.0.1:0")
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait(120)
        yield from ()

    def silent_probe(channel: grpc.Channel) -> None:
        call = channel.stream_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        with suppress(grpc.RpcError):
            call(silent(), timeout=120)

    wire = wire_to(server)
    monkeypatch.setattr(server.node.store, "await_puts", lambda *_: over.wait(120))
    request = pb.LookupRequest(digests=wire.key(1)[16:], wait_ms=10_000)
    count = 2 * CALLS_PER_WORKER + 4
    refused: list[QuotaExceededError] = []
    look = partial(look_up, wire, request, refused)
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.node.health_port}") as channel,
        ThreadPoolExecutor(count + 4) as threads,
    ):
        for _ in range(4):
            threads.submit(silent_probe, channel)
        time.sleep(0.3)  # nothing says that they have come
        for _ in range(count):
            threads.submit(look)
        assert eventually(lambda: bool(refused))
        over.set()


def test_lookups_beyond_their_queue_are_refused_at_once_and_served_again_after(
    busy: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = wire_to(busy)
    gate = threading.Event()
    monkeypatch.setattr(busy.node.store, "await_puts", lambda *_: gate.wait(20))
    request = pb.LookupRequest(digests=wire.key(1)[16:], wait_ms=10_000)
    count = 2 * CALLS_PER_WORKER + 4
    refused: list[QuotaExceededError] = []
    look = partial(look_up, wire, request, refused)
    with ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            threads.submit(look)
        assert eventually(lambda: bool(refused))
        gate.set()
    assert len(refused) <= 4
    assert store(busy.connect("grpc"), 1, 4)


def test_lookups_are_refused_before_their_queue_is_full_when_they_wait_too_long(
    busy: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = wire_to(busy)
    gate, begun = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        gate.wait(20)

    monkeypatch.setattr(busy.node.store, "await_puts", wait)
    monkeypatch.setattr(load_shedding, "LATE_S", -1.0)
    request = pb.LookupRequest(digests=wire.key(1)[16:], wait_ms=10_000)
    count = 2 * CALLS_PER_WORKER
    with ThreadPoolExecutor(count) as threads:
        looks = [threads.submit(wire.call, "Lookup", request)]
        assert begun.wait(20)
        looks += [threads.submit(wire.call, "Lookup", request) for _ in range(count - 1)]
        assert eventually(lambda: sum(look.done() for look in looks) == count - 3)
        refused = [look for look in looks if look.done()]
        gate.set()
    assert all(isinstance(look.exception(), QuotaExceededError) for look in refused)
    assert all(look.result().ready == 0 for look in looks if look not in refused)
    monkeypatch.undo()
    assert store(busy.connect("grpc"), 1, 4)


def test_a_call_that_waited_past_its_deadline_is_not_begun(
    busy: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = wire_to(busy)
    gate, begun = threading.Event(), []

    def wait(*_: object) -> None:
        begun.append(1)
        gate.wait(20)

    monkeypatch.setattr(busy.node.store, "await_puts", wait)
    first = pb.LookupRequest(
        session_id=wire.terms.session_id, digests=wire.key(1)[16:], wait_ms=10_000
    )
    with ThreadPoolExecutor(2) as threads:
        threads.submit(wire.call, "Lookup", first)
        assert eventually(lambda: bool(begun))
        with pytest.raises(DeadlineError):
            wire.connection.call("Lookup", first, 200, pb.LookupResponse)
        gate.set()
    assert wire.call("Lookup", pb.LookupRequest(digests=wire.key(1)[16:])).ready == 0
    assert len(begun) == 1
