"""The servers behind one Redis URL: their connections, and which of them holds a key.

redis-py's pool, Sentinel and RedisCluster know no deadline of a call, and RedisCluster holds a lock
while it requests who holds what. So that is done here, over redis-py's connections.
"""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Empty, LifoQueue
from typing import Final

import structlog
from redis import exceptions as errors
from redis.crc import key_slot

from kvstore.tiers.redis_connection import (
    WINDOW,
    Command,
    ConnectionOptions,
    RedisConnection,
    Reply,
    SlotLostError,
    pack,
)
from kvstore.tiers.redis_url import HostPort, RedisUrl

FAR_WINDOW = 16
"""Slices on their way from a server that is far: those are in nobody's cache."""
FAR_S = 0.001
"""A server that answers faster is on this host, or in the same rack."""
MAX_TOPOLOGY_BYTES = 1 << 20
REST_S = 0.5
"""A server of a Cluster that failed is left alone for this long."""
MIN_RENEW_S = 0.1
"""Least time between two questions who serves what."""
MIN_ASK_SHARE = 0.1
"""Share of the time of a call below which no further server is asked who serves what: it would
count as failed without a chance. The next call asks it first."""
SLOTS = 16384

Clock = Callable[[], float]

logger = structlog.get_logger(__name__)


