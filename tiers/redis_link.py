"""The connection to one Redis: bounded, without retries, and never naming its password."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis import BlockingConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError

Argument: TypeAlias = bytes | str | int | memoryview
Command: TypeAlias = Sequence[Argument]

MAX_CONNECTIONS = 16
"""Calls at one time; further ones wait up to the timeout."""

_READ_BYTES = 256 << 10
_INLINE_BYTES = 6000
_URL_OPTIONS = frozenset(
    {
        "db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile",
        "ssl_check_hostname",
    }
)  # fmt: skip
_FIXES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((AuthenticationError, NoPermissionError), "check the user, its password and its ACL"),
    ((ReadOnlyError,), "point the URL at the primary"),
    ((BusyLoadingError,), "wait until it has loaded its data"),
    ((TimeoutError,), "check that it is reachable and not overloaded, or raise timeout_ms"),
    ((ResponseError,), "see the server's log"),
)
_FIX = "check that it runs and that the URL names it"


class RedisLink:
    """Send pipelines to one Redis, each one round trip.

    Each connect, send and receive ends after *timeout_ms*. Nothing is retried: a retry would
    outlive the caller's deadline. Thread-safe.
    """

    def __init__(self, tier: str, url: str, timeout_ms: int) -> None:
        parts = _split(url)
        self.url = _without_password(parts)
        """The URL as it may be shown."""
        self._tier = tier
        password = parts.password or ""
        self._secrets = tuple(s for s in {password, unquote(password)} if s)
        self._closed = False
        timeout_s = timeout_ms / 1000
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            decode_responses=False,
            protocol=2,
            # hiredis packs a command by copying its payload twice; this sends views as they are
            command_packer=PythonRespSerializer(_INLINE_BYTES, _encode),
        )
        self._client = Redis(connection_pool=self._pool)

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send *commands* in one round trip and return their replies, in order.

        A command on a key of the wrong type is answered with None, as if it were absent.
        Raises redis' OutOfMemoryError when the server takes no more, and
        TierUnavailableError for anything else.
        """
        if self._closed:
            raise TierUnavailableError(self._tier, f"{self.url}: closed; open it again")
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call,unused-ignore]
                replies = pipeline.execute(raise_on_error=False)
            for index, reply in enumerate(replies):
                if isinstance(reply, ResponseError):
                    if not str(reply).startswith("WRONGTYPE"):
                        raise reply
                    replies[index] = None
        except OutOfMemoryError:
            raise
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None
        return replies

    def each(self, commands: Sequence[Command], take: Callable[[int, Any], bool]) -> bool:
        """Send *commands* in one round trip and give each reply to *take* as it arrives.

        The server sends on while *take* works. Return False, reading no further, once *take*
        does. Raises TierUnavailableError.
        """
        if self._closed:
            raise TierUnavailableError(self._tier, f"{self.url}: closed; open it again")
        connection = None
        unread = len(commands)
        try:
            connection = self._pool.get_connection()  # type: ignore[no-untyped-call,unused-ignore]
            connection.send_packed_command(connection.pack_commands(commands))
            for index in range(len(commands)):
                reply = connection.read_response()
                unread -= 1
                if not take(index, reply):
                    return False
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise self._unavailable(error) from None
            return False
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from None
        finally:
            if connection is not None:
                if unread:  # its next reader must not take our replies for its own
                    connection.disconnect()
                self._pool.release(connection)  # type: ignore[no-untyped-call,unused-ignore]
        return True

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._closed = True
        self._pool.disconnect()

    def _unavailable(self, error: Exception) -> TierUnavailableError:
        reason = str(error)
        for secret in self._secrets:  # a proxy may quote the AUTH it does not understand
            reason = reason.replace(secret, "***")
        fix = next((fix for kinds, fix in _FIXES if isinstance(error, kinds)), _FIX)
        return TierUnavailableError(
            self._tier, f"{self.url}: {type(error).__name__}: {reason}; {fix}"
        )


def _encode(value: object) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    return str(value).encode()


def _split(url: str) -> SplitResult:
    """Parse *url*. The error never quotes it: a badly escaped password may be anywhere in it."""
    fix = (
        "give redis://user:password@host:port/db, or rediss:// for TLS, with the password "
        f"percent-encoded and no other options than {', '.join(sorted(_URL_OPTIONS))}"
    )
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        well_formed = (
            parts.scheme in ("redis", "rediss")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and re.fullmatch(r"/?[0-9]{0,9}", parts.path) is not None
            and not parts.fragment
            and all(name in _URL_OPTIONS for name, _ in options)
        )
    except ValueError:
        well_formed = False
    if not well_formed:
        raise InvalidRequestError("redis url", "(not shown)", fix)
    return parts


def _without_password(parts: SplitResult) -> str:
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"
