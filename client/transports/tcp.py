"""The tcp transport: frames over TCP or TLS between hosts, from memory to memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from kvstore.client.connection import Until
from kvstore.client.frames import FrameAssembler, Room, here
from kvstore.client.session import Session
from kvstore.client.transports.base import (
    Arrival,
    Arrivals,
    Outgoing,
    Put,
    PutTerms,
    ReadPlan,
    Transport,
    read_outcomes,
    room_of,
    whole_frame,
)
from kvstore.client.transports.grpc import StreamTransport
from kvstore.client.transports.tcp_connection import Entrance, FrameStream, FrameStreams
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.framing import MAX_PIECES

_REQUEST_SLACK_BYTES = 32
"""What a message adds to a get."""
IDLE_FRAME_BYTES = 128 << 20
"""Memory kept for the frames of the next get: to fault fresh pages in costs as much as a copy."""


SMALL_FRAME_BYTES = 1 << 17
"""Goes in one part; of a larger one the header goes ahead, and the server takes the rest to where
it stays.
"""
_LARGE_BLOCK_BYTES = (32 << 20) - (1 << 16)
"""The largest that glibc draws its conclusion from, with room for its own header."""


class BulkTransport(Transport):
    """Gets and puts over FrameStreams, one at a time each; through gRPC where none is to be had.

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "tcp"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        if not session.terms.bulk_address:
            raise TierUnavailableError("tcp", "the server was started without --bulk")
        self._fallback = StreamTransport(session)
        self._memory = FrameMemory(IDLE_FRAME_BYTES)
        keep_freed_memory()
        self._streams = FrameStreams(Entrance.of(session.terms, session.connection.address))

    def connect(self, within_s: float, *, is_short: bool = False) -> None:
        """Connect for the first call. One that *is_short* goes on without, and one more is
        connected beside it. Raises TierUnavailableError, DeadlineError.
        """
        if not is_short:
            self._streams.connect(within_s)
        elif (stream := self._streams.take(within_s)) is not None:
            self._streams.pool.give_back(stream, is_clean=True)

    # --- get

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        until = Until(plan.deadline_ms)
        stream = self._begin_get(self.request(plan, pb.VIA_STREAM), until)
        if stream is None:
            with self._fallback.read(replace(plan, deadline_ms=until.left_ms(1))) as arriving:
                yield arriving
            return
        frames: list[Bytes] = []
        is_clean = False
        try:
            if plan.layer_major or plan.ranges:
                parts = self._parts(stream, until)
                yield Arrivals(parts, is_layered=plan.layer_major)
            else:
                room = room_of(plan.direct, partial(self._memory.take, owner=frames))
                yield Arrivals(self._frames(stream, room, until))
            is_clean = stream.is_over or stream.leave(until.at_s)
        finally:
            self._streams.pool.give_back(stream, is_clean=is_clean)
            self._memory.give(frames)

    def _begin_get(self, request: pb.GetRequest, until: Until) -> FrameStream | None:
        """Return the stream that begins to answer *request*; None where gRPC is to be used."""
        has_room = request.ByteSize() < bulk.MAX_HEADER_BYTES - _REQUEST_SLACK_BYTES
        stream = self._take(until) if has_room else None
        if stream is None:
            return None
        try:
            with self._noted(until, DeadlineError), self._dropped_if_it_fails(stream):
                number = stream.next_request()
                stream.send(pb.StreamMessage(request=number, get=request), until.at_s)
                stream.hear(until.at_s)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return stream

    def _frames(self, stream: FrameStream, room: Room, until: Until) -> Iterator[Arrival]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room)
        with self._noted(until):
            for part, payload in stream.parts(until.at_s):
                frame = whole_frame(assembler, part, payload)
                if frame is not None:
                    yield frame
            assembler.end(stream.frames)

    def _parts(self, stream: FrameStream, until: Until) -> Iterator[Arrival]:
        with self._noted(until):
            for part, payload in stream.parts(until.at_s):
                data = here(payload)
                yield Arrival(part.index, part.tier, part.frame_bytes, data, offset=part.offset)

    # --- put

    @override
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        until = Until(terms.within_ms)
        upload = self._begin_put(terms.request(self.session), until)
        if upload is None:
            return self._fallback.put(chunks, replace(terms, within_ms=until.left_ms(1)))
        is_over = False
        try:
            with self._noted(until):
                puts = upload.run(chunks)
            is_over = True
        finally:
            self._streams.pool.give_back(upload.stream, is_clean=is_over)
        return puts

    def _begin_put(self, request: pb.PutRequest, until: Until) -> StreamUpload | None:
        """Return a put that a stream takes; None where gRPC is to be asked."""
        stream = self._take(until)
        if stream is None:
            return None
        upload = StreamUpload(stream, until.at_s)
        try:
            with self._noted(until, DeadlineError), self._dropped_if_it_fails(stream):
                upload.begin(request)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return upload

    # --- streams

    def _take(self, until: Until) -> FrameStream | None:
        self.session.connection.breaker.check()
        return self._streams.take(until.left_s(0.0))

    @contextmanager
    def _noted(
        self, until: Until, *kinds: type[DeadlineError | TierUnavailableError]
    ) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, TierUnavailableError) as error:
            if not kinds or isinstance(error, kinds):
                self.session.connection.breaker.note(error, until)
            raise

    @contextmanager
    def _dropped_if_it_fails(self, stream: FrameStream) -> Iterator[None]:
        try:
            yield
        except KVStoreError:
            self._streams.pool.give_back(stream, is_clean=False)
            raise

    @override
    def hang_up(self) -> None:
        super().hang_up()
        self._streams.pool.hang_up()

    @override
    def leave(self) -> None:
        super().leave()
        self._memory = FrameMemory(IDLE_FRAME_BYTES)  # another thread may have had its lock
        self._streams.pool.leave()

    @override
    def close(self) -> None:
        self._streams.close()


