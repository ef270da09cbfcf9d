"""Fixtures of the client's tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from helpers.local_server import LocalServer
from helpers.prompts import SMALL

from kvstore.client import Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.client.session import Session


@pytest.fixture
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    """A client of the server, over shared memory or the transport that is the parameter."""
    transport: TransportName = getattr(request, "param", "shm")
    return server.connect(transport)


@pytest.fixture
def session(server: LocalServer) -> Iterator[Session]:
    """A session by itself."""
    session = Session(server.dial(), SMALL, ClientOptions())
    yield session
    session.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
