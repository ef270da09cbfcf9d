"""What the bulk channel asks of the store: the same as the gRPC service's Get and Put."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from kvstore.proto import bulk
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.server.api.put_stream import PutStream
from kvstore.server.api.validation import Checks, fidelity
from kvstore.server.bulk.peer_server import PeerLimits, PeerServer
from kvstore.server.bulk.tcp_transfers import Piece, StreamWork
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import ByteRange, RangeRead
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.store import Store

if TYPE_CHECKING:
    from kvstore.server.bulk.tcp_transfers import StreamPut
    from kvstore.server.telemetry.tracing import Tracing


class BulkService:
    """Gets and puts for whoever moves their bytes. Thread-safe."""

    def __init__(
        self,
        store: Store,
        sessions: SessionTable,
        checks: Checks,
        peer_limits: PeerLimits | None = None,
    ) -> None:
        self._store = store
        self.peer_server = PeerServer(store.moves, peer_limits or PeerLimits())
        self._sessions = sessions
        self._checks = checks
        self.tracing: Tracing | None = None
        self._own_gets = 0
        self._lock = threading.Lock()  # guards that

    def checked(self, word: bulk.Get) -> float:
        """Return the deadline of a get. Raises InvalidRequestError."""
        known = bulk.LAYER_MAJOR | bulk.RANGES | 3 << bulk.FIDELITY_SHIFT
        if word.flags & bulk.LAYER_MAJOR and not word.flags & bulk.RANGES:
            known |= bulk.SKIP_ROWS
        if word.flags & bulk.PEER:
            known = bulk.PEER | bulk.RANGES
        _check_flags(word.flags, known)
        return self._checks.deadline(word.deadline_ms)

    def checked_put(self, word: bulk.Put) -> float:
        """Return the deadline of a put. Raises InvalidRequestError."""
        _check_flags(word.flags, bulk.DURABLE)
        return self._checks.deadline(word.deadline_ms)

    def get(self, work: StreamWork, digests: bytes) -> None:
        """Send the frames of *digests*, in order, up to the first missing or late one, or layers.

        With the flags of ranges and of rows, *digests* is what ``unpack_ranges`` and
        ``unpack_skipped`` parse. Return once their memory is in use no more, or the deadline is
        over.
        """
        session = self._sessions.get(work.word.session_id)
        if work.word.flags & bulk.PEER:
            self.peer_server.get(work, digests)
            return
        self._count_own(1)
        try:
            with self._traced("Get"):
                self._get(session, work, digests)
        finally:
            self._count_own(-1)

    def _count_own(self, more: int) -> None:
        with self._lock:
            self._own_gets += more

    @property
    def is_busy(self) -> bool:
        """Whether clients of this server's own are being sent frames."""
        return self._own_gets > 0

    def _traced(self, method: str) -> AbstractContextManager[None]:
        return nullcontext() if self.tracing is None else self.tracing.call(method, "tcp")

    def _get(self, session: Session, work: StreamWork, digests: bytes) -> None:
        ranges: list[bulk.Range] = []
        if work.word.flags & bulk.RANGES:
            digests, ranges = bulk.unpack_ranges(digests)
        skip_rows = b""
        if work.word.flags & bulk.SKIP_ROWS:
            digests, skip_rows = bulk.unpack_skipped(digests)
        keys = self._checks.keys(session, digests)
        self._checks.ranges(ranges, len(keys))
        skipped = SkippedRows.unpack(skip_rows, len(keys))
        lease_id, known = self._store.open_get(session, keys, work.word.lease_id)
        try:
            least = fidelity(work.word.flags >> bulk.FIDELITY_SHIFT & 3)
            if work.word.flags & bulk.RANGES:
                reading = RangeRead(self._store.reads, session, least, work.deadline)
                found = self._ranges(reading, keys[:known], ranges)
            elif work.word.flags & bulk.LAYER_MAJOR:
                moves = self._store.moves
                layered = LayerwiseRead(moves, session, keys[:known], work.deadline, least)
                layered.skipped = skipped
                found = self._layers(layered)
            else:
                found = self._frames(session, keys[:known], work.deadline, least)
            with closing(found):
                for piece in found:
                    if not work.offer(piece):
                        break
        finally:
            if not work.word.lease_id:
                self._store.release(session, lease_id)

    def _frames(
        self, session: Session, keys: Sequence[ChunkKey], deadline: float, least: Fidelity
    ) -> Generator[Piece, None, None]:
        for one in self._store.reads.get(session, keys, deadline, least=least):
            yield Piece(one.index, one.tier, len(one.frame), 0, one.frame)

    def _layers(self, layered: LayerwiseRead) -> Generator[Piece, None, None]:
        for part in layered.parts():
            yield Piece(*part)

    def _ranges(
        self, reading: RangeRead, keys: Sequence[ChunkKey], ranges: Sequence[bulk.Range]
    ) -> Generator[Piece, None, None]:
        for index, group in groupby(ranges, key=attrgetter("index")):
            if index >= len(keys):
                continue
            spans = [ByteRange(one.start, one.stop) for one in group]
            with reading.read(keys[index], spans) as stored:
                if stored is None:
                    continue
                for span, data in zip(spans, stored.data, strict=True):
                    if len(data):
                        size = stored.frame_bytes
                        yield Piece(index, stored.tier, size, span.start, data)

    def put(self, put: StreamPut) -> list[PutResult]:
        """Store the frames of *put*, received where they stay; return what became of each.

        Raises as ``PutStream`` does; frames before a bad one stay stored.
        """
        with self._putting(put.word) as stream:
            for word, size_bytes in put.words():
                if isinstance(word, bulk.Hint):
                    stream.hint(put.hints(size_bytes))
                else:
                    put.land(stream, self._next(stream, word, put.word), word, size_bytes)
            return stream.finish()

    @contextmanager
    def _putting(self, word: bulk.Put) -> Iterator[PutStream]:
        stream = PutStream(self._store, self._sessions, self._checks)
        with self._traced("Put"), stream:
            durable = bool(word.flags & bulk.DURABLE)
            stream.open(durable=durable, deadline_ms=word.deadline_ms)
            yield stream

    def _next(self, stream: PutStream, part: bulk.Part, word: bulk.Put) -> Session:
        """Return whose part it is. Raises InvalidFrameError unless it is the next."""
        if (part.chunk, part.offset) != (stream.frames, stream.received_bytes):
            raise InvalidFrameError(
                "offset", (part.chunk, part.offset), "parts must follow each other"
            )
        return self._sessions.get(word.session_id)


def _check_flags(flags: int, known: int) -> None:
    if flags & ~known:
        raise InvalidRequestError("flags", flags, f"this server knows {known}")
