"""A server with streams, a session on it, and who speaks over one with messages of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from conftest import ServerMaker
from helpers.local_server import LocalServer, open_session
from helpers.stream_caller import StreamCaller

from kvstore.client import Client
from kvstore.proto import kvstore_pb2 as pb


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def caller(terms: pb.OpenSessionResponse) -> Iterator[StreamCaller]:
    with closing(StreamCaller(terms)) as one:
        yield one


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Another client of the server, which is to be served whatever the caller does."""
    return server.connect("tcp")
