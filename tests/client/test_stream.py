"""The grpc transport: the contract, and how frames are put together from parts."""

from __future__ import annotations

from contracts.transport import TransportContract

from kvstore.client.stream import StreamTransport


class TestStreamTransport(TransportContract):
    transport = StreamTransport
