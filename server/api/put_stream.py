"""A PutStream: frames that arrive in pieces, one after another."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.messages import hints_from_message
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.api.validation import Checks
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult, PutTicket
from kvstore.server.store.store import Store
from kvstore.server.store.writes import AnyTicket


@dataclass(slots=True)
class _Frame:
    """A frame being received: its result if its bytes are not needed, else its ticket.

    Small, as a stream has thousands: no header, and no verifier once it is committed.
    """

    key: ChunkKey
    header_bytes: int
    frame_bytes: int
    ticket: AnyTicket | None = None
    result: PutResult | None = None
    check: FrameVerifier | None = None
    """None: it is checked when complete."""
    received_bytes: int = 0
    is_whole: bool = False


class PutStream:
    """Receives the frames of a stream whose first message is *first*. Used once, by one thread.

    The frames before a bad one stay stored. Raises InvalidRequestError if the server cannot meet
    the request's durability.
    """

    def __init__(self, store: Store, checks: Checks, first: pb.PutRequest) -> None:
        if first.durable:
            checks.durable(store)
        self._store = store
        self._checks = checks
        self._first = first
        self._deadline = checks.deadline(first.deadline_ms)
        self._hints = hints_from_message(first.hints)
        self._frames: list[_Frame] = []

    @property
    def position(self) -> tuple[int, int]:
        """The frame of the next piece, and its offset there."""
        count = len(self._frames)
        if not count or self._frames[-1].is_whole:
            return count, 0
        return count - 1, self._frames[-1].received_bytes

    def take(self, session: Session, frame_bytes: int, data: Bytes) -> None:
        """Process the next piece; *frame_bytes* is used where a frame begins.

        Raises KVStoreErrors for a bad frame or piece.
        """
        if not self._frames or self._frames[-1].is_whole:
            if not frame_bytes:
                raise InvalidRequestError("frame_bytes", 0, "give it with a frame's first message")
            self._checks.batch("frames", len(self._frames) + 1)
            header = parse_header(data, takes_shards=True)
            frame = self._begin(session, header, frame_bytes)
            if isinstance(frame.ticket, PutTicket) and frame.ticket.buffer is not None:
                key, head = header.key, header.header_bytes
                frame.check = FrameVerifier(frame.ticket.buffer, key, head)
        buffer = self.buffer(len(data))
        if buffer is not None:
            copy_bytes(buffer, data)
        self.landed(len(data))

    def _begin(self, session: Session, header: FrameHeader, frame_bytes: int) -> _Frame:
        info, part = self._checks.chunk(session, header.info(), header.shard, frame_bytes)
        self._commit_last(info)
        begun = self._store.writes.open(
            session, info, self._deadline, self._hints, is_last=None, part=part
        )
        frame = _Frame(header.key, header.header_bytes, header.frame_bytes)
        if isinstance(begun, PutResult):
            frame.result = begun
        else:  # owned here: the end of the session must not free it during a write
            frame.ticket = begun
        self._frames.append(frame)
        return frame

    def buffer(self, size_bytes: int) -> Bytes | None:
        """Return the buffer for the next bytes of the current frame; None: skip them.

        Report the bytes to ``landed``. Raises InvalidFrameError beyond the end of the frame.
        """
        if not self._frames or self._frames[-1].is_whole:
            raise InvalidFrameError("data", size_bytes, "no frame has begun")
        frame = self._frames[-1]
        start, stop = frame.received_bytes, frame.received_bytes + size_bytes
        if not size_bytes or stop > frame.frame_bytes:
            raise InvalidFrameError("data", stop, f"the frame has {frame.frame_bytes} bytes")
        buffer = None if frame.ticket is None else frame.ticket.buffer
        return None if buffer is None else buffer[start:stop]

    def landed(self, size_bytes: int) -> None:
        """Record *size_bytes* more bytes in their ``buffer``, and verify them while in cache.

        A complete frame is committed, unless its state is stored only if the next frame does not
        continue it. Raises for an invalid frame.
        """
        frame = self._frames[-1]
        frame.received_bytes += size_bytes
        frame.is_whole = frame.received_bytes == frame.frame_bytes
        if frame.check is not None:
            frame.check.update(frame.received_bytes)
        if frame.is_whole and getattr(frame.ticket, "kept_layout", None) is None:
            self._commit(frame)

    def finish(self) -> list[PutResult]:
        """Return the result of each frame, made durable if requested."""
        for frame in self._frames:
            if not frame.is_whole:
                raise InvalidFrameError("frame", frame.received_bytes, "the stream ended inside it")
        results = []
        for frame in self._frames:
            self._commit(frame, is_last=True)
            assert frame.result is not None
            results.append(frame.result)
        if not self._first.durable:
            return results
        keys = [frame.key for frame in self._frames]
        deadline = self._checks.deadline(self._first.deadline_ms)
        return self._store.harden(keys, results, deadline)

    def close(self) -> None:
        """Free incomplete frames."""
        with suppress(KVStoreError):  # the frames before a bad one stay
            self._commit_last()
        for frame in self._frames:
            if frame.ticket is not None:
                self._store.writes.discard(frame.ticket)

    def _commit_last(self, following: ChunkInfo | None = None) -> None:
        """Commit the last frame if it is complete and pending; *following* may continue it."""
        if self._frames and self._frames[-1].is_whole:
            is_last = following is None or following.parent_key != self._frames[-1].key
            self._commit(self._frames[-1], is_last=is_last)

    def _commit(self, frame: _Frame, *, is_last: bool = False) -> None:
        ticket, frame.ticket = frame.ticket, None
        if ticket is not None:
            check, frame.check = frame.check, None
            frame.result = self._store.writes.commit(ticket, check, is_last=is_last)
