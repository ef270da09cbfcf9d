"""A bare connection: closed, cut off, and calls that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bare_wire import wire_to
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import chunks_of, keys_of

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError, LeaseExpiredError, TierUnavailableError
from kvstore.proto.types import ChunkKey

HEARTBEAT = pb.HeartbeatRequest(session_id=1)

CALLS: dict[str, Callable[[Connection], object]] = {
    "call": lambda connection: connection.call("Status", pb.StatusRequest(), 1000, object),
    "send": lambda connection: connection.send("Status", pb.StatusRequest(), 1000)(),
    "stream": lambda connection: list(connection.stream("List", pb.ListRequest(), 1000)),
    "upload": lambda connection: connection.upload("Put", iter([]), 1000, object),
}


@pytest.mark.parametrize("kind", CALLS)
def test_closed_connection_says_so(server: LocalServer, kind: str) -> None:
    connection = server.dial()
    connection.call("Status", pb.StatusRequest(), DEADLINE_MS, object)
    connection.close()
    connection.close()
    with pytest.raises(KVStoreError, match="the client is closed"):
        CALLS[kind](connection)


@pytest.mark.parametrize("kind", CALLS)
def test_no_server_is_a_tier_that_is_unavailable(kind: str, no_leaks: None) -> None:
    connection = Connection("127.0.0.1:9", retry_after_ms=1)
    with pytest.raises(TierUnavailableError, match="tier 'server'"):
        CALLS[kind](connection)
    connection.close()


def test_error_of_a_call_that_was_sent_comes_to_who_waits(server: LocalServer) -> None:
    connection = server.dial()
    waits = [connection.send("Heartbeat", HEARTBEAT, DEADLINE_MS) for _ in range(20)]
    for wait in waits:
        with pytest.raises(LeaseExpiredError, match="open a session"):
            wait()


def test_call_that_nobody_waits_for_arrives_all_the_same(server: LocalServer) -> None:
    client = server.connect()
    keys: list[ChunkKey] = keys_of(client, 1, 1)
    client.put_chunks(chunks_of(client, keys))
    wire = wire_to(server)
    wire.terms.key_namespace = client.namespace
    lookup = pb.LookupRequest(digests=keys[0][16:], lease=True)
    leases = [wire.call("Lookup", lookup).lease_id for _ in range(50)]
    for lease_id in leases:
        wire.connection.send(
            "Release",
            pb.ReleaseRequest(session_id=wire.terms.session_id, lease_ids=[lease_id]),
            DEADLINE_MS,
        )
    assert eventually(lambda: server.usage().leases == 0)


def test_stream_that_is_closed_early_is_cancelled(server: LocalServer) -> None:
    client = server.connect("grpc")
    client.put_chunks(chunks_of(client, keys_of(client, 1, 300)))
    wire = wire_to(server)
    request = pb.ListRequest(session_id=wire.terms.session_id)
    pages = wire.connection.stream("List", request, DEADLINE_MS)
    assert len(next(pages).chunks) == 256
    pages.close()
    assert list(pages) == []
    assert eventually(lambda: len(wire.stream("List", pb.ListRequest())) == 2)
