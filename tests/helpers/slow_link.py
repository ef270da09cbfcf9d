"""A slow link: a TCP proxy in front of a server, whose answers come at so many bytes a second."""

from __future__ import annotations

import math
import socket
import threading
import time

from helpers.tcp_proxy import TcpProxy
from typing_extensions import override

STEP_BYTES = 4096
STEP_S = 0.0005
"""What passes at once is that many bytes, or on a faster link what it brings in this time."""


class SlowLink(TcpProxy):
    """``bytes_per_s`` may be changed at any time: 0 lets everything pass at once. So may
    ``stop_at_bytes``, of ``passed_bytes``: what is beyond waits. All connections share both.
    """

    def __init__(self, port: int, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.stop_at_bytes = math.inf
        self.passed_bytes = 0
        """What the server sent through it."""
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
