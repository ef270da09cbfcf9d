"""FrameStreams: the TCP connections of a session, over which frames come and go."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64

from kvstore.client.connection import SLACK_S, Pool
from kvstore.client.frames import Payload
from kvstore.client.session import SessionTerms
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.framing import connect_wire

T = TypeVar("T")

MAX_STREAMS = 8
"""Gets and puts at once; more go through gRPC. Below what a server allows one session."""
DIAL_S = 2.0
"""For a connection; a call that waits for one gives it half of its time at most."""
AGAIN_S = 30.0
"""A server that did not let us in is not dialled again for. One that did not do so within a call is
dialled beside calls for as long."""
_JOIN_S = 0.2

LEAVE_S = 0.05
"""For the server to end a get that is wanted no more; past it the stream is closed."""
_SKIP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a server's bulk channel is, ``tcp://host:port``, and the message that lets us in.

    ``certificate`` in DER: TLS with that one alone; empty: in plain text.
    """

    where: str
    certificate: bytes
    attach: pb.StreamAttach

    @classmethod
    def of(cls, terms: SessionTerms, address: str) -> Entrance:
        """Return that of our own session's server, which was reached at *address*."""
        host = address.rpartition(":")[0].rpartition("/")[2]
        where = terms.bulk_address.replace("*", host or "127.0.0.1")
        attach = pb.StreamAttach(session_id=terms.session_id, token=terms.attach_token)
        return cls(where, terms.bulk_certificate, attach)


