"""What the bulk channel asks of the manager: the same as the gRPC service's Get and Put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.proto import bulk
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.server.bulk_work import GetWork, Piece, PutWork
from kvstore.server.checks import Checks, fidelity
from kvstore.server.intake import PutResult
from kvstore.server.layered import LayeredGet
from kvstore.server.manager import TierManager
from kvstore.server.put_stream import PutStream
from kvstore.server.sessions import Session, SessionTable


class BulkService:
    """Gets and puts for whoever moves their bytes. Thread-safe."""

    def __init__(self, manager: TierManager, sessions: SessionTable, checks: Checks) -> None:
        self._manager = manager
        self._sessions = sessions
        self._checks = checks

    def count(self, name: str) -> None:
        """Count one of *name*."""
        self._manager.counters.add(name)

    def new_get(self, session: Session, word: bulk.Get, wake: Callable[[], None]) -> GetWork:
        """Return a get about to run. Raises InvalidRequestError."""
        _check_flags(word.flags, bulk.LAYER_MAJOR | 3 << bulk.FIDELITY_SHIFT)
        deadline = self._checks.deadline(word.deadline_ms)
        return GetWork(session, word, deadline, self._checks.clock, wake)

    def new_put(self, session: Session, word: bulk.Put) -> PutWork:
        """Return a put about to run. Raises InvalidRequestError."""
        _check_flags(word.flags, bulk.DURABLE)
        deadline = self._checks.deadline(word.deadline_ms)
        return PutWork(session, word, deadline, self._checks.clock)

    def get(self, work: GetWork, digests: bytes) -> None:
        """Offer the frames of *digests*, in order, up to the first missing or late one, or layers.

        Return once their memory is in use no more, or the deadline is over.
        """
        session = self._sessions.get(work.word.session_id)
        keys = self._checks.keys(session, digests)
        lease_id, known = self._manager.open_get(session, keys, work.word.lease_id)
        try:
            pieces = self._layers if work.word.flags & bulk.LAYER_MAJOR else self._frames
            least = fidelity(work.word.flags >> bulk.FIDELITY_SHIFT & 3)
            for piece in pieces(session, keys[:known], work.deadline, least):
                if not work.offer(piece):
                    break
            work.settle()
        finally:
            if not work.word.lease_id:
                self._manager.release(session, lease_id)

    def _frames(
        self, session: Session, keys: Sequence[ChunkKey], deadline: float, least: Fidelity
    ) -> Iterator[Piece]:
        for one in self._manager.gets.get(session, keys, deadline, least=least):
            yield Piece(one.index, one.tier, len(one.frame), 0, one.frame, one.place is None)

    def _layers(
        self, session: Session, keys: Sequence[ChunkKey], deadline: float, least: Fidelity
    ) -> Iterator[Piece]:
        for part in LayeredGet(self._manager.transfers, session, keys, deadline, least).parts():
            yield Piece(*part)

    def put(self, work: PutWork, grant: Callable[[int], None]) -> list[PutResult]:
        """Store the frames of *work* and return what became of each; *grant* sends credit.

        Raises as ``PutStream`` does; frames before a bad one stay stored.
        """
        with PutStream(self._manager, self._sessions, self._checks) as stream:
            durable = bool(work.word.flags & bulk.DURABLE)
            stream.open(durable=durable, deadline_ms=work.word.deadline_ms)
            for part, data in work.parts():
                if (part.chunk, part.offset) != (stream.frames, stream.received_bytes):
                    raise InvalidFrameError(
                        "offset", (part.chunk, part.offset), "parts must follow each other"
                    )
                session = self._sessions.get(work.word.session_id)
                stream.take(session, 0 if part.offset else part.frame_bytes, data)
                credit_bytes = work.consume(len(data))
                if credit_bytes:
                    grant(credit_bytes)
            return stream.finish()


def _check_flags(flags: int, known: int) -> None:
    if flags & ~known:
        raise InvalidRequestError("flags", flags, f"this server knows {known}")