class StreamUpload:
    """Used once, by one thread. After an error the stream is of no use."""

    def __init__(self, stream: FrameStream, deadline: float) -> None:
        self.stream = stream
        self._deadline = deadline
        self._request = stream.next_request()
        self._room = np.empty(0, np.uint8)

    def begin(self, request: pb.PutRequest) -> None:
        """Send *request*, and wait until frames may come. Raises the server's errors."""
        self.stream.send(pb.StreamMessage(request=self._request, put=request), self._deadline)
        answer = self._answer()
        if not answer.ready:
            raise InvalidFrameError("kind", answer.WhichOneof("body"), "not an answer to a put")

    def run(self, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return what became of each. Raises the server's errors."""
        for index, chunk in enumerate(chunks):
            self._send(index, chunk.frame_bytes, chunk.pieces(self._room_of))
        finish = pb.StreamMessage(request=self._request, finish=len(chunks))
        self.stream.send(finish, self._deadline)
        answer = self._answer()
        outcomes, reasons = answer.stored.outcomes, answer.stored.reasons
        is_answer = len(outcomes) == len(reasons) == len(chunks) and answer.HasField("stored")
        if not is_answer:
            raise InvalidFrameError("answer", answer, f"{len(chunks)} were put")
        return read_outcomes(outcomes, reasons)

    def _room_of(self, size_bytes: int) -> Bytes:
        """The socket has taken what was in it before."""
        if len(self._room) < size_bytes:
            self._room = np.empty(size_bytes, np.uint8)
        return self._room[:size_bytes]

    def _send(self, index: int, frame_bytes: int, pieces: Sequence[Bytes]) -> None:
        head = pb.StreamPart(index=index, frame_bytes=frame_bytes)
        message = pb.StreamMessage(request=self._request, part=head)
        for part in _parts(frame_bytes, pieces):
            if self.stream.has_more():
                kind = self._answer().WhichOneof("body")
                raise InvalidFrameError("kind", kind, "not an answer to a part")
            self.stream.send(message, self._deadline, part)
            message.part.offset += sum(map(len, part))

    def _answer(self) -> pb.StreamMessage:
        message, payload = self.stream.receive(self._deadline)
        if message.request != self._request or payload is not None:
            raise InvalidFrameError("request", message.request, f"{self._request} was asked")
        if message.HasField("failed"):
            raise bulk.error_of(message.failed)
        return message


def _parts(frame_bytes: int, pieces: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Cut a frame into what one message may have; its header is one by itself."""
    part: list[Bytes] = []
    room = bulk.MAX_PAYLOAD_BYTES
    if frame_bytes > SMALL_FRAME_BYTES:
        yield [pieces[0]]
        pieces = pieces[1:]
    for piece in pieces:
        left = piece
        while len(left):
            if not room or len(part) == MAX_PIECES:
                yield part
                part, room = [], bulk.MAX_PAYLOAD_BYTES
            part.append(left[:room])
            room -= len(part[-1])
            left = left[len(part[-1]) :]
    if part:
        yield part


class FrameMemory:
    """Memory of frames that were read, for those of the next get. Thread-safe.

    At most *limit_bytes* of it lie idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()  # guards the two above

    def take(self, size_bytes: int, owner: list[Bytes]) -> Bytes:
        """Return memory of *size_bytes*, noted with its *owner*."""
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
        """Take back what its owner reads no more."""
        with self._lock:
            for frame in frames:
                if self._idle_bytes + len(frame) > self._limit_bytes:
                    self._idle.clear()
                    self._idle_bytes = 0
                self._idle.setdefault(len(frame), []).append(frame)
                self._idle_bytes += len(frame)


def keep_freed_memory() -> None:
    """Have the allocator keep what messages of a megabyte free, rather than give it back each time.

    glibc does so once the process has freed one block as large as this; its pages are never
    touched. Each piece of a layered get has memory of its own.
    """
    np.empty(_LARGE_BLOCK_BYTES, np.uint8)