class FrameStream:
    """Connected and attached at birth; one get or put at a time, used by one thread.

    Frames go from the socket to their place, and from their place to the socket. Raises
    TierUnavailableError or DeadlineError when *entrance* does not let us in within
    *within_s* seconds, the server's own errors. A request that does not come to its end, or of
    which nothing comes for *silence_s*, leaves it of no use.
    """

    def __init__(
        self,
        entrance: Entrance,
        is_closing: Callable[[], bool],
        within_s: float,
        silence_s: float = math.inf,
    ) -> None:
        self._is_closing = is_closing
        self._silence_s = silence_s
        self._is_given_up = False
        self._is_spoiled = False
        """A call failed: what comes next is not known."""
        self._coming: _Coming | None = None
        self._requests = 0
        self.is_over = False
        """The last get has been answered whole, or by an error."""
        self.frames = 0
        """What its end counted."""
        self._heard: tuple[pb.StreamMessage, _Coming | None] | None = None
        deadline = time.monotonic() + within_s
        self._wire = connect_wire(
            entrance.where, entrance.certificate, deadline, time.monotonic, "server"
        )
        try:
            self.send(pb.StreamMessage(attach=entrance.attach), deadline)
            answer, _ = self.receive(deadline)
            if not answer.ready:
                kind = answer.WhichOneof("body")
                raise InvalidRequestError("kind", kind, "not an answer to attach")
        except KVStoreError:
            self.close()
            raise

    @property
    def request(self) -> int:
        """The number of the last request."""
        return self._requests

    def next_request(self) -> int:
        """Return a number that no earlier request of this stream had."""
        self._requests += 1
        self.is_over = False
        return self._requests

    def send(
        self, message: pb.StreamMessage, deadline: float, pieces: Sequence[Bytes] = ()
    ) -> None:
        """Send a message, a part with *pieces* from where they lie. Raises as ``receive``."""
        self._by(deadline)
        self._try(deadline, lambda: self._wire.send(message, pieces))

    def has_more(self) -> bool:
        """Whether there is a message to receive, or the server hung up."""
        return self._wire.has_more()

    def hear(self, deadline: float) -> None:
        """Wait for the next message, which ``receive`` will return. Raises as that."""
        self._heard = self.receive(deadline)

    def receive(self, deadline: float) -> tuple[pb.StreamMessage, _Coming | None]:
        """Return the next message; a part's payload is still to come.

        Raises DeadlineError, TierUnavailableError when the server hung up, InvalidRequestError for
        what is no message of ours, and InvalidFrameError for a part that nobody asked for.
        """
        if self._heard is not None:
            heard, self._heard = self._heard, None
            return heard
        self._by(deadline)
        message, size_bytes = self._try(deadline, self._wire.receive)
        if message.HasField("part"):
            if message.request != self._requests:
                raise InvalidFrameError("request", message.request, f"{self._requests} was asked")
            self._coming = _Coming(self, size_bytes, deadline)
            return message, self._coming
        if message.HasField("failed") and not message.request:  # of the session, not of a request
            raise bulk.error_of(message.failed)
        return message, None

    def parts(self, deadline: float) -> Iterator[tuple[pb.StreamPart, Payload]]:
        """Yield what answers the last get, until ``is_over``: each part, its payload to come.

        What is of earlier requests is skipped. Raises the error that the server sent, and as
        ``receive``.
        """
        while not self.is_over:
            message, payload = self.receive(deadline)
            if payload is not None:
                yield message.part, payload
            elif message.request == self._requests:
                self.is_over = message.HasField("done") or message.HasField("failed")
                self.frames = message.done
                if message.HasField("failed"):
                    raise bulk.error_of(message.failed)
                if not self.is_over:
                    kind = message.WhichOneof("body")
                    raise InvalidFrameError("kind", kind, "not an answer to a get")

    def leave(self, deadline: float) -> bool:
        """Want no more of the last get; whether the stream is fit for another by then.

        What is on its way is passed by, for LEAVE_S at most.
        """
        is_inside = self._heard is None and self._coming is not None and self._coming.left
        if self._is_spoiled or is_inside:
            return False
        soon = min(deadline, time.monotonic() + LEAVE_S)
        cancel = pb.StreamMessage(request=self._requests, cancel=True)
        is_told = False
        try:
            while True:
                if not is_told and self._heard is None and not self.has_more():
                    self.send(cancel, soon)
                    is_told = True
                message, payload = self.receive(soon)
                if payload is None:
                    return message.HasField("done") or message.HasField("failed")
                payload.skip(len(payload))
                if not is_told:
                    self.send(cancel, soon)
                    is_told = True
        except KVStoreError:
            return False

    def fill(self, out: Bytes, deadline: float, digest: xxh3_64 | None = None) -> None:
        """Fill *out* with the next bytes of a part, and add them to *digest*.

        Raises as ``receive``.
        """
        self._try(deadline, lambda: self._wire.fill(out, digest))

    def give_up(self) -> None:
        """Have whoever waits on this stream wait no more. For any thread."""
        self._is_given_up = True
        self._wire.hang_up()

    def is_broken(self) -> bool:
        """Whether the server hung up, said what nobody asked for, or is waited for no more."""
        is_ended = self._is_given_up or self._is_spoiled or self._wire.fileno() < 0
        return is_ended or self._wire.has_more()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._wire.close()

    def _by(self, deadline: float) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        self._wire.set_timeout(min(left_s, self._silence_s), deadline)

    def _try(self, deadline: float, call: Callable[[], T]) -> T:
        try:
            return call()
        except KVStoreError as error:
            self._is_spoiled = True
            if not isinstance(error, DeadlineError | TierUnavailableError):
                raise
            if self._is_closing():
                raise KVStoreError("the client is closed") from None
            if self._is_given_up:
                raise DeadlineError("the server hangs") from None
            # Its own deadline passes a little before ours: it hangs up in the midst of a frame.
            if time.monotonic() >= deadline - SLACK_S:
                raise DeadlineError("the server did not answer in time over TCP") from None
            raise error


