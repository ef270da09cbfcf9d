"""Too many calls, callers that send nothing, connections of nobody: few, and they do not last."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import ServerMaker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.bare_wire import wire_to
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import LARGE, SMALL, frame_of, store

from kvstore.client import ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, KVStoreError, QuotaExceededError
from kvstore.server.api import grpc_server, load_shedding
from kvstore.server.api.grpc_server import most_connections
from kvstore.server.api.interceptors import AuthenticatedContext, CallWrapper
from kvstore.server.api.load_shedding import (
    CALLS_PER_WORKER,
    GRACE_S,
    SLOW_FOR_S,
    SLOW_S,
    STALL_S,
    WRITES_PER_WORKER,
    StallGuard,
)
from kvstore.server.security.sessions import ROLES, Principal
from kvstore.server.settings.process_limits import LEAST


@pytest.fixture
def busy(make_server: ServerMaker) -> LocalServer:
    """A server with one thread for reads and one for writes."""
    return make_server("--workers", "2", "--cpu", "16MiB")


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


SERVICE = "/kvstore.v1.KVStore/"


class Silent:
    """A caller that has said nothing; ``cancel`` ends its call as gRPC's context would."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.is_ended = False

    def __iter__(self) -> Silent:
        return self

    def __next__(self) -> bytes:
        self._over.wait(20)
        raise StopIteration

    def cancel(self) -> None:
        self.is_ended = True
        self._over.set()


