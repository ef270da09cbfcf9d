"""One Put stream: frames that arrive in pieces, written where they will stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.frame import parse_header
from kvstore.proto.types import ChunkKey
from kvstore.server.checks import Checks
from kvstore.server.intake import PutResult, PutTicket
from kvstore.server.manager import TierManager
from kvstore.server.sessions import Session, SessionTable


@dataclass(slots=True)
class _Incoming:
    """The frame being received: where it goes (None: nowhere, it exists) and how far it is."""

    ticket: PutTicket | None
    frame_bytes: int
    received_bytes: int = 0


class PutStream:
    """Receive the frames of one stream, one after another. Used once, by one thread."""

    def __init__(self, manager: TierManager, sessions: SessionTable, checks: Checks) -> None:
        self._manager = manager
        self._sessions = sessions
        self._checks = checks
        self._results: list[PutResult] = []
        self._keys: list[ChunkKey] = []
        self._incoming: _Incoming | None = None

    def run(self, messages: Iterator[pb.PutRequest]) -> list[PutResult]:
        """Store each frame; return what became of them in order.

        At the first bad message its error is raised; frames before it stay stored, the one
        it belongs to leaves nothing behind.
        """
        first: pb.PutRequest | None = None
        try:
            for message in messages:
                session = self._sessions.get(message.session_id)
                if first is None:
                    first = message
                    self._checks.durable(message.durable, is_possible=self._manager.can_be_durable)
                    deadline = self._checks.deadline(message.deadline_ms)
                if self._incoming is None:
                    self._begin(session, message, deadline)
                self._take(message.data)
            if self._incoming is not None:
                raise InvalidFrameError(
                    "frame", self._incoming.received_bytes, "the stream ended inside it"
                )
        finally:
            if self._incoming is not None and self._incoming.ticket is not None:
                self._manager.puts.discard(self._incoming.ticket)
        if first is not None and first.durable:
            deadline = self._checks.deadline(first.deadline_ms)
            return self._manager.harden(self._keys, self._results, deadline)
        return self._results

    def _begin(self, session: Session, message: pb.PutRequest, deadline: float) -> None:
        if not message.frame_bytes:
            raise InvalidRequestError("frame_bytes", 0, "give it with a frame's first message")
        self._checks.batch("frames", len(self._keys) + 1)
        header = parse_header(as_bytes(message.data))
        info = self._checks.header(session, header, message.frame_bytes)
        begun = self._manager.puts.begin(session, info, deadline)
        self._keys.append(info.key)
        if isinstance(begun, PutResult):
            self._results.append(begun)
            self._incoming = _Incoming(None, info.size_bytes)
        else:
            # Ours from here on: the end of the session must not free what we write into.
            ticket = self._manager.puts.claim(session, begun.ticket_id)
            self._incoming = _Incoming(ticket, info.size_bytes)

    def _take(self, data: bytes) -> None:
        incoming = self._incoming
        assert incoming is not None
        stop = incoming.received_bytes + len(data)
        if not data or stop > incoming.frame_bytes:
            raise InvalidFrameError("data", stop, f"the frame has {incoming.frame_bytes} bytes")
        if incoming.ticket is not None:
            view = self._manager.puts.view(incoming.ticket)
            copy_bytes(view[incoming.received_bytes : stop], as_bytes(data))
        incoming.received_bytes = stop
        if stop == incoming.frame_bytes:
            self._incoming = None
            if incoming.ticket is not None:
                self._results.append(self._manager.puts.commit(incoming.ticket))
