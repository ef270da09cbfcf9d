"""A PeerLink: one connection to another server, over which its memory is asked and read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.bulk_reading import BulkPieces
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    TierUnavailableError,
)
from kvstore.proto.peer_words import pack_wanted, unpack_found
from kvstore.proto.types import ChunkInfo, ChunkKey

if TYPE_CHECKING:
    import zmq


MOST_SILENCES = 20
"""A read takes as many waits for its next bytes at most."""
WINDOW_BYTES = 12 << 20
"""Under way to a read: a frame of 8 MiB is sent without a wait for credit."""
MAX_GET_MS = 600_000
"""What servers take for a deadline."""


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """What the other server said when it opened a session for this one, and where it is."""

    address: str
    public_key: bytes
    session_id: int
    token: bytes
    heartbeat_ms: int
    max_frame_bytes: int
    max_batch_chunks: int
    stream_address: str = ""
    """Where its streams are, tcp://host:port; empty: it has none."""
    stream_certificate: bytes = b""
    """In DER; empty: they go in plain text."""


class PeerLink:
    """One DEALER socket for one request at a time. Not thread-safe.

    Connects at the first request. One that raises anything but what the peer said of the request
    leaves the link closed: what is still on its way is for nobody. Every ``deadline`` is a point
    on *clock*, in monotonic seconds.
    """

    def __init__(
        self, terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]], clock: Callable[[], float]
    ) -> None:
        self.terms = terms
        self._context = context
        self._clock = clock
        self._link: zmq.Socket[bytes] | None = None
        self._is_attached = False
        self._timeout_ms = -1
        self._requests = 0
        self._is_asking = False

    def begin_find(self, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Ask which of *keys*, of one namespace, are in the peer's memory; ``end_find`` waits.

        Raises TierUnavailableError.
        """
        self._begin()
        deadline_ms = max(1, int(1000 * (deadline - self._clock())))
        self._send(bulk.Find(self._requests, self.terms.session_id, deadline_ms), pack_wanted(keys))

    def end_find(self, keys: Sequence[ChunkKey], deadline: float) -> list[ChunkInfo | None]:
        """Return what the peer knows of the *keys* of ``begin_find``.

        Raises DeadlineError, the peer's own errors, and InvalidFrameError or InvalidRequestError
        for what is no answer to that.
        """
        try:
            word, payload = self._receive(deadline)
            if word.request != self._requests:
                raise InvalidFrameError("request", word.request, f"{self._requests} was asked")
            self._is_asking = False
            if isinstance(word, bulk.Failed):
                raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
            if not isinstance(word, bulk.Done) or payload is None:
                self._is_asking = True
                raise InvalidFrameError("kind", type(word).__name__, "not an answer to a find")
            return unpack_found(keys, payload.tobytes())
        finally:
            self._settle()

    def read(
        self,
        info: ChunkInfo,
        out: Bytes,
        offset: int,
        silence_s: float,
        following: Sequence[ChunkInfo] = (),
    ) -> Generator[int, None, None]:
        """Fill *out* with the frame of *info* from byte *offset*; yield how many bytes have come.

        Nothing is yielded when the peer does not have it in memory. The bytes are not verified.
        What is *following* is asked for when it is read: only a StreamLink asks ahead. Raises
        DeadlineError when nothing comes for *silence_s*, or not all of it in MOST_SILENCES such
        times; the peer's own errors, and InvalidFrameError or InvalidRequestError for parts that
        are not of this.
        """
        self._begin()
        pieces = BulkPieces(self._requests, WINDOW_BYTES)
        most_s = MOST_SILENCES * silence_s
        until = self._clock() + most_s
        whole = bulk.Range(0, offset, offset + len(out))
        deadline_ms = min(max(1, int(1000 * most_s)), MAX_GET_MS)
        flags = bulk.PEER | bulk.RANGES
        ask = bulk.Get(self._requests, self.terms.session_id, 0, pieces.open(), deadline_ms, flags)
        arrived = 0
        try:
            self._send(ask, bulk.pack_ranges(pack_wanted([info.key]), [whole]))
            while not pieces.is_over:
                now = self._clock()
                if now >= until:
                    raise DeadlineError(f"{self.terms.address} takes too long")
                part, data = self._next_part(pieces, min(now + silence_s, until))
                if part is None or data is None:
                    continue
                if part.frame_bytes != info.size_bytes:
                    raise InvalidFrameError("frame_bytes", part.frame_bytes, f"{info.size_bytes}")
                self._take(part, data, out, offset + arrived, offset)
                arrived += len(data)
                credit_bytes = pieces.credit(len(data))
                if credit_bytes:
                    self._send(bulk.Credit(self._requests, credit_bytes))
                yield arrived
            if arrived not in (0, len(out)):
                raise InvalidFrameError("frame_bytes", arrived, f"{len(out)} were asked for")
        finally:
            self._is_asking = not pieces.is_over
            self._settle()

    def _next_part(
        self, pieces: BulkPieces, deadline: float
    ) -> tuple[bulk.Part | None, Bytes | None]:
        word, payload = self._receive(deadline)
        return pieces.take(word, payload), payload

    def _take(self, part: bulk.Part, data: Bytes, out: Bytes, at: int, offset: int) -> None:
        stop = at - offset + len(data)
        if part.chunk or part.offset != at or not len(data) or stop > len(out):
            raise InvalidFrameError("offset", (part.chunk, part.offset), f"{at} was to follow")
        copy_bytes(out[at - offset : stop], data)

    def _begin(self) -> None:
        if self._is_asking:
            raise InvalidRequestError("request", self._requests, "has not ended")
        self._connect()
        self._requests += 1
        self._is_asking = True

    def _settle(self) -> None:
        """Hang up unless the last request has had its answer."""
        if self._is_asking:
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether it may be used again as it is: connected, and nothing is being answered."""
        return self._link is not None and not self._is_asking

    def close(self) -> None:
        """Hang up. Idempotent; a later request connects again."""
        self._is_asking = False
        if self._link is not None:
            self._link.close(0)
            self._link = None

    # --- the socket

    def _connect(self) -> None:
        """Connect, and say whose connection it is; the answer comes before that to a request."""
        if self._link is not None:
            return
        import zmq

        terms = self.terms
        self._is_attached, self._timeout_ms = False, -1
        try:
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
            link.connect(terms.address)
        except zmq.ZMQError as error:
            self.close()
            raise TierUnavailableError("peer", f"{terms.address}: {error.strerror}") from None
        self._send(bulk.Attach(0, terms.session_id, terms.token))

    def _send(self, word: bulk.Word, payload: bytes | None = None) -> None:
        import zmq

        frames = [bulk.pack(word)] if payload is None else [bulk.pack(word), payload]
        assert self._link is not None
        try:
            self._link.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.close()
            raise TierUnavailableError("peer", f"{self.terms.address}: {error}") from None

    def _receive(self, deadline: float) -> tuple[bulk.Word, Bytes | None]:
        while True:
            word, payload = self._receive_any(deadline)
            if self._is_attached:
                return word, payload
            if not isinstance(word, bulk.Attached):
                raise InvalidRequestError("kind", type(word).__name__, "not an answer to attach")
            self._is_attached = True

    def _receive_any(self, deadline: float) -> tuple[bulk.Word, Bytes | None]:
        # What has come is taken even when the time is up: others may have been waited for before.
        import zmq

        assert self._link is not None
        left_ms = max(0, int(1000 * (deadline - self._clock())))
        try:
            if left_ms != self._timeout_ms:
                self._link.rcvtimeo = self._timeout_ms = left_ms
            frames = self._link.recv_multipart(copy=False)
        except zmq.Again:
            raise DeadlineError(f"{self.terms.address} did not answer in time") from None
        except zmq.ZMQError as error:  # all are hung up on
            self.close()
            raise TierUnavailableError("peer", f"{self.terms.address}: {error}") from None
        if len(frames) > 2:
            raise InvalidRequestError("frames", len(frames), "a message has two at most")
        payload = as_bytes(frames[1].buffer) if len(frames) == 2 else None
        word = bulk.unpack(frames[0].bytes, None if payload is None else len(payload))
        if isinstance(word, bulk.Failed) and not word.request:  # of the session, not of a request
            raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
        return word, payload
