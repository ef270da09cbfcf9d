"""A TCP proxy in front of a server on this host; subclasses may change the bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any


class TcpProxy:
    """Forwards connections to *port* of the loopback from its own ``address``."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._closed = threading.Event()
        self._links: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hand_on(self, data: bytes, sink: socket.socket, *, is_up: bool) -> None:
        """Forward *data* to *sink*, the server if *is_up*. An OSError closes the connection."""
        sink.sendall(data)

    def cut(self) -> None:
        """Close all connections."""
        for link in self._links:
            hang_up(link)

    def close(self) -> None:
        self._closed.set()
        hang_up(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *terms: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=terms, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the server is gone
                hang_up(near)
                continue
            for link in (near, far):
                # Keeps few bytes in flight beyond the forwarded ones.
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links += [near, far]
            if self._closed.is_set():
                self.cut()
            self._start(self._pump, near, far, True)
            self._start(self._pump, far, near, False)

    def _piece_bytes(self) -> int:
        """Return the size of a forwarded piece."""
        return 1 << 16

    def _pump(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes()):
                self.hand_on(data, sink, is_up=is_up)
        hang_up(source)
        hang_up(sink)


def hang_up(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
