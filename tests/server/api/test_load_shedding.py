"""Too many calls: the queue stays short, reads go first, late ones are not begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from conftest import ServerMaker
from helpers.bare_wire import wire_to
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


@pytest.fixture
def busy(make_server: ServerMaker) -> LocalServer:
    """A server with one thread for reads and one for writes."""
    return make_server("--workers", "2", "--cpu", "16MiB")


def test_an_executor_is_late_when_calls_waited_too_long_and_many_are_to_come() -> None:
    now = [0.0]
    executor = BoundedExecutor("test", 1, 3, lambda: now[0])
    gates = [threading.Event() for _ in range(3)]
    executor.submit(gates[0].wait)
    assert eventually(lambda: not executor._queued_at)
    last = [executor.submit(job) for job in (gates[1].wait, gates[2].wait, int)][-1]
    assert eventually(lambda: len(executor._queued_at) == 3), "what runs does not count"
    assert executor.is_full
    now[0] += 2 * LATE_S
    assert not executor.is_late, "a thread that stands still says nothing of those that come"
    gates[0].set()
    assert eventually(lambda: len(executor._queued_at) == 2)
    assert not executor.is_full
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


class Gate:
    """Where lookups stand that are told to wait for puts."""

    def __init__(self, server: LocalServer, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.begun = threading.Event(), 0
        self.wire = wire_to(server)
        patch.setattr(server.node.store, "await_puts", self._stand)
        self.request = pb.LookupRequest(digests=self.wire.key(1)[16:], wait_ms=10_000)

    def _stand(self, *_: object) -> None:
        self.begun += 1
        self.opened.wait(20)

    def look(self) -> int:
        return int(self.wire.call("Lookup", self.request).ready)

    def looks(self, threads: ThreadPoolExecutor, count: int) -> list[Future[int]]:
        """Have one lookup stand in the only thread, and others come behind it."""
        looks = [threads.submit(self.look)]
        assert eventually(lambda: self.begun == 1)
        return looks + [threads.submit(self.look) for _ in range(count - 1)]


def refused(looks: list[Future[int]]) -> list[Future[int]]:
    return [one for one in looks if one.done() and isinstance(one.exception(), QuotaExceededError)]


def test_lookups_beyond_their_queue_are_refused_though_probes_send_nothing_and_served_after(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server("--workers", "2", "--cpu", "16MiB", "--health", "127.0.0.1:0")
    gate, count = Gate(server, monkeypatch), 2 * CALLS_PER_WORKER + 4

    def silent() -> Iterator[bytes]:
        gate.opened.wait(120)
        yield from ()

    with (
        grpc.insecure_channel(f"127.0.0.1:{server.node.health_port}") as channel,
        ThreadPoolExecutor(count) as threads,
    ):
        probe = channel.stream_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        probes = [probe.future(silent(), timeout=120) for _ in range(4)]
        looks = gate.looks(threads, count)
        assert eventually(lambda: bool(refused(looks)))
        gate.opened.set()
    assert 1 <= len(refused(looks)) <= 4
    assert all(one.exception() for one in probes), "they sent nothing"
    assert store(server.connect("grpc"), 1, 4)


def test_lookups_are_refused_before_their_queue_is_full_when_they_wait_too_long(
    busy: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, count = Gate(busy, monkeypatch), 2 * CALLS_PER_WORKER
    monkeypatch.setattr(load_shedding, "LATE_S", -1.0)
    with ThreadPoolExecutor(count) as threads:
        looks = gate.looks(threads, count)
        assert eventually(lambda: len(refused(looks)) == count - 3)
        rest = [look for look in looks if not look.done()]
        gate.opened.set()
    assert [look.result() for look in rest] == [0] * 3
    monkeypatch.undo()
    assert store(busy.connect("grpc"), 1, 4)


def test_a_call_that_waited_past_its_deadline_is_not_begun(
    busy: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(busy, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        gate.looks(threads, 1)
        with pytest.raises(DeadlineError):
            gate.wire.connection.call("Lookup", gate.request, 200, pb.LookupResponse)
        gate.opened.set()
    assert gate.wire.call("Lookup", pb.LookupRequest(digests=gate.wire.key(1)[16:])).ready == 0
    assert gate.begun == 1
