"""The Redis client: every call ends in bounded time, and no error contains a password.

redis-py's pool, Sentinel and RedisCluster have no deadline per call, and RedisCluster holds a lock
while it requests the topology. This module does it over redis-py's connections.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import structlog
from redis import exceptions as errors
from redis.crc import key_slot

from kvstore.proto.errors import KVStoreError, TierUnavailableError
from kvstore.tiers.redis_connection import (
    Clock,
    Command,
    ConnectionOptions,
    LoadingError,
    RedisConnection,
    Reply,
    Server,
    SlotLostError,
    Step,
    WrongTypeError,
    pack,
)
from kvstore.tiers.redis_url import HostPort, RedisUrl, parse_redis_url, tls_context

DEFAULT_CONNECTIONS = 16
SLOWEST_BYTES_PER_S = 16 << 20
"""A call ends after the timeout plus its payload's time at this rate."""
MAX_REPLY_BYTES = 16 << 10
"""Limit of the mean reply to a command whose reply is parsed."""
MAX_LISTING_BYTES = 4 << 20
"""Limit of one page of a listing."""
MAX_TOPOLOGY_BYTES = 1 << 20
RETRY_AFTER_S = 0.5
"""A failed server of a Cluster is not used for this long."""
REFUSED_S = 30.0
"""A server that refused a command itself does not count for this long as one that works."""
MIN_RENEW_S = 0.1
"""Least time between two requests for the topology."""
MIN_REQUEST_SHARE = 0.1
"""Share of a call's time below which no further server is requested for the topology: it would
time out and count as failed. The next call starts with it."""
SLOTS = 16384

TIER_RIGHTS = ("getrange", "set", "unlink", "expire", "scan", "eval")
"""Commands that the tier needs; in a Cluster also cluster|slots."""
DIRECTORY_RIGHTS = ("sadd", "srem", "srandmember", "hget", "hset", "hdel", "hgetall", "time")
"""Further commands that the node directory needs."""

_ELSEWHERE = (
    errors.AskError, errors.TryAgainError, errors.ReadOnlyError, LoadingError,
    errors.ClusterDownError, SlotLostError,
)  # fmt: skip
"""Replies, including AskError's subclass MovedError, of a server that did not run the command."""
_LOCAL = (OSError, errors.ConnectionError, errors.TimeoutError, errors.InvalidResponse, *_ELSEWHERE)
"""Errors of one server; others of the Cluster may work."""
_FAILED = (OSError, errors.RedisError)
_ALLOW = (
    f"allow its user in its ACL {' '.join(f'+{word}' for word in TIER_RIGHTS)}, for the node"
    f" directory {' '.join(f'+{word}' for word in DIRECTORY_RIGHTS)}, in a Cluster"
    " +cluster|slots, on the names that begin with --redis-prefix"
)
_FIXES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (errors.NoPermissionError, f"{_ALLOW}; kvstore doctor tries each"),
    (errors.AuthenticationError, "check the user and its password"),
    (ssl.SSLError, "check --redis-tls-ca, and that its certificates are valid and name its hosts"),
    (errors.ReadOnlyError, "point the URL at the primary"),
    (LoadingError, "wait until it has loaded its data"),
    ((SlotLostError, errors.ClusterDownError), "restart its masters, or let replicas take over"),
    (errors.TimeoutError, "check that it is up and not overloaded, or raise --redis-timeout-ms"),
    (errors.OutOfMemoryError, "raise its maxmemory, or let it evict (allkeys-lru)"),
    (errors.InvalidResponse, "check that the URL names a Redis, and no proxy changes its answers"),
    (errors.ResponseError, "see the server's log"),
)
_FIX = "check that it runs and that the URL names it"

Call = tuple[bytes | Server, Command]
"""The server, or the key name that selects it, and the command."""


logger = structlog.get_logger(__name__)


