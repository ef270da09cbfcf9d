"""The shm transport: the contract, and what only shared memory has."""

from __future__ import annotations

from contracts.transport import TransportContract

from kvstore.client.shm import ShmTransport


class TestShmTransport(TransportContract):
    transport = ShmTransport
