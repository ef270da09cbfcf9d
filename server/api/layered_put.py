"""One layered Put stream: frames that arrive side by side, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameHeader, parse_header
from kvstore.proto.messages import hints_from_message
from kvstore.proto.plans import NO_HINTS
from kvstore.server.api.validation import Checks
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.reservations import PutOptions, PutResult
from kvstore.server.store.store import Store
from kvstore.server.store.writes import AnyTicket


@dataclass(slots=True)
class _Incoming:
    """A frame being received: its answer if it needs none of its bytes, else where they go."""

    result: PutResult | None
    ticket: AnyTicket | None
    header: FrameHeader
    is_whole: bool = False


class LayeredPutStream:
    """Receive the frames of one ``layer_major`` stream. Used once, by one thread.

    A frame begins with its header, whose checksums are still open, and ends with the header
    that has them. Nothing is visible before the stream ends, all its frames whole; then each is
    verified and sealed.
    """

    def __init__(self, store: Store, sessions: SessionTable, checks: Checks) -> None:
        self._store = store
        self._sessions = sessions
        self._checks = checks
        self._frames: list[_Incoming] = []
        self._hints = NO_HINTS

    def run(self, messages: Iterator[pb.PutRequest]) -> list[PutResult]:
        """Store the frames; return what became of them in order.

        At the first bad message its error is raised, and nothing of the stream stays.
        """
        first: pb.PutRequest | None = None
        try:
            for message in messages:
                session = self._sessions.get(message.session_id)
                if first is None:
                    first = message
                    self._checks.durable(message.durable, is_possible=self._store.can_be_durable)
                    deadline = self._checks.deadline(message.deadline_ms)
                    self._hints = hints_from_message(message.hints)
                if message.frame == len(self._frames):
                    self._begin(session, message, deadline)
                else:
                    self._take(message)
            return [] if first is None else self._finish(first)
        finally:
            for frame in self._frames:
                if frame.ticket is not None:
                    self._store.writes.discard(frame.ticket)

    def _begin(self, session: Session, message: pb.PutRequest, deadline: float) -> None:
        self._checks.batch("frames", len(self._frames) + 1)
        header = parse_header(as_bytes(message.data), FLAG_UNSUMMED)
        if len(message.data) != header.header_bytes or not header.flags & FLAG_UNSUMMED:
            raise InvalidFrameError("data", len(message.data), "begin with an open header, alone")
        info, _ = self._checks.header(session, header, message.frame_bytes)
        begun = self._store.writes.open(session, info, deadline, PutOptions(self._hints))
        if isinstance(begun, PutResult):
            self._frames.append(_Incoming(begun, None, header))
            return
        # Ours: the end of the session must not free what we write into.
        self._frames.append(_Incoming(None, begun, header))
        view = begun.room
        assert view is not None
        end = header.header_bytes
        for row in header.segments:  # what no segment covers, and no checksum
            view[end : int(row["offset"])] = 0
            end = int(row["offset"]) + int(row["stored_bytes"])

    def _take(self, message: pb.PutRequest) -> None:
        if message.frame > len(self._frames):
            raise InvalidRequestError("frame", message.frame, "begin frames one after another")
        frame = self._frames[message.frame]
        start, stop = message.offset, message.offset + len(message.data)
        head = frame.header.header_bytes
        is_header = start == 0 and stop == head
        if frame.is_whole or not message.data or not (is_header or start >= head):
            raise InvalidFrameError("offset", start, "send segments, and the header last, once")
        if stop > frame.header.frame_bytes:
            raise InvalidFrameError("data", stop, f"the frame has {frame.header.frame_bytes} bytes")
        frame.is_whole = is_header
        if frame.ticket is not None and frame.ticket.room is not None:
            copy_bytes(frame.ticket.room[start:stop], as_bytes(message.data))

    def _finish(self, first: pb.PutRequest) -> list[PutResult]:
        for number, frame in enumerate(self._frames):
            if not frame.is_whole:
                raise InvalidFrameError("frame", number, "the stream ended before it was whole")
        results = []
        for frame in self._frames:
            if frame.ticket is not None:
                ticket, frame.ticket = frame.ticket, None
                frame.result = self._store.writes.commit(ticket)
            assert frame.result is not None
            results.append(frame.result)
        if not first.durable:
            return results
        keys = [frame.header.key for frame in self._frames]
        return self._store.harden(keys, results, self._checks.deadline(first.deadline_ms))
