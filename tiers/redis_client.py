"""The way to Redis: every call ends in bounded time, and no error names a password."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from redis import exceptions as errors

from kvstore.proto.errors import KVStoreError, TierUnavailableError
from kvstore.tiers.redis_connection import (
    Command,
    ConnectionOptions,
    LoadingError,
    SlotLostError,
    Transfer,
    WrongTypeError,
)
from kvstore.tiers.redis_servers import Batch, Clock, Server, Topology
from kvstore.tiers.redis_url import parse_redis_url, tls_context

DEFAULT_CONNECTIONS = 16
SLOWEST_BYTES_PER_S = 16 << 20
"""A call ends after the timeout and what its payload takes at this rate."""
MAX_REPLY_BYTES = 16 << 10
"""Limit of the mean reply to a command whose reply is parsed."""
MAX_LISTING_BYTES = 4 << 20
"""Limit of one page of a listing."""

TIER_RIGHTS = ("getrange", "set", "unlink", "expire", "scan", "eval")
"""Commands that the tier needs; a Cluster's user needs cluster|slots as well."""
DIRECTORY_RIGHTS = ("sadd", "srem", "srandmember", "hget", "hset", "hdel", "hgetall", "time")
"""Commands that the node directory needs, too."""

_ELSEWHERE = (
    errors.AskError, errors.TryAgainError, errors.ReadOnlyError, LoadingError,
    errors.ClusterDownError, SlotLostError,
)  # fmt: skip
"""A server that answers with one of these, AskError's child MovedError too, did nothing."""
_UNREACHED = (OSError, errors.ConnectionError, errors.TimeoutError, SlotLostError)
"""Why a server could not be asked."""
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
    ((SlotLostError, errors.ClusterDownError), "bring back its masters, or let replicas take over"),
    (errors.TimeoutError, "check that it is reachable and not overloaded, or raise timeout_ms"),
    (errors.InvalidResponse, "check that the URL names a Redis, and no proxy changes its answers"),
    (errors.ResponseError, "see the server's log"),
)
_FIX = "check that it runs and that the URL names it"

Call = tuple[bytes | Server, Command]
"""The server, or the name that decides which it is, and the command."""


class _Failure(NamedTuple):
    error: Exception
    is_undone: bool


