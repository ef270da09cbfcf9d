"""A slow link: a TCP proxy in front of a server, whose answers come at so many bytes a second."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

STEP_BYTES = 4096
STEP_S = 0.0005
"""What passes at once is that many bytes, or on a faster link what it brings in this time."""


class SlowLink:
    """Passes connections on to *port* of this host. ``address`` is its own; ``close`` ends all.

    ``bytes_per_s`` may be changed at any time: 0 lets everything pass at once. So may
    ``stop_at_bytes``, of ``passed_bytes``: what is beyond waits. All connections share both.
    """

    def __init__(self, port: int, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.stop_at_bytes = math.inf
        self.passed_bytes = 0
        """What the server sent through it."""
        self._port = port
        self._lock = threading.Lock()  # guards _free_at and passed_bytes
        self._free_at = 0.0
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """The same with its host."""
        return f"127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # the server is gone
                _hang_up(near)
                continue
            for one in (near, far):
                # Little is on its way beyond what was let through.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            for source, sink, is_slow in ((near, far, False), (far, near, True)):
                thread = threading.Thread(
                    target=self._pump, args=(source, sink, is_slow), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        try:
            while data := source.recv(max(STEP_BYTES, int(STEP_S * self.bytes_per_s))):
                if is_slow:
                    self._hold_back(len(data))
                sink.sendall(data)
        except OSError:
            pass
        finally:
            _hang_up(source)
            _hang_up(sink)

    def _hold_back(self, size_bytes: int) -> None:
        with self._lock:
            while self.passed_bytes + size_bytes > self.stop_at_bytes:
                if self._closed.wait(0.001):
                    raise ConnectionAbortedError
            self.passed_bytes += size_bytes
            if not self.bytes_per_s:
                return
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        if wait_s > 0:
            self._closed.wait(wait_s)

    def close(self) -> None:
        """Hang up everywhere."""
        self._closed.set()
        _hang_up(self._listener)
        for one in self._sockets:
            _hang_up(one)
        for thread in self._threads:
            thread.join()


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
