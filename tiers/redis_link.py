"""The way to Redis: every call ends in bounded time, and no error names a password."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.tiers.redis_cluster import Cluster
from kvstore.tiers.redis_exchange import (
    ELSEWHERE,
    MAX_REPLY_BYTES,
    UNREACHED,
    Asking,
    Exchange,
    Filling,
)
from kvstore.tiers.redis_fill import Fill, FillTalk
from kvstore.tiers.redis_lines import MAX_CONNECTIONS, Lines
from kvstore.tiers.redis_open import LineOptions, tls_context
from kvstore.tiers.redis_reply import SlotLostError, WrongTypeError
from kvstore.tiers.redis_row import Rows
from kvstore.tiers.redis_sentinel import SentinelMaster
from kvstore.tiers.redis_topology import SingleServer, Topology
from kvstore.tiers.redis_url import RedisUrl, parse_redis_url
from kvstore.tiers.redis_wire import Command, converse

SLOWEST_BYTES_PER_S = 16 << 20
"""A call ends after the timeout and what its payload takes at this rate."""
MAX_LISTING_BYTES = 4 << 20
"""Limit of one page of a listing."""

TIER_RIGHTS = ("getrange", "set", "unlink", "expire", "scan", "eval")
"""Commands that the tier needs; a Cluster's user needs cluster|slots as well."""
DIRECTORY_RIGHTS = ("sadd", "srem", "srandmember", "hget", "hset", "hdel", "hgetall", "time")
"""Commands that the node directory needs, too."""

_ALLOW = (
    f"allow its user in its ACL {' '.join(f'+{word}' for word in TIER_RIGHTS)}, for the node"
    f" directory {' '.join(f'+{word}' for word in DIRECTORY_RIGHTS)}, in a Cluster"
    " +cluster|slots, on the names that begin with --redis-prefix"
)
_FIXES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((NoPermissionError,), f"{_ALLOW}; kvstore doctor tries each"),
    ((AuthenticationError,), "check the user and its password"),
    (
        (ssl.SSLError,),
        "check --redis-tls-ca, and that its certificates are valid and name its hosts",
    ),
    ((ReadOnlyError,), "point the URL at the primary"),
    ((BusyLoadingError,), "wait until it has loaded its data"),
    ((SlotLostError, ClusterDownError), "bring back its masters, or let replicas take over"),
    ((TimeoutError,), "check that it is reachable and not overloaded, or raise timeout_ms"),
    ((InvalidResponse,), "check that the URL names a Redis, and no proxy changes its answers"),
    ((ResponseError,), "see the server's log"),
)
_FIX = "check that it runs and that the URL names it"

Call = tuple[bytes, Command]
"""The name that decides which server is asked, and what it is asked."""


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of a reply: this key's part of the Cluster gives none, though others do."""

    error: TierUnavailableError