class Server:
    """One Redis server and its connections, of which ``limit`` are open at most. Thread-safe. Each
    has one user at a time; one that failed is not used again.
    """

    def __init__(self, address: HostPort, options: ConnectionOptions, clock: Clock) -> None:
        self.address = address
        self._options = options
        self.clock: Final = clock
        self._free: LifoQueue[RedisConnection | None] = LifoQueue()
        """The connections in no use; None for each that may be opened."""
        for _ in range(options.limit):
            self._free.put(None)
        self.rests_until = 0.0
        self.nearest_s = float("inf")
        """Time of the fastest answer, which says how far the server is: others had to wait."""
        self._is_closed = False

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)

    @property
    def is_resting(self) -> bool:
        """Whether the server is being left alone."""
        return self.clock() < self.rests_until

    @property
    def window(self) -> int:
        """Slices to have on their way on a connection. TLS leaves nothing in the caches anyway."""
        is_far = self._options.tls is not None or self.nearest_s > FAR_S
        return FAR_WINDOW if is_far else WINDOW

    def acquire(self, deadline: float) -> RedisConnection:
        """Return a connection that is open and quiet, waiting for one up to *deadline*."""
        try:
            connection = self._free.get(timeout=max(0.0, deadline - self.clock()))
        except Empty:
            raise errors.TimeoutError("all connections are in use") from None
        try:
            if connection is not None:
                poll = select.poll()
                poll.register(connection.link, select.POLLIN | select.POLLRDHUP)
                if poll.poll(0):  # it hung up, or says more
                    connection.disconnect()  # type: ignore[no-untyped-call]
                    connection = None
            if self._is_closed:
                raise errors.ConnectionError("closed")
            if connection is None:
                connection = RedisConnection(self.address, self._options, self.clock)
                connection.open(deadline)
        except BaseException:
            self._free.put(None)
            raise
        connection.link.deadline = deadline
        return connection

    def release(self, connection: RedisConnection, *, is_clean: bool) -> None:
        """Take a connection back; hang up unless all its replies were read."""
        if not is_clean:
            connection.disconnect()  # type: ignore[no-untyped-call]
        self._free.put(connection if is_clean else None)
        if self._is_closed:
            self.close()

    @contextmanager
    def connection(self, deadline: float) -> Iterator[RedisConnection]:
        """Give a connection for replies that are all read, unless this raises."""
        connection, is_clean = self.acquire(deadline), False
        try:
            yield connection
            is_clean = True
        finally:
            self.release(connection, is_clean=is_clean)

    def close(self) -> None:
        """Hang up; what is in use follows as it comes back. Idempotent."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                connection = self._free.get_nowait()
                if connection is not None:
                    connection.disconnect()  # type: ignore[no-untyped-call]
        self._free.put(None)  # for who waits, to learn of it


class Batch:
    """Commands to one server, over one connection. ``error`` is why it failed, if it
    did; without a ``connection`` nothing was sent.
    """

    def __init__(self, server: Server, commands: Sequence[Command]) -> None:
        self.server = server
        self.commands = commands
        self.replies: list[Reply] = []
        self.error: Exception | None = None
        self.connection: RedisConnection | None = None
        self._sent_at = 0.0

    def send(self, deadline: float) -> None:
        """Take a connection and send all."""
        try:
            self.connection = self.server.acquire(deadline)
            self._sent_at = self.server.clock()
            self.connection.send(pack(*self.commands))
        except (OSError, errors.RedisError) as error:
            self.error = error

    def receive(self, reply_bytes: int) -> None:
        """Receive the replies, each *reply_bytes* at most in the mean."""
        if self.error is None and self.connection is not None:
            count = len(self.commands)
            try:
                self.replies = self.connection.read_replies(count, reply_bytes * count)
                seconds = self.server.clock() - self._sent_at
                self.server.nearest_s = min(self.server.nearest_s, seconds)
            except (OSError, errors.RedisError) as error:
                self.error = error

    def close(self) -> None:
        """Give the connection back, clean when every reply was received. Called once."""
        if self.connection is not None:
            self.server.release(self.connection, is_clean=bool(self.replies))


class Topology:
    """Which server holds a key: the only one, the master that Sentinels name, or a Cluster's.

    redis.io, "Sentinel clients" and "Cluster specification". Any Sentinel or node says who holds
    what, and again after a failure. A Cluster's master that failed is left alone for REST_S.
    Thread-safe; raises redis-py's errors and OSError.
    """

    def __init__(self, url: RedisUrl, options: ConnectionOptions, clock: Clock) -> None:
        self.moves: Final = url.mode != "single"
        """Whether another server may come to hold a key."""
        self.is_cluster: Final = url.mode == "cluster"
        self._url, self._options, self._clock = url, options, clock
        own = replace(options, login=url.sentinel_login, database=0, limit=1)
        is_watched = url.mode == "sentinel"
        self._sentinels = [Server(host, own, clock) for host in url.hosts if is_watched]
        # Guards the fields below; never held over a request.
        self._lock = threading.Lock()
        self._is_closed = False
        self._nodes: dict[HostPort, Server] = {}
        self._holders: list[Server | None] = [] if self.moves else [self._node(url.hosts[0])]
        self._is_stale = self.moves
        self._renewed_at = -MIN_RENEW_S
        self._reason = "no server has answered yet"
        self._cause: Exception | None = None

    def has_others(self) -> bool:
        """Whether a master of a Cluster is not known to be down."""
        masters = set(self._holders) if self.is_cluster else ()
        return any(server is not None and not server.is_resting for server in masters)

    def server_of(self, name: bytes, deadline: float) -> Server:
        """Return the server of the key called *name*."""
        self._renew_if_stale(deadline)
        server = self._holders[key_slot(name) if self.is_cluster else 0]
        if server is None:
            raise SlotLostError("no node holds the slot")
        if self.is_cluster and server.is_resting:
            raise errors.ConnectionError(f"{server}: failed a moment ago and is left alone")
        return server

    def masters(self, deadline: float) -> list[Server]:
        """Return each server that holds keys."""
        self._renew_if_stale(deadline)
        return list(dict.fromkeys(server for server in self._holders if server is not None))

    def note_failure(self, server: Server, error: Exception) -> None:
        """Follow a slot that moved, and ask who holds what before the next use."""
        if self.is_cluster and not isinstance(error, errors.ResponseError):
            server.rests_until = self._clock() + REST_S
        with self._lock:
            self._is_stale = self.moves
            if isinstance(error, errors.MovedError) and 0 <= error.slot_id < len(self._holders):
                host = error.host or server.address[0]
                if self.is_cluster and not self._is_closed and 0 < error.port < 1 << 16:
                    self._holders[error.slot_id] = self._node((host, error.port))

    def _renew_if_stale(self, deadline: float) -> None:
        if not self._is_stale:
            return
        with self._lock:
            is_due = self._is_stale and self._clock() - self._renewed_at >= MIN_RENEW_S
            if is_due:
                self._renewed_at = math.inf  # the others go on with what is known
        if is_due:
            try:
                self._renew(deadline)
            finally:
                self._renewed_at = self._clock()
        if not self._holders:
            raise errors.ConnectionError(self._reason) from self._cause

    def _renew(self, deadline: float) -> None:
        with self._lock:
            known = [self._node(at) for at in (*self._nodes, *self._url.hosts) if self.is_cluster]
        # those that failed are asked last
        asked = sorted(dict.fromkeys(self._sentinels or known), key=lambda one: one.rests_until)
        reasons = []
        least_s = (deadline - self._clock()) * MIN_ASK_SHARE
        for at, server in enumerate(asked, 1):
            left_s = deadline - self._clock()
            if left_s <= max(0.0, least_s):
                reasons.append("no time was left to ask the others")
                break
            try:  # a silent one leaves half of the time to the others
                ranges = self._ask(server, deadline - (left_s / 2 if at < len(asked) else 0))
            except (OSError, errors.RedisError) as error:
                reasons.append(f"{server}: {error}")
                self._cause = error
                server.rests_until = self._clock() + REST_S
            else:
                self._settle(ranges)
                return
        what = "no node of the Cluster answers" if self.is_cluster else "no Sentinel names a master"
        self._reason = f"{what}: {'; '.join(reasons)}"

    def _ask(self, server: Server, deadline: float) -> list[tuple[int, int, HostPort]]:
        """Return (first slot, slot after the last, master) as *server* knows them."""
        service = self._url.service
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.encode())
        with server.connection(deadline) as connection:
            connection.send(pack((b"CLUSTER", b"SLOTS") if self.is_cluster else question))
            (reply,) = connection.read_replies(1, MAX_TOPOLOGY_BYTES)
        if isinstance(reply, Exception):
            raise reply
        if self.is_cluster:
            return _slot_ranges(reply, server.address[0])
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit() and 0 < int(port) < 1 << 16:
                return [(0, 1, (host.decode(errors="replace"), int(port)))]
            case _:
                raise errors.ConnectionError(f"knows no service {service!r}")

    def _settle(self, ranges: Sequence[tuple[int, int, HostPort]]) -> None:
        with self._lock:
            old = self._holders
            holders: list[Server | None] = [None] * (SLOTS if self.is_cluster else 1)
            for start, stop, address in ranges:
                holders[start:stop] = [self._node(address)] * (stop - start)
            self._holders = holders
            used = {server.address for server in holders if server is not None}
            used |= set(self._url.hosts) if self.is_cluster else set()
            gone = [self._nodes.pop(address) for address in set(self._nodes) - used]
            # Until each master answers again somebody may be on the way to take its place.
            self._is_stale = any(server.is_resting for server in self._nodes.values())
        if self._sentinels and old and old != holders:
            logger.info("redis has a new master", old=str(old[0]), new=str(holders[0]))
        for server in gone:
            server.close()

    def _node(self, address: HostPort) -> Server:
        if self._is_closed:
            raise errors.ConnectionError("closed")
        if address not in self._nodes:
            self._nodes[address] = Server(address, self._options, self._clock)
        return self._nodes[address]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self._is_closed = True
            servers = [*self._sentinels, *self._nodes.values()]
        for server in servers:
            server.close()


def _slot_ranges(reply: Reply, asked_host: str) -> list[tuple[int, int, HostPort]]:
    found = []
    for row in reply if isinstance(reply, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                # a node that does not know its own name means the one it was asked by
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                found.append((first, last + 1, (name or asked_host, port)))
            case _:
                raise errors.ConnectionError("CLUSTER SLOTS was answered with something else")
    if not found:
        raise errors.ConnectionError("the node belongs to no Cluster, or knows no slots yet")
    return found
