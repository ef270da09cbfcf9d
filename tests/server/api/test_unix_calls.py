"""Calls over the Unix socket: strangers, garbage, who joins, who hangs up, who never reads."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from contracts.shelf import open_files
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import LARGE, SMALL, store
from helpers.socket_peer import OPEN, Claim, Peer, attached, joined, staging, ticking
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvstore.client import ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, UnauthenticatedError
from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import (
    HEADER_BYTES,
    MAX_PACKET_BYTES,
    METHODS,
    Answer,
    Op,
    Packet,
    Reply,
    Request,
    pack_answer,
    pack_call,
    unpack_answer,
)
from kvstore.server.api import unix_calls, unix_server
from kvstore.server.api.unix_calls import UnixCalls, can_send
from kvstore.server.api.unix_server import CONNECTIONS_PER_SESSION, UnixServer
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.settings.settings import Settings

Terms = pb.OpenSessionResponse


@pytest.fixture
def host(terms: Terms) -> Iterator[Peer]:
    """The session's attaching connection."""
    with attached(terms.socket_path, terms) as peer:
        yield peer


@pytest.fixture
def joint(terms: Terms, host: Peer) -> Iterator[Peer]:
    """A connection that joined the session."""
    with joined(terms.socket_path, terms) as peer:
        yield peer


def lookup(terms: Terms, keys: list[ChunkKey] | None = None) -> pb.LookupRequest:
    digests = b"".join(key[16:] for key in keys or [])
    return pb.LookupRequest(session_id=terms.session_id, digests=digests)


def finished(peer: Peer, answer: Answer) -> Answer:
    """Read on to the last packet of an answer."""
    while answer.reply in (Reply.more, Reply.part):
        answer = peer.receive()
    return answer


def assert_works(peer: Peer, terms: Terms) -> None:
    assert peer.call("Lookup", lookup(terms)).reply is Reply.ok


# --- who may call


def test_calls_that_are_sent_ahead_are_answered_in_their_order(
    server: LocalServer, host: Peer, joint: Peer, terms: Terms
) -> None:
    keys = store(server.connect("grpc"), 1, 2)
    counts = [n % 3 for n in range(2 * unix_server._IN_A_ROW + 3)]
    for peer in (host, joint):
        for count in counts:
            peer.send_call("Lookup", lookup(terms, keys[:count]))
        answers = [pb.LookupResponse.FromString(peer.receive().body) for _ in counts]
        assert [answer.ready for answer in answers] == counts
        assert_works(peer, terms)


def test_call_before_attach_or_join_or_behind_a_wrong_token_is_denied(
    host: Peer, terms: Terms
) -> None:
    with Peer(terms.socket_path) as stranger:
        for token in (None, bytes(16), terms.attach_token[::-1]):
            if token is not None:
                assert stranger.join(Claim(terms.session_id, token)) is Reply.denied
            for number in METHODS:
                body = METHODS[number].request(session_id=terms.session_id).SerializeToString()
                assert stranger.request(Request(Op.call, number).pack() + body) is Reply.denied


def test_call_in_another_session_s_name_is_refused_and_leaves_nothing(
    server: LocalServer, joint: Peer, terms: Terms
) -> None:
    keys = store(server.connect(), 1, 1)
    for session_id in (open_session(server.dial()).session_id, 0):
        request = lookup(terms, keys)
        request.session_id, request.lease = session_id, True
        answer = joint.call("Lookup", request)
        assert type(answer.error) is UnauthenticatedError
        assert str(answer.error) == "session_id: call on the connection of your session"
    assert server.settled().leases == 0
    assert_works(joint, terms)


# --- what is no call


@given(method=st.sampled_from([0, 99, *METHODS]), body=st.binary(max_size=300), own=st.booleans())
@example(method=1, body=b"", own=False)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body_is_answered_and_kills_no_thread_and_of_nobody_s_session_fails(
    server: LocalServer, joint: Peer, terms: Terms, method: int, body: bytes, own: bool
) -> None:
    own = own and method in METHODS
    if own:
        body += METHODS[method].request(session_id=terms.session_id).SerializeToString()
    joint.link.send(Request(Op.call, method).pack() + body)
    answer = finished(joint, joint.receive())
    assert own or (answer.reply, answer.body) == (Reply.failed, b"")
    assert answer.reply in (Reply.ok, Reply.failed)
    assert_works(joint, terms)
    assert server.node.is_alive()


