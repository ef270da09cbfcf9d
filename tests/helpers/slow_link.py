"""A slow link: a TCP proxy in front of a server that limits the rate of replies."""

from __future__ import annotations

import math
import socket
import threading
import time

from helpers.tcp_proxy import TcpProxy
from typing_extensions import override

STEP_BYTES = 4096
STEP_S = 0.0005
"""Size of a forwarded piece: STEP_BYTES, or the bytes of STEP_S on a faster link."""


class SlowLink(TcpProxy):
    """``bytes_per_s`` (0: no limit) and ``stop_at_bytes`` may change at any time.

    Bytes beyond ``stop_at_bytes`` of ``passed_bytes`` wait. All connections share both limits.
    """

    def __init__(self, port: int, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.stop_at_bytes = math.inf
        self.passed_bytes = 0
        """Bytes from the server so far."""
        self._lock = threading.Lock()  # guards _free_at and passed_bytes
        self._free_at = 0.0
        super().__init__(port)

    @override
    def _piece_bytes(self) -> int:
        return max(STEP_BYTES, int(STEP_S * self.bytes_per_s))

    @override
    def hand_on(self, data: bytes, sink: socket.socket, *, is_up: bool) -> None:
        if not is_up:
            self._hold_back(len(data))
        sink.sendall(data)

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
