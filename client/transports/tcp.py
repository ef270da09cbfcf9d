"""The tcp transport: frames over TCP or TLS between hosts, memory to memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from kvstore.client.connection import SLACK_S, Pool, Until
from kvstore.client.frames import Arrival, FrameAssembler, Payload, received
from kvstore.client.session import Session
from kvstore.client.transports.base import (
    Arrivals,
    Outgoing,
    Put,
    PutTerms,
    ReadPlan,
    read_outcomes,
)
from kvstore.client.transports.grpc import StreamTransport
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
from kvstore.proto.framing import MAX_PIECES, connect_wire

T = TypeVar("T")

MAX_STREAMS = 8
"""Gets and puts at once; more go through gRPC. Below what a server allows one session."""
DIAL_S = 2.0
"""Connect timeout; a call waits for at most half of its time."""
AGAIN_S = 30.0
"""How long a server that refused access is not dialled."""
LEAVE_S = 0.05
"""Timeout for the server to end a cancelled get; then the stream is closed."""
_REQUEST_SLACK_BYTES = 32
"""Bytes that a message adds to a get."""
IDLE_FRAME_BYTES = 128 << 20
"""Memory kept for the frames of the next get: faulting in new pages costs as much as a copy."""
SMALL_FRAME_BYTES = 1 << 17
"""Sent in one part. The header of a larger frame is sent first, so that the server receives the
rest in its final place."""
_LARGE_BLOCK_BYTES = (32 << 20) - (1 << 16)
"""The largest block that raises glibc's mmap threshold, less its own header."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """The address of a server's bulk channel, ``tcp://host:port``, and the message to attach.

    ``certificate`` in DER: TLS that accepts it alone; empty: plain text.
    """

    where: str
    certificate: bytes
    attach: pb.StreamAttach

    @classmethod
    def of(cls, terms: pb.OpenSessionResponse, address: str) -> Entrance:
        """Return that of the session's own server, which was reached at *address*."""
        host = address.rpartition(":")[0].rpartition("/")[2]
        where = terms.bulk_address.replace("*", host or "127.0.0.1")
        attach = pb.StreamAttach(session_id=terms.session_id, token=terms.attach_token)
        return cls(where, terms.bulk_certificate, attach)


