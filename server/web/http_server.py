"""The HTTP server: one thread, a bounded number of connections, optionally over TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from asyncio import BaseTransport, TimerHandle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security.certificates import checked_pair
from kvstore.server.security.key_files import WatchedFile

MAX_CONNECTIONS = 64
"""Concurrent connections; as many more are answered 503, and those beyond closed at once, before a
TLS handshake."""
MAX_PER_ADDRESS = 32
"""Connections of one address, half of all; MAX_CONNECTIONS more are answered 503."""
SILENT_S = 20.0
"""A connection without a complete request for this time is closed."""
KEEP_ALIVE_S = 5
MAX_REQUEST_BYTES = 16 << 10
"""Limit of a request before its body; a longer one is answered 400. No request has a body."""
BACKLOG = 64
STUCK_MS = 20_000

CERTIFICATE = "certificate"
"""Request state: the caller's verified certificate in PEM; empty without one."""
TlsFiles = tuple[Path, Path, Path | None]
"""Certificate, key, and CA bundle of optional client certificates."""


class _Protocol(H11Protocol):
    """Passes the caller's certificate to the application, and closes silent connections."""

    _silence: TimerHandle | None = None
    _is_served = False

    @override
    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # the same, by another name
        others: list[Any] = [one for one in self.connections if one is not self]
        alike = [one._is_served for one in others if one._host() == self._host()]
        served = sum(one._is_served for one in others)
        self._is_served = served < MAX_CONNECTIONS and sum(alike) < MAX_PER_ADDRESS
        self.limit_concurrency = None if self._is_served else 0  # 0: answered 503
        self._wait_for_request()
        link = transport.get_extra_info("ssl_object")
        der = link.getpeercert(binary_form=True) if link is not None else None
        pem = ssl.DER_cert_to_PEM_cert(der).encode() if der else b""
        self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE: pem}

    def _host(self) -> str:
        return self.client[0] if self.client else ""

    @override
    def on_response_complete(self) -> None:
        self._wait_for_request()  # first: the next request may be buffered already
        super().on_response_complete()

    def _wait_for_request(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self.loop.call_later(SILENT_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        super().connection_lost(exc)


class _Listener(socket.socket):
    """Closes connections beyond the limits, those in a TLS handshake included."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__(made.family, made.type, made.proto, made.detach())
        self._open: dict[socket.socket, str] = {}
        """Addresses of connections."""

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        link, address = super().accept()
        self._open = {one: host for one, host in self._open.items() if one.fileno() >= 0}
        alike, most = list(self._open.values()).count(address[0]), MAX_PER_ADDRESS + MAX_CONNECTIONS
        if len(self._open) >= 2 * MAX_CONNECTIONS or alike >= most:
            link.close()
            raise ConnectionAbortedError  # which asyncio ignores
        self._open[link] = address[0]
        return link, address


class _Tls(ssl.SSLContext):
    """Makes each connection by the current files: a context cannot drop an authority."""

    files: WatchedFile[ssl.SSLContext]

    @override
    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.files.value.wrap_bio(*args, **options)


class HttpServer:
    """Serves *app*, an ASGI application, until ``close``.

    ``tick``, called a few times a second, reloads changed *tls* files and calls *on_tick*. Raises
    InvalidRequestError for an unavailable address or unusable files.
    """

    def __init__(
        self,
        address: tuple[str, int],
        app: Callable[..., object],
        tls: TlsFiles | None,
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_tick = on_tick
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # below it, one line per invalid request
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,  # streams check ``is_ending`` once a second
            h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
        )
        config.load()
        self._files: WatchedFile[ssl.SSLContext] | None = None
        if tls is not None:
            config.ssl = context = _Tls(ssl.PROTOCOL_TLS_SERVER)
            self._files = WatchedFile(tuple(filter(None, tls)), partial(_load, tls))
            context.files = self._files
        self._server = uvicorn.Server(config)
        self._socket = _listen(address)
        self.port: int = self._socket.getsockname()[1]
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="http", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Reload a changed certificate for new connections."""
        self._on_tick()
        if self._files is not None:
            self._files.refresh()

    def is_ending(self) -> bool:
        """Whether ``close`` was called."""
        return self._server.should_exit

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _load(tls: TlsFiles, *data: bytes) -> ssl.SSLContext:
    """Return a context of the files, whose content is *data*. Raises InvalidRequestError."""
    checked_pair(*data)
    context, (cert, key, client_ca) = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:  # changed again meanwhile
        raise InvalidRequestError("tls_cert", str(cert), str(error)) from None
    return context


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, where = found[0]
        is_v6 = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        made = socket.create_server(
            (str(where[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
    except OSError as error:
        fix = f"{(error.strerror or '').partition(' (')[0]}; choose another address"
        raise InvalidRequestError("http", f"{host}:{port}", fix) from None
    listening = _Listener(made)
    # Closes the connection of a reader that has stalled.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
    return listening