def test_packet_too_long_or_of_no_method_is_refused_and_its_descriptors_are_closed(
    joint: Peer, terms: Terms
) -> None:
    assert_works(joint, terms)
    before = open_files()
    call = lookup(terms)
    call.digests = bytes(MAX_PACKET_BYTES - 100)
    call.digests += bytes(MAX_PACKET_BYTES - len(pack_call("Lookup", call)))
    fits = pack_call("Lookup", call)
    assert len(fits) == MAX_PACKET_BYTES
    joint.link.send(fits)
    assert "digests" in str(joint.receive().error)
    assert joint.request(fits + b"\0") is Reply.invalid
    assert joint.request(fits + bytes(5000)) is Reply.invalid
    for number in (0, 11, (1 << 64) - 1):
        joint.link.send(Request(Op.call, number).pack() + lookup(terms).SerializeToString())
        error = joint.receive().error
        assert type(error) is InvalidRequestError
        assert str(error) == f"method={number}: use one of {sorted(METHODS)}"
    with staging() as descriptor:
        for _ in range(10):
            packet = pack_call("Lookup", lookup(terms))
            assert joint.request(packet, [descriptor] * 4) is Reply.ok
    assert_works(joint, terms)
    # Fewer when the memory of attach was not closed yet when they were counted.
    assert eventually(lambda: open_files() <= before)


# --- joining


def test_join_before_attach_is_refused_and_does_not_keep_the_session_alive(
    server: LocalServer, terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_server, "_ATTACH_WITHIN_S", 1e6)  # or the skip would end the peer too
    with Peer(terms.socket_path) as peer:
        assert peer.join(terms) is Reply.invalid
        server.skip(server.config.limits.session_ttl_ms / 1000 + 1)
        assert eventually(lambda: server.counter("expired_sessions") == 1)
        assert peer.join(terms) is Reply.denied


def test_session_is_attached_once_and_a_connection_has_one_session(
    server: LocalServer, host: Peer, joint: Peer, terms: Terms
) -> None:
    other = open_session(server.dial())
    with staging() as descriptor:
        for peer in (host, joint):
            assert peer.join(terms) is Reply.invalid
            assert peer.join(other) is Reply.invalid
            assert peer.attach(other, descriptor) is Reply.invalid
            assert_works(peer, terms)
        with Peer(terms.socket_path) as second:
            assert second.attach(terms, descriptor) is Reply.invalid
    with joined(terms.socket_path, terms):
        assert_works(host, terms)
    assert len(server.node.sessions) == 2


def test_connections_of_a_session_are_bounded_and_those_that_ended_make_room(
    server: LocalServer,
    plane: UnixServer,
    host: Peer,
    terms: Terms,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unix_server, "_ATTACH_WITHIN_S", 300.0)  # *late* waits for all the others
    with ExitStack() as stack:
        peers = [
            stack.enter_context(joined(terms.socket_path, terms))
            for _ in range(CONNECTIONS_PER_SESSION - 1)
        ]
        late = stack.enter_context(Peer(terms.socket_path))
        assert late.join(terms) is Reply.invalid
        for peer in (host, *peers):
            assert_works(peer, terms)
        peers[3].close()
        assert eventually(lambda: late.join(terms) is Reply.ok)
        assert_works(late, terms)
    assert eventually(lambda: len(plane._peers) == 1)
    assert len(server.node.sessions) == 1, "a joined connection's end is not the session's"
    assert_works(host, terms)
    assert len(plane.staging(terms.session_id).memory) > 0


@pytest.mark.parametrize("how", ["the attaching connection ends", "CloseSession"])
def test_joined_connections_end_with_their_session(
    server: LocalServer, plane: UnixServer, host: Peer, terms: Terms, how: str
) -> None:
    peers = [joined(terms.socket_path, terms) for _ in range(5)]
    if how == "CloseSession":
        request = pb.CloseSessionRequest(session_id=terms.session_id)
        server.dial().call("CloseSession", request, DEADLINE_MS, pb.CloseSessionResponse)
        assert host.is_hung_up()
    host.close()
    for peer in peers:
        assert peer.is_hung_up()
        peer.close()
    assert eventually(lambda: plane._peers == {} and plane._staging == {})
    assert len(server.node.sessions) == 0


# --- answers that are not read


@pytest.fixture
def big(server: LocalServer) -> Iterator[tuple[Terms, pb.GetRequest]]:
    """A session of a larger model, and a get of four of its chunks: 4 MiB of messages."""
    options = ClientOptions("shm", chunk_tokens=128, deadline_ms=DEADLINE_MS)
    client = server.connect("shm", LARGE, options)
    digests = b"".join(key[16:] for key in store(client, 1, 4))
    client.close()
    terms = open_session(server.dial(), LARGE)
    request = pb.GetRequest(session_id=terms.session_id, digests=digests, deadline_ms=DEADLINE_MS)
    with attached(terms.socket_path, terms):
        server.settled()
        yield terms, request