def test_who_says_nothing_is_ended_the_longest_silent_first() -> None:
    now = [0.0]
    guard = StallGuard(2, lambda: now[0])
    silent: Any = [Silent() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for count, one in enumerate(silent, 1):
            threads.submit(list, guard.each(one, one))
            assert eventually(lambda count=count: len(guard._waiting) == count)  # type: ignore[misc]
        now[0] = GRACE_S / 2
        assert guard.tick() == 0
        now[0] = GRACE_S
        assert guard.tick() == 2
        assert [one.is_ended for one in silent] == [True, True, False, False]
        now[0] = STALL_S - 0.1
        assert guard.tick() == 0
        now[0] = STALL_S
        assert guard.tick() == 2
    assert len(guard._waiting) == 0


def test_a_slow_tenant_gets_the_last_quarter_of_threads_again_when_its_time_is_over() -> None:
    now, both = [0.0], [Principal("key:1", name, ROLES) for name in ("slow", "other")]
    guard = StallGuard(1, lambda: now[0])
    calls: list[Any] = [Silent() for _ in range(3)]
    silent = [AuthenticatedContext(one, both[0]) for one in calls]
    with ThreadPoolExecutor(3) as threads:
        for count, one in enumerate(silent, 1):
            threads.submit(list, guard.each(calls[count - 1], one))
            assert eventually(lambda count=count: len(guard._waiting) == count)  # type: ignore[misc]
        slow, other = (AuthenticatedContext(Silent(), who) for who in both)  # type: ignore[arg-type]
        assert list(guard.each(iter([1]), slow)) == [1], "nobody is slow yet"
        now[0] = SLOW_S
        assert guard.tick() == 0
        with pytest.raises(QuotaExceededError, match="slow"):
            list(guard.each(iter([1]), slow))
        with pytest.raises(QuotaExceededError, match="slow"):
            list(guard.taken(iter([1]), slow))
        assert list(guard.each(iter([1]), other)) == [1]
        now[0] = STALL_S
        assert guard.tick() == 3
        assert eventually(lambda: not guard._waiting)
        assert list(guard.each(iter([1]), slow)) == [1]
        now[0] = STALL_S + SLOW_FOR_S
        assert guard.tick() == 0
    assert not guard._slow


def test_a_tenant_that_renews_its_silent_calls_leaves_threads_for_another(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_shedding, "SLOW_S", 0.1)
    monkeypatch.setattr(load_shedding, "GRACE_S", 60.0)
    ring = KeyRing(tmp_path / "keys")
    hostile, honest = ring.make("hostile"), ring.make("honest")
    server = make_server("--workers", "16", "--cpu", "16MiB", "--auth-keys", str(ring.path))
    guard, over = server.node._shedder.reads.stall_guard, threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    def answered(key: str, messages: Iterator[bytes], timeout_s: float) -> bool:
        """Whether a call on a connection of its own has an answer."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options) as channel:
            call = channel.stream_unary(SERVICE + "Quota", None, None)
            try:
                call(messages, timeout=timeout_s, metadata=(("authorization", f"Bearer {key}"),))
            except grpc.RpcError:
                return False
            return True

    def renew() -> None:
        while not over.wait(0.02):
            # One that begins before its tenant is slow may be one of all threads.
            assert not answered(hostile, silent(), 60 if "hostile" in guard._slow else 1)

    with ThreadPoolExecutor(12) as threads:  # more than the 8 threads, fewer than make calls late
        renewed = [threads.submit(renew) for _ in range(12)]
        found = eventually(lambda: "hostile" in guard._slow)
        answers = [answered(honest, iter([b""]), DEADLINE_MS / 1000) for _ in range(20)]
        over.set()
    assert found
    assert [one.result() for one in renewed] == [None] * 12
    assert answers == [True] * 20


def _begun(stack: ExitStack, server: LocalServer, method: str, first: list[bytes]) -> Any:
    """Begin a call that never ends on a connection of its own, of which only *first* is sent."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = stack.enter_context(grpc.insecure_channel(server.address, options))
    over = threading.Event()
    stack.callback(over.set)

    def messages() -> Iterator[bytes]:
        yield from first
        over.wait(60)

    return channel.stream_unary(SERVICE + method, None, None).future(messages())


@pytest.mark.parametrize("method", ["Lookup", "Put"])
def test_calls_without_a_message_leave_threads_for_others_and_end(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("kvstore.server.api.load_shedding.GRACE_S", 0.4)
    server = make_server("--workers", "8", "--cpu", "16MiB")
    wire = wire_to(server)
    request = pb.LookupRequest(digests=wire.key(1)[16:])
    frame = frame_of(wire.key(9), SMALL).tobytes()
    whole = pb.PutRequest(session_id=wire.terms.session_id, frame_bytes=len(frame), data=frame)
    with ExitStack() as stack:
        calls = [_begun(stack, server, method, []) for _ in range(12)]
        # Both within 5 s, of 15 that those may take.
        assert wire.call("Lookup", request).ready == 0
        assert eventually(lambda: server.counter("stalled_calls") >= 4)  # of a queue's places, some
        assert wire.connection.upload("Put", iter([whole]), 5000, pb.PutResponse).outcomes
        assert eventually(lambda: server.counter("stalled_calls") >= 8)
        assert eventually(lambda: sum(call.done() for call in calls) >= 8)
        ended = [call for call in calls if call.done()]
        assert {call.code() for call in ended} == {grpc.StatusCode.CANCELLED}
        assert wire.call("Lookup", request).ready == 0


def test_a_stream_that_is_not_read_to_its_end_leaves_no_message() -> None:
    seen: list[weakref.ref[Silent]] = []
    guard = StallGuard(1, lambda: 0.0)

    def read_one(messages: Iterator[Silent], _: object) -> None:
        seen.append(weakref.ref(next(messages)))

    handler = grpc.stream_unary_rpc_method_handler(read_one)
    context: Any = Silent()
    context.invocation_metadata = tuple
    answers = CallWrapper().around(handler, "Put", guard.each, guard.taken)
    gc.disable()
    try:
        assert list(answers(iter([Silent()]), context)) == [None]
        assert [message() for message in seen] == [None]
    finally:
        gc.enable()


def test_a_put_that_stops_half_way_ends_and_leaves_nothing(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.api.load_shedding.STALL_S", 0.3)
    server = make_server("--workers", "8", "--cpu", "16MiB")
    wire = wire_to(server)
    frame = frame_of(wire.key(9), SMALL).tobytes()
    first = pb.PutRequest(
        session_id=wire.terms.session_id, frame_bytes=len(frame), data=frame[:1000]
    )
    with ExitStack() as stack:
        call = _begun(stack, server, "Put", [first.SerializeToString()])
        assert call.code() is not grpc.StatusCode.OK
        assert eventually(lambda: server.counter("stalled_calls") == 1)  # counted once it is over
    assert server.settled().open_puts == 0


def test_who_is_unknown_is_refused_before_a_message_comes(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    KeyRing(tmp_path / "keys").make("acme")
    server = make_server("--auth-keys", str(tmp_path / "keys"))
    with ExitStack() as stack:
        for method in ("Lookup", "Put"):
            call = _begun(stack, server, method, [])
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert server.counter("stalled_calls") == 0


def test_a_get_whose_reader_takes_nothing_ends(
    make_server: ServerMaker,
) -> None:
    server = make_server("--workers", "2", "--cpu", "64MiB")
    options = ClientOptions("grpc", chunk_tokens=128, deadline_ms=DEADLINE_MS)
    client = server.connect(representation=LARGE, options=options)
    keys = store(client, 1, 16)
    terms = open_session(server.dial(), LARGE)
    request = pb.GetRequest(
        session_id=terms.session_id, digests=b"".join(key[16:] for key in keys), deadline_ms=600_000
    )
    with grpc.insecure_channel(server.address) as channel:
        unread = channel.unary_stream(SERVICE + "Get", pb.GetRequest.SerializeToString, bytes)
        get = unread(request, timeout=600)
        assert eventually(lambda: server.counter("stalled_calls") == 1)
        with pytest.raises(grpc.RpcError):
            list(get)
        assert get.code() is grpc.StatusCode.CANCELLED
    assert client.get_chunks(keys[:1])


def test_nobody_holds_threads_by_watching_health_or_by_a_call_without_a_message(
    server: LocalServer,
) -> None:
    request = health_pb2.HealthCheckRequest(service="")
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        empty = channel.stream_unary(SERVICE + "Lookup", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(request, timeout=20))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as caught:
            empty(iter([]), timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "send one with the call" in str(caught.value.details())
        assert stub.Check(request, timeout=20).status == 1


# --- connections


SESSIONS = 4


@pytest.mark.parametrize("port", ["port", "health_port"])
def test_a_compressed_message_is_refused_before_it_is_unpacked(
    make_server: ServerMaker, port: str
) -> None:
    server = make_server("--health", "127.0.0.1:0")
    address, squeezed = f"127.0.0.1:{getattr(server.node, port)}", grpc.Compression.Gzip
    large = ("grpc.max_send_message_length", -1)
    with grpc.insecure_channel(address, [large], squeezed) as channel:
        request = health_pb2.HealthCheckRequest(service="x" * (32 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def connected(server: LocalServer, stack: ExitStack) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    link = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
    link.settimeout(20)
    return link


def is_served(link: socket.socket) -> bool:
    """Whether the server speaks first, as HTTP/2 has it, or has hung up."""
    try:
        return bool(link.recv(1))
    except ConnectionError:
        return False


def test_connections_beyond_what_sessions_need_are_closed_as_they_come(
    make_server: ServerMaker,
) -> None:
    server = make_server("--max-sessions", str(SESSIONS), "--cpu", "16MiB")
    wire = wire_to(server)
    most = most_connections(SESSIONS, 0)
    with ExitStack() as stack:
        links = [connected(server, stack) for _ in range(2 * most)]
        assert sum(map(is_served, links)) < most
        assert wire.call("Lookup", pb.LookupRequest(digests=wire.key(1)[16:])).ready == 0


def test_a_connection_that_says_nothing_is_closed(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 200)
    server = make_server("--cpu", "16MiB")
    with ExitStack() as stack:
        link = connected(server, stack)
        while link.recv(4096):
            pass
        assert link.recv(1) == b""


def test_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert most_connections(1024, 0) == 488
    assert most_connections(1024, 176) == 400
    assert most_connections(1024, 1000) == LEAST
    assert most_connections(100, 0) == 264
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert most_connections(1024, 0) == 2112
