"""Callers of a server, of their own making: over gRPC, and over the Unix socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import LocalServer, open_session
from helpers.socket_peer import Peer

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.api.unix_server import UnixServer


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def plane(server: LocalServer) -> UnixServer:
    plane = server.node.unix_server
    assert plane is not None
    return plane


@pytest.fixture
def connect(plane: UnixServer) -> Iterator[Callable[[], Peer]]:
    """Connect peers to the server's socket."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Peer(str(plane.path)))
