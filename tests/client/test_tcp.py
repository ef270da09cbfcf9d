"""The tcp transport: the contract, how it is chosen, what a server or a port may do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conftest import ServerMaker
from contracts.bad_puts import changed
from contracts.bulk_channel import BULK, BulkChannelContract, digests
from cryptography import x509
from helpers import stream_messages as messages
from helpers.fake_peer import peer_session
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, assert_reads, chunks_of, keys_of, store
from helpers.stream_messages import Sent

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Pool
from kvstore.client.frames import Arrival, FrameAssembler
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
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.framing import FramedSocket, make_tls
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.bulk.service import BulkService
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

    def test_a_stream_without_an_answer_takes_along_the_idle_ones_that_may_be_as_dead(
        self, bare: BulkTransport, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan, ended = plan_of(store(client, 1, 2)), threading.Event()
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(bare.read(plan))
        assert len(bare.streams.idle) == 3

        def silent(*_: object) -> Iterator[float]:
            ended.wait(SOON_S)
            yield from ()

        monkeypatch.setattr(BulkService, "get", silent)
        with pytest.raises(DeadlineError), bare.read(replace(plan, deadline_ms=100)):
            pass
        ended.set()
        assert bare.streams.idle == []

    def test_a_server_that_is_late_within_a_get_shuts_the_gate(
        self, bare: BulkTransport, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(*_: object) -> Iterator[Arrival]:
            raise DeadlineError("late")

        keys = store(client, 1, 1)
        breaker, opened = bare.session.connection.breaker, list[bool]()
        record = breaker.record  # a heartbeat may close it again before we look
        monkeypatch.setattr(breaker, "record", lambda *some: opened.append(record(*some)))
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


@pytest.mark.parametrize("name", ["read", "put"])
def test_grpc_has_what_is_left_of_a_call_that_waited_for_a_stream(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given: list[int] = []

    def in_vain(within_s: float) -> None:
        time.sleep(within_s)
        raise TierUnavailableError("server", "refused")

    def asked(_: object, what: Any, terms: PutTerms | None = None) -> None:
        given.append(what.deadline_ms if terms is None else terms.within_ms)
        raise TierUnavailableError("server", "not asked")

    transport = transport_of(server.connect("tcp"))
    monkeypatch.setattr(transport.streams, "take", in_vain)
    monkeypatch.setattr(StreamTransport, name, asked)
    with suppress(TierUnavailableError), ExitStack() as stack:
        if name == "put":
            transport.put([], PutTerms(False, 600))
        else:
            stack.enter_context(transport.read(ReadPlan(b"", 0, 600)))
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


def forbid_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every get and put through gRPC fail."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("it went through gRPC")

    for name in ("read", "put"):
        monkeypatch.setattr(StreamTransport, name, forbidden)


def test_a_server_that_has_hung_up_on_idle_streams_is_dialled_again(server: LocalServer) -> None:
    client = server.connect("tcp")
    keys = store(client, 1, 2)
    assert_reads(client, keys)
    assert server.node.bulk is not None
    for stream in list(server.node.bulk._streams):
        stream.wire.hang_up()
    streams = transport_of(client).streams
    assert eventually(lambda: streams.idle[0].is_broken())
    assert_reads(client, keys)
    assert_reads(client, keys)
    assert not streams.idle[0].is_broken()


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


# --- a server that is held up


def test_a_server_that_falls_silent_is_a_miss_by_the_deadline_and_found_again(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect(options=ClientOptions("tcp", 16, deadline_ms=300, retry_after_ms=1))
    keys = store(server.connect("grpc"), 1, 2)

    def is_found() -> bool:
        with suppress(DeadlineError, TierUnavailableError):
            return len(client.get_chunks(keys)) == 2
        return False

    assert eventually(is_found)
    go_on = threading.Event()

    def waits(*_: object) -> Iterator[float]:
        go_on.wait(DEADLINE_MS / 1000)
        yield from ()

    monkeypatch.setattr(BulkService, "get", waits)
    with pytest.raises(DeadlineError):
        client.get_chunks(keys)
    go_on.set()
    monkeypatch.undo()
    assert eventually(is_found)
    assert_reads(server.connect("tcp"), keys)
    assert server.settled().leases == 0


def test_a_server_that_stops_does_not_wait_for_a_get_that_waits_for_a_tier(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect("tcp")
    keys = store(client, 1, 2)
    assert server.node.bulk is not None
    began, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def waits(*_: object) -> None:
        began.set()
        ended.append(go_on.wait(SOON_S))

    monkeypatch.setattr(server.node.bulk.service, "get", waits)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.get_chunks, keys)
        assert began.wait(SOON_S)
        server.stop()
        assert not ended
        go_on.set()
        with suppress(KVStoreError):  # whichever the end of its server is
            reading.result()
    assert eventually(lambda: bool(ended))


def test_a_server_whose_threads_for_gets_are_all_held_up_answers_others_through_grpc(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK, "--workers", "1")
    slow, other = server.connect("tcp"), server.connect("tcp")
    keys = store(slow, 1, 2)
    began, go_on = threading.Event(), threading.Event()
    answer = BulkService.get

    def held_up(*terms: Any) -> Any:
        began.set()
        assert go_on.wait(SOON_S)
        return answer(*terms)

    monkeypatch.setattr(BulkService, "get", held_up)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(slow.get_chunks, keys)
        assert began.wait(SOON_S)
        assert_reads(other, keys)
        assert not held.done()
        assert not transport_of(other).streams.idle, "it was hung up on"
        go_on.set()
        assert len(held.result(SOON_S)) == 2
    monkeypatch.setattr(BulkService, "get", answer)
    monkeypatch.setattr(StreamTransport, "read", None)
    for _ in range(3):  # and its threads are there for all again
        assert_reads(slow, keys)


# --- a server that answers otherwise

FRAME_BYTES = 1000
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
        self.terms = pb.OpenSessionResponse(
            session_id=7, attach_token=bytes(16), bulk_address=self.where
        )
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


def test_a_server_that_hangs_up_in_a_frame_costs_nothing_and_a_slow_one_the_deadline_once() -> None:
    with pytest.raises(TierUnavailableError):
        answered([part(0, 500)], hangs_up=True)
    slow: list[tuple[Words, float, dict[str, float]]] = [
        ([part(0, 500)], 0.2, {}),
        ([part(at, 1) for at in range(500)], 0.2, {"pause_s": 0.01}),
        ([], 0.8, {"stall_s": 0.7}),  # a late header, and no payload behind it
    ]
    for words, within_s, pace in slow:
        with stream_to(words, **pace) as stream:
            began = time.monotonic()
            with pytest.raises(DeadlineError):
                read(stream, within_s)
            assert time.monotonic() - began < within_s + 0.4


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
    terms.attach_token = bytes(16)
    with closing(streams_to(Entrance.of(terms, ""))) as streams:
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
        assert Entrance.of(pb.OpenSessionResponse(bulk_address=told), reached).where == where


def test_certificates_of_streams_are_valid_whatever_the_clock_of_a_host() -> None:
    certificate = x509.load_der_x509_certificate(make_tls()[1])
    assert certificate.not_valid_before_utc.timestamp() == 0
    assert certificate.not_valid_after_utc.year == 9999


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
