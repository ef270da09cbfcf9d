"""A TCP proxy that does to a connection what networks do: delay, silence, cuts, flipped bytes."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from helpers.tcp_proxy import TcpProxy
from typing_extensions import override


@dataclass(slots=True)
class Trouble:
    """What happens to the bytes of one direction; the default is nothing.

    ``cut_at`` and ``flip_at`` count the bytes of that direction over all connections since the
    trouble was set; each happens once.
    """

    delay_s: float = 0.0
    is_silent: bool = False
    """Nothing gets through, and no connection is closed."""
    cut_at: int | None = None
    flip_at: int | None = None
    bytes_per_s: float = 0.0
    seen_bytes: int = 0

    def changed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what becomes of *data*, and whether the connection is cut behind it."""
        start, self.seen_bytes = self.seen_bytes, self.seen_bytes + len(data)
        if self.flip_at is not None and start <= self.flip_at < self.seen_bytes:
            turned = bytearray(data)
            turned[self.flip_at - start] ^= 0x10
            data, self.flip_at = bytes(turned), None
        if self.cut_at is not None and start <= self.cut_at < self.seen_bytes:
            data, self.cut_at = data[: self.cut_at - start], None
            return data, True
        return data, False


class FaultProxy(TcpProxy):
    """``to_server`` and ``to_client`` may be replaced at any time."""

    def __init__(self, port: int) -> None:
        self.to_server = Trouble()
        self.to_client = Trouble()
        super().__init__(port)

    def go_silent(self) -> None:
        """From now on nothing gets through in either direction."""
        self.to_server, self.to_client = Trouble(is_silent=True), Trouble(is_silent=True)

    def heal(self) -> None:
        """From now on nothing happens to new bytes; what was held back is cut off."""
        if self.to_server.is_silent or self.to_client.is_silent:
            self.cut()
        self.to_server, self.to_client = Trouble(), Trouble()

    @override
    def hand_on(self, data: bytes, sink: socket.socket, *, is_up: bool) -> None:
        trouble = self.to_server if is_up else self.to_client
        while trouble.is_silent:
            if self._closed.wait(0.01):
                raise ConnectionAbortedError
            trouble = self.to_server if is_up else self.to_client
        self._closed.wait(
            trouble.delay_s + (len(data) / trouble.bytes_per_s if trouble.bytes_per_s else 0.0)
        )
        data, is_cut = trouble.changed(data)
        sink.sendall(data)
        if is_cut:
            raise ConnectionAbortedError
