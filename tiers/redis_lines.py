"""Connections to one Redis server: opened and authenticated by redis-py, then used bare."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import socket

from redis import Connection, SSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from kvstore.tiers.redis_url import HostPort, Login

DEFAULT_CONNECTIONS = 16
MAX_CONNECTIONS = 64
"""The most that may be configured for one server."""


@dataclass(frozen=True, slots=True)
class LineOptions:
    """How each connection is opened. ``limit`` bounds those to one server."""

    timeout_s: float
    limit: int
    login: Login = field(default_factory=Login)
    database: int = 0
    tls: tuple[tuple[str, str], ...] | None = None


class Line:
    """One connection whose socket is non-blocking."""

    __slots__ = ("_connection", "sock")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # redis-py has no public name for it; nothing else could read into a given buffer
        sock = connection._sock
        assert isinstance(sock, socket)
        sock.settimeout(0)
        self.sock: socket = sock

    def is_quiet(self) -> bool:
        """Whether the server neither hung up nor sent what nobody asked for."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def hang_up(self) -> None:
        """Close the connection."""
        self._connection.disconnect()  # type: ignore[no-untyped-call,unused-ignore]


class Lines:
    """The connections to one server. Thread-safe.

    A caller has one at a time, at most ``limit`` are open, and one that failed is not used
    again. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        address: HostPort,
        options: LineOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._options = options
        self._clock = clock
        self._free = threading.BoundedSemaphore(options.limit)
        self._idle: deque[Line] = deque()
        self._is_closed = False
        self._rests_until = 0.0

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)

    def rest(self, seconds: float) -> None:
        """Leave the server alone for a while: it failed."""
        self._rests_until = self._clock() + seconds

    @property
    def is_resting(self) -> bool:
        """Whether the server is being left alone."""
        return self._clock() < self._rests_until

    def borrow(self, deadline: float) -> Line:
        """Return a connection that is open and quiet, waiting for one up to *deadline*.

        Raises redis' errors and OSError.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TimeoutError("all connections are in use")
        return self._ready(deadline)

    def borrow_spare(self, deadline: float) -> Line | None:
        """Return a connection if one is to be had without waiting for others."""
        return self._ready(deadline) if self._free.acquire(blocking=False) else None

    def _ready(self, deadline: float) -> Line:
        try:
            while self._idle:
                line = self._idle.pop()
                if line.is_quiet():
                    return line
                line.hang_up()
        except IndexError:  # another thread was faster
            pass
        except BaseException:
            self._free.release()
            raise
        try:
            return self._open(deadline)
        except BaseException:
            self._free.release()
            raise

    def _open(self, deadline: float) -> Line:
        if self._is_closed:
            raise ConnectionError("closed")
        options = self._options
        left_s = min(options.timeout_s, deadline - self._clock())
        if left_s <= 0:
            raise TimeoutError("no connection in time")
        settings: dict[str, object] = {
            "host": self.address[0],
            "port": self.address[1],
            "db": options.database,
            "username": options.login.username or None,
            "password": options.login.password or None,
            "socket_timeout": left_s,
            "socket_connect_timeout": left_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if options.tls is None:
            connection = Connection(**settings)  # type: ignore[no-untyped-call,arg-type,unused-ignore]
        else:
            tls = {name: _typed(value) for name, value in options.tls}
            connection = SSLConnection(**settings, **tls)  # type: ignore[no-untyped-call,arg-type,unused-ignore]
        try:
            connection.connect()  # type: ignore[no-untyped-call,unused-ignore]
            return Line(connection)
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call,unused-ignore]
            raise

    def give_back(self, line: Line, *, is_clean: bool) -> None:
        """Take a borrowed connection back; hang up unless all its replies were read."""
        if is_clean and not self._is_closed:
            self._idle.append(line)
        else:
            line.hang_up()
        self._free.release()
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Hang up; what is borrowed follows as it comes back. Idempotent."""
        self._is_closed = True
        while True:
            try:
                self._idle.pop().hang_up()
            except IndexError:
                return


def _typed(value: str) -> object:
    """Return a TLS option as redis-py takes it: truth values are not text there."""
    return {"true": True, "false": False}.get(value.lower(), value)