class RedisLink:
    """Send commands to the servers behind one URL.

    A call ends once nothing came for *timeout_ms*, and at the latest after that and the time
    of its payload at SLOWEST_BYTES_PER_S. What a server did not begin to do is tried once
    more where another server may do it; nothing else is retried: a retry would outlive the
    caller's deadline. At most *connections* are open to each server. Thread-safe; *clock*
    returns monotonic seconds.
    """

    def __init__(
        self,
        tier: str,
        url: str,
        timeout_ms: int,
        connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise InvalidRequestError("connections", connections, f"use 1 to {MAX_CONNECTIONS}")
        parsed = parse_redis_url(url)
        self.url: Final = parsed.shown
        """The URL as it may be shown."""
        self._tier = tier
        self._secrets = parsed.secrets
        self._timeout_s = timeout_ms / 1000
        self._clock = clock
        self._topology = _open_topology(parsed, self._timeout_s, connections)
        self.is_cluster: Final = parsed.mode == "cluster"
        self._is_closed = False
        self._rows = Rows()

    def run(self, name: bytes, commands: Sequence[Command]) -> list[Any]:
        """Send *commands* about the key called *name*, in order, and return their replies.

        A command on a key of the wrong type is answered with None, as if it were absent.
        Raises redis' OutOfMemoryError when the server takes no more, and
        TierUnavailableError for anything else.
        """
        replies = self.ask([(name, command) for command in commands])
        for reply in replies:
            if isinstance(reply, Lost):
                raise reply.error
        return replies

    def ask(
        self,
        calls: Sequence[Call],
        *,
        within_s: float | None = None,
        reply_bytes: int = MAX_REPLY_BYTES,
    ) -> list[Any]:
        """Send *calls*, in one round trip to all servers at once, and return their replies.

        Like ``run``, but what only a part of the Cluster does not answer is Lost. With
        *within_s* it ends after so many seconds. *reply_bytes* limits the mean reply.
        """
        self._check_open()
        replies: list[Any] = [None] * len(calls)
        deadline = self._deadline(sum(_payload_bytes(command) for _, command in calls))
        if within_s is not None:
            deadline = min(deadline, self._clock() + within_s)
        try:
            failed = self._ask_once(dict(enumerate(calls)), replies, deadline, reply_bytes)
            again = {at: calls[at] for at, failure in failed.items() if failure.is_unsent}
            if again and self._may_try_again(deadline):
                failed = {at: failed[at] for at in failed.keys() - again.keys()}
                failed |= self._ask_once(again, replies, deadline, reply_bytes)
        except OutOfMemoryError:
            raise
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None
        for at, failure in failed.items():
            replies[at] = Lost(self._given_up(failure.error))
        return replies

    def _ask_once(
        self, calls: Mapping[int, Call], replies: list[Any], deadline: float, reply_bytes: int
    ) -> dict[int, _Failure]:
        """Fill in *replies* by number; return why others have none. Raises what nothing cures."""
        failed: dict[int, _Failure] = {}
        groups: dict[Lines, list[tuple[int, Command]]] = {}
        for at, (name, command) in calls.items():
            try:
                lines = self._topology.lines_of(name, deadline)
            except UNREACHED as error:
                failed[at] = _Failure(error, is_unsent=True)
            else:
                groups.setdefault(lines, []).append((at, command))
        askings = [Asking(lines, group, reply_bytes) for lines, group in groups.items()]
        self._ask_all(askings, deadline)
        for asking in askings:
            failed |= self._take_in(asking, replies)
        return failed

    def _ask_all(self, askings: Sequence[Asking], deadline: float) -> None:
        self._rows.end()  # lest it wait for a line while it keeps one
        self._carry_on(askings, deadline)

    def _carry_on(self, exchanges: Sequence[Exchange], deadline: float) -> None:
        try:
            # in one order for all callers, lest two wait for what the other holds
            for exchange in sorted(exchanges, key=lambda exchange: exchange.lines.address):
                exchange.open(deadline)
            talks = [talk for exchange in exchanges for talk in exchange.talks]
            match talks:
                case [FillTalk(runs_alone=True) as talk]:
                    talk.run(deadline, self._timeout_s, self._clock)
                    talks = [] if talk.is_done or talk.error else [talk]
            converse(talks, deadline, self._timeout_s, self._clock)
        finally:
            for exchange in exchanges:
                exchange.close()

    def _take_in(self, asking: Asking, replies: list[Any]) -> dict[int, _Failure]:
        if asking.error is not None:
            self._topology.note_failure(asking.lines, asking.error)
            failure = _Failure(asking.error, asking.is_unsent)
            return {at: failure for at, _ in asking.commands}
        failed: dict[int, _Failure] = {}
        for at, reply in asking.replies():
            if isinstance(reply, ELSEWHERE):
                failed[at] = _Failure(reply, is_unsent=True)
                self._topology.note_failure(asking.lines, reply)
            elif isinstance(reply, RedisError) and not isinstance(reply, WrongTypeError):
                raise reply
            else:
                replies[at] = None if isinstance(reply, WrongTypeError) else reply
        return failed

    def fill(self, name: bytes, fill: Fill) -> bool:
        """Carry out *fill* on the server of the key called *name*.

        Where something is to be asked ahead, the calling thread fills from that next, or calls
        ``end_row``. Return False when a reply is another than expected. Raises
        TierUnavailableError.
        """
        self._check_open()
        deadline = self._deadline(fill.payload_bytes)
        try:
            failure = self._fill_once(name, fill, deadline)
            if failure and failure.is_stale:
                failure = self._fill_once(name, fill, deadline)
            if failure and failure.is_unsent and self._may_try_again(deadline):
                failure = self._fill_once(name, fill, deadline)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None
        if failure is not None:
            if isinstance(failure.error, (InvalidResponse, WrongTypeError)):
                return False
            raise self._given_up(failure.error)
        return True

    def _fill_once(self, name: bytes, fill: Fill, deadline: float) -> _Failure | None:
        try:
            filling = Filling(self._topology.lines_of(name, deadline), fill, self._rows)
        except UNREACHED as error:
            return _Failure(error, is_unsent=True)
        self._carry_on([filling], deadline)
        why = filling.error
        if why is None:
            return None
        if isinstance(why, (*UNREACHED, *ELSEWHERE)) and not filling.is_stale:
            self._topology.note_failure(filling.lines, why)
        return _Failure(why, filling.is_unsent, filling.is_stale)

    def end_row(self) -> None:
        """The calling thread reads nothing of what it had asked ahead."""
        self._rows.end()

    def masters(self) -> list[Lines]:
        """Return the servers that hold keys. Raises TierUnavailableError."""
        self._check_open()
        try:
            return self._topology.masters(self._deadline(0))
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None

    def list_on(self, master: Lines, command: Command) -> Any:
        """Send a *command* that lists what one master has. Raises TierUnavailableError."""
        self._check_open()
        asking = Asking(master, [(0, command)], MAX_LISTING_BYTES)
        replies: list[Any] = [None]
        try:
            self._ask_all([asking], self._deadline(0))
            failed = self._take_in(asking, replies)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None
        if failed:
            raise self._given_up(failed[0].error)
        return replies[0]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._is_closed = True
        self._topology.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailableError(self._tier, f"{self.url}: closed; open it again")

    def _deadline(self, payload_bytes: int) -> float:
        return self._clock() + self._timeout_s + payload_bytes / SLOWEST_BYTES_PER_S

    def _may_try_again(self, deadline: float) -> bool:
        return self._topology.moves and self._clock() < deadline

    def _given_up(self, error: Exception) -> TierUnavailableError:
        """Return the error when other parts of the Cluster go on; else raise it."""
        if isinstance(error, ClusterDownError) or not self._topology.has_others():
            raise self._unavailable(error) from None
        return self._unavailable(error, is_partial=True)

    def _unavailable(self, error: Exception, *, is_partial: bool = False) -> TierUnavailableError:
        reason = str(error)
        for secret in self._secrets:  # a proxy may quote the AUTH it does not understand
            reason = reason.replace(secret, "***")
        whys = (error, error.__cause__)
        fix = next((f for kinds, f in _FIXES if any(isinstance(w, kinds) for w in whys)), _FIX)
        return TierUnavailableError(
            self._tier,
            f"{self.url}: {type(error).__name__}: {reason}; {fix}",
            is_partial=is_partial,
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a call has no reply; *is_unsent* when nothing of it was done, *is_stale* when that was
    over a connection that was gone before.
    """

    error: Exception
    is_unsent: bool
    is_stale: bool = False


def _payload_bytes(command: Command) -> int:
    return sum(len(argument) for argument in command if isinstance(argument, memoryview))


def _open_topology(url: RedisUrl, timeout_s: float, connections: int) -> Topology:
    """Return the topology that *url* names; nothing is asked before the first use."""
    tls = None if url.tls is None else tls_context(url.tls)
    options = LineOptions(timeout_s, connections, url.login, url.database, tls)
    if url.mode == "sentinel":
        return SentinelMaster(url, options)
    return Cluster(url, options) if url.mode == "cluster" else SingleServer(url, options)
