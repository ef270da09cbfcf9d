"""Writes: a put reserves space, its caller writes the frame, and commit verifies it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
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
from kvstore.proto.types import Accuracy, ChunkInfo
from kvstore.server.security.sessions import Session
from kvstore.server.store.parallel_writes import ChunkPart, ParallelWrites, PartTicket
from kvstore.server.store.reservations import PutResult, PutTicket, Reservations

RESERVED_S = 120.0
"""A reservation made by a separate call is freed after this time."""

AnyTicket: TypeAlias = PutTicket | PartTicket
"""The put of a chunk, or of a part of one."""


class Writes:
    """Puts in progress. Thread-safe.

    The caller owns a ticket and commits or discards it. Tickets of ``begin_all`` are kept in a
    table, by session and id, until a later call claims them. *new_id* returns unpredictable numbers
    below 2^64. Parts of chunks go to *parallel*.
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
        self._limit = limit_per_session
        self._new_id = new_id
        self._clock = reservations.clock
        self._tickets: dict[int, dict[int, AnyTicket]] = {}
        # Guards the table; held for dictionary operations only.
        self._lock = threading.Lock()
        self.is_draining = False
        """Whether puts are refused."""

    def open(
        self,
        session: Session,
        info: ChunkInfo,
        deadline: float,
        hints: Hints = NO_HINTS,
        *,
        is_last: bool | None = True,
        part: ChunkPart | None = None,
    ) -> AnyTicket | PutResult:
        """Reserve space for the frame of a chunk, or of a *part* of it; or return the result of a
        put that needs no write. *is_last*: see ``Reservations.reserve``.

        Raises ShuttingDownError, QuotaExceededError, InvalidRequestError.
        """
        if self.is_draining:
            raise ShuttingDownError("the server is draining; no new puts")
        if part is None:
            return self._reservations.reserve(session, info, deadline, hints, is_last=is_last)
        return self.parallel.begin(PartTicket(session, info, part, hints, is_last), deadline)

    def begin_all(
        self,
        session: Session,
        infos: Sequence[ChunkInfo],
        deadline: float,
        hints: Hints = NO_HINTS,
        parts: Sequence[ChunkPart | None] | None = None,
    ) -> list[AnyTicket | PutResult]:
        """Begin a batch, to be claimed within RESERVED_S; if one put is invalid, begin none."""
        until = self._clock() + RESERVED_S
        begun: list[AnyTicket | PutResult] = []
        continued = {info.parent_key for info in infos}
        try:
            for info, part in zip(infos, parts or [None] * len(infos), strict=True):
                is_last = info.key not in continued
                ticket = self.open(session, info, deadline, hints, is_last=is_last, part=part)
                if not isinstance(ticket, PutResult):
                    self._own(ticket, until)
                begun.append(ticket)
        except KVStoreError:
            for result in begun:
                if not isinstance(result, PutResult):
                    self.abort(session, result.ticket_id)
            raise
        return begun

    def _own(self, ticket: AnyTicket, until: float) -> None:
        session = ticket.session
        ticket.ticket_id, ticket.until = self._new_id(), until
        with self._lock:
            # The end of the session aborted its puts; this one was not in the table yet.
            is_late = session.is_closed
            owned = {} if is_late else self._tickets.setdefault(session.session_id, {})
            if len(owned) < self._limit and not is_late:
                owned[ticket.ticket_id] = ticket
                return
        self.discard(ticket)
        if is_late:
            raise LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")
        name = "max_reservations_per_session"
        raise QuotaExceededError(name, self._limit, f"session {session.session_id}")

    def claim(self, session: Session, ticket_id: int) -> AnyTicket:
        """Remove a put from the table to finish it. Raises LeaseExpiredError."""
        with self._lock:
            ticket = self._tickets.get(session.session_id, {}).pop(ticket_id, None)
        if ticket is None:
            raise LeaseExpiredError(
                f"reservation_id={ticket_id}: spent, aborted or not this session's; reserve again"
            )
        return ticket

    def discard(self, ticket: AnyTicket) -> None:
        """Free the space of a put that the caller owns."""
        if isinstance(ticket, PutTicket):
            self._reservations.discard(ticket)
        else:
            self.parallel.discard(ticket)

    def abort(self, session: Session, ticket_id: int) -> bool:
        """Drop a put. Return whether the session had it."""
        try:
            ticket = self.claim(session, ticket_id)
        except LeaseExpiredError:
            return False
        self.discard(ticket)
        return True

    def commit(
        self,
        ticket: AnyTicket,
        check: FrameVerifier | None = None,
        *,
        frame: Bytes | None = None,
        is_last: bool = False,
    ) -> PutResult:
        """Verify the frame of a put that the caller owns and make it visible, or drop the put.

        The frame is in the ticket's buffer, verified by *check* as it was written if its writer
        cannot change it, or is copied there from *frame*. *is_last*: no chunk of the put continues
        it. Raises InvalidFrameError, ChunkCorruptError, UnknownCodecError, InvalidRequestError
        for frames that differ from the reservation; these are discarded.
        """
        if isinstance(ticket, PartTicket):
            return self.parallel.commit(ticket, ticket.buffer if frame is None else frame)
        if is_last:
            self._reservations.keep_state(ticket)
        info, buffer = ticket.info, ticket.buffer
        assert buffer is not None
        try:
            if check is not None:
                header = check.finish()
            elif frame is not None:
                header = copy_frame(buffer, frame, info.key)
            else:
                header = check_frame(buffer, info.key)
            check_put(header, info, ticket.session)
        except KVStoreError as error:
            self._reservations.reject(info.key, error)
            self._reservations.discard(ticket)
            raise
        return self._reservations.commit(ticket, header)

    def expire(self) -> None:
        """Free reservations that were not written in time."""
        count = self._abort_until(self._clock()) + self.parallel.expire()
        self._reservations.counters.add("dropped_unfinished_chunks", count)

    def _abort_until(self, until: float) -> int:
        with self._lock:
            owned = [one for tickets in self._tickets.values() for one in tickets.values()]
        late = [one for one in owned if one.until <= until]
        return sum(self.abort(one.session, one.ticket_id) for one in late)

    def abort_session(self, session: Session) -> None:
        """Drop every put of a session that ended."""
        with self._lock:
            owned = self._tickets.pop(session.session_id, {})
        for ticket in owned.values():
            self.discard(ticket)
        self.parallel.end_session(session.session_id)

    def close(self) -> None:
        """Drop all puts in progress, refuse new ones; no space on the tiers stays reserved."""
        self.is_draining = True
        self._abort_until(math.inf)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._tickets.values()))


def check_put(header: FrameHeader, info: ChunkInfo, session: Session) -> None:
    """Refuse a frame that differs from its reservation, is not an original of this session's
    model, or has a codec that cannot move it to another tier.
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
    if header.flags & FLAG_RESTORED or header.accuracy is not Accuracy.exact:
        raise InvalidRequestError(
            "accuracy", header.accuracy.name, "restored or lossy KV is never stored as an original"
        )
