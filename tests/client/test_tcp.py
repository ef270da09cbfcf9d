"""The tcp transport: the contract, how it is chosen, what a server or a port may do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from contracts.bad_puts import changed
from contracts.bulk_channel import BULK, BulkChannelContract, ServerMaker, digests
from helpers import stream_messages as messages
from helpers.fake_peer import peer_session
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, SMALL, assert_reads, chunks_of, keys_of, store
from helpers.stream_messages import Sent

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Pool
from kvstore.client.frames import Arrival, FrameAssembler
from kvstore.client.session import Session, SessionTerms
from kvstore.client.transports.base import PutTerms, ReadPlan
from kvstore.client.transports.grpc import StreamTransport
from kvstore.client.transports.tcp import (
    MAX_STREAMS,
    BulkTransport,
    Entrance,
    FrameStream,
    streams_to,
    upload,
)
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket, make_tls
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import ChunkKey, Namespace, PutOutcome
from kvstore.server.bulk.tcp_server import BulkServer
from kvstore.server.cluster.peer_connections import StreamLink
from kvstore.server.store.writes import Writes


class TestBulkTransport(BulkChannelContract):
    def test_more_calls_at_once_than_streams_go_through_grpc(
        self, bare: BulkTransport, client: Client
    ) -> None:
        keys = store(client, 1, 2)
        with ExitStack() as stack:
            gets = [stack.enter_context(bare.read(plan_of(keys))) for _ in range(MAX_STREAMS + 2)]
            assert len(bare.streams.busy) == MAX_STREAMS
            assert bare.put([], PutTerms(False, DEADLINE_MS)) == []
            for arriving in gets:
                assert [one.index for one in arriving.frames] == [0, 1]
        assert len(bare.streams.idle) == MAX_STREAMS

    def test_a_server_that_is_late_within_a_get_shuts_the_gate(
        self, bare: BulkTransport, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(*_: object) -> Iterator[Arrival]:
            raise DeadlineError("late")

        keys = store(client, 1, 1)
        breaker, opened = bare.session.connection.breaker, list[bool]()
        note = breaker.note  # a heartbeat may close it again before we look
        monkeypatch.setattr(breaker, "note", lambda *some: opened.append(note(*some)))
        monkeypatch.setattr(FrameStream, "parts", late)
        with bare.read(plan_of(keys)) as arriving, pytest.raises(DeadlineError):
            next(arriving.frames)
        assert True in opened


def plan_of(keys: Sequence[ChunkKey]) -> ReadPlan:
    return ReadPlan(digests(keys), 0, DEADLINE_MS)


# --- the choice


@pytest.mark.parametrize(
    ("flags", "name"),
    [(BULK, "shm"), ((*BULK, "--socket", "off"), "tcp"), (("--socket", "off"), "grpc")],
)
def test_auto_takes_shared_memory_then_tcp_then_grpc(
    make_server: ServerMaker, flags: tuple[str, ...], name: str
) -> None:
    client = make_server(*flags).connect("auto")
    assert client.transport_name == name
    assert_reads(client, store(client, 1, 2))


def test_tcp_from_a_server_without_it_is_an_error_that_says_so(make_server: ServerMaker) -> None:
    with pytest.raises(TierUnavailableError, match="started without --bulk"):
        _ = make_server().connect("tcp").transport_name


def test_a_channel_that_does_not_answer_leaves_grpc(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive_only(_: BulkServer, link: socket.socket, *__: object) -> None:
        with link:
            while link.recv(4096):
                pass

    server = make_server(*BULK, "--socket", "off")
    monkeypatch.setattr(BulkServer, "_welcome", receive_only)
    options = ClientOptions("auto", chunk_tokens=16, deadline_ms=1000)
    client = server.connect(options=options)
    assert client.transport_name == "grpc"
    with pytest.raises(DeadlineError):
        _ = server.connect(options=ClientOptions("tcp", deadline_ms=400)).transport_name


# --- the other side's end


@pytest.fixture
def lost(make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkTransport]:
    """A transport without a stream, to a server that takes 0.6 s to let one in."""
    server = make_server(*BULK)
    session = Session(server.dial(), SMALL, ClientOptions("tcp", 16, deadline_ms=DEADLINE_MS))
    transport = BulkTransport(session)
    transport.connect(DEADLINE_MS / 2000)
    for stream in transport.streams.idle:
        stream.wake(KVStoreError("lost"))
    welcome = BulkServer._welcome

    def slow(*terms: Any) -> None:
        threading.Event().wait(0.6)
        welcome(*terms)

    monkeypatch.setattr(BulkServer, "_welcome", slow)
    yield transport
    transport.close()
    session.close()


@pytest.mark.parametrize("name", ["read", "put"])
def test_grpc_has_what_is_left_of_a_call_that_waited_for_a_stream(
    lost: BulkTransport, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given: list[int] = []

    def asked(_: object, what: Any, terms: PutTerms | None = None) -> None:
        given.append(what.deadline_ms if terms is None else terms.within_ms)
        raise TierUnavailableError("server", "not asked")

    monkeypatch.setattr(StreamTransport, name, asked)
    with suppress(TierUnavailableError), ExitStack() as stack:
        if name == "put":
            lost.put([], PutTerms(False, 600))
        else:
            stack.enter_context(lost.read(ReadPlan(b"", 0, 600)))
    assert 1 <= given[0] <= 300


SOON_S = 20.0


def transport_of(client: Client) -> BulkTransport:
    transport = client._link.connected()
    assert isinstance(transport, BulkTransport)
    return transport


@pytest.fixture
def server(make_server: ServerMaker, request: pytest.FixtureRequest) -> LocalServer:
    if getattr(request, "param", "plain") == "plain":
        return make_server(*BULK)
    return make_server("--bulk", "0.0.0.0:0", "--insecure")


BOTH = pytest.mark.parametrize("server", ["plain", "tls"], indirect=True)
"""In plain text and over TLS."""


@BOTH
def test_gets_come_over_the_stream_and_nothing_of_them_through_grpc(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(server.connect("grpc", MEDIUM), 1, 3)
    client = server.connect("tcp", MEDIUM)
    forbid_grpc(monkeypatch)
    assert_reads(client, keys)
    assert_reads(client, keys)
    layers = list(client.get_chunk_layers(keys))
    assert [len(layer.tensors) for layer in layers] == [len(keys)] * len(layers)
    assert layers
    assert server.settled().leases == 0


@BOTH
def test_puts_go_over_the_stream_with_their_hints_and_nothing_of_them_through_grpc(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [server.connect("tcp"), server.connect("tcp", MEDIUM), large_chunks(server)]
    forbid_grpc(monkeypatch)
    taken: list[Hints] = []
    opened = Writes.open

    def noted(writes: Writes, *terms: Any, **others: Any) -> object:
        taken.append(terms[3])
        return opened(writes, *terms, **others)

    monkeypatch.setattr(Writes, "open", noted)
    hints = Hints(Reuse.keep, priority=3, ttl_ms=60_000, category="code")
    for client, durable in zip(clients, (False, True, True), strict=True):
        keys = keys_of(client, 3, 3)
        for outcome in (PutOutcome.stored, PutOutcome.exists):
            puts = client.put_chunks(chunks_of(client, keys), durable=durable, hints=hints)
            assert [put.outcome for put in puts] == [outcome] * 3
        assert_reads(client, keys)
    assert set(taken) == {hints}
    assert server.settled().open_puts == 0


def large_chunks(server: LocalServer) -> Client:
    """Return a client whose frames are of several messages."""
    options = ClientOptions("tcp", chunk_tokens=300, deadline_ms=DEADLINE_MS)
    return server.connect("tcp", MEDIUM, options)


def test_a_put_that_finds_no_thread_goes_through_grpc(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("tcp")
    streams = server.node.bulk
    assert streams is not None
    store(client, 1, 2)
    # Its thread is done a little after its answer.
    assert eventually(lambda: streams._clients_served == 0)
    monkeypatch.setattr(streams, "_clients_served", streams._client_threads)
    store(client, 2, 2)
    assert not _streams_idle(client)  # it was hung up on


def test_a_frame_damaged_on_its_way_is_refused_and_the_next_put_goes_on(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = large_chunks(server)
    keys = keys_of(client, 1, 3)
    send = FrameStream.send

    def damaged(stream: FrameStream, message: pb.StreamMessage, pieces: Sequence[Any] = ()) -> None:
        if message.part.index == 1 and message.part.offset:
            pieces = [pieces[0] ^ 1, *pieces[1:]]
        send(stream, message, pieces)

    monkeypatch.setattr(FrameStream, "send", damaged)
    with pytest.raises(ChunkCorruptError):
        client.put_chunks(chunks_of(client, keys))
    monkeypatch.undo()
    assert server.settled().tiers[0][1].chunks == 1
    assert [put.outcome for put in client.put_chunks(chunks_of(client, keys))] == [
        PutOutcome.exists,
        PutOutcome.stored,
        PutOutcome.stored,
    ]
    assert_reads(client, keys)


def forbid_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every get and put through gRPC fail."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("it went through gRPC")

    for name in ("read", "put"):
        monkeypatch.setattr(StreamTransport, name, forbidden)


def test_a_port_that_is_reached_no_more_is_tried_twice_and_gets_come_through_grpc(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("tcp")
    keys = store(client, 1, 2)
    tried: list[object] = []

    def refused(_: socket.socket, address: object) -> None:
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refused)
    for stream in _streams_idle(client):
        stream.wake(KVStoreError("lost"))
    streams = transport_of(client).streams
    assert_reads(client, keys)
    assert_reads(client, keys)
    assert eventually(lambda: streams._rests_until_s > 0), "a dial beside the call has failed too"
    for _ in range(3):
        assert_reads(client, keys)
    assert len(tried) == 2
    monkeypatch.undo()
    streams._rests_until_s = 0.0
    assert_reads(client, keys)
    assert eventually(lambda: len(streams.idle) == 1)


def test_a_server_that_has_hung_up_on_idle_streams_is_dialled_again(
    server: LocalServer,
) -> None:
    client = server.connect("tcp")
    keys = store(client, 1, 2)
    assert_reads(client, keys)
    assert server.node.bulk is not None
    for stream in list(server.node.bulk._streams):
        stream.wire.hang_up()
    assert eventually(lambda: _first(client).is_broken())
    assert_reads(client, keys)
    assert_reads(client, keys)
    assert not _first(client).is_broken()


def _first(client: Client) -> FrameStream:
    return transport_of(client).streams.idle[0]


def test_a_get_that_waits_ends_when_its_transport_closes_or_the_server_is_given_up() -> None:
    for end, error in (
        (Pool.close, "the client is closed"),
        (lambda streams: streams.hang_up(DeadlineError("the server hangs")), "hangs"),
    ):
        with closing(Answerer([])) as other:
            streams = streams_to(Entrance.of(other.terms, ""))
            stream = streams.take(SOON_S)
            assert stream is not None
            threading.Timer(0.05, end, [streams]).start()
            with pytest.raises(KVStoreError, match=error):
                read(stream, SOON_S)
            streams.give_back(stream, is_clean=False)
            streams.close()


def _streams_idle(client: Client) -> list[FrameStream]:
    return transport_of(client).streams.idle


# --- a server that answers otherwise

FRAME_BYTES = 1000
TERMS = SessionTerms(
    7, 1, Namespace(bytes(16)), 60_000, 1 << 28, 64, "", "", bytes(16), "", b"", "", 0, 0, 0,
)  # fmt: skip
Words = list[Sent]


class Answerer:
    """Lets one in, answers its get with *words*, then says nothing or hangs up."""

    def __init__(
        self, words: Words, *, hangs_up: bool = False, pause_s: float = 0.0, stall_s: float = 0.0
    ) -> None:
        """After *stall_s* the header of a part comes, and nothing of its payload."""
        self._words, self._hangs_up, self._pause_s = words, hangs_up, pause_s
        self._stall_s = stall_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.terms = replace(TERMS, bulk_address=self.where)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        link, _ = self._listener.accept()
        with closing(FramedSocket(link, "reader", time.monotonic, is_encrypted=False)) as wire:
            wire.set_timeout(SOON_S)
            wire.receive()
            wire.send(messages.ready())
            try:
                wire.receive()
                if self._stall_s:
                    self._ended.wait(self._stall_s)
                    link.sendall(bulk.pack(messages.part(1, FRAME_BYTES, 0), 500))
                    self._ended.wait(SOON_S)
                for message, payload in self._words:
                    messages.send(wire, message, payload)
                    self._ended.wait(self._pause_s)
            except KVStoreError:
                return
            if not self._hangs_up:
                self._ended.wait(SOON_S)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
        self._listener.close()


def part(offset: int, size_bytes: int, **other: int) -> Sent:
    return changed((messages.part(1, FRAME_BYTES, offset, 0, "cpu"), bytes(size_bytes)), **other)


def read(stream: FrameStream, within_s: float) -> int:
    """Ask for a frame; return how many came whole."""
    deadline = time.monotonic() + within_s
    reading = FrameAssembler(1 << 20)
    stream.begin(messages.get(0, 7, bytes(16)), deadline)
    frames = len(list(reading.frames(stream.parts())))
    reading.end(stream.frames)
    return frames


@contextmanager
def stream_to(words: Words, **other: Any) -> Iterator[FrameStream]:
    with closing(Answerer(words, **other)) as server:
        stream = FrameStream(Entrance.of(server.terms, ""), SOON_S)
        with closing(stream):
            yield stream


def answered(words: Words, within_s: float = SOON_S, **other: Any) -> int:
    """Read from a server that says *words*."""
    with stream_to(words, **other) as stream:
        return read(stream, within_s)


def put_to(words: Words, *, hangs_up: bool = False, within_s: float = SOON_S) -> object:
    """Put nothing to a server that says *words*; return what it made of it."""
    with stream_to(words, hangs_up=hangs_up) as stream:
        deadline = time.monotonic() + within_s
        request = pb.PutRequest(session_id=7, deadline_ms=1000)
        stream.begin(pb.StreamMessage(put=request), deadline)
        return upload(stream, [])


GO_ON: Sent = (messages.ready(1), b"")


def test_what_is_no_answer_to_a_put_is_refused() -> None:
    stored = (messages.stored(1, b""), b"")
    assert put_to([GO_ON, stored]) == []
    lies: list[Words] = [
        [stored],
        [(messages.ready(2), b"")],
        [part(0, 500)],
        [GO_ON, GO_ON],
        [GO_ON, (messages.done(1, 0), b"")],
        [GO_ON, (messages.stored(1, bytes(1)), b"")],
        [GO_ON, (messages.stored(2, b""), b"")],
    ]
    for words in lies:
        with pytest.raises(InvalidFrameError):
            put_to(words)


def test_a_put_ends_by_the_server_s_error_by_its_end_or_by_the_deadline() -> None:
    refused = (messages.failed(1, "QuotaExceededError", "chunks=9: too many"), b"")
    for words in ([refused], [GO_ON, refused]):
        with pytest.raises(QuotaExceededError, match="too many"):
            put_to(words)
    for words in ([], [GO_ON]):
        with pytest.raises(TierUnavailableError):
            put_to(words, hangs_up=True)
        with pytest.raises(DeadlineError):
            put_to(words, within_s=0.2)


def test_what_is_of_an_earlier_request_is_skipped_and_the_server_s_error_is_raised() -> None:
    earlier = [(messages.failed(9, "KVStoreError", "no"), b""), (messages.done(9, 5), b"")]
    parts = [part(0, 1), part(1, 700), part(701, 299), (messages.done(1, 1), b"")]
    assert answered([*earlier, *parts]) == 1
    with pytest.raises(QuotaExceededError, match="too many"):
        answered([*earlier, (messages.failed(1, "QuotaExceededError", "too many"), b"")])


def test_parts_that_do_not_follow_each_other_are_refused() -> None:
    lies: list[Words] = [
        [part(0, 500), part(400, 500)],
        [(messages.part(2, FRAME_BYTES, 0), bytes(500))],
        [part(0, 500, frame_bytes=1 << 40)],
        [part(0, 500), (messages.done(1, 1), b"")],
        [(messages.ready(1), b"")],
    ]
    for words in lies:
        with pytest.raises(InvalidFrameError):
            answered(words)


def test_a_payload_that_stalls_behind_a_late_header_costs_the_deadline_once() -> None:
    with stream_to([], stall_s=0.8) as stream:
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            read(stream, 1.0)
        assert time.monotonic() - began < 1.4


def test_a_server_that_hangs_up_in_a_frame_costs_nothing_and_a_slow_one_the_deadline() -> None:
    with pytest.raises(TierUnavailableError):
        answered([part(0, 500)], hangs_up=True)
    with pytest.raises(DeadlineError):
        answered([part(0, 500)], 0.2)
    with pytest.raises(DeadlineError):
        answered([part(at, 1) for at in range(500)], 0.2, pause_s=0.01)


def test_addresses_of_a_name_share_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, ExitStack() as stack:
        place = silent.getsockname()
        for _ in range(3):  # what it takes in; further ones hear nothing
            link = stack.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(place)
        found = socket.getaddrinfo(place[0], place[1], type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found * 3)
        entrance = Entrance(f"tcp://store:{place[1]}", b"", messages.attach(7, bytes(16)).attach)
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            FrameStream(entrance, 0.6)
        assert time.monotonic() - began < 1.0


def test_who_shows_another_token_has_no_stream(server: LocalServer) -> None:
    terms = server.connect("tcp")._link.connected().session.terms
    with closing(streams_to(Entrance.of(replace(terms, attach_token=bytes(16)), ""))) as streams:
        with pytest.raises(UnauthenticatedError):
            streams.take(SOON_S)
        assert streams.take(SOON_S) is None


def test_where_every_interface_is_bound_the_host_is_the_one_that_was_reached() -> None:
    for told, reached, where in (
        ("tcp://10.0.0.5:7421", "store.example:7420", "tcp://10.0.0.5:7421"),
        ("tcp://*:7421", "store.example:7420", "tcp://store.example:7421"),
        ("tcp://*:7421", "[fe80::1]:7420", "tcp://[fe80::1]:7421"),
        ("tcp://*:7421", "dns:///store.example:7420", "tcp://store.example:7421"),
    ):
        assert Entrance.of(replace(TERMS, bulk_address=told), reached).where == where


@pytest.fixture
def late_tls() -> Iterator[Entrance]:
    """Where TLS is spoken after 0.7 s, and nothing is said then."""
    (context, certificate), ended = make_tls(), threading.Event()

    def run() -> None:
        link, _ = listener.accept()
        ended.wait(0.7)
        with link, suppress(OSError), context.wrap_socket(link, server_side=True):
            ended.wait(SOON_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        yield Entrance(where, certificate, messages.attach(7, bytes(16)).attach)
        ended.set()
        thread.join()


@pytest.mark.parametrize("whose", ["client", "server"])
def test_to_connect_to_shake_hands_and_to_attach_share_their_time(
    late_tls: Entrance, whose: str
) -> None:
    terms = peer_session(late_tls.where, late_tls.certificate)
    link = StreamLink(terms, time.monotonic)
    reach = link.connect if whose == "server" else partial(FrameStream, late_tls)
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        reach(1.0)
    assert time.monotonic() - began < 1.4
