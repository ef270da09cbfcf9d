"""Calls over the Unix socket: strangers, garbage, who joins, who hangs up, who never reads."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from contracts.shelf import open_files
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import LARGE, SMALL, store
from helpers.socket_peer import OPEN, Claim, Peer, attached, joined, staging, ticking
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstore.client import ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, UnauthenticatedError
from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import (
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

ServerMaker = Callable[..., LocalServer]
Terms = pb.OpenSessionResponse


@pytest.fixture
def terms(server: LocalServer) -> Terms:
    return open_session(server.dial())


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


def lookup(terms: Terms, *, lease: bool = False, digests: bytes = b"") -> pb.LookupRequest:
    return pb.LookupRequest(session_id=terms.session_id, digests=digests, lease=lease)


def digests(keys: list[ChunkKey]) -> bytes:
    return b"".join(key[16:] for key in keys)


def finished(peer: Peer, answer: Answer) -> Answer:
    """Read on to the last packet of an answer."""
    while answer.reply in (Reply.more, Reply.part):
        answer = peer.receive()
    return answer


def plane_of(server: LocalServer) -> UnixServer:
    plane = server.node.unix_server
    assert plane is not None
    return plane


def assert_works(peer: Peer, terms: Terms) -> None:
    assert peer.call("Lookup", lookup(terms)).reply is Reply.ok


# --- who may call


def test_attached_and_joined_connections_carry_calls(host: Peer, joint: Peer, terms: Terms) -> None:
    for peer in (host, joint, host):
        answer = peer.call("Lookup", lookup(terms, digests=bytes(48)))
        assert answer.reply is Reply.ok
        assert pb.LookupResponse.FromString(answer.body).ready == 0


def test_calls_that_are_sent_ahead_are_answered_in_their_order(
    server: LocalServer, joint: Peer, terms: Terms
) -> None:
    keys = store(server.connect("grpc"), 1, 2)
    counts = [n % 3 for n in range(2 * unix_server._IN_A_ROW + 3)]
    for count in counts:
        joint.send_call("Lookup", lookup(terms, digests=digests(keys[:count])))
    answers = [pb.LookupResponse.FromString(joint.receive().body) for _ in counts]
    assert [answer.ready for answer in answers] == counts
    assert_works(joint, terms)


def test_call_before_attach_or_join_is_denied(host: Peer, terms: Terms) -> None:
    with Peer(terms.socket_path) as stranger:
        for number in METHODS:
            body = METHODS[number].request(session_id=terms.session_id).SerializeToString()
            assert stranger.ask(Request(Op.call, number).pack() + body) is Reply.denied


def test_call_in_another_session_s_name_is_refused_and_leaves_nothing(
    server: LocalServer, joint: Peer, terms: Terms
) -> None:
    other = open_session(server.dial())
    client = server.connect()
    keys = store(client, 1, 1)
    for session_id in (other.session_id, 0):
        request = pb.LookupRequest(session_id=session_id, digests=digests(keys), lease=True)
        answer = joint.call("Lookup", request)
        assert type(answer.error) is UnauthenticatedError
        assert str(answer.error) == "session_id: call on the connection of your session"
    assert server.settled().leases == 0
    assert_works(joint, terms)


# --- what is no call


def test_method_without_a_number_is_refused_and_the_known_ones_named(
    joint: Peer, terms: Terms
) -> None:
    for number in (0, 11, (1 << 64) - 1):
        joint.link.send(Request(Op.call, number).pack() + lookup(terms).SerializeToString())
        error = joint.receive().error
        assert type(error) is InvalidRequestError
        assert str(error) == f"method={number}: use one of {sorted(METHODS)}"
    assert_works(joint, terms)


@given(number=st.integers(0, 8), body=st.binary(max_size=300))
@example(number=1, body=b"")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_body_of_nobody_s_session_fails_and_kills_no_thread(
    server: LocalServer, joint: Peer, terms: Terms, number: int, body: bytes
) -> None:
    joint.link.send(Request(Op.call, number).pack() + body)
    answer = joint.receive()
    assert (answer.reply, answer.body) == (Reply.failed, b"")
    assert_works(joint, terms)
    assert server.node.is_alive()


@given(method=st.sampled_from(list(METHODS)), body=st.binary(max_size=100))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_body_of_one_s_own_session_is_answered_and_kills_no_thread(
    server: LocalServer, joint: Peer, terms: Terms, method: int, body: bytes
) -> None:
    own = METHODS[method].request(session_id=terms.session_id).SerializeToString()
    joint.link.send(Request(Op.call, method).pack() + body + own)
    assert finished(joint, joint.receive()).reply in (Reply.ok, Reply.failed)
    assert_works(joint, terms)
    assert server.node.is_alive()


def test_longest_packet_is_a_call_and_one_byte_more_is_invalid(joint: Peer, terms: Terms) -> None:
    fits = pack_call("Lookup", lookup(terms, digests=bytes(MAX_PACKET_BYTES - 100)))
    fits = pack_call("Lookup", lookup(terms, digests=bytes(2 * MAX_PACKET_BYTES - 100 - len(fits))))
    assert len(fits) == MAX_PACKET_BYTES
    joint.link.send(fits)
    assert "digests" in str(joint.receive().error)
    assert joint.ask(fits + b"\0") is Reply.invalid
    assert joint.ask(fits + bytes(5000)) is Reply.invalid
    assert_works(joint, terms)


def test_descriptors_that_come_with_a_call_are_closed(
    server: LocalServer, joint: Peer, terms: Terms
) -> None:
    assert_works(joint, terms)
    before = open_files()
    with staging() as descriptor:
        for _ in range(10):
            packet = pack_call("Lookup", lookup(terms))
            assert joint.ask(packet, [descriptor] * 4) is Reply.ok
    assert_works(joint, terms)
    # Fewer when the memory of attach was not closed yet when they were counted.
    assert eventually(lambda: open_files() <= before)


# --- joining


def test_join_with_a_wrong_token_is_denied(host: Peer, terms: Terms) -> None:
    for token in (bytes(16), terms.attach_token[::-1]):
        with Peer(terms.socket_path) as peer:
            assert peer.join(Claim(terms.session_id, token)) is Reply.denied
            assert peer.ask(pack_call("Lookup", lookup(terms))) is Reply.denied


def test_join_before_attach_is_refused_and_does_not_keep_the_session_alive(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_server, "_ATTACH_WITHIN_S", 1e6)  # or the skip would end the peer too
    server = make_server()
    terms = open_session(server.dial())
    with Peer(terms.socket_path) as peer:
        assert peer.join(terms) is Reply.invalid
        server.skip(server.config.limits.session_ttl_ms / 1000 + 1)
        assert eventually(lambda: server.counter("expired_sessions") == 1)
        assert peer.join(terms) is Reply.denied


def test_connection_that_has_a_session_takes_no_other(
    server: LocalServer, host: Peer, joint: Peer, terms: Terms
) -> None:
    other = open_session(server.dial())
    with staging() as descriptor:
        for peer in (host, joint):
            assert peer.join(terms) is Reply.invalid
            assert peer.join(other) is Reply.invalid
            assert peer.attach(other, descriptor) is Reply.invalid
            assert_works(peer, terms)


def test_session_is_attached_once_and_the_second_does_not_end_it(
    server: LocalServer, host: Peer, terms: Terms
) -> None:
    with staging() as descriptor, Peer(terms.socket_path) as second:
        assert second.attach(terms, descriptor) is Reply.invalid
    with joined(terms.socket_path, terms):
        assert_works(host, terms)
    assert len(server.node.sessions) == 1


def test_connections_of_a_session_are_bounded_and_those_that_ended_make_room(
    host: Peer, terms: Terms, monkeypatch: pytest.MonkeyPatch
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


# --- the end


def test_end_of_a_joined_connection_does_not_end_the_session(
    server: LocalServer, host: Peer, terms: Terms
) -> None:
    plane = plane_of(server)
    for _ in range(3):
        with joined(terms.socket_path, terms) as peer:
            assert_works(peer, terms)
        assert eventually(lambda: len(plane._peers) == 1)
    assert len(server.node.sessions) == 1
    assert_works(host, terms)
    assert len(plane.staging(terms.session_id).memory) > 0


@pytest.mark.parametrize("how", ["the attaching connection ends", "CloseSession"])
def test_joined_connections_end_with_their_session(
    server: LocalServer, host: Peer, terms: Terms, how: str
) -> None:
    plane = plane_of(server)
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
    keys = store(client, 1, 4)
    client.close()
    terms = open_session(server.dial(), LARGE)
    request = pb.GetRequest(
        session_id=terms.session_id, digests=digests(keys), deadline_ms=DEADLINE_MS
    )
    with attached(terms.socket_path, terms):
        server.settled()
        yield terms, request


def test_message_longer_than_a_packet_comes_in_parts(big: tuple[Terms, pb.GetRequest]) -> None:
    terms, request = big
    with joined(terms.socket_path, terms) as peer:
        answer = peer.call("Get", request)
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


def test_caller_that_hangs_up_in_the_middle_of_a_get_leaves_no_lease(
    server: LocalServer, big: tuple[Terms, pb.GetRequest]
) -> None:
    terms, request = big
    for _ in range(5):
        with joined(terms.socket_path, terms) as peer:
            assert peer.call("Get", request).reply is Reply.part
            assert server.usage().leases == 1
        assert server.settled().leases == 0
    assert len(server.node.sessions) == 1
    assert eventually(lambda: len(plane_of(server)._peers) == 1)


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


def test_caller_that_never_reads_is_hung_up_on_and_holds_up_nobody(
    server: LocalServer, big: tuple[Terms, pb.GetRequest], patience: threading.Event
) -> None:
    terms, request = big
    with ExitStack() as stack:
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


def test_caller_that_never_reads_is_hung_up_on_by_a_server_with_many_descriptors(
    server: LocalServer, big: tuple[Terms, pb.GetRequest], patience: threading.Event
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this user may not open 1024 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    terms, request = big
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        peer = stack.enter_context(joined(terms.socket_path, terms))
        peer.send_call("Get", request)
        assert eventually(lambda: server.usage().leases == 1)
        patience.set()
        assert server.settled().leases == 0
        assert server.node.is_alive()


def test_caller_that_reads_slowly_gets_everything(
    server: LocalServer, big: tuple[Terms, pb.GetRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        unix_calls, "SEND_WITHIN_S", 300
    )  # a busy machine is slower than the caller
    terms, request = big
    with joined(terms.socket_path, terms) as peer:
        peer.send_call("Get", request)
        assert eventually(lambda: server.usage().leases == 1)
        for _ in range(20):  # what it takes another connection to be answered, over and over
            with joined(terms.socket_path, terms) as other:
                assert_works(other, terms)
            answer = peer.receive()
        assert finished(peer, answer).reply is Reply.ok
    assert server.settled().leases == 0


# --- UnixCalls by itself


class Service:
    """Answers as the test says."""

    def __init__(self, replies: list[Any]) -> None:
        self._replies = replies
        self.is_over = False

    def Lookup(self, request: pb.LookupRequest, context: None) -> Any:
        """Return the first reply, or raise it."""
        if isinstance(self._replies[0], Exception):
            raise self._replies[0]
        return self._replies[0]

    def Get(self, request: pb.GetRequest, context: None) -> Iterator[Any]:
        """Yield the replies, up to one that is to be raised."""
        try:
            for reply in self._replies:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            self.is_over = True


def session_of(table: SessionTable) -> Session:
    return table.open(SMALL, "test")


def packets_of(method: int, *replies: Any) -> tuple[Service, Generator[Packet, None, None]]:
    service: Any = Service(list(replies))
    calls, session = calls_of(service)
    body = METHODS[method].request(session_id=session.session_id).SerializeToString()
    return service, calls.answer(session, Request(Op.call, method), body)


def calls_of(
    service: Any, after_lookup: Callable[[], None] = lambda: None
) -> tuple[UnixCalls, Session]:
    table = SessionTable(1, 1000, lambda _: b"", lambda: 0.0, os.urandom)
    authorizer = Authorizer(Settings(), table, lambda: 0.0)
    return UnixCalls(service, authorizer, after_lookup), session_of(table)


def answers_of(method: int, *replies: Any) -> list[Answer]:
    return [unpack_answer(packet) for packet in packets_of(method, *replies)[1]]


def test_bug_in_the_service_is_an_error_that_tells_nothing() -> None:
    for answer in answers_of(1, RuntimeError("secret")) + answers_of(2, RuntimeError("secret")):
        assert type(answer.error) is KVStoreError
        assert str(answer.error) == "internal error; see the server's log"


@pytest.mark.parametrize("error", [None, RuntimeError("secret")], ids=["well", "badly"])
def test_what_follows_a_lookup_comes_after_its_answer_and_is_told_nobody(
    error: Exception | None,
) -> None:
    done = []

    def learn() -> None:
        done.append("learnt")
        if error is not None:
            raise error

    service: Any = Service([pb.LookupResponse(ready=3)])
    calls, session = calls_of(service, learn)
    body = pb.LookupRequest(session_id=session.session_id).SerializeToString()
    packets = calls.answer(session, Request(Op.call, 1), body)
    assert pb.LookupResponse.FromString(unpack_answer(next(packets)).body).ready == 3
    assert done == []
    assert list(packets) == []
    assert done == ["learnt"]


def test_stream_that_fails_in_the_middle_ends_with_its_error() -> None:
    first, last = answers_of(2, pb.GetResponse(index=4), InvalidRequestError("x", 1, "y"))
    assert (first.reply, pb.GetResponse.FromString(first.body).index) == (Reply.more, 4)
    assert (last.reply, type(last.error)) == (Reply.failed, InvalidRequestError)


def test_longest_error_fits_a_packet() -> None:
    (answer,) = answers_of(1, KVStoreError("\U0001f600" * 100_000))
    assert len(str(answer.error)) == 600


def test_answer_of_every_chunk_of_the_largest_batch_is_cut_and_whole() -> None:
    reply = pb.LookupResponse(
        ready=4096, tiers=bytes(4096), load_us=bytes(4 * 4096), tier_names=["x" * 150_000]
    )
    answers = answers_of(1, reply)
    assert [answer.reply for answer in answers] == [Reply.part, Reply.ok]
    assert pb.LookupResponse.FromString(b"".join(a.body for a in answers)) == reply


def test_answer_that_is_given_up_ends_the_service_s_stream() -> None:
    service, packets = packets_of(2, pb.GetResponse(), pb.GetResponse())
    assert unpack_answer(next(packets)).reply is Reply.more
    assert not service.is_over
    packets.close()
    assert service.is_over


# --- planes by themselves


class Plane:
    """A plane whose calls wait until they are let go, with one attached session."""

    def __init__(self, path: Path, threads: int = 4) -> None:
        self.table = SessionTable(8, 1000, lambda _: b"", lambda: 0.0, os.urandom)
        self.session = session_of(self.table)
        self.plane = UnixServer(path, self.table, {}, OPEN, threads, 64)
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.host = attached(str(path), self.session)

    def answer(self, session: Session, head: Request, body: bytes) -> Generator[Packet, None, None]:
        """Wait, then answer with an empty message."""
        self.begun.release()
        self.let_go.wait(20)
        yield from pack_answer(pb.LookupResponse())

    def join(self) -> Peer:
        """Return a connection that joined the session."""
        return joined(str(self.plane.path), self.session)


def test_calls_are_invalid_as_long_as_nobody_answers_them(tmp_path: Path, no_leaks: None) -> None:
    own = Plane(tmp_path / "s.sock")
    assert own.host.ask(pack_call("Lookup", pb.LookupRequest())) is Reply.invalid
    own.let_go.set()
    own.plane.answer = own.answer
    assert own.host.call("Lookup", pb.LookupRequest()).reply is Reply.ok
    own.host.close()
    own.plane.close()


def test_calls_wait_side_by_side_and_each_more_than_the_threads_for_its_turn(
    tmp_path: Path, no_leaks: None
) -> None:
    own = Plane(tmp_path / "s.sock", threads=3)
    own.plane.answer = own.answer
    peers = [own.join() for _ in range(6)]
    for peer in peers:
        peer.send_call("Lookup", pb.LookupRequest())
    for _ in range(3):
        assert own.begun.acquire(timeout=20)
    assert not own.begun.acquire(blocking=False)
    own.let_go.set()
    for peer in peers:
        assert peer.receive().reply is Reply.ok
        peer.close()
    own.host.close()
    own.plane.close()


def test_plane_that_closes_while_calls_run_hangs_up_and_leaves_nothing(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_server, "_END_WITHIN_S", 0.1)
    own = Plane(tmp_path / "s.sock")
    own.plane.answer = own.answer
    peers = [own.join() for _ in range(2)]
    for peer in peers:
        peer.send_call("Lookup", pb.LookupRequest())
        assert own.begun.acquire(timeout=20)
    connections = [p.connection for p in own.plane._peers.values() if p.staging is None]
    own.plane.close()
    assert [peer.is_hung_up() for peer in (own.host, *peers)] == [True] * 3
    # Closed under a thread that is about to send, its number could be another file's by then.
    assert [connection.fileno() > 0 for connection in connections] == [True] * 2
    assert not own.plane.path.exists()
    assert len(own.table) == 0
    own.let_go.set()
    own.plane.close()
    for peer in (own.host, *peers):
        peer.close()


def test_connection_that_is_served_outlives_its_session_until_the_answer(
    tmp_path: Path, no_leaks: None
) -> None:
    own = Plane(tmp_path / "s.sock")
    own.plane.answer = own.answer
    busy, idle = own.join(), own.join()
    busy.send_call("Lookup", pb.LookupRequest())
    assert own.begun.acquire(timeout=20)
    own.table.close(own.session.session_id)
    with ticking(own.plane):
        assert idle.is_hung_up()
        own.let_go.set()
        assert busy.receive().reply is Reply.ok
        assert busy.is_hung_up()
    for peer in (own.host, busy, idle):
        peer.close()
    own.plane.close()


class SlowPoll:
    """The plane's poll; *before* runs whenever a connection is about to be waited for again."""

    def __init__(self, poll: select.epoll, before: Callable[[socket.socket], None]) -> None:
        self._poll = poll
        self._before = before

    def modify(self, connection: socket.socket, events: int) -> None:
        """Wait for *connection* again."""
        self._before(connection)
        self._poll.modify(connection, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)


def test_session_that_ends_just_behind_its_call_kills_no_thread(
    tmp_path: Path, no_leaks: None
) -> None:
    own = Plane(tmp_path / "s.sock")
    own.let_go.set()
    own.plane.answer = own.answer
    peer = own.join()
    (served,) = (p.connection for p in own.plane._peers.values() if p.staging is None)

    def end_session(connection: socket.socket) -> None:
        if connection is served and own.begun.acquire(blocking=False):
            own.table.close(own.session.session_id)
            own.plane.tick()

    poll = own.plane._poll
    own.plane._poll = SlowPoll(poll, end_session)  # type: ignore[assignment]
    assert peer.call("Lookup", pb.LookupRequest()).reply is Reply.ok
    assert peer.is_hung_up()
    assert own.host.is_hung_up()
    own.plane._poll = poll
    with Peer(str(own.plane.path)) as other:
        assert other.ask(b"hello") is Reply.invalid
    assert own.plane.is_alive()
    for link in (own.host, peer):
        link.close()
    own.plane.close()
