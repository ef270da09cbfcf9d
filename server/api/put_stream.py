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
    """A frame being received: its result where it needs none of its bytes, else its ticket.

    Small, as a stream has thousands: no header, and no check once it is committed.
    """

    key: ChunkKey
    header_bytes: int
    frame_bytes: int
    ticket: AnyTicket | None = None
    result: PutResult | None = None
    check: FrameVerifier | None = None
    """None: it is checked when it is whole."""
    received_bytes: int = 0
    """Of one that comes one piece after the other."""
    is_whole: bool = False


class PutStream:
    """Receives the frames of the stream that *first* begins. Used once, by one thread, and closed.

    The frames before a bad one stay stored. Raises InvalidRequestError for what this server cannot
    promise.
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
        """The frame that the next piece belongs to, and the offset in it."""
        count = len(self._frames)
        if not count or self._frames[-1].is_whole:
            return count, 0
        return count - 1, self._frames[-1].received_bytes

    def take(self, session: Session, frame_bytes: int, data: Bytes) -> None:
        """Take the next piece; *frame_bytes* is looked at where a frame begins.

        Raises KVStoreErrors of what is wrong with the frame or the piece.
        """
        if not self._frames or self._frames[-1].is_whole:
            if not frame_bytes:
                raise InvalidRequestError("frame_bytes", 0, "give it with a frame's first message")
            self._checks.batch("frames", len(self._frames) + 1)
            header = parse_header(data, takes_shards=True)
            frame = self._begin(session, header, frame_bytes)
            if isinstance(frame.ticket, PutTicket) and frame.ticket.room is not None:
                key, head = header.key, header.header_bytes
                frame.check = FrameVerifier(frame.ticket.room, key, head)
        room = self.room(len(data))
        if room is not None:
            copy_bytes(room, data)
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
        else:  # ours: the end of the session must not free what we write into
            frame.ticket = begun
        self._frames.append(frame)
        return frame

    def room(self, size_bytes: int) -> Bytes | None:
        """Return where the next bytes of a frame that has begun go; None: nowhere, they are
        skipped.

        Report how many came to ``landed``. Raises InvalidFrameError when the frame has not so many.
        """
        if not self._frames or self._frames[-1].is_whole:
            raise InvalidFrameError("data", size_bytes, "no frame has begun")
        frame = self._frames[-1]
        start, stop = frame.received_bytes, frame.received_bytes + size_bytes
        if not size_bytes or stop > frame.frame_bytes:
            raise InvalidFrameError("data", stop, f"the frame has {frame.frame_bytes} bytes")
        room = None if frame.ticket is None else frame.ticket.room
        return None if room is None else room[start:stop]

    def landed(self, size_bytes: int) -> None:
        """Take note that so many bytes more are in their ``room``, and check them while in cache.

        A frame that is whole is committed, but for one whose state is kept only if the next frame
        does not continue it: raises what is wrong with it.
        """
        frame = self._frames[-1]
        frame.received_bytes += size_bytes
        frame.is_whole = frame.received_bytes == frame.frame_bytes
        if frame.check is not None:
            frame.check.update(frame.received_bytes)
        if frame.is_whole and getattr(frame.ticket, "kept_layout", None) is None:
            self._commit(frame)

    def finish(self) -> list[PutResult]:
        """Return what became of each frame, durable where that was requested."""
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
        """Free what did not become whole."""
        with suppress(KVStoreError):  # the frames before a bad one stay
            self._commit_last()
        for frame in self._frames:
            if frame.ticket is not None:
                self._store.writes.discard(frame.ticket)

    def _commit_last(self, following: ChunkInfo | None = None) -> None:
        """Commit the last frame if it is whole and was not; *following* may continue it."""
        if self._frames and self._frames[-1].is_whole:
            is_last = following is None or following.parent_key != self._frames[-1].key
            self._commit(self._frames[-1], is_last=is_last)

    def _commit(self, frame: _Frame, *, is_last: bool = False) -> None:
        ticket, frame.ticket = frame.ticket, None
        if ticket is not None:
            check, frame.check = frame.check, None
            frame.result = self._store.writes.commit(ticket, check, is_last=is_last)
