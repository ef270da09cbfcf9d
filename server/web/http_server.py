"""The HTTP server: one thread, a bounded number of connections, over TLS where that is wanted."""

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
"""Connections at once; as many more are answered 503, and those beyond hung up on."""
MAX_PER_ADDRESS = 32
"""Of them those of one address, half: its further ones are answered 503."""
SILENT_S = 20.0
"""A connection is closed that long after it came or was answered, if no whole request followed."""
KEEP_ALIVE_S = 5
MAX_REQUEST_BYTES = 16 << 10
"""Of a request before its body; a longer one is answered 400. No request has a body."""
BACKLOG = 64
STUCK_MS = 20_000

CERTIFICATE = "certificate"
"""In the state of a request: the caller's certificate in PEM, verified; empty without one."""
TlsFiles = tuple[Path, Path, Path | None]
"""A certificate, its key, and who signs callers' certificates, which nobody has to show."""


class _Protocol(H11Protocol):
    """Tells the application the certificate of who calls, and waits for no request for ever."""

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
        if len(others) >= 2 * MAX_CONNECTIONS or alike.count(False) >= MAX_CONNECTIONS:
            self.transport.abort()
        self._wait_for_request()
        link = transport.get_extra_info("ssl_object")
        der = link.getpeercert(binary_form=True) if link is not None else None
        pem = ssl.DER_cert_to_PEM_cert(der).encode() if der else b""
        self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE: pem}

    def _host(self) -> str:
        return self.client[0] if self.client else ""

    @override
    def on_response_complete(self) -> None:
        self._wait_for_request()  # first: the next one may be here already
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


class HttpServer:
    """Serves *app*, an ASGI application, on an address of its own from birth to ``close``.

    The files of *tls* are read again when they are replaced. ``tick``, called a few times a second,
    does that and *on_tick*.
    Raises InvalidRequestError for an address that cannot be had, or files that cannot be used.
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
            log_level="error",  # below it, a line for whatever a stranger sends
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,  # answers that go on see ``is_ending`` once a second
            h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
        )
        config.load()
        self._files: WatchedFile[None] | None = None
        if tls is not None:
            config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            files = tuple(filter(None, tls))
            self._files = WatchedFile(files, partial(_load, config.ssl, tls))
        self._server = uvicorn.Server(config)
        self._socket = _listen(address)
        self.port: int = self._socket.getsockname()[1]
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="http", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Take in a certificate that was replaced, for connections to come."""
        self._on_tick()
        if self._files is not None:
            self._files.refresh()

    def is_ending(self) -> bool:
        """Whether it was closed."""
        return self._server.should_exit

    def close(self) -> None:
        """End every connection and the thread. Idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _load(context: ssl.SSLContext, tls: TlsFiles, *data: bytes) -> None:
    """Have *context* use the files, which hold *data*. Raises InvalidRequestError."""
    checked_pair(*data)
    cert, key, client_ca = tls
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:  # replaced once more, meanwhile
        raise InvalidRequestError("tls_cert", str(cert), str(error)) from None


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, where = found[0]
        is_v6 = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(
            (str(where[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
    except OSError as error:
        fix = f"{(error.strerror or '').partition(' (')[0]}; choose another address"
        raise InvalidRequestError("http", f"{host}:{port}", fix) from None
    # The connection of a reader that takes nothing any more ends.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
    return listening
