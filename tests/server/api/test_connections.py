"""Connections that nobody has to prove anything for are few, and do not stay silent for long."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from conftest import ServerMaker
from helpers.bare_wire import wire_to
from helpers.local_server import LocalServer

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.api import grpc_server
from kvstore.server.api.grpc_server import most_connections
from kvstore.server.settings.process_limits import LEAST

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
