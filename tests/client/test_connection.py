"""A bare connection: closed, cut off, and calls that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.bare_wire import wire_to
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import chunks_of, keys_of

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError, TierUnavailableError

HEARTBEAT = pb.HeartbeatRequest(session_id=1)

CALLS: dict[str, Callable[[Connection], object]] = {
    "call": lambda connection: connection.call("Status", pb.StatusRequest(), 1000, object),
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
