"""Callers that send nothing and connections of nobody are few, and do not last."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from conftest import ServerMaker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.bare_wire import wire_to
from helpers.local_server import LocalServer, eventually
from helpers.prompts import SMALL, frame_of

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.api import grpc_server
from kvstore.server.api.grpc_server import most_connections
from kvstore.server.api.load_shedding import GRACE_S, STALL_S, StallGuard
from kvstore.server.settings.process_limits import LEAST

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


def test_a_call_without_its_message_is_told(server: LocalServer) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(SERVICE + "Lookup", None, None)(iter([]), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "send one with the call" in str(caught.value.details())


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


def test_nobody_holds_threads_by_watching_health(make_server: ServerMaker) -> None:
    server = make_server("--workers", "4", "--cpu", "16MiB")
    wire = wire_to(server)
    request = health_pb2.HealthCheckRequest(service="")
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(6):
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(request, timeout=20))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert stub.Check(request, timeout=20).status == 1
    assert wire.call("Lookup", pb.LookupRequest(digests=wire.key(1)[16:])).ready == 0


# --- connections


SESSIONS = 4


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
