"""The tcp transport: frames over TCP or TLS between hosts, from memory to memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from typing_extensions import override

from kvstore.client.connection import SLACK_S
from kvstore.client.frame_memory import FrameMemory, keep_freed_memory
from kvstore.client.frame_stream import Entrance, FrameStream
from kvstore.client.frame_streams import FrameStreams
from kvstore.client.frames import DirectFrame, FrameAssembler, here
from kvstore.client.layer_stream import LayerStream
from kvstore.client.session import Session
from kvstore.client.stream import StreamTransport
from kvstore.client.stream_upload import StreamUpload
from kvstore.client.transport import Arrived, Direct, FramePiece, Outgoing, Put, Transport
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
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import Accuracy, ChainDigest, Shard

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
    def get(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[Arrived]]:
        with self.get_layers_of(None, digests, lease_id, deadline_ms, least) as arriving:
            yield arriving

    @override
    @contextmanager
    def get_layers_of(
        self,
        shard: Shard | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        direct: Direct | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        deadline = _end_of(deadline_ms)
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        stream = self._begin_get(request, deadline)
        if stream is None:
            with self._fallback.get(digests, lease_id, _left_ms(deadline), least) as arriving:
                yield arriving
            return
        frames: list[Bytes] = []

        def room(chunk: int, size_bytes: int, start: Bytes) -> Bytes | DirectFrame:
            taker = None if direct is None else direct(chunk, size_bytes, start)
            return self._memory.take(size_bytes, frames) if taker is None else taker

        reading = FrameAssembler(self.session.terms.max_frame_bytes, room)
        try:
            with self._ending_get(stream, deadline):
                yield self._arriving(stream, reading, deadline)
        finally:
            self._memory.give(frames)

    @override
    @contextmanager
    def get_layers(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        skipped: SkippedRows | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        deadline = _end_of(deadline_ms)
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        request.layer_major = True
        if skipped is not None:
            request.skip_rows = skipped.pack()
        stream = self._begin_get(request, deadline)
        if stream is None:
            left_ms = _left_ms(deadline)
            with self._fallback.get_layers(digests, lease_id, left_ms, least, skipped) as arriving:
                yield arriving
            return
        with self._ending_get(stream, deadline):
            # A piece has what the feed looks at in a reply.
            pieces = cast("Iterator[pb.GetResponse]", self._pieces(stream, deadline))
            limit_bytes = self.session.terms.max_frame_bytes
            yield LayerStream(pieces, limit_bytes, is_cut=skipped is not None).arriving()

    @override
    @contextmanager
    def get_ranges(
        self,
        digests: Sequence[ChainDigest],
        ranges: Sequence[pb.FrameRange],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[FramePiece]]:
        deadline = _end_of(deadline_ms)
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        request.ranges.extend(ranges)
        stream = self._begin_get(request, deadline)
        if stream is None:
            left_ms = _left_ms(deadline)
            with self._fallback.get_ranges(digests, ranges, lease_id, left_ms, least) as pieces:
                yield pieces
            return
        with self._ending_get(stream, deadline):
            yield (
                FramePiece(one.index, one.tier, *one.part) for one in self._pieces(stream, deadline)
            )

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

    def _arriving(
        self, stream: FrameStream, reading: FrameAssembler, deadline: float
    ) -> Iterator[Arrived]:
        with self._noted():
            for part, payload in stream.parts(deadline):
                frame = reading.take(part.index, part.frame_bytes, part.offset, payload)
                if frame is not None:
                    frame = cast("Bytes | DirectFrame", frame)  # of our own room
                    yield Arrived(part.index, part.tier, frame)
            reading.end(stream.frames)

    def _pieces(self, stream: FrameStream, deadline: float) -> Iterator[_PieceReply]:
        with self._noted():
            for part, payload in stream.parts(deadline):
                piece = _PieceData(part.frame_bytes, part.offset, here(payload))
                yield _PieceReply(part.index, part.tier, piece)

    @contextmanager
    def _ending_get(self, stream: FrameStream, deadline: float) -> Iterator[None]:
        """Give *stream* back at the end, fit for another get unless this one failed."""
        is_clean = False
        try:
            yield
            is_clean = stream.is_over or stream.leave(deadline)
        finally:
            self._streams.give_back(stream, is_clean=is_clean)

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


class _PieceData(NamedTuple):
    frame_bytes: int
    offset: int
    data: Bytes


class _PieceReply(NamedTuple):
    index: int  # type: ignore[assignment]
    tier: str
    part: _PieceData