class RedisClient:
    """Send commands to the servers behind one URL.

    A call ends once nothing came for *timeout_ms*, and at the latest after that and the time
    of its payload at SLOWEST_BYTES_PER_S. What a server did not begin to do is tried once
    more where another server may do it. At most *connections* are open to each server.
    Thread-safe.
    """

    def __init__(
        self, tier: str, url: str, timeout_ms: int, connections: int, clock: Clock = time.monotonic
    ) -> None:
        parsed = parse_redis_url(url)
        self.url: Final = parsed.shown
        """The URL as it may be shown."""
        self.is_cluster: Final = parsed.mode == "cluster"
        self._tier = tier
        self._secrets = {parsed.login.password, parsed.sentinel_login.password} - {""}
        self._timeout_s = timeout_ms / 1000
        self._clock = clock
        tls = None if parsed.tls is None else tls_context(parsed.tls)
        options = ConnectionOptions(
            self._timeout_s, connections, parsed.login, parsed.database, tls
        )
        self._topology = Topology(parsed, options, clock)
        self._is_closed = False

    def run(
        self, name: bytes | Server, commands: Sequence[Command], reply_bytes: int = MAX_REPLY_BYTES
    ) -> list[Any]:
        """Send *commands* about the key called *name*, or to that server, and return their replies.

        The reply for a key of the wrong type is None, as if it were absent. Raises redis-py's
        OutOfMemoryError when the server takes no more, else TierUnavailableError.
        """
        calls = [(name, command) for command in commands]
        replies = self.ask(calls, reply_bytes=reply_bytes)
        for reply in replies:
            if isinstance(reply, TierUnavailableError):
                raise reply
        return replies

    def ask(
        self,
        calls: Sequence[Call],
        *,
        within_s: float | None = None,
        reply_bytes: int = MAX_REPLY_BYTES,
    ) -> list[Any]:
        """Send *calls*, in one round trip to all servers at once, and return their replies.

        Like ``run``, but the reply of a part of the Cluster that is down is the error. With
        *within_s* it ends after so many seconds. *reply_bytes* limits the mean reply.
        """
        views = (len(word) for _, words in calls for word in words if type(word) is memoryview)
        deadline = self._deadline(sum(views))
        if within_s is not None:
            deadline = min(deadline, self._clock() + within_s)
        replies: list[Any] = [None] * len(calls)
        self._ask_once(dict(enumerate(calls)), replies, deadline, reply_bytes)
        failed = {at: reply for at, reply in enumerate(replies) if isinstance(reply, _Failure)}
        again = {at: calls[at] for at, failure in failed.items() if failure.is_undone}
        if again and self._may_try_again(deadline):
            self._ask_once(again, replies, deadline, reply_bytes)
        for at in failed:
            if isinstance(replies[at], _Failure):
                replies[at] = self._partial_failure(replies[at].error)
        return replies

    def _ask_once(
        self, calls: dict[int, Call], replies: list[Any], deadline: float, reply_bytes: int
    ) -> None:
        """Fill in *replies* by number; failures that others may not have among them. Raises what
        nothing cures.
        """
        groups: dict[Server, list[int]] = {}
        for at, (name, _) in calls.items():
            try:
                if isinstance(name, Server):
                    groups.setdefault(name, []).append(at)
                else:
                    groups.setdefault(self._topology.server_of(name, deadline), []).append(at)
            except _UNREACHED as error:
                replies[at] = _Failure(error, is_undone=True)
        batches = [Batch(server, [calls[at][1] for at in some]) for server, some in groups.items()]
        try:
            # in one order for all callers, lest two wait for what the other holds
            for batch in sorted(batches, key=lambda batch: batch.server.address):
                batch.send(deadline)
            for batch in batches:
                batch.receive(reply_bytes)
        finally:
            for batch in batches:
                batch.close()
        for batch, some in zip(batches, groups.values(), strict=True):
            self._take_in(batch, some, replies)

    def _take_in(self, batch: Batch, numbers: Sequence[int], replies: list[Any]) -> None:
        if batch.error is not None:
            self._topology.note_failure(batch.server, batch.error)
            for at in numbers:
                replies[at] = _Failure(batch.error, is_undone=batch.connection is None)
        for at, reply in zip(numbers, batch.replies, strict=False):
            replies[at] = reply
            if isinstance(reply, WrongTypeError):
                replies[at] = None
            elif isinstance(reply, _ELSEWHERE):
                replies[at] = _Failure(reply, is_undone=True)
                self._topology.note_failure(batch.server, reply)
            elif isinstance(reply, errors.OutOfMemoryError):
                raise reply
            elif isinstance(reply, errors.RedisError):
                raise self._unavailable(reply)

    def transfer(self, name: bytes, transfer: Transfer) -> bool:
        """Carry out *transfer* of the key called *name*. Return False when a reply is another than
        expected. Raises TierUnavailableError.
        """
        deadline = self._deadline(len(transfer.out))
        is_first = True
        while True:
            server: Server | None = None
            try:
                server = self._topology.server_of(name, deadline)
                with server.connection(deadline) as connection:
                    transfer.run(connection, server.window)
                return True
            except KVStoreError:  # of the caller that checks what arrives
                raise
            except (errors.InvalidResponse, WrongTypeError):
                return False
            except (OSError, errors.RedisError) as error:
                is_curable = isinstance(error, (*_UNREACHED, *_ELSEWHERE))
                if server is not None and is_curable:
                    self._topology.note_failure(server, error)
                # What was reported to have come is not requested again.
                may_repeat = is_first and is_curable and not transfer.filled_bytes
                if not may_repeat or not self._may_try_again(deadline):
                    raise self._partial_failure(error) from None
                is_first = False

    def masters(self) -> list[Server]:
        """Return the servers that hold keys. Raises TierUnavailableError."""
        try:
            return self._topology.masters(self._deadline(0))
        except (errors.RedisError, OSError) as error:
            raise self._unavailable(error) from None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._is_closed = True
        self._topology.close()

    def _deadline(self, payload_bytes: int) -> float:
        if self._is_closed:
            raise TierUnavailableError(self._tier, f"{self.url}: closed; open it again")
        return self._clock() + self._timeout_s + payload_bytes / SLOWEST_BYTES_PER_S

    def _may_try_again(self, deadline: float) -> bool:
        return self._topology.moves and self._clock() < deadline

    def _partial_failure(self, error: Exception) -> TierUnavailableError:
        """Return the error when other parts of the Cluster go on; else raise it."""
        if isinstance(error, errors.ClusterDownError) or not self._topology.has_others():
            raise self._unavailable(error) from None
        return self._unavailable(error, is_partial=True)

    def _unavailable(self, error: Exception, *, is_partial: bool = False) -> TierUnavailableError:
        reason = str(error)
        for secret in self._secrets:  # a proxy may quote the AUTH it does not understand
            reason = reason.replace(secret, "***")
        whys = (error, error.__cause__)
        fix = next((fix for kind, fix in _FIXES if any(isinstance(w, kind) for w in whys)), _FIX)
        return TierUnavailableError(
            self._tier,
            f"{self.url}: {type(error).__name__}: {reason}; {fix}",
            is_partial=is_partial,
        )
