"""A Wire: one connection of the bulk channel, as a PeerLink uses it; here through libzmq."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import DeadlineError, InvalidRequestError, TierUnavailableError

if TYPE_CHECKING:
    import zmq


class Wire(Protocol):
    """Messages of one or two frames. Not thread-safe; unusable once anything was raised.

    A ``deadline`` is in monotonic seconds. What has come is taken even when it is over.
    """

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, or keep it until the connection stands. Raises TierUnavailableError."""

    def receive(self, deadline: float) -> tuple[bytes, int | None]:
        """Return the next message's header, and its payload's size, None without one.

        Raises DeadlineError, TierUnavailableError, InvalidRequestError.
        """

    def fill(self, out: Bytes, deadline: float) -> None:
        """Fill *out* with the next bytes of the payload of the message that ``receive`` gave.

        Raises as it does, InvalidRequestError when so many are not left.
        """

    def tend(self) -> bool:
        """Do what an idle connection needs; whether it may be used again. Never waits."""

    def close(self) -> None:
        """Hang up."""


class ZmqWire:
    """Through libzmq, which also encrypts: *public_key* is the other side's for CURVE, or empty.

    *clock* returns monotonic seconds. Raises TierUnavailableError.
    """

    def __init__(
        self,
        address: str,
        public_key: bytes,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
    ) -> None:
        import zmq

        self._address = address
        self._clock = clock
        self._timeout_ms = -1
        self._payload: Bytes = np.empty(0, np.uint8)
        link = self._link = context.socket(zmq.DEALER)
        link.linger = 0
        link.sndhwm = link.rcvhwm = bulk.QUEUE_MESSAGES
        link.maxmsgsize = bulk.MAX_WIRE_BYTES
        link.heartbeat_ivl, link.heartbeat_timeout = bulk.HEARTBEAT_MS, bulk.SILENCE_MS
        link.reconnect_ivl = -1
        link.ipv6 = True
        if public_key:
            link.curve_serverkey = public_key
            link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
        try:
            link.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise TierUnavailableError("peer", f"{address}: {error.strerror}") from None

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message. Raises TierUnavailableError."""
        import zmq

        try:
            self._link.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TierUnavailableError("peer", f"{self._address}: {error}") from None

    def receive(self, deadline: float) -> tuple[bytes, int | None]:
        """Return the next message's header and its payload's size."""
        import zmq

        left_ms = max(0, int(1000 * (deadline - self._clock())))
        if left_ms != self._timeout_ms:
            self._link.rcvtimeo = self._timeout_ms = left_ms
        try:
            frames = self._link.recv_multipart(copy=False)
        except zmq.Again:
            raise DeadlineError(f"{self._address} did not answer in time") from None
        if len(frames) > 2:
            raise InvalidRequestError("frames", len(frames), "a message has two at most")
        if len(frames) == 1:
            return frames[0].bytes, None
        self._payload = as_bytes(frames[1].buffer)
        return frames[0].bytes, len(self._payload)

    def fill(self, out: Bytes, deadline: float) -> None:
        """Copy the next bytes of the payload."""
        if len(out) > len(self._payload):
            raise InvalidRequestError("payload", len(self._payload), f"{len(out)} are asked for")
        copy_bytes(out, self._payload[: len(out)])
        self._payload = self._payload[len(out) :]

    def tend(self) -> bool:
        """Return True: libzmq answers heartbeats by itself."""
        return True

    def close(self) -> None:
        """Hang up."""
        self._link.close(0)