def test_message_longer_than_a_packet_comes_in_parts_and_who_hangs_up_leaves_no_lease(
    server: LocalServer, plane: UnixServer, big: tuple[Terms, pb.GetRequest]
) -> None:
    terms, request = big
    with joined(terms.socket_path, terms) as peer:
        peer.send_call("Get", request)
        assert eventually(lambda: server.usage().leases == 1)
        for _ in range(20):  # its reader is slow: others are answered meanwhile, over and over
            with joined(terms.socket_path, terms) as other:
                assert_works(other, terms)
        answer = peer.receive()
        assert answer.reply is Reply.part
        received, replies = [answer], []
        while received[-1].reply is not Reply.ok:
            received.append(peer.receive())
            replies.append(received[-1].reply)
        assert replies.count(Reply.more) >= 4
        assert replies.count(Reply.part) + 1 >= 4 * (1 << 20) // MAX_PACKET_BYTES
        assert received[-1].body == b""
        body = b"".join(answer.body for answer in received[: 1 + replies.index(Reply.more) + 1])
        first = pb.GetResponse.FromString(body)
        assert (first.index, first.part.offset, len(first.part.data)) == (0, 0, 1 << 20)
        assert peer.call("Get", request).reply is Reply.part
        assert server.usage().leases == 1
    assert server.settled().leases == 0
    assert len(server.node.sessions) == 1
    assert eventually(lambda: len(plane._peers) == 1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What begins the second that answers wait for callers that do not read."""
    monkeypatch.setattr(unix_calls, "SEND_WITHIN_S", 1)
    begin = threading.Event()

    def begun(connection: socket.socket, within_s: float) -> bool:
        return begin.wait(60) and can_send(connection, within_s)

    monkeypatch.setattr(unix_calls, "can_send", begun)
    yield begin
    begin.set()


def test_callers_that_never_read_are_hung_up_on_and_hold_up_nobody_with_many_descriptors_too(
    server: LocalServer, big: tuple[Terms, pb.GetRequest], patience: threading.Event
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    terms, request = big
    with ExitStack() as stack:
        if hard >= 4096:  # select() takes no descriptor above 1023
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(1100):
                stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        deaf = [stack.enter_context(joined(terms.socket_path, terms)) for _ in "123"]
        for peer in deaf:
            peer.send_call("Get", request)
        assert eventually(lambda: server.usage().leases == 3)
        with joined(terms.socket_path, terms) as other:
            assert_works(other, terms)
        patience.set()
        assert server.settled().leases == 0
        for peer in deaf:
            while peer.link.recv(MAX_PACKET_BYTES):
                pass
    assert server.node.is_alive()


# --- errors


@pytest.mark.parametrize(("method", "name"), [("Lookup", "lookup"), ("Get", "open_get")])
def test_bug_in_the_service_is_an_error_that_tells_nothing_and_the_longest_fits_a_packet(
    server: LocalServer, joint: Peer, terms: Terms, monkeypatch: pytest.MonkeyPatch,
    method: str, name: str,
) -> None:  # fmt: skip
    request = getattr(pb, f"{method}Request")(session_id=terms.session_id, digests=bytes(16))
    errors: list[Exception] = [RuntimeError("secret"), KVStoreError("\U0001f600" * 100_000)]

    def broken(*_: object, **__: object) -> None:
        raise errors[0]

    with monkeypatch.context() as patch, capture_logs():
        patch.setattr(server.node.store, name, broken)
        answer = finished(joint, joint.call(method, request))
        assert type(answer.error) is KVStoreError
        assert str(answer.error) == "internal error; see the server's log"
        errors.pop(0)
        answer = finished(joint, joint.call(method, request))
        assert len(str(answer.error)) == 600
    assert_works(joint, terms)


def packets_of(service: Any, method: str, learn: Callable[[], None]) -> Iterator[Packet]:
    """Call *method* of *service* without a socket; *learn* is what follows lookups."""
    table = SessionTable(1, 1000, lambda _: b"", lambda: 0.0, os.urandom)
    session = table.open(SMALL, "test")
    calls = UnixCalls(service, Authorizer(Settings(), table, lambda: 0.0), learn)
    packet = pack_call(method, getattr(pb, f"{method}Request")(session_id=session.session_id))
    head = Request.unpack(packet[:HEADER_BYTES])
    return calls.answer(session, head, packet[HEADER_BYTES:])


def test_what_follows_a_lookup_comes_after_its_answer_and_is_told_nobody() -> None:
    done: list[str] = []
    service = Mock(Lookup=lambda *_: pb.LookupResponse(ready=3))

    def learn() -> None:
        done.append("learnt")
        raise RuntimeError("secret")

    packets = packets_of(service, "Lookup", learn)
    assert pb.LookupResponse.FromString(unpack_answer(next(packets)).body).ready == 3
    assert done == []
    assert list(packets) == []
    assert done == ["learnt"]


def test_stream_that_fails_in_the_middle_ends_with_its_error() -> None:
    def get(*_: object) -> Iterator[pb.GetResponse]:
        yield pb.GetResponse(index=4)
        raise InvalidRequestError("x", 1, "y")

    first, last = map(unpack_answer, packets_of(Mock(Get=get), "Get", lambda: None))
    assert (first.reply, pb.GetResponse.FromString(first.body).index) == (Reply.more, 4)
    assert (last.reply, type(last.error)) == (Reply.failed, InvalidRequestError)


# --- planes by themselves


class Plane:
    """A plane whose calls wait until they are let go, with one attached session."""

    def __init__(self, path: Path, threads: int) -> None:
        self.table = SessionTable(8, 1000, lambda _: b"", lambda: 0.0, os.urandom)
        self.session = self.table.open(SMALL, "test")
        self.plane = UnixServer(path, self.table, {}, OPEN, threads, 64)
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.host = attached(str(path), self.session)
        self.peers = [self.host]
        assert self.host.request(pack_call("Lookup", pb.LookupRequest())) is Reply.invalid
        self.plane.answer = self.answer  # who asks before is told that nobody answers

    def answer(self, session: Session, head: Request, body: bytes) -> Generator[Packet, None, None]:
        """Wait, then answer with an empty message."""
        self.begun.release()
        self.let_go.wait(20)
        yield from pack_answer(pb.LookupResponse())

    def join(self) -> Peer:
        """Return a connection that joined the session."""
        self.peers.append(joined(str(self.plane.path), self.session))
        return self.peers[-1]

    def begin(self, peer: Peer) -> None:
        """Have a call of *peer* wait."""
        peer.send_call("Lookup", pb.LookupRequest())
        assert self.begun.acquire(timeout=20)

    def close(self) -> None:
        """End all of it."""
        self.let_go.set()
        for peer in self.peers:
            peer.close()
        self.plane.close()


@pytest.fixture
def own(tmp_path: Path, no_leaks: None) -> Iterator[Plane]:
    own = Plane(tmp_path / "s.sock", threads=3)
    yield own
    own.close()


def test_calls_wait_side_by_side_and_each_more_than_the_threads_for_its_turn(own: Plane) -> None:
    peers = [own.join() for _ in range(6)]
    for peer in peers:
        peer.send_call("Lookup", pb.LookupRequest())
    for _ in range(3):
        assert own.begun.acquire(timeout=20)
    assert not own.begun.acquire(blocking=False)
    own.let_go.set()
    assert [peer.receive().reply for peer in peers] == [Reply.ok] * 6


def test_plane_that_closes_while_calls_run_hangs_up_and_leaves_nothing(
    own: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_server, "_END_WITHIN_S", 0.1)
    peers = [own.join() for _ in range(2)]
    for peer in peers:
        own.begin(peer)
    connections = [p.connection for p in own.plane._peers.values() if p.staging is None]
    own.plane.close()
    assert [peer.is_hung_up() for peer in (own.host, *peers)] == [True] * 3
    # Closed under a thread that is about to send, its number could be another file's by then.
    assert [connection.fileno() > 0 for connection in connections] == [True] * 2
    assert not own.plane.path.exists()
    assert len(own.table) == 0


def test_connection_that_is_served_outlives_its_session_until_the_answer(own: Plane) -> None:
    busy, idle = own.join(), own.join()
    own.begin(busy)
    own.table.close(own.session.session_id)
    with ticking(own.plane):
        assert idle.is_hung_up()
        own.let_go.set()
        assert busy.receive().reply is Reply.ok
        assert busy.is_hung_up()


def test_session_that_ends_just_behind_its_call_kills_no_thread(own: Plane) -> None:
    own.let_go.set()
    peer = own.join()
    (served,) = (p.connection for p in own.plane._peers.values() if p.staging is None)

    def end_session(connection: socket.socket, _: int) -> object:
        """It ends just before its connection is waited for again."""
        if connection is served and own.begun.acquire(blocking=False):
            own.table.close(own.session.session_id)
            own.plane.tick()
        return DEFAULT

    poll = own.plane._poll
    own.plane._poll = Mock(wraps=poll)
    own.plane._poll.modify.side_effect = end_session
    assert peer.call("Lookup", pb.LookupRequest()).reply is Reply.ok
    assert peer.is_hung_up()
    assert own.host.is_hung_up()
    own.plane._poll = poll
    with Peer(str(own.plane.path)) as other:
        assert other.request(b"hello") is Reply.invalid
    assert own.plane.is_alive()
