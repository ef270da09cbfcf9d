"""The zmq transport: the contract, how it is chosen, more at once than it has links, its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from contracts.bulk_channel import ZMQ, BulkChannelContract, ServerMaker, digests
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import SMALL, assert_reads, chunks_of, keys_of, store

from kvstore.client import Client, ClientOptions, frame_streams
from kvstore.client.session import Session
from kvstore.client.transport import Arrived
from kvstore.client.zmq_link import endpoint
from kvstore.client.zmq_links import MAX_LINKS
from kvstore.client.zmq_transport import ZmqTransport
from kvstore.proto.errors import DeadlineError, KVStoreError, TierUnavailableError


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all go through ZeroMQ; test_frame_streams.py is of the other way."""
    monkeypatch.setattr(frame_streams, "MAX_STREAMS", 0)


class TestZmqTransport(BulkChannelContract):
    def test_a_link_serves_one_request_after_another_whatever_became_of_each(
        self, bare: ZmqTransport, client: Client
    ) -> None:
        keys = store(client, 1, 8)
        for read in (0, 3, 8, 1, 8):
            with bare.get(digests(keys), 0, DEADLINE_MS) as arriving:
                found = [next(arriving).index for _ in range(read)]
            assert found == list(range(read))
        assert len(bare._links) == 1

    def test_more_requests_at_once_than_links_go_through_grpc(
        self, bare: ZmqTransport, client: Client
    ) -> None:
        keys = store(client, 1, 2)
        with ExitStack() as stack:
            gets = [
                stack.enter_context(bare.get(digests(keys), 0, DEADLINE_MS))
                for _ in range(MAX_LINKS + 2)
            ]
            for arriving in gets:
                assert [one.index for one in arriving] == [0, 1]
        assert len(bare._links) == MAX_LINKS

    def test_a_get_that_runs_while_its_transport_closes_ends_cleanly(
        self, bare: ZmqTransport, client: Client
    ) -> None:
        keys = store(client, 1, 2)
        with bare.get(digests([*keys, *keys_of(client, 2, 1)]), 0, DEADLINE_MS) as arriving:
            assert next(arriving).index == 0
            closer = threading.Thread(target=bare.close)
            closer.start()
            list(ended(arriving))
        closer.join()
        assert eventually(lambda: len(bare._links) == 0)
        with pytest.raises(KVStoreError, match="the client is closed"):
            bare.put([], durable=False, deadline_ms=DEADLINE_MS)


def ended(arriving: Iterator[Arrived]) -> Iterator[Arrived]:
    """Yield what arrives, up to the error that a closed client may meet."""
    with suppress(KVStoreError):
        yield from arriving


# --- the choice


@pytest.mark.parametrize(
    ("flags", "name"),
    [(ZMQ, "shm"), ((*ZMQ, "--socket", "off"), "zmq"), (("--socket", "off"), "grpc")],
)
def test_auto_takes_shared_memory_then_zmq_then_grpc(
    make_server: ServerMaker, flags: tuple[str, ...], name: str
) -> None:
    client = make_server(*flags).connect("auto")
    assert client.transport_name == name
    assert_reads(client, store(client, 1, 2))


def test_zmq_from_a_server_without_it_is_an_error_that_says_so(server: LocalServer) -> None:
    with pytest.raises(TierUnavailableError, match="started without --zmq"):
        _ = server.connect("zmq").transport_name


def test_a_channel_that_does_not_answer_leaves_grpc(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*ZMQ, "--socket", "off")
    assert server.node.bulk is not None
    monkeypatch.setattr(server.node.bulk, "_receive", lambda: False)
    options = ClientOptions("auto", chunk_tokens=16, deadline_ms=1000)
    client = server.connect(options=options)
    assert client.transport_name == "grpc"
    with pytest.raises(DeadlineError):
        _ = server.connect(options=ClientOptions("zmq", deadline_ms=400)).transport_name


@pytest.mark.parametrize(
    ("told", "reached", "where"),
    [
        ("tcp://10.0.0.5:7421", "store.example:7420", "tcp://10.0.0.5:7421"),
        ("tcp://*:7421", "store.example:7420", "tcp://store.example:7421"),
        ("tcp://*:7421", "[fe80::1]:7420", "tcp://[fe80::1]:7421"),
        ("tcp://*:7421", "dns:///store.example:7420", "tcp://store.example:7421"),
    ],
)
def test_where_every_interface_is_bound_the_host_is_the_one_that_was_reached(
    told: str, reached: str, where: str
) -> None:
    assert endpoint(told, reached) == where


# --- the other side's end


def test_a_server_that_falls_silent_is_a_miss_by_the_deadline_and_found_again(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*ZMQ)
    client = server.connect(options=ClientOptions("zmq", 16, deadline_ms=300, retry_after_ms=1))
    keys = store(server.connect("grpc"), 1, 2)

    def is_found() -> bool:
        with suppress(DeadlineError, TierUnavailableError):
            return len(client.get(keys)) == 2
        return False

    assert eventually(is_found)
    plane = server.node.bulk
    assert plane is not None
    monkeypatch.setattr(plane, "_pump", lambda: False)
    monkeypatch.setattr(plane, "_finish", lambda *_: None)
    with pytest.raises(DeadlineError):
        client.get(keys)
    monkeypatch.undo()
    assert eventually(is_found)
    assert_reads(server.connect("zmq"), keys)
    assert server.settled().leases == 0


def test_a_put_to_a_server_that_stores_nothing_in_time_is_an_error(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*ZMQ)
    client = server.connect(options=ClientOptions("zmq", 16, deadline_ms=300))
    chunks = chunks_of(client, keys_of(client, 1, 2))
    assert server.node.bulk is not None
    monkeypatch.setattr(server.node.bulk, "_put", lambda *_: threading.Event().wait(0.6))
    with pytest.raises(KVStoreError):
        client.put(chunks)


def test_a_server_that_was_restarted_is_used_again(make_server: ServerMaker) -> None:
    server = make_server(*ZMQ)
    client = server.connect("zmq")
    first = store(client, 1, 2)
    for session in list(server.node.sessions._sessions):
        server.node.sessions.close(session)  # what its client sees of a restart
    second = store(client, 2, 2)
    assert client.transport_name == "zmq"
    assert_reads(client, first)
    assert_reads(client, second)
    assert len(server.node.sessions) == 1


def test_a_session_of_its_own_is_all_that_a_transport_needs(make_server: ServerMaker) -> None:
    server = make_server(*ZMQ)
    session = Session(server.dial(), SMALL, ClientOptions("zmq", 16, deadline_ms=DEADLINE_MS))
    transport = ZmqTransport(session)
    assert transport.put([], durable=False, deadline_ms=DEADLINE_MS) == []
    transport.close()
    transport.close()
    session.close()
