"""A server in the test's own process, with real sockets, and its usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from helpers.prompts import SMALL

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.options import TransportName
from kvstore.codecs.base import codec_by_name
from kvstore.codecs.speed import make_sample, measure
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import as_message
from kvstore.proto.types import ChunkKey, Model
from kvstore.server.bulk.tcp_server import BulkServer
from kvstore.server.cluster.peer_tier import PeerTier
from kvstore.server.node import Node
from kvstore.server.settings.rules import is_auto
from kvstore.server.settings.settings import load_config
from kvstore.tiers.base import TierStats

DEADLINE_MS = 20_000
"""Deadline of calls that should succeed, also on a busy machine."""

_SETTLE_S = 60.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether *condition* holds within _SETTLE_S."""
    deadline = time.monotonic() + _SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@lru_cache(maxsize=16)
def _warm_up(codec: str) -> None:
    """Warm up a codec once a process, as first calls may exceed deadlines on a busy machine."""
    if not is_auto(codec):
        with suppress(KVStoreError):  # the server reports the error
            measure(codec, codec_by_name(codec), make_sample(), time.monotonic, 0.0)


@dataclass(frozen=True, slots=True)
class Usage:
    """A server's state at one instant: bytes and chunks by tier, leases, pins and puts."""

    tiers: tuple[tuple[str, TierStats], ...]
    leases: int
    held: int
    pending_puts: int
    open_puts: int


class LocalServer:
    """A started Node. ``connect`` makes clients, ``dial`` bare connections; ``close`` ends all."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """*flags* may override those for small tiers in *folder*."""
        sizes = ("--cpu", "16MiB", "--disk", f"32MiB:{folder / 'disk'}")
        places = ("--listen", "127.0.0.1:0", "--socket", str(folder / "s.sock"))
        self.config = load_config([*sizes, *places, "--log-level", "error", *flags])
        for tier in {"disk", "redis"} & {*self.config.tiers}:
            _warm_up(self.config.codec[tier])
        self._ahead_s = 0.0
        self.node = Node(self.config, lambda: time.monotonic() + self._ahead_s)
        self.node.start()
        self._connected: list[Client | Connection] = []
        self._stopped = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.node.port}"

    @property
    def streams(self) -> BulkServer:
        """The bulk channel, which must exist."""
        assert self.node.bulk is not None
        return self.node.bulk

    @property
    def peer_tier(self) -> PeerTier:
        """The tier of other servers' memory, which must exist."""
        assert self.node.store.tiers.remote is not None
        return cast("PeerTier", self.node.store.tiers.remote.tier)

    def connect(
        self,
        transport: TransportName = "auto",
        representation: Model = SMALL,
        options: ClientOptions | None = None,
    ) -> Client:
        """Return a client, by default of chunks of 16 tokens; ``close`` closes it."""
        options = options or ClientOptions(transport, chunk_tokens=16, deadline_ms=DEADLINE_MS)
        client = Client(self.address, representation, options)
        self._connected.append(client)
        return client

    def dial(self) -> Connection:
        """Return a bare connection; ``close`` closes it."""
        connection = Connection(self.address, retry_after_ms=1)
        self._connected.append(connection)
        return connection

    def skip(self, seconds: float) -> None:
        """Advance the server's clock, or put it back.

        Tests of expiry so need no short timeouts, which a busy machine would miss.
        """
        self._ahead_s += seconds

    def usage(self) -> Usage:
        store = self.node.store
        return Usage(
            tuple((slot.name, slot.tier.stats()) for slot in store.tiers.slots.values()),
            len(store.catalog.leases),
            store.catalog.leases.pins.total(),
            store.catalog.in_flight.writers.total(),
            len(store.writes),
        )

    def settled(self) -> Usage:
        """Return the usage once nothing is leased, being put or moved."""
        store = self.node.store

        def is_quiet() -> bool:
            usage = self.usage()
            counts = (usage.leases, usage.held, usage.pending_puts, usage.open_puts)
            return not any(counts) and store.moves.work_queue.is_idle()

        assert eventually(is_quiet), self.usage()
        return self.usage()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Fail unless usage is the same after the block."""
        before = self.settled()
        yield
        assert eventually(lambda: self.usage() == before), (before, self.usage())

    def counter(self, name: str) -> int:
        return self.node.counters[name]

    def leave_memory(self, keys: Sequence[ChunkKey]) -> None:
        """Drop unheld chunks from CPU memory, so that the next read comes from a lower tier."""
        moves = self.node.store.moves
        for key in keys:
            if moves.catalog.drop_copy("cpu", key, even_if_held=False):
                moves.eviction.delete_from(moves.tiers.cpu, key)

    def stop(self) -> bool:
        """Stop the server, but not its clients. Idempotent; return whether the stop was clean."""
        if self._stopped:
            return True
        self._stopped = True
        return self.node.stop(5.0)

    def close(self) -> None:
        while self._connected:
            self._connected.pop().close()
        self.stop()


def open_session(connection: Connection, representation: Model = SMALL) -> pb.OpenSessionResponse:
    """Open a session without heartbeats."""
    request = pb.OpenSessionRequest(representation=as_message(pb.Representation, representation))
    return connection.call("OpenSession", request, DEADLINE_MS, pb.OpenSessionResponse)
