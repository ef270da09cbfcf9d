"""Put streams: frames that arrive in pieces, one after another or layer by layer.

Each is used once, by one thread, and closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameHeader, parse_header
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChunkKey
from kvstore.server.api.validation import Checks
from kvstore.server.security.sessions import Session
from kvstore.server.store.parallel_writes import PartTicket
from kvstore.server.store.reservations import PutOptions, PutResult, PutTicket
from kvstore.server.store.store import Store
from kvstore.server.store.writes import AnyTicket


@dataclass(slots=True)
class _Incoming:
    """The frame being received: where it goes (None: nowhere, it exists) and how far it is."""

    ticket: AnyTicket | None
    frame_bytes: int
    check: FrameVerifier | None = None
    """None: it is checked when it is whole."""
    received_bytes: int = 0


class PutStream:
    """Receives the frames of one stream, one after another; those before a bad one stay stored.

    Raises InvalidRequestError for what this server cannot promise.
    """

    def __init__(
        self,
        store: Store,
        checks: Checks,
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> None:
        if durable:
            checks.durable(store)
        self.deadline = checks.deadline(deadline_ms)
        self.hints = hints
        self._store = store
        self._checks = checks
        self._durable = durable
        self._deadline_ms = deadline_ms
        self._keys: list[ChunkKey] = []
        self._results: list[PutResult] = []
        self._incoming: _Incoming | None = None
        self._held: _Incoming | None = None
        """A whole frame whose state is kept only if the next one does not continue it."""

    @property
    def position(self) -> tuple[int, int]:
        """The frame that the next piece belongs to, and the offset in it."""
        if self._incoming is None:
            return len(self._keys), 0
        return len(self._keys) - 1, self._incoming.received_bytes

    def take(self, session: Session, frame_bytes: int, data: Bytes) -> None:
        """Take the next piece; *frame_bytes* is looked at where a frame begins.

        Raises KVStoreErrors of what is wrong with the frame or the piece.
        """
        if self._incoming is None:
            self._begin(session, frame_bytes, data)
        room = self.room(len(data))
        if room is not None:
            copy_bytes(room, data)
        self.landed(len(data))

    def room(self, size_bytes: int) -> Bytes | None:
        """Return where the next bytes of a frame that has begun go; None: nowhere, they are
        skipped.

        Report how many came to ``landed``. Raises InvalidFrameError when the frame has not so many.
        """
        incoming = self._incoming
        if incoming is None:
            raise InvalidFrameError("data", size_bytes, "no frame has begun")
        stop = incoming.received_bytes + size_bytes
        if not size_bytes or stop > incoming.frame_bytes:
            raise InvalidFrameError("data", stop, f"the frame has {incoming.frame_bytes} bytes")
        room = None if incoming.ticket is None else incoming.ticket.room
        return None if room is None else room[incoming.received_bytes : stop]

    def landed(self, size_bytes: int) -> None:
        """Take note that so many bytes more are in their ``room``, and check them while in cache.

        A frame that is whole is committed: raises what is wrong with it.
        """
        incoming = self._incoming
        assert incoming is not None
        incoming.received_bytes += size_bytes
        if incoming.check is not None:
            incoming.check.update(incoming.received_bytes)
        if incoming.received_bytes < incoming.frame_bytes:
            return
        self._incoming = None
        if incoming.ticket is not None:
            self._held = incoming
            if isinstance(incoming.ticket, PartTicket) or incoming.ticket.kept_layout is None:
                self._commit_held(is_last=False)

    def finish(self) -> list[PutResult]:
        """Return what became of each frame, durable where that was requested."""
        if self._incoming is not None:
            raise InvalidFrameError(
                "frame", self._incoming.received_bytes, "the stream ended inside it"
            )
        self._commit_held(is_last=True)
        return self.hardened(self._keys, self._results) if self._durable else self._results

    def hardened(self, keys: Sequence[ChunkKey], results: list[PutResult]) -> list[PutResult]:
        """Return *results* once what was stored is durable, where that was asked for."""
        if not self._durable:
            return results
        return self._store.harden(keys, results, self._checks.deadline(self._deadline_ms))

    def close(self) -> None:
        """Free what did not become whole."""
        with suppress(KVStoreError):  # the frames before a bad one stay
            self._commit_held(is_last=True)
        if self._incoming is not None and self._incoming.ticket is not None:
            self._store.writes.discard(self._incoming.ticket)
        self._incoming = None

    def _commit_held(self, *, is_last: bool) -> None:
        held, self._held = self._held, None
        if held is not None and held.ticket is not None:
            writes = self._store.writes
            self._results.append(writes.commit(held.ticket, held.check, is_last=is_last))

    def _begin(self, session: Session, frame_bytes: int, data: Bytes) -> None:
        if not frame_bytes:
            raise InvalidRequestError("frame_bytes", 0, "give it with a frame's first message")
        self._checks.batch("frames", len(self._keys) + 1)
        header = parse_header(data, takes_shards=True)
        info, part = self._checks.chunk(session, header.info(), header.shard, frame_bytes)
        if self._held is not None and self._held.ticket is not None:
            self._commit_held(is_last=info.parent_key != self._held.ticket.info.key)
        options = PutOptions(self.hints, is_last=None)
        begun = self._store.writes.open(session, info, self.deadline, options, part)
        self._keys.append(info.key)
        if isinstance(begun, PutResult):
            self._results.append(begun)
            self._incoming = _Incoming(None, frame_bytes)
            return
        # Ours: the end of the session must not free what we write into.
        check = None
        if isinstance(begun, PutTicket) and begun.room is not None:
            check = FrameVerifier(begun.room, info.key, header.header_bytes)
        self._incoming = _Incoming(begun, frame_bytes, check)


@dataclass(slots=True)
class _LayeredFrame:
    """A frame being received: its answer if it needs none of its bytes, else where they go."""

    result: PutResult | None
    ticket: AnyTicket | None
    header: FrameHeader
    is_whole: bool = False


class LayeredPutStream:
    """Receives the frames of one ``layer_major`` stream, of which all or none stay.

    A frame begins with its header, whose checksums are still open, and ends with the header
    that has them. Nothing is visible before the stream ends, all its frames whole; then each is
    verified and sealed. *stream* has what holds for all frames, and takes none itself.
    """

    def __init__(self, store: Store, checks: Checks, stream: PutStream) -> None:
        self._writes = store.writes
        self._checks = checks
        self._stream = stream
        self._frames: list[_LayeredFrame] = []

    def close(self) -> None:
        """Free what did not become whole."""
        for frame in self._frames:
            if frame.ticket is not None:
                self._writes.discard(frame.ticket)

    def take(self, session: Session, message: pb.PutRequest) -> None:
        """Take the next piece. Raises KVStoreErrors of what is wrong with it."""
        if message.frame == len(self._frames):
            self._begin(session, message)
            return
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

    def _begin(self, session: Session, message: pb.PutRequest) -> None:
        self._checks.batch("frames", len(self._frames) + 1)
        header = parse_header(as_bytes(message.data), FLAG_UNSUMMED)
        if len(message.data) != header.header_bytes or not header.flags & FLAG_UNSUMMED:
            raise InvalidFrameError("data", len(message.data), "begin with an open header, alone")
        info, _ = self._checks.chunk(session, header.info(), None, message.frame_bytes)
        options = PutOptions(self._stream.hints)
        begun = self._writes.open(session, info, self._stream.deadline, options)
        if isinstance(begun, PutResult):
            self._frames.append(_LayeredFrame(begun, None, header))
            return
        # Ours: the end of the session must not free what we write into.
        self._frames.append(_LayeredFrame(None, begun, header))
        view = begun.room
        assert view is not None
        end = header.header_bytes
        for row in header.segments:  # what no segment covers, and no checksum
            view[end : int(row["offset"])] = 0
            end = int(row["offset"]) + int(row["stored_bytes"])

    def finish(self) -> list[PutResult]:
        """Return what became of each frame, durable where that was requested."""
        for number, frame in enumerate(self._frames):
            if not frame.is_whole:
                raise InvalidFrameError("frame", number, "the stream ended before it was whole")
        results = []
        for frame in self._frames:
            if frame.ticket is not None:
                ticket, frame.ticket = frame.ticket, None
                frame.result = self._writes.commit(ticket)
            assert frame.result is not None
            results.append(frame.result)
        return self._stream.hardened([frame.header.key for frame in self._frames], results)
