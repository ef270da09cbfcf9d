"""The suite of the tcp transport, in plain text or encrypted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import ServerMaker
from contracts.transport import TransportContract
from helpers.local_server import LocalServer

from kvstore.client.transports.tcp import BulkTransport
from kvstore.proto.types import DIGEST_BYTES, ChunkKey

BULK = ("--bulk", "127.0.0.1:0")


def digests(keys: Sequence[ChunkKey]) -> bytes:
    """Return what a transport asks for *keys* by."""
    return b"".join(key[DIGEST_BYTES:] for key in keys)


class BulkChannelContract(TransportContract):
    """A TransportContract against servers with a bulk channel."""

    transport = BulkTransport

    @pytest.fixture
    def make_server(self, make_server: ServerMaker) -> ServerMaker:
        """Start servers with a bulk channel."""
        return lambda *flags: make_server(*BULK, *flags)

    @pytest.fixture
    def server(self, make_server: ServerMaker) -> LocalServer:
        return make_server()