class FrameStream:
    """A connection, attached by the constructor; one get or put at a time, used by one thread.
    Raises the server's errors, and TierUnavailableError or DeadlineError when it is not attached
    within *within_s*. A request that does not end, or is silent for *silence_s*, makes it unusable.
    """

    def __init__(
        self,
        entrance: Entrance,
        within_s: float,
        begin: Callable[[FrameStream], None] = lambda stream: None,
        silence_s: float = math.inf,
    ) -> None:
        """*begin* gets the stream before it attaches."""
        self._silence_s = silence_s
        self._deadline = time.monotonic() + within_s
        """Deadline of the last request."""
        self._woken_by: KVStoreError | None = None
        self._has_failed = False
        """A call failed: the position in the stream is unknown."""
        self._payload: Payload | None = None
        self.requests = 0
        """The number of the last request."""
        self.is_over = True
        """The last request has been answered completely, or by an error."""
        self.frames = 0
        """The frame count in its end message."""
        self._first_answer: tuple[pb.StreamMessage, Payload | None] | None = None
        self._wire = connect_wire(
            entrance.where, entrance.certificate, self._deadline, time.monotonic, "server"
        )
        try:
            begin(self)
            self.send(pb.StreamMessage(attach=entrance.attach))
            if not (answer := self.answer()).ready:
                kind = answer.WhichOneof("body")
                raise InvalidRequestError("kind", kind, "not an answer to attach")
        except KVStoreError:
            self.close()
            raise

    def begin(self, request: pb.StreamMessage, deadline: float) -> None:
        """Send a request, with the next number, and wait for its first answer. Raises as
        ``receive``, and the server's refusal of a put.
        """
        self.requests, self.is_over, self._deadline = self.requests + 1, False, deadline
        request.request = self.requests
        self.send(request)
        if not request.HasField("put"):
            self._first_answer = self.receive()
        elif not (answer := self.answer()).ready:
            raise InvalidFrameError("kind", answer.WhichOneof("body"), "not an answer to a put")

    def send(self, message: pb.StreamMessage, pieces: Sequence[Bytes] = ()) -> None:
        """Send a message, a part with *pieces* without a copy. Raises as ``receive``."""
        self._set_timeout()
        self._try(self._wire.send, message, pieces)

    def has_more(self) -> bool:
        """Whether there is a message to receive, or the server hung up."""
        return self._wire.has_more()

    def answer(self) -> pb.StreamMessage:
        """Return the answer to the last request, which is not a part. Raises the server's error."""
        message, payload = self.receive()
        if message.request != self.requests or payload is not None:
            raise InvalidFrameError("request", message.request, f"expected {self.requests}")
        if message.HasField("failed"):
            raise bulk.error_of(message.failed)
        return message

    def receive(self) -> tuple[pb.StreamMessage, Payload | None]:
        """Return the next message; a part's payload is read later.

        Raises DeadlineError, TierUnavailableError when the server hung up, InvalidRequestError, and
        InvalidFrameError for a part that was not requested.
        """
        if self._first_answer is not None:
            answer, self._first_answer = self._first_answer, None
            return answer
        self._set_timeout()
        message, size_bytes = self._try(self._wire.receive)
        if message.HasField("part"):
            if message.request != self.requests:
                raise InvalidFrameError("request", message.request, f"expected {self.requests}")
            self._payload = Payload(size_bytes, partial(self._try, self._wire.fill))
            return message, self._payload
        if message.HasField("failed") and not message.request:  # of the session, not of a request
            raise bulk.error_of(message.failed)
        return message, None

    def parts(self) -> Iterator[Arrival]:
        """Yield the parts that answer the last get, until ``is_over``; read each one's payload.

        Answers to earlier requests are skipped. Raises the server's error, and as ``receive``.
        """
        while not self.is_over:
            message, payload = self.receive()
            if payload is not None:
                part = message.part
                yield Arrival(part.index, part.tier, part.frame_bytes, payload, offset=part.offset)
            elif message.request == self.requests:
                kind, self.frames = message.WhichOneof("body"), message.done
                self.is_over = kind in ("done", "failed")
                if kind == "failed":
                    raise bulk.error_of(message.failed)
                if not self.is_over:
                    raise InvalidFrameError("kind", kind, "not an answer to a get")

    def leave(self) -> None:
        """Cancel the last get and discard what is in flight. Past LEAVE_S it is not reused."""
        is_inside = self._first_answer is None and self._payload is not None and self._payload.left
        if self.is_over or self._has_failed or is_inside:
            return
        self._deadline = min(self._deadline, time.monotonic() + LEAVE_S)
        with suppress(KVStoreError):
            is_here = self._first_answer is not None or self.has_more()
            if is_here and self._discard_next():
                return
            self.send(pb.StreamMessage(request=self.requests, cancel=True))
            while not self._discard_next():
                pass

    def _discard_next(self) -> bool:
        """Discard the next message; return whether it is the end of a get."""
        message, payload = self.receive()
        if payload is not None:
            payload.skip(len(payload))
        else:
            self.is_over = message.HasField("done") or message.HasField("failed")
        return payload is None

    def wake(self, error: KVStoreError) -> None:
        """Fail the call that waits on this stream with *error*. For any thread."""
        self._woken_by = error
        self._wire.hang_up()

    def is_broken(self) -> bool:
        """Whether the server hung up or sent an unexpected message, or a call failed."""
        is_ended = self._woken_by is not None or self._has_failed or self._wire.fileno() < 0
        return is_ended or self._wire.has_more()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._wire.close()

    def _set_timeout(self) -> None:
        left_s = max(0.001, self._deadline - time.monotonic())
        self._wire.set_timeout(min(left_s, self._silence_s), self._deadline)

    def _try(self, call: Callable[..., T], *terms: Any) -> T:
        try:
            return call(*terms)
        except KVStoreError as error:
            self._has_failed = True
            if not isinstance(error, DeadlineError | TierUnavailableError):
                raise
            if self._woken_by is not None:
                raise self._woken_by from None
            # The server's deadline passes a little earlier: it hangs up in the middle of a frame.
            if time.monotonic() >= self._deadline - SLACK_S:
                raise DeadlineError("the server did not answer in time over TCP") from None
            raise error