class Topology:
    """Maps keys to servers: the only one, the master that Sentinels name, or a Cluster's.

    See redis.io, "Sentinel clients" and "Cluster specification". Any Sentinel or node provides the
    topology, again after each failure. A failed master of a Cluster is not used for RETRY_AFTER_S.
    Thread-safe; raises redis-py's errors and OSError.
    """

    def __init__(self, url: RedisUrl, options: ConnectionOptions, clock: Clock) -> None:
        self.moves: Final = url.mode != "single"
        """Whether keys may move to another server."""
        self.is_cluster: Final = url.mode == "cluster"
        self._url, self._options, self._clock = url, options, clock
        own = options._replace(login=url.sentinel_login, database=0, limit=1)
        self._sentinels = [Server(at, own, clock) for at in url.hosts if url.mode == "sentinel"]
        # Guards the fields below; never held over a request.
        self._lock = threading.Lock()
        self.is_closed = False
        self._nodes: dict[HostPort, Server] = {}
        self.holders: list[Server | None] = [] if self.moves else [self._node(url.hosts[0])]
        self._is_stale = self.moves
        self._renewed_at = -MIN_RENEW_S
        self._reason = "no server has answered yet"
        self._cause: Exception | None = None

    def has_others(self, *, is_refusal: bool) -> bool:
        """Return whether any master of a Cluster is not known to be down; nor, for *is_refusal*, to
        have refused a command.
        """
        known = {server for server in self.holders if server is not None and self.is_cluster}
        up = (server for server in known if not server.is_suspended)
        return any(not is_refusal or server.refused_at + REFUSED_S < self._clock() for server in up)

    def server_of(self, name: bytes | Server, deadline: float) -> Server:
        """Return the server of the key called *name*."""
        if isinstance(name, Server):
            return name
        self.renew_if_stale(deadline)
        server = self.holders[key_slot(name) if self.is_cluster else 0]
        if server is None:
            raise SlotLostError("no node holds the slot")
        if self.is_cluster and server.is_suspended:
            raise errors.ConnectionError(f"{server}: failed recently and is not retried yet")
        return server

    def note_failure(self, server: Server, error: Exception, *, is_local: bool) -> None:
        """Note a refusal; after *is_local* errors follow a moved slot, and renew the topology."""
        is_down = isinstance(error, errors.ClusterDownError)  # in its view: it may be alone
        if is_down or not is_local:
            server.refused_at = self._clock()
        if not is_local:
            return
        if self.is_cluster and not isinstance(error, errors.ResponseError):
            server.retry_at = self._clock() + RETRY_AFTER_S
        with self._lock:
            was_stale, self._is_stale = self._is_stale, self.moves
            if isinstance(error, errors.MovedError) and 0 <= error.slot_id < len(self.holders):
                host = error.host or server.address[0]
                if self.is_cluster and not self.is_closed and 0 < error.port < 1 << 16:
                    self.holders[error.slot_id] = self._node((host, error.port))
                    if not was_stale:  # a node that does not know of the move yet would undo it
                        self._renewed_at = self._clock()

    def renew_if_stale(self, deadline: float) -> None:
        """Request the topology if it may have changed. Raises if none is known yet."""
        if not self._is_stale:
            return
        with self._lock:
            is_due = self._is_stale and self._clock() - self._renewed_at >= MIN_RENEW_S
            if is_due:
                self._renewed_at = math.inf  # other threads use the known topology
        if is_due:
            try:
                self._renew(deadline)
            finally:
                self._renewed_at = self._clock()
        if not self.holders:
            raise errors.ConnectionError(self._reason) from self._cause

    def _renew(self, deadline: float) -> None:
        with self._lock:
            known = [self._node(at) for at in (*self._nodes, *self._url.hosts) if self.is_cluster]
        # failed servers last, and those that may not know the Cluster
        known = self._sentinels or known
        candidates = sorted(dict.fromkeys(known), key=lambda one: max(one.retry_at, one.refused_at))
        reasons = []
        least_s = (deadline - self._clock()) * MIN_REQUEST_SHARE
        for at, server in enumerate(candidates, 1):
            left_s = deadline - self._clock()
            if left_s <= max(0.0, least_s):
                reasons.append("no time was left for the others")
                break
            kept_s = left_s / 2 if at < len(candidates) else 0.0  # for the others
            try:
                self._settle(self._fetch(server, deadline - kept_s))
                return
            except _FAILED as error:
                reasons.append(f"{server}: {error}")
                self._cause = error
                server.retry_at = self._clock() + RETRY_AFTER_S
        what = "no node of the Cluster answers" if self.is_cluster else "no Sentinel names a master"
        self._reason = f"{what}: {'; '.join(reasons)}"

    def _fetch(self, server: Server, deadline: float) -> list[tuple[int, int, HostPort]]:
        """Return (first slot, slot after the last, master) rows from *server*."""
        service = self._url.service
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.encode())
        with server.connection(deadline) as connection:
            connection.send(pack((b"CLUSTER", b"SLOTS") if self.is_cluster else command))
            (reply,) = connection.read_replies(1, MAX_TOPOLOGY_BYTES)
        if isinstance(reply, Exception):
            raise reply
        if self.is_cluster:
            return _slot_ranges(reply, server.address[0])
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit() and 0 < int(port) < 1 << 16:
                return [(0, 1, (host.decode(errors="replace"), int(port)))]
            case _:
                raise errors.ConnectionError(f"has no service {service!r}")

    def _settle(self, ranges: Sequence[tuple[int, int, HostPort]]) -> None:
        with self._lock:
            old = self.holders
            holders: list[Server | None] = [None] * (SLOTS if self.is_cluster else 1)
            for start, stop, address in ranges:
                holders[start:stop] = [self._node(address)] * (stop - start)
            self.holders = holders
            used = {server.address for server in holders if server is not None}
            used |= set(self._url.hosts) if self.is_cluster else set()
            gone = [self._nodes.pop(address) for address in set(self._nodes) - used]
            # Until each master answers again, a failover may be under way.
            self._is_stale = any(server.is_suspended for server in self._nodes.values())
        if self._sentinels and old and old != holders:
            logger.info("redis has a new master", old=str(old[0]), new=str(holders[0]))
        for server in gone:
            server.close()

    def _node(self, address: HostPort) -> Server:
        if self.is_closed:
            raise errors.ConnectionError("closed")
        if address not in self._nodes:
            self._nodes[address] = Server(address, self._options, self._clock)
        return self._nodes[address]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self.is_closed = True
            servers = [*self._sentinels, *self._nodes.values()]
        for server in servers:
            server.close()


