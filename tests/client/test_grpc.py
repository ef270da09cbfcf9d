"""The grpc transport: the contract, and frames of several messages."""

from __future__ import annotations

from collections.abc import Callable

from contracts.transport import TransportContract
from helpers.prompts import MEDIUM, assert_reads, store

from kvstore.client import Client
from kvstore.client.transports.grpc import StreamTransport


class TestStreamTransport(TransportContract):
    transport = StreamTransport

    def test_frames_of_several_messages_come_back(self, connect: Callable[..., Client]) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=300))
        assert_reads(client, store(client, 1, 3))