def streams_to(entrance: Entrance, silence_s: float = math.inf) -> Pool[FrameStream]:
    """Return the streams of one session; *silence_s* as for FrameStream."""
    dial = partial(FrameStream, entrance, silence_s=silence_s)
    return Pool(MAX_STREAMS, dial, DIAL_S, AGAIN_S)


@contextmanager
def in_use(streams: Pool[FrameStream], stream: FrameStream | None) -> Iterator[FrameStream | None]:
    """Enter for one call on *stream*, if any; it is closed unless this succeeds and is over."""
    is_clean = False
    try:
        yield stream
        is_clean = stream is not None and stream.is_over
    finally:
        if stream is not None:
            streams.give_back(stream, is_clean=is_clean)


class BulkTransport(StreamTransport):
    """Gets and puts over FrameStreams, one at a time each; through gRPC if none is available.
    Raises TierUnavailableError when the server has no bulk channel.
    """

    name = "tcp"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        if not session.terms.bulk_address:
            raise TierUnavailableError("tcp", "the server was started without --bulk")
        self._memory = FrameMemory(IDLE_FRAME_BYTES)
        entrance = Entrance.of(session.terms, session.connection.address)
        self.pool = self.streams = streams_to(entrance)

    def connect(self, within_s: float) -> None:
        """Connect for the first call. Raises the error of a failed connect."""
        with in_use(self.streams, self.streams.take(within_s)):
            pass

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        until = Until(plan.deadline_ms)
        request = self.request(plan, pb.VIA_STREAM)
        fits = request.ByteSize() < bulk.MAX_HEADER_BYTES - _REQUEST_SLACK_BYTES
        with ExitStack() as stack, ExitStack() as begun:
            message = pb.StreamMessage(get=request)
            stream = begun.enter_context(self._begun(message, until)) if fits else None
            if stream is None:
                begun.close()  # frees the connection for other calls
                left = replace(plan, deadline_ms=until.left_ms(1))
                yield stack.enter_context(super().read(left))
            elif plan.layer_major or plan.ranges:
                end = partial(stream.wake, KVStoreError("nothing more is wanted"))
                yield Arrivals(self._parts(stream, until), is_layered=plan.layer_major, end=end)
            else:
                frames: list[Bytes] = []
                stack.callback(self._memory.give, frames)
                allocate = partial(self._memory.take, owner=frames)
                limit_bytes = self.session.terms.max_frame_bytes
                assembler = FrameAssembler(limit_bytes, plan.direct, allocate)
                yield Arrivals(self._frames(stream, assembler, until))
            if stream is not None:
                stream.leave()

    def _frames(
        self, stream: FrameStream, assembler: FrameAssembler, until: Until
    ) -> Iterator[Arrival]:
        with self._noted(until):
            yield from assembler.frames(stream.parts())
            assembler.end(stream.frames)

    def _parts(self, stream: FrameStream, until: Until) -> Iterator[Arrival]:
        with self._noted(until):
            for part in stream.parts():
                yield replace(part, data=received(part.data))

    @override
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        until = Until(terms.within_ms)
        with self._begun(pb.StreamMessage(put=terms.request(self.session)), until) as stream:
            if stream is not None:
                with self._noted(until):
                    return upload(stream, chunks)
        return super().put(chunks, replace(terms, within_ms=until.left_ms(1)))

    @contextmanager
    def _begun(self, request: pb.StreamMessage, until: Until) -> Iterator[FrameStream | None]:
        """Enter with a stream on which *request* is being answered; None: use gRPC."""
        self.session.connection.breaker.check()
        stream: FrameStream | None = None
        with suppress(DeadlineError, TierUnavailableError, QuotaExceededError):
            stream = self.streams.take(until.left_s(0.0) / 2)
        with in_use(self.streams, stream):
            try:
                if stream is not None:
                    stream.begin(request, until.at_s)
            except TierUnavailableError:
                stream = None
            except DeadlineError as error:
                self.streams.close_idle()
                self.session.connection.breaker.record(error, until)
                raise
            yield stream

    @contextmanager
    def _noted(self, until: Until) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, TierUnavailableError) as error:
            self.session.connection.breaker.record(error, until)
            raise

    @override
    def leave(self) -> None:
        super().leave()
        self._memory = FrameMemory(IDLE_FRAME_BYTES)  # another thread may have held its lock


