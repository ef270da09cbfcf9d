"""Writes: chunks on their way in. Reserved, written by the caller, verified, then visible."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvstore.codecs.base import codec_by_id
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
)
from kvstore.proto.frame import FLAG_RESTORED, FrameHeader, check_frame, copy_frame
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity
from kvstore.server.security.sessions import Session
from kvstore.server.store.parallel_writes import ChunkPart, ParallelWrites, PartTicket
from kvstore.server.store.reservations import NO_OPTIONS, PutOptions, Reservations
from kvstore.server.store.reservations import PutResult as PutResult
from kvstore.tiers.base import Reservation

RESERVED_S = 120.0
"""Room that was reserved by a call of its own and not written to by then is given back."""


@dataclass(frozen=True, slots=True)
class PutTicket:
    """Room in CPU memory for a chunk that is being put; owned by a session, ``until`` then at
    most unless it is claimed.
    """

    ticket_id: int
    session: Session
    reservation: Reservation
    hints: Hints = NO_HINTS
    until: float = math.inf

    @property
    def key(self) -> ChunkKey:
        """The chunk's name."""
        return self.reservation.info.key

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that is to come."""
        return self.reservation.info.size_bytes


AnyTicket: TypeAlias = PutTicket | PartTicket
"""A chunk that is being put, or a portion of one."""


class Writes:
    """Puts at work, by ticket, each owned by a session. Thread-safe.

    *new_id* returns unpredictable numbers below 2^64. Portions go to *parallel*.
    """

    def __init__(
        self,
        reservations: Reservations,
        parallel: ParallelWrites,
        limit_per_session: int,
        new_id: Callable[[], int],
    ) -> None:
        self._reservations = reservations
        self.parallel = parallel
        self._counters = reservations.counters
        self._limit = limit_per_session
        self._new_id = new_id
        self._tickets: dict[int, AnyTicket] = {}
        self._by_session: dict[int, set[int]] = {}
        self._draining = False
        # Guards the three fields above; held for dictionary operations only.
        self._lock = threading.Lock()

    def open(
        self,
        session: Session,
        info: ChunkInfo,
        deadline: float,
        options: PutOptions = NO_OPTIONS,
        part: ChunkPart | None = None,
        until: float = math.inf,
    ) -> AnyTicket | PutResult:
        """Reserve room for a frame, or say why there is nothing to write.

        The caller commits or discards the put. *info* is that of the whole chunk, also where only
        a *part* of it is put. Raises ShuttingDownError, QuotaExceededError, InvalidRequestError,
        and LeaseExpiredError for a session that has ended.
        """
        if self._draining:
            raise ShuttingDownError("the server drains; no new puts")
        ticket: AnyTicket
        if part is not None:
            ticket = PartTicket(self._new_id(), session, info, part, options)
            answer = self.parallel.begin(ticket, deadline)
            if answer is not None:
                return answer
        else:
            reserved = self._reservations.reserve(session, info, deadline, options)
            if isinstance(reserved, PutResult):
                return reserved
            ticket = PutTicket(self._new_id(), session, reserved, options.hints, until)
        if session.is_closed:
            self.discard(ticket)
            raise _closed(session)
        return ticket

    def _owned(self, begun: AnyTicket | PutResult) -> AnyTicket | PutResult:
        if not isinstance(begun, PutResult):
            try:
                self._own(begun)
            except (QuotaExceededError, LeaseExpiredError):
                self.discard(begun)
                raise
        return begun

    def begin_all(
        self,
        session: Session,
        infos: Sequence[ChunkInfo],
        deadline: float,
        hints: Hints = NO_HINTS,
        parts: Sequence[ChunkPart | None] | None = None,
    ) -> list[AnyTicket | PutResult]:
        """Begin a batch, to be claimed within RESERVED_S.

        All of its room is given back when one of it is invalid.
        """
        until = self._reservations.clock() + RESERVED_S
        begun: list[AnyTicket | PutResult] = []
        continued = {info.parent_key for info in infos}
        try:
            for info, part in zip(infos, parts or [None] * len(infos), strict=True):
                options = PutOptions(hints, info.key not in continued)
                ticket = self.open(session, info, deadline, options, part, until)
                begun.append(self._owned(ticket))
        except KVStoreError:
            for result in begun:
                if not isinstance(result, PutResult):
                    self.abort(session, result.ticket_id)
            raise
        return begun

    def _own(self, ticket: AnyTicket) -> None:
        limit = self._limit
        session_id = ticket.session.session_id
        with self._lock:
            if ticket.session.is_closed:
                # Its puts were already aborted; this one came too late for that.
                raise _closed(ticket.session)
            owned = self._by_session.setdefault(session_id, set())
            if len(owned) >= limit:
                raise QuotaExceededError(
                    "max_reservations_per_session", limit, f"session {session_id}"
                )
            owned.add(ticket.ticket_id)
            self._tickets[ticket.ticket_id] = ticket

    def view(self, ticket: AnyTicket) -> Bytes:
        """Return the memory to write the frame into."""
        if isinstance(ticket, PutTicket):
            return self._reservations.view(ticket.reservation)
        assert ticket.frame is not None
        return ticket.frame

    def claim(self, session: Session, ticket_id: int) -> AnyTicket:
        """Take a put out of the table to finish it. Raises LeaseExpiredError."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None or ticket.session is not session:
                raise LeaseExpiredError(
                    f"reservation_id={ticket_id}: spent, aborted or not this session's; reserve "
                    "again"
                )
            self._disown(ticket)
            return ticket

    def _disown(self, ticket: AnyTicket) -> None:
        del self._tickets[ticket.ticket_id]
        owned = self._by_session[ticket.session.session_id]
        owned.discard(ticket.ticket_id)
        if not owned:
            del self._by_session[ticket.session.session_id]

    def discard(self, ticket: AnyTicket) -> None:
        """Give back the room of a put that is the caller's."""
        if isinstance(ticket, PutTicket):
            self._reservations.give_back(ticket.reservation)
        else:
            self.parallel.discard(ticket)

    def abort(self, session: Session, ticket_id: int) -> bool:
        """Give up a put. Return whether the session had it."""
        try:
            ticket = self.claim(session, ticket_id)
        except LeaseExpiredError:
            return False
        self.discard(ticket)
        return True

    def may_lose_state(self, ticket: AnyTicket) -> bool:
        """Whether the chunk will be kept without its state, unless it ends its put."""
        return isinstance(ticket, PutTicket) and self._reservations.may_lose_state(
            ticket.reservation
        )

    def commit(
        self, ticket: AnyTicket, check: FrameVerifier | None = None, *, is_last: bool = False
    ) -> PutResult:
        """Verify what was written into a put of the caller's and make it visible, or abort it.

        *check* followed what was written, where its writer has no hand on it. *is_last*: it turned
        out that nothing of the put continues it.
        Raises InvalidFrameError, ChunkCorruptError, UnknownCodecError, InvalidRequestError
        for frames that are not what was reserved; nothing of them stays.
        """
        if isinstance(ticket, PutTicket):
            if is_last:
                self._reservations.keep_state(ticket.reservation)
            return self._finish(ticket, check_frame if check is None else partial(_found, check))
        return self.parallel.take(ticket, self.view(ticket))

    def _finish(
        self, ticket: PutTicket, receive: Callable[[Bytes, ChunkKey], FrameHeader]
    ) -> PutResult:
        info = ticket.reservation.info
        try:
            header = receive(self.view(ticket), info.key)
            check_put(header, info, ticket.session)
        except KVStoreError as error:
            self._counters.add("put_invalid_chunks")
            self._reservations.record_invalid(info.key, error)
            self.discard(ticket)
            raise
        session = ticket.session
        return self._reservations.seal(ticket.reservation, header, session.tenant, ticket.hints)

    def ingest(self, tickets: Sequence[AnyTicket], frames: Sequence[Bytes]) -> list[PutResult]:
        """Copy frames into puts of the caller's and commit them, in order.

        At the first bad frame its error is raised and the rest is aborted.
        """
        results: list[PutResult] = []
        try:
            for ticket, frame in zip(tickets, frames, strict=True):
                if isinstance(ticket, PutTicket):
                    results.append(self._finish(ticket, partial(_copy_from, frame)))
                else:
                    results.append(self.parallel.take(ticket, frame))
        except KVStoreError:
            for ticket in tickets[len(results) + 1 :]:
                self.discard(ticket)
            raise
        return results

    def expire(self) -> int:
        """Give back room that nobody came to write to in time; return of how many chunks."""
        now = self._reservations.clock()
        with self._lock:
            late = [one for one in self._tickets.values() if isinstance(one, PutTicket)]
            late = [one for one in late if one.until <= now]
        count = sum(self.abort(one.session, one.ticket_id) for one in late)
        self._counters.add("dropped_unfinished_chunks", count)
        return count + self.parallel.expire()

    def abort_session(self, session: Session) -> None:
        """Give up every put of a session that ended."""
        with self._lock:
            owned = list(self._by_session.get(session.session_id, ()))
        for ticket_id in owned:
            self.abort(session, ticket_id)
        self.parallel.end_session(session.session_id)

    def drain(self) -> None:
        """Refuse new puts from now on."""
        with self._lock:
            self._draining = True

    @property
    def is_draining(self) -> bool:
        """Whether puts are refused."""
        return self._draining

    def __len__(self) -> int:
        return len(self._tickets)


def _closed(session: Session) -> LeaseExpiredError:
    return LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")


def _found(check: FrameVerifier, view: Bytes, key: ChunkKey) -> FrameHeader:
    return check.finish()


def _copy_from(frame: Bytes, view: Bytes, key: ChunkKey) -> FrameHeader:
    return copy_frame(view, frame, key)


def check_put(header: FrameHeader, info: ChunkInfo, session: Session) -> None:
    """Refuse a frame that is not what was reserved, not an original of this session's model,
    or of a codec that could not move it to another tier.
    """
    codec_by_id(header.codec_id).check_header(header)
    if header.representation != session.representation_digest:
        raise InvalidRequestError(
            "representation", header.representation.hex(), "the frame is of another model's KV"
        )
    if (header.layout, header.parent) != (info.layout, info.parent):
        raise InvalidRequestError(
            "frame", header.key.hex(), "its layout or parent is not what was reserved"
        )
    if header.flags & FLAG_RESTORED or header.fidelity is not Fidelity.exact:
        raise InvalidRequestError(
            "fidelity", header.fidelity.name, "restored or lossy KV is never stored as an original"
        )
