"""The tcp transport: frames over TCP or TLS between hosts, from memory to memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from typing_extensions import override

from kvstore.client.connection import SLACK_S
from kvstore.client.frame_memory import FrameMemory, keep_freed_memory
from kvstore.client.frame_stream import Entrance, FrameStream
from kvstore.client.frame_streams import FrameStreams
from kvstore.client.frames import FrameAssembler, Room, here
from kvstore.client.session import Session
from kvstore.client.stream import StreamTransport
from kvstore.client.stream_upload import StreamUpload
from kvstore.client.transport import (
    Arrival,
    Arrivals,
    Outgoing,
    Put,
    ReadPlan,
    Transport,
    room_of,
    whole_frame,
)
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.messages import hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints

_REQUEST_SLACK_BYTES = 32
"""What a message adds to a get."""
IDLE_FRAME_BYTES = 128 << 20
"""Memory kept for the frames of the next get: to fault fresh pages in costs as much as a copy."""


class BulkTransport(Transport):
    """Gets and puts over FrameStreams, one at a time each; through gRPC where none is to be had.

    Raises TierUnavailableError or DeadlineError at birth when the server does not take part.
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
        # Half of what a call may take: where nobody answers, gRPC is still to be asked.
        self._streams.connect(session.options.deadline_ms / 2000)

    # --- get

    @override
    @contextmanager
    def read(self, plan: ReadPlan) -> Iterator[Arrivals]:
        deadline = _end_of(plan.deadline_ms)
        stream = self._begin_get(self.request(plan, pb.VIA_STREAM), deadline)
        if stream is None:
            with self._fallback.read(replace(plan, deadline_ms=_left_ms(deadline))) as arriving:
                yield arriving
            return
        frames: list[Bytes] = []
        is_clean = False
        try:
            if plan.layer_major or plan.ranges:
                parts = self._parts(stream, deadline)
                yield Arrivals(parts, is_layered=plan.layer_major)
            else:
                room = room_of(plan.direct, partial(self._memory.take, owner=frames))
                yield Arrivals(self._frames(stream, room, deadline))
            is_clean = stream.is_over or stream.leave(deadline)
        finally:
            self._streams.give_back(stream, is_clean=is_clean)
            self._memory.give(frames)

    def _begin_get(self, request: pb.GetRequest, deadline: float) -> FrameStream | None:
        """Return the stream that begins to answer *request*; None where gRPC is to be used."""
        has_room = request.ByteSize() < bulk.MAX_HEADER_BYTES - _REQUEST_SLACK_BYTES
        stream = self._take(deadline) if has_room else None
        if stream is None:
            return None
        try:
            with self._noted(DeadlineError), self._dropped_if_it_fails(stream):
                number = stream.next_request()
                stream.send(pb.StreamMessage(request=number, get=request), deadline)
                stream.hear(deadline)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return stream

    def _frames(self, stream: FrameStream, room: Room, deadline: float) -> Iterator[Arrival]:
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, room)
        with self._noted():
            for part, payload in stream.parts(deadline):
                frame = whole_frame(assembler, part, payload)
                if frame is not None:
                    yield frame
            assembler.end(stream.frames)

    def _parts(self, stream: FrameStream, deadline: float) -> Iterator[Arrival]:
        with self._noted():
            for part, payload in stream.parts(deadline):
                data = here(payload)
                yield Arrival(part.index, part.tier, part.frame_bytes, data, offset=part.offset)

    # --- put

    @override
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        deadline = _end_of(deadline_ms)
        request = pb.PutRequest(
            session_id=self.session.terms.session_id,
            durable=durable,
            deadline_ms=deadline_ms,
            hints=hints_to_message(hints),
        )
        upload = self._begin_put(request, deadline)
        if upload is None:
            left_ms = _left_ms(deadline)
            return self._fallback.put(chunks, durable=durable, deadline_ms=left_ms, hints=hints)
        is_over = False
        try:
            with self._noted():
                puts = upload.run(chunks)
            is_over = True
        finally:
            self._streams.give_back(upload.stream, is_clean=is_over)
        return puts

    def _begin_put(self, request: pb.PutRequest, deadline: float) -> StreamUpload | None:
        """Return a put that a stream takes; None where gRPC is to be asked."""
        stream = self._take(deadline)
        if stream is None:
            return None
        upload = StreamUpload(stream, deadline)
        try:
            with self._noted(DeadlineError), self._dropped_if_it_fails(stream):
                upload.begin(request)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return upload

    # --- streams

    def _take(self, deadline: float) -> FrameStream | None:
        self.session.connection.gate.check()
        return self._streams.take(deadline - time.monotonic())

    @contextmanager
    def _noted(self, *kinds: type[DeadlineError | TierUnavailableError]) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, TierUnavailableError) as error:
            if not kinds or isinstance(error, kinds):
                self.session.connection.gate.note(error)
            raise

    @contextmanager
    def _dropped_if_it_fails(self, stream: FrameStream) -> Iterator[None]:
        try:
            yield
        except KVStoreError:
            self._streams.give_back(stream, is_clean=False)
            raise

    @override
    def hang_up(self) -> None:
        super().hang_up()
        self._streams.hang_up()

    @override
    def leave(self) -> None:
        super().leave()
        self._memory = FrameMemory(IDLE_FRAME_BYTES)  # another thread may have had its lock
        self._streams.leave()

    @override
    def close(self) -> None:
        self._streams.close()


def _end_of(deadline_ms: int) -> float:
    """Return until when, in monotonic seconds, a call may take."""
    return time.monotonic() + deadline_ms / 1000 + SLACK_S


def _left_ms(deadline: float) -> int:
    """Return what is left of a call for gRPC, which adds SLACK_S itself; at least 1."""
    return max(1, int(1000 * (deadline - SLACK_S - time.monotonic())))