class FrameStreams:
    """The streams of one session: connected when they are needed, kept for the next call.

    Thread-safe. A call takes one that is idle or connects one, or does without where there are as
    many as there may be, or the server does not let us in. *silence_s* as theirs.
    """

    def __init__(self, entrance: Entrance, silence_s: float = math.inf) -> None:
        self._entrance = entrance
        self._silence_s = silence_s
        self.pool: Pool[FrameStream] = Pool(MAX_STREAMS, FrameStream.close, FrameStream.give_up)
        self._dialling: threading.Thread | None = None
        self._refused_until = -math.inf
        self._beside_until = -math.inf

    @property
    def is_ready(self) -> bool:
        """Whether a call would find one now; else, and if that may help, one is connected."""
        if not self.pool.idle:
            self._dial_if_due()
        return bool(self.pool.idle)

    def take(self, within_s: float = 0.0) -> FrameStream | None:
        """Return a stream of our own for one call of *within_s* seconds; None when there is none.

        Without time to connect one, or where that took too long of late, one is connected beside
        the call, for the next.
        """
        while (stream := self.pool.take()) is not None:
            if not stream.is_broken():
                return stream
            self.pool.give_back(stream, is_clean=False)
        is_beside = self._dialling is not None or time.monotonic() < self._beside_until
        if within_s <= 0 or is_beside:
            self._dial_if_due()
        elif self._may_connect():
            try:
                return self._connected(within_s / 2)
            except (DeadlineError, TierUnavailableError, QuotaExceededError):
                self._beside_until = time.monotonic() + AGAIN_S
                self._refused_until = -math.inf  # it had the time of one call: that says little
                self._dial_if_due()
        return None

    def connect(self, within_s: float) -> None:
        """Connect a stream for the first call. Raises as ``FrameStream``."""
        if self._may_connect():
            self.pool.give_back(self._connected(within_s), is_clean=True)

    def close(self) -> None:
        """Hang up on all; calls at work end. Idempotent."""
        self.pool.close()
        dialling = self._dialling
        if dialling is not None:
            dialling.join(_JOIN_S)

    def _may_connect(self) -> bool:
        """Whether one more may be connected now; if so, it is counted."""
        return time.monotonic() >= self._refused_until and self.pool.may_make()

    def _connected(self, within_s: float) -> FrameStream:
        """Return one more, in use. Raises as it does, for a while after which none is tried."""
        stream: FrameStream | None = None
        seconds = min(within_s, DIAL_S)
        try:
            stream = FrameStream(
                self._entrance, lambda: self.pool.is_closed, seconds, self._silence_s
            )
        finally:
            if stream is None:
                self._refused_until = time.monotonic() + AGAIN_S
            self.pool.made(stream)
        return stream

    def _dial_if_due(self) -> None:
        if self._dialling is None and self._may_connect():
            self._dialling = threading.Thread(
                target=self._dial, name="kvstore-stream-dial", daemon=True
            )
            self._dialling.start()

    def _dial(self) -> None:
        with suppress(KVStoreError):
            self.pool.give_back(self._connected(DIAL_S), is_clean=True)
        self._dialling = None


class _Coming:
    """The payload of a part that is to be received."""

    def __init__(self, stream: FrameStream, size_bytes: int, deadline: float) -> None:
        self.left = size_bytes
        """Bytes that are not received yet."""
        self._stream = stream
        self._size_bytes = size_bytes
        self._deadline = deadline

    def __len__(self) -> int:
        return self._size_bytes

    def into(self, out: Bytes) -> None:
        """Receive the next bytes where they are to stay."""
        self._stream.fill(out, self._deadline)
        self.left -= len(out)

    def summed(self, out: Bytes, digest: xxh3_64) -> None:
        """The same, and add them to *digest*."""
        self._stream.fill(out, self._deadline, digest)
        self.left -= len(out)

    def skip(self, size_bytes: int) -> None:
        """Receive so many for nobody."""
        nowhere = np.empty(min(size_bytes, _SKIP_BYTES), np.uint8)
        while size_bytes:
            out = nowhere[:size_bytes]
            self.into(out)
            size_bytes -= len(out)
