"""A PeerLink: one connection to another server, over which its memory is asked and read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.proto import bulk
from kvstore.proto.buffers import BLOCK_BYTES, Bytes
from kvstore.proto.bulk_reading import BulkPieces
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    TierUnavailableError,
)
from kvstore.proto.peer_words import pack_wanted, unpack_found
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.peer_wire import Wire, ZmqWire
from kvstore.server.cluster.zmtp_wire import ZmtpWire

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


class PeerLink:
    """One connection, a DEALER's to the peer, for one request at a time. Not thread-safe.

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
        self._wire: Wire | None = None
        self._is_attached = False
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
            word, size_bytes = self._receive(deadline)
            if word.request != self._requests:
                raise InvalidFrameError("request", word.request, f"{self._requests} was asked")
            is_answer = isinstance(word, bulk.Done) and size_bytes is not None
            if not is_answer and not isinstance(word, bulk.Failed):
                raise InvalidFrameError("kind", type(word).__name__, "not an answer to a find")
            payload = self._words(size_bytes, deadline)
            self._is_asking = False
            if isinstance(word, bulk.Failed):
                raise bulk.unpack_failure(payload)
            return unpack_found(keys, payload)
        finally:
            self._settle()

    def read(
        self, info: ChunkInfo, out: Bytes, offset: int, silence_s: float
    ) -> Generator[int, None, None]:
        """Fill *out* with the frame of *info* from byte *offset*; yield how many bytes have come.

        Nothing is yielded when the peer does not have it in memory. The bytes are not verified.
        Raises DeadlineError when nothing comes for *silence_s*, or not all of it in
        MOST_SILENCES such times; the peer's own errors, and
        InvalidFrameError or InvalidRequestError for parts that are not of this.
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
                word, size_bytes = self._receive(self._patience(silence_s, until))
                if size_bytes is None or not isinstance(word, bulk.Part):
                    pieces.take(word, self._payload(size_bytes, until))
                    continue
                room = self._room(word, size_bytes, info, out, arrived, offset)
                pieces.take(word, room)
                for start in range(0, size_bytes, BLOCK_BYTES):
                    block = room[start : start + BLOCK_BYTES]
                    self._fill(block, self._patience(silence_s, until))
                    arrived += len(block)
                    yield arrived
                credit_bytes = pieces.credit(size_bytes)
                if credit_bytes:
                    self._send(bulk.Credit(self._requests, credit_bytes))
            if arrived not in (0, len(out)):
                raise InvalidFrameError("frame_bytes", arrived, f"{len(out)} were asked for")
        finally:
            self._is_asking = not pieces.is_over
            self._settle()

    def _patience(self, silence_s: float, until: float) -> float:
        """Return until when the next bytes are waited for. Raises DeadlineError past *until*."""
        now = self._clock()
        if now >= until:
            raise DeadlineError(f"{self.terms.address} takes too long")
        return min(now + silence_s, until)

    def _room(
        self, part: bulk.Part, size_bytes: int, info: ChunkInfo, out: Bytes, at: int, offset: int
    ) -> Bytes:
        """Return where in *out* a part's bytes belong, which must be the next. Raises
        InvalidFrameError.
        """
        if part.request != self._requests:
            raise InvalidFrameError("request", part.request, f"{self._requests} was asked")
        if part.frame_bytes != info.size_bytes:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, f"{info.size_bytes}")
        if part.chunk or part.offset != offset + at or not 0 < size_bytes <= len(out) - at:
            raise InvalidFrameError("offset", (part.chunk, part.offset), f"{offset + at} follows")
        return out[at : at + size_bytes]

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
        return self._wire is not None and not self._is_asking

    def tend(self) -> None:
        """Keep an idle connection alive, or hang up if the peer did. Never waits."""
        if self._wire is not None and self._is_attached and not self._wire.tend():
            self.close()

    def close(self) -> None:
        """Hang up. Idempotent; a later request connects again."""
        self._is_asking = False
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # --- the connection

    def _connect(self) -> None:
        """Connect, and say whose connection it is; the answer comes before that to a request."""
        self.tend()
        if self._wire is not None:
            return
        terms = self.terms
        self._is_attached = False
        if terms.public_key:
            self._wire = ZmqWire(terms.address, terms.public_key, self._context, self._clock)
        else:
            self._wire = ZmtpWire(terms.address, self._clock)
        self._send(bulk.Attach(0, terms.session_id, terms.token))

    def _send(self, word: bulk.Word, payload: bytes | None = None) -> None:
        frames = [bulk.pack(word)] if payload is None else [bulk.pack(word), payload]
        assert self._wire is not None
        try:
            self._wire.send(frames)
        except TierUnavailableError:
            self.close()
            raise

    def _receive(self, deadline: float) -> tuple[bulk.Word, int | None]:
        """Return the next word that answers a request, and its payload's size."""
        while True:
            assert self._wire is not None
            header, size_bytes = self._wire.receive(deadline)
            word = bulk.unpack(header, size_bytes)
            if isinstance(word, bulk.Failed) and not word.request:  # of the session
                raise bulk.unpack_failure(self._words(size_bytes, deadline))
            if self._is_attached:
                return word, size_bytes
            if not isinstance(word, bulk.Attached):
                raise InvalidRequestError("kind", type(word).__name__, "not an answer to attach")
            self._is_attached = True

    def _payload(self, size_bytes: int | None, deadline: float) -> Bytes | None:
        """Return the payload of the message that was received, which is of so many bytes."""
        if size_bytes is None:
            return None
        payload = np.empty(size_bytes, np.uint8)
        self._fill(payload, deadline)
        return payload

    def _words(self, size_bytes: int | None, deadline: float) -> bytes:
        payload = self._payload(size_bytes, deadline)
        return b"" if payload is None else payload.tobytes()

    def _fill(self, out: Bytes, deadline: float) -> None:
        assert self._wire is not None
        self._wire.fill(out, deadline)
