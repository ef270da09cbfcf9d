"""A PeerLink: one server pulls chunks from another, with the words that clients use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.bulk_reading import BulkReading, Landed, Room
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.types import ChainDigest
from kvstore.proto.wire import join_digests

if TYPE_CHECKING:
    import zmq


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """What the other server said when it opened a session for this one, and where it is."""

    address: str
    public_key: bytes
    session_id: int
    token: bytes
    max_frame_bytes: int


class PeerLink:
    """One connection to another server, for one fetch at a time. Not thread-safe.

    Connects at the first fetch, and again after one that failed. *clock* returns monotonic
    seconds.
    """

    def __init__(
        self, terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]], clock: Callable[[], float]
    ) -> None:
        self._terms = terms
        self._context = context
        self._clock = clock
        self._link: zmq.Socket[bytes] | None = None
        self._requests = 0

    def fetch(
        self, digests: Sequence[ChainDigest], out_for: Room, deadline_ms: int
    ) -> list[Landed]:
        """Return the longest prefix of *digests* that the peer gave by the deadline.

        Frames lie where *out_for* said; their bytes are not verified. Raises
        TierUnavailableError when the peer does not answer, else its own errors: LeaseExpiredError
        when it does not know the session. What is late is missing.
        """
        deadline = self._clock() + deadline_ms / 1000
        self._requests += 1
        reading = BulkReading(self._requests, self._terms.max_frame_bytes, out_for)
        landed: list[Landed] = []
        try:
            link = self._connected(deadline)
            word = bulk.Get(
                self._requests, self._terms.session_id, 0, reading.open(), max(1, deadline_ms), 0
            )
            self._send(link, word, join_digests(digests))
            while not reading.is_over:
                self._read_one(link, reading, landed, deadline)
        except DeadlineError:
            self.close()  # what is still on its way is for nobody
        except KVStoreError:
            if not reading.is_over:
                self.close()
            raise
        return landed

    def _read_one(
        self,
        link: zmq.Socket[bytes],
        reading: BulkReading,
        landed: list[Landed],
        deadline: float,
    ) -> None:
        word, payload = self._receive(link, deadline)
        frame = reading.take(word, payload)
        if frame is not None:
            landed.append(frame)
        if isinstance(word, bulk.Part) and payload is not None:
            credit_bytes = reading.credit(len(payload))
            if credit_bytes:
                self._send(link, bulk.Credit(reading.request, credit_bytes))

    def close(self) -> None:
        """Hang up. Idempotent; a later fetch connects again."""
        if self._link is not None:
            self._link.close(0)
            self._link = None

    # --- the socket

    def _connected(self, deadline: float) -> zmq.Socket[bytes]:
        if self._link is not None:
            return self._link
        import zmq

        terms = self._terms
        link = self._link = self._context.socket(zmq.DEALER)
        link.linger = 0
        link.sndhwm = link.rcvhwm = bulk.QUEUE_MESSAGES
        link.maxmsgsize = bulk.MAX_WIRE_BYTES
        link.heartbeat_ivl, link.heartbeat_timeout = bulk.HEARTBEAT_MS, bulk.SILENCE_MS
        link.reconnect_ivl = -1
        link.ipv6 = True
        if terms.public_key:
            link.curve_serverkey = terms.public_key
            link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
        try:
            link.connect(terms.address)
        except zmq.ZMQError as error:
            self.close()
            raise TierUnavailableError("peer", f"{terms.address}: {error.strerror}") from None
        self._attach(link, deadline)
        return link

    def _attach(self, link: zmq.Socket[bytes], deadline: float) -> None:
        terms = self._terms
        self._send(link, bulk.Attach(0, terms.session_id, terms.token))
        try:
            word, _ = self._receive(link, deadline)
        except DeadlineError:
            raise TierUnavailableError("peer", f"{terms.address} does not answer") from None
        if not isinstance(word, bulk.Attached):
            raise InvalidRequestError("kind", type(word).__name__, "not an answer to attach")

    def _send(self, link: zmq.Socket[bytes], word: bulk.Word, payload: bytes | None = None) -> None:
        frames = [bulk.pack(word)] if payload is None else [bulk.pack(word), payload]
        import zmq

        try:
            link.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TierUnavailableError("peer", f"{self._terms.address}: {error}") from None

    def _receive(self, link: zmq.Socket[bytes], deadline: float) -> tuple[bulk.Word, Bytes | None]:
        left_ms = int(1000 * (deadline - self._clock()))
        if left_ms <= 0 or not link.poll(left_ms):
            raise DeadlineError("the peer did not answer in time")
        frames = link.recv_multipart(copy=False)
        if len(frames) > 2:
            raise InvalidRequestError("frames", len(frames), "a message has two at most")
        payload = as_bytes(frames[1].buffer) if len(frames) == 2 else None
        word = bulk.unpack(frames[0].bytes, None if payload is None else len(payload))
        if isinstance(word, bulk.Failed) and not word.request:  # of the session, not of a request
            raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
        return word, payload