def _slot_ranges(reply: Reply, default_host: str) -> list[tuple[int, int, HostPort]]:
    found = []
    for row in reply if isinstance(reply, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                # an empty host means the node that answered
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                found.append((first, last + 1, (name or default_host, port)))
            case _:
                raise errors.ConnectionError("invalid reply to CLUSTER SLOTS")
    if not found:
        raise errors.ConnectionError("the node belongs to no Cluster, or has no slots yet")
    return found


class RedisClient:
    """Sends commands to the servers behind one URL.

    A call ends when no byte arrives for *timeout_ms*, and at the latest after that plus its
    payload's time at SLOWEST_BYTES_PER_S. A command that its server did not run is retried once
    if another server may run it. At most *connections* are open to each server. Thread-safe.
    """

    def __init__(
        self, tier: str, url: str, timeout_ms: int, connections: int, clock: Clock = time.monotonic
    ) -> None:
        parsed = parse_redis_url(url)
        self.url: Final = parsed.shown
        """The URL without credentials."""
        self.is_cluster: Final = parsed.mode == "cluster"
        self._tier = tier
        self._secrets = {parsed.login.password, parsed.sentinel_login.password} - {""}
        self._timeout_s = timeout_ms / 1000
        self._clock = clock
        tls = None if parsed.tls is None else tls_context(parsed.tls)
        how = ConnectionOptions(self._timeout_s, connections, parsed.login, parsed.database, tls)
        self._topology = Topology(parsed, how, clock)

    def run(
        self, name: bytes | Server, commands: Sequence[Command], reply_bytes: int = MAX_REPLY_BYTES
    ) -> list[Any]:
        """Send *commands* about the key called *name*, or to that server, and return their replies.

        The reply for a key of the wrong type is None, as if it were absent. Raises redis-py's
        OutOfMemoryError when the server is out of memory, else TierUnavailableError.
        """
        replies = self.execute([(name, command) for command in commands], reply_bytes=reply_bytes)
        for reply in replies:
            if isinstance(reply, TierUnavailableError):
                raise reply
        return replies

    def execute(
        self, calls: Sequence[Call], within_s: float = math.inf, reply_bytes: int = MAX_REPLY_BYTES
    ) -> list[Any]:
        """Send *calls*, in one round trip to all servers at once, and return their replies.

        Like ``run``, but the reply of an unavailable part of the Cluster is the error. *within_s*
        limits the call's time. *reply_bytes* limits the mean reply.
        """
        views = (len(word) for _, words in calls for word in words if type(word) is memoryview)
        deadline = min(self._deadline(sum(views)), self._clock() + within_s)
        replies, undone = self._execute_once(dict(enumerate(calls)), deadline, reply_bytes)
        if undone and self._topology.moves and self._clock() < deadline:
            again, undone = self._execute_once(undone, deadline, reply_bytes)
            replies |= again
        for at, reply in replies.items():
            if isinstance(reply, WrongTypeError):
                replies[at] = None
            elif isinstance(reply, Exception):
                is_local = at in undone or isinstance(reply, _LOCAL)
                is_partial = self._is_partial(reply, is_local=is_local)
                is_one = not is_partial or len({call[0] for call in calls}) == 1
                if is_one and isinstance(reply, errors.OutOfMemoryError):
                    raise reply
                if not is_partial:
                    raise self._unavailable(reply)
                replies[at] = self._unavailable(reply, is_partial=True)
        return [replies[at] for at in range(len(calls))]

    def _execute_once(
        self, calls: dict[int, Call], deadline: float, reply_bytes: int
    ) -> tuple[dict[int, Any], dict[int, Call]]:
        """Return the replies by number, including errors, and the calls that no server ran."""
        replies: dict[int, Any] = {}
        undone: dict[int, Call] = {}
        groups: dict[Server, list[int]] = {}
        for at, call in calls.items():
            try:
                groups.setdefault(self._topology.server_of(call[0], deadline), []).append(at)
            except _FAILED as error:
                replies[at], undone[at] = error, call
        commands = {server: [calls[at][1] for at in some] for server, some in groups.items()}
        for server, (was_sent, found) in _exchange(commands, deadline, reply_bytes).items():
            for at, reply in zip(groups[server], found, strict=True):
                replies[at] = reply
                if isinstance(reply, Exception) and not isinstance(reply, WrongTypeError):
                    is_local = not was_sent or isinstance(reply, _LOCAL)
                    self._topology.note_failure(server, reply, is_local=is_local)
                    if not was_sent or isinstance(reply, _ELSEWHERE):
                        undone[at] = calls[at]
        return replies, undone

    def transfer(
        self, name: bytes, steps: Sequence[Step], out: memoryview, arrived: Callable[[int], object]
    ) -> bool:
        """Run *steps* on the key called *name*, whose payload fills *out*; call *arrived* after
        each slice with the bytes received. Return False when a reply is not the one expected.
        """
        deadline = self._deadline(len(out))
        received_bytes, may_repeat = 0, self._topology.moves
        while True:
            server: Server | None = None
            try:
                server = self._topology.server_of(name, deadline)
                with server.connection(deadline) as connection:
                    for received_bytes in connection.transfer(steps, out, server.window):
                        arrived(received_bytes)
                return True
            except KVStoreError:  # from *arrived*
                raise
            except (errors.InvalidResponse, WrongTypeError):
                return False
            except _FAILED as error:
                is_curable = isinstance(error, _LOCAL)
                if server is not None:
                    self._topology.note_failure(server, error, is_local=is_curable)
                # Bytes reported to *arrived* are not requested again.
                may_repeat = may_repeat and is_curable and not received_bytes
                if not may_repeat or self._clock() >= deadline:
                    is_partial = self._is_partial(error, is_local=is_curable)
                    raise self._unavailable(error, is_partial=is_partial) from None
                may_repeat = False

    def unserved_slots(self) -> int:
        """Return how many slots of a Cluster have no master in the last topology."""
        return self._topology.holders.count(None)

    def masters(self) -> list[Server]:
        """Return the servers that hold keys. Raises TierUnavailableError."""
        try:
            self._topology.renew_if_stale(self._deadline(0))
        except _FAILED as error:
            raise self._unavailable(error) from None
        return list(dict.fromkeys(one for one in self._topology.holders if one is not None))

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._topology.close()

    def _deadline(self, payload_bytes: int) -> float:
        if self._topology.is_closed:
            raise TierUnavailableError(self._tier, f"{self.url}: closed; open it again")
        return self._clock() + self._timeout_s + payload_bytes / SLOWEST_BYTES_PER_S

    def _is_partial(self, error: Exception, *, is_local: bool) -> bool:
        """Return whether other parts of the Cluster still work."""
        is_refusal = not is_local or isinstance(error, errors.ClusterDownError)
        return self._topology.has_others(is_refusal=is_refusal)

    def _unavailable(self, error: Exception, *, is_partial: bool = False) -> TierUnavailableError:
        """Return *error* with a fix and without passwords."""
        reason = str(error)
        for secret in self._secrets:  # a proxy may quote an AUTH command it does not support
            reason = reason.replace(secret, "***")
        whys = (error, error.__cause__)
        fix = next((fix for kind, fix in _FIXES if any(isinstance(w, kind) for w in whys)), _FIX)
        text = f"{self.url}: {type(error).__name__}: {reason}; {fix}"
        return TierUnavailableError(self._tier, text, is_partial=is_partial)


def _exchange(
    commands: dict[Server, list[Command]], deadline: float, reply_bytes: int
) -> dict[Server, tuple[bool, list[Reply | Exception]]]:
    """Send *commands*, then receive the replies, at most *reply_bytes* each on average. Return per
    server whether anything was sent, and the replies; after a failure each is the error.
    """
    results: dict[Server, tuple[bool, list[Any]]] = {}
    sent: dict[Server, RedisConnection] = {}
    with ExitStack() as stack:
        # in one order for all callers, to avoid deadlock
        for server in sorted(commands, key=lambda one: one.address):
            connection = None
            try:
                connection = stack.enter_context(server.connection(deadline))
                connection.send(pack(*commands[server]))
                sent[server] = connection
            except _FAILED as error:
                results[server] = connection is not None, [error] * len(commands[server])
        for server, connection in sent.items():
            count = len(commands[server])
            try:
                results[server] = True, connection.read_replies(count, reply_bytes * count)
            except _FAILED as error:
                results[server] = True, [error] * count
    return results