def upload(stream: FrameStream, chunks: Sequence[Outgoing]) -> list[Put]:
    """Send the frames of a put that *stream* has begun. Raises the server's errors."""
    scratch = np.empty(max((one.frame_bytes for one in chunks), default=0), np.uint8)
    number = stream.requests
    for index, chunk in enumerate(chunks):
        head = pb.StreamPart(index=index, frame_bytes=chunk.frame_bytes)
        message = pb.StreamMessage(request=number, part=head)
        for part in _parts(chunk.frame_bytes, chunk.pieces(scratch)):
            if stream.has_more():
                kind = stream.answer().WhichOneof("body")
                raise InvalidFrameError("kind", kind, "not an answer to a part")
            stream.send(message, part)
            message.part.offset += sum(map(len, part))
    stream.send(pb.StreamMessage(request=number, finish=len(chunks)))
    answer = stream.answer()
    outcomes, reasons = answer.stored.outcomes, answer.stored.reasons
    if not (len(outcomes) == len(reasons) == len(chunks) and answer.HasField("stored")):
        raise InvalidFrameError("answer", answer, f"expected {len(chunks)} outcomes")
    stream.is_over = True
    return read_outcomes(outcomes, reasons)


def _parts(frame_bytes: int, pieces: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Cut a frame into the parts of messages; a large frame's header is a part by itself."""
    part: list[Bytes] = []
    space = bulk.MAX_PAYLOAD_BYTES
    if frame_bytes > SMALL_FRAME_BYTES:
        yield [pieces[0]]
        pieces = pieces[1:]
    for piece in pieces:
        left = piece
        while len(left):
            if not space or len(part) == MAX_PIECES:
                yield part
                part, space = [], bulk.MAX_PAYLOAD_BYTES
            part.append(left[:space])
            space -= len(part[-1])
            left = left[len(part[-1]) :]
    if part:
        yield part


class FrameMemory:
    """Reuses up to *limit_bytes* of memory of frames for the next get. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()  # guards the two above
        # Freeing one block of this size makes glibc keep the memory of messages of a megabyte: a
        # layered get allocates one a piece. The pages of the block are never touched.
        np.empty(_LARGE_BLOCK_BYTES, np.uint8)

    def take(self, size_bytes: int, owner: list[Bytes]) -> Bytes:
        """Return memory of *size_bytes*, and add it to *owner*."""
        with self._lock:
            of_size = self._idle.get(size_bytes)
            frame = of_size.pop() if of_size else None
            if frame is not None:
                self._idle_bytes -= size_bytes
        if frame is None:
            frame = np.empty(size_bytes, np.uint8)
        owner.append(frame)
        return frame

    def give(self, frames: Sequence[Bytes]) -> None:
        """Take back frames that their owner no longer reads."""
        with self._lock:
            for frame in frames:
                if self._idle_bytes + len(frame) > self._limit_bytes:
                    self._idle.clear()
                    self._idle_bytes = 0
                self._idle.setdefault(len(frame), []).append(frame)
                self._idle_bytes += len(frame)
