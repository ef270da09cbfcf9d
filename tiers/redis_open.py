"""A connection to one Redis server, opened, encrypted and authenticated by a deadline.

redis-py bounds each receive of its handshake, so that a server which answers byte by byte
holds the caller for as long as it likes. Here every step ends at the deadline.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from redis.exceptions import ConnectionError, RedisError, TimeoutError

from kvstore.proto.errors import InvalidRequestError
from kvstore.tiers.redis_url import HostPort, Login
from kvstore.tiers.redis_wire import AskTalk, Command, converse

MAX_HANDSHAKE_BYTES = 16 << 10

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LineOptions:
    """How each connection is opened. ``limit`` bounds those to one server."""

    timeout_s: float
    limit: int
    login: Login = field(default_factory=Login)
    database: int = 0
    tls: ssl.SSLContext | None = None


def tls_context(options: tuple[tuple[str, str], ...]) -> ssl.SSLContext:
    """Return what *options*, by their names in the URL, ask of TLS.

    Raises InvalidRequestError for files that cannot be read.
    """
    given = dict(options)
    requirement = given.get("ssl_cert_reqs", "required")
    check = given.get("ssl_check_hostname", "true").lower()
    if requirement not in ("required", "none") or check not in ("true", "false"):
        raise InvalidRequestError(
            "redis url", f"{requirement}, {check}", "ssl_cert_reqs is required or none,"
            " ssl_check_hostname is true or false",
        )  # fmt: skip
    try:
        context = ssl.create_default_context(
            cafile=given.get("ssl_ca_certs"), capath=given.get("ssl_ca_path")
        )
        if "ssl_certfile" in given:
            context.load_cert_chain(given["ssl_certfile"], given.get("ssl_keyfile"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            "redis url", str(error), "name files of certificates in PEM that this user can read"
        ) from None
    context.check_hostname = check == "true" and requirement == "required"
    if requirement == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def open_socket(
    address: HostPort, options: LineOptions, deadline: float, clock: Clock = time.monotonic
) -> socket.socket:
    """Return a non-blocking socket on which commands can be sent at once.

    Raises redis' errors and OSError.
    """
    deadline = min(deadline, clock() + options.timeout_s)
    sock = _connect(address, deadline, clock)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(0)
        if options.tls is not None:
            sock = options.tls.wrap_socket(
                sock, server_hostname=address[0], do_handshake_on_connect=False
            )
            _shake_hands(sock, deadline, clock)
        _log_in(sock, options, deadline, clock)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(address: HostPort, deadline: float, clock: Clock) -> socket.socket:
    failure: Exception = TimeoutError("no connection in time")
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        left_s = deadline - clock()
        if left_s <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s)
            sock.connect(place)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _shake_hands(sock: ssl.SSLSocket, deadline: float, clock: Clock) -> None:
    poll = select.poll()
    poll.register(sock)
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            poll.modify(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            poll.modify(sock, select.POLLOUT)
        else:
            return
        left_s = deadline - clock()
        if left_s <= 0 or not poll.poll(ceil(1000 * left_s)):
            raise TimeoutError("no TLS handshake in time")


def _log_in(sock: socket.socket, options: LineOptions, deadline: float, clock: Clock) -> None:
    """Say who we are and choose the database. A server that asks for neither gets no command."""
    commands: list[Command] = []
    login = options.login
    if login.username or login.password:
        words = [word.encode() for word in (login.username, login.password) if word]
        commands.append((b"AUTH", *words))
    if options.database:
        commands.append((b"SELECT", options.database))
    talk = AskTalk(sock, commands, MAX_HANDSHAKE_BYTES)
    converse([talk], deadline, options.timeout_s, clock)
    if talk.error is not None:
        raise talk.error
    for reply in talk.replies:
        if isinstance(reply, RedisError):
            raise reply
        if reply != b"OK":
            raise ConnectionError("the server did not let us in")
