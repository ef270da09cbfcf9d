"""A ZmqLink: one DEALER socket of a session, for one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.client.session import SessionTerms
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)

if TYPE_CHECKING:
    import zmq

_SLICE_MS = 2
"""How soon a wait notices that its client was closed, or hung up."""


def endpoint(zmq_address: str, address: str) -> str:
    """Return where to connect to, for a client that reached the server at *address*."""
    host = address.rpartition(":")[0].rpartition("/")[2]
    return zmq_address.replace("*", host or "127.0.0.1")


class ZmqLink:
    """Connected and attached at birth; used by one thread at a time.

    Raises TierUnavailableError or DeadlineError when the server does not let us in by
    *deadline*, a point on ``time.monotonic``, LeaseExpiredError when it does not know the
    session. Nothing is connected again: a link that broke is closed by its user.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        where: str,
        terms: SessionTerms,
        is_closing: Callable[[], bool],
        deadline: float,
    ) -> None:
        import zmq

        self._is_closing = is_closing
        self._is_given_up = False
        self._is_left = False
        self._requests = 0
        self._timeout_ms = _SLICE_MS
        self._socket = context.socket(zmq.DEALER)
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        try:
            self._set_up(terms.zmq_public_key)
            self._socket.connect(where)
            self.send(bulk.Attach(0, terms.session_id, terms.attach_token), deadline)
            word, _ = self.receive(deadline)
        except zmq.ZMQError as error:
            self.close()
            raise TierUnavailableError("zmq", f"{where}: {error.strerror}") from None
        except KVStoreError:
            self.close()
            raise
        if not isinstance(word, bulk.Attached):
            self.close()
            raise InvalidRequestError("kind", type(word).__name__, "not an answer to attach")

    def _set_up(self, server_key: bytes) -> None:
        import zmq

        link = self._socket
        link.linger = 0
        link.sndhwm = link.rcvhwm = bulk.QUEUE_MESSAGES
        link.maxmsgsize = bulk.MAX_WIRE_BYTES
        link.heartbeat_ivl = bulk.HEARTBEAT_MS
        link.heartbeat_timeout = bulk.SILENCE_MS
        link.reconnect_ivl = -1
        link.rcvtimeo = link.sndtimeo = _SLICE_MS
        link.ipv6 = True
        if server_key:
            link.curve_serverkey = server_key
            link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()

    def next_request(self) -> int:
        """Return a number that no earlier request of this link had."""
        self._requests += 1
        return self._requests

    def send(
        self, word: bulk.Word, deadline: float, payload: bytes | Bytes | None = None
    ) -> zmq.MessageTracker | None:
        """Send a message; an array's bytes are not copied, the tracker says when they are free.

        Raises DeadlineError.
        """
        import zmq

        more = 0 if payload is None else zmq.SNDMORE
        header = bulk.pack(word)
        self._check_owner()
        while True:
            try:
                self._socket.send(header, more)
                break
            except zmq.Again:
                self._check(deadline)
        if payload is None:
            return None
        if isinstance(payload, bytes):
            self._socket.send(payload)
            return None
        return self._socket.send(payload.data, copy=False, track=True)

    def receive(self, deadline: float) -> tuple[bulk.Word, Bytes | None]:
        """Return the next message; its payload is ZeroMQ's memory, ours while it is held.

        Raises DeadlineError, InvalidRequestError for what is no message of ours.
        """
        import zmq

        self._check_owner()
        while True:
            self._wait_at_most(0.0 if self._is_given_up else deadline)
            try:
                frames = self._socket.recv_multipart(copy=False)
                break
            except zmq.Again:
                self._check(deadline)
        if len(frames) > 2:
            raise InvalidRequestError("frames", len(frames), "a message has two at most")
        payload = as_bytes(frames[1].buffer) if len(frames) == 2 else None
        word = bulk.unpack(frames[0].bytes, None if payload is None else len(payload))
        if isinstance(word, bulk.Failed) and not word.request:  # of the session, not of a request
            raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
        return word, payload

    def grant(self, request: int, credit_bytes: int, deadline: float) -> None:
        """Let the server send so many bytes more. Raises DeadlineError."""
        self.send(bulk.Credit(request, credit_bytes), deadline)

    def cancel(self, request: int, deadline: float) -> None:
        """Want no more of a request; the server's last word of it is still to come."""
        self.send(bulk.Cancel(request), deadline)

    def give_up(self) -> None:
        """Have whoever waits on this link wait no more. For any thread."""
        self._is_given_up = True

    def is_broken(self) -> bool:
        """Whether the server hung up, could not be reached, or is not waited for any more."""
        return self._is_left or self._is_given_up or bool(self._events.poll(0))

    def has_more(self) -> bool:
        """Whether a message has arrived that was not received yet."""
        import zmq

        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _wait_at_most(self, deadline: float) -> None:
        timeout_ms = max(0, min(_SLICE_MS, int(1000 * (deadline - time.monotonic())) + 1))
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.rcvtimeo = timeout_ms

    def _check(self, deadline: float) -> None:
        if self._is_closing():
            raise KVStoreError("the client is closed")
        if self._is_given_up:
            raise DeadlineError("the server hangs")
        if self.is_broken():
            raise TierUnavailableError("server", "hung up on zmq")
        if time.monotonic() >= deadline:
            raise DeadlineError("the server did not answer in time over zmq")

    def leave(self) -> None:
        """In a child: use the socket, which is the parent's, no more."""
        self._is_left = True

    def _check_owner(self) -> None:
        if self._is_left:
            raise LeaseExpiredError("the connection is the parent process's")

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._is_left and not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(0)
