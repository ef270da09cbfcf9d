"""The tcp transport: the contract, how it is chosen, more at once than it has streams, its end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from contracts.bulk_channel import BULK, BulkChannelContract, ServerMaker, digests
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, assert_reads, chunks_of, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.client.frames import Arrival
from kvstore.client.session import Session
from kvstore.client.transports.base import PutTerms, ReadPlan, read_layers
from kvstore.client.transports.grpc import StreamTransport
from kvstore.client.transports.tcp import MAX_STREAMS, BulkTransport, FrameStream
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, KVStoreError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.bulk.service import BulkService
from kvstore.server.bulk.tcp_server import BulkServer


class TestBulkTransport(BulkChannelContract):
    def test_a_stream_serves_one_get_after_another_however_many_frames_were_taken(
        self, bare: BulkTransport, client: Client, server: LocalServer
    ) -> None:
        keys = store(client, 1, 8)
        bare.connect(DEADLINE_MS / 1000)
        (stream,) = bare._streams.pool.idle
        for read in (8, 3, 8, 0, 8):
            with bare.read(plan_of(keys)) as arriving:
                found = [next(arriving).index for _ in range(read)]
            assert found == list(range(read))
            assert bare._streams.pool.idle == [stream]
        assert server.settled().leases == 0

    def test_layers_and_ranges_come_over_the_same_stream_and_so_does_what_is_left_of_them(
        self, bare: BulkTransport, client: Client, server: LocalServer
    ) -> None:
        keys = digests(store(client, 1, 8))
        bare.connect(DEADLINE_MS / 1000)
        (stream,) = bare._streams.pool.idle
        ranges = [pb.FrameRange(index=chunk, stop=100) for chunk in range(8)]
        for is_read in (True, False, True):
            with read_layers(bare, ReadPlan(keys, 0, DEADLINE_MS)) as arriving:
                assert not is_read or len(list(arriving)) == 8
            assert bare._streams.pool.idle == [stream]
            with bare.read(ReadPlan(keys, 0, DEADLINE_MS, ranges=ranges)) as pieces:
                assert not is_read or [len(one.data) for one in pieces] == [100] * 8
            assert bare._streams.pool.idle == [stream]
        assert server.settled().leases == 0

    def test_more_calls_at_once_than_streams_go_through_grpc(
        self, bare: BulkTransport, client: Client
    ) -> None:
        keys = store(client, 1, 2)
        with ExitStack() as stack:
            gets = [stack.enter_context(bare.read(plan_of(keys))) for _ in range(MAX_STREAMS + 2)]
            assert len(bare._streams.pool.busy) == MAX_STREAMS
            assert bare.put([], PutTerms(False, DEADLINE_MS)) == []
            for arriving in gets:
                assert [one.index for one in arriving] == [0, 1]
        assert len(bare._streams.pool.idle) == MAX_STREAMS

    def test_a_stream_whose_request_was_refused_is_free_while_grpc_answers(
        self, bare: BulkTransport, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object) -> None:
            raise TierUnavailableError("server", "too many requests at once")

        keys = store(client, 1, 2)
        monkeypatch.setattr(FrameStream, "begin", refused)
        with bare.read(plan_of(keys)) as arriving:
            assert not bare._streams.pool.busy
            assert [one.index for one in arriving] == [0, 1]

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
            next(iter(arriving))
        assert True in opened

    def test_the_longest_question_goes_over_a_stream_too(
        self, bare: BulkTransport, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = digests([*store(client, 1, 1), *keys_of(client, 2, 1)])
        ranges = [pb.FrameRange(start=at, stop=at + 1) for at in range(2000)]
        monkeypatch.setattr(StreamTransport, "read", None)
        plan = ReadPlan(keys[:16] + keys[16:] * 4095, 0, DEADLINE_MS, ranges=ranges)
        with bare.read(plan) as pieces:
            assert [one.offset for one in pieces] == list(range(2000))

    def test_a_get_that_runs_while_its_transport_closes_ends_cleanly(
        self, bare: BulkTransport, client: Client
    ) -> None:
        keys = store(client, 1, 2)
        with bare.read(plan_of([*keys, *keys_of(client, 2, 1)])) as arriving:
            assert next(arriving).index == 0
            closer = threading.Thread(target=bare.close)
            closer.start()
            list(ended(arriving))
        closer.join()
        assert not bare._streams.pool.idle
        assert not bare._streams.pool.busy


def plan_of(keys: Sequence[ChunkKey]) -> ReadPlan:
    return ReadPlan(digests(keys), 0, DEADLINE_MS)


def ended(arriving: Iterator[Arrival]) -> Iterator[Arrival]:
    """Yield what arrives, up to the error that a closed client may meet."""
    with suppress(KVStoreError):
        yield from arriving


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


def test_tcp_from_a_server_without_it_is_an_error_that_says_so(server: LocalServer) -> None:
    with pytest.raises(TierUnavailableError, match="started without --bulk"):
        _ = server.connect("tcp").transport_name


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
    for stream in transport._streams.pool.idle:
        stream.give_up()
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


def test_after_a_call_that_had_no_time_to_connect_streams_are_connected_beside_calls(
    lost: BulkTransport,
) -> None:
    streams = lost._streams
    assert streams.take(0.8) is None
    assert eventually(lambda: bool(streams.pool.idle))
    first = streams.take(0.8)
    assert first is not None
    began = time.monotonic()
    assert streams.take(0.8) is None
    assert time.monotonic() - began < 0.2
    assert eventually(lambda: bool(streams.pool.idle))
    streams.pool.give_back(first, is_clean=True)


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


def test_a_put_to_a_server_that_stores_nothing_in_time_is_an_error(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect(options=ClientOptions("tcp", 16, deadline_ms=300))
    chunks = chunks_of(client, keys_of(client, 1, 2))
    monkeypatch.setattr(BulkService, "put", lambda *_: threading.Event().wait(0.6))
    with pytest.raises(KVStoreError):
        client.put_chunks(chunks)


def test_a_server_that_was_restarted_is_used_again(make_server: ServerMaker) -> None:
    server = make_server(*BULK)
    client = server.connect("tcp")
    first = store(client, 1, 2)
    for session in list(server.node.sessions.by_id):
        server.node.sessions.close(session)  # what its client sees of a restart
    second = store(client, 2, 2)
    assert client.transport_name == "tcp"
    assert_reads(client, first)
    assert_reads(client, second)
    assert len(server.node.sessions) == 1
