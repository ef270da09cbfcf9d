"""Intake: chunks on their way in. Reserved, written by the caller, verified, then visible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.codecs.base import codec_by_id
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    TierFullError,
)
from kvstore.proto.frame import FLAG_RESTORED, FrameHeader, check_frame, copy_frame
from kvstore.proto.hints import NO_HINTS, Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, PutOutcome
from kvstore.server.knowledge import Origin
from kvstore.server.policy.admission import Moment
from kvstore.server.sessions import Session
from kvstore.server.shelf import Room
from kvstore.server.transfer import Transfers
from kvstore.tiers.base import Reservation


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one chunk of a put; ``reason`` says why when it was not stored."""

    outcome: PutOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PutTicket:
    """Room in CPU memory for a chunk that is being put; owned by a session."""

    ticket_id: int
    session: Session
    reservation: Reservation
    hints: Hints = NO_HINTS


class Intake:
    """Puts at work, by ticket, each owned by a session. Thread-safe.

    *new_id* returns unpredictable numbers below 2^64. ``headroom_bytes`` of CPU memory are
    kept for loads: stores give way to them.
    """

    def __init__(
        self,
        transfers: Transfers,
        limit_per_session: int,
        headroom_percent: int,
        new_id: Callable[[], int],
    ) -> None:
        self._transfers = transfers
        self._catalog = transfers.catalog
        self._counters = transfers.counters
        self._limit = limit_per_session
        self._new_id = new_id
        cpu = transfers.cpu_tier
        wanted_bytes = cpu.capacity_bytes * headroom_percent // 100
        self._headroom_bytes = min(wanted_bytes, cpu.capacity_bytes - cpu.slab_bytes)
        self._tickets: dict[int, PutTicket] = {}
        self._by_session: dict[int, set[int]] = {}
        self._draining = False
        # Guards the three fields above; held for dictionary operations only.
        self._lock = threading.Lock()

    def begin(
        self, session: Session, info: ChunkInfo, deadline: float, hints: Hints = NO_HINTS
    ) -> PutTicket | PutResult:
        """Reserve room for a frame, or say why there is nothing to write.

        Raises ShuttingDownError, QuotaExceededError, InvalidRequestError.
        """
        if self._draining:
            raise ShuttingDownError("the server drains; no new puts")
        if not self._catalog.begin_put(info.key):
            self._counters.add("put_existing_chunks")
            self._hint(info.key, hints)
            return PutResult(PutOutcome.exists)
        try:
            room = Room(info, session.tenant, deadline, self._headroom_bytes, hints.category)
            reservation = self._transfers.reserve_for_put(room)
        except TierFullError as error:
            self._catalog.end_put(info.key)
            self._counters.add("put_refused_chunks")
            return PutResult(PutOutcome.refused, str(error))
        except KVStoreError:
            self._catalog.end_put(info.key)
            raise
        ticket = PutTicket(self._new_id(), session, reservation, hints)
        try:
            self._own(ticket)
        except (QuotaExceededError, LeaseExpiredError):
            self.discard(ticket)
            raise
        return ticket

    def _hint(self, key: ChunkKey, hints: Hints) -> None:
        if hints != NO_HINTS:
            self._counters.add("ignored_pins", self._catalog.hint([key], hints))

    def begin_all(
        self,
        session: Session,
        infos: Sequence[ChunkInfo],
        deadline: float,
        hints: Hints = NO_HINTS,
    ) -> list[PutTicket | PutResult]:
        """Begin a batch; all of its room is given back when one of it is invalid."""
        begun: list[PutTicket | PutResult] = []
        try:
            for info in infos:
                begun.append(self.begin(session, info, deadline, hints))  # noqa: PERF401
        except KVStoreError:
            for result in begun:
                if isinstance(result, PutTicket):
                    self.abort(session, result.ticket_id)
            raise
        return begun

    def _own(self, ticket: PutTicket) -> None:
        limit = self._limit
        session_id = ticket.session.session_id
        with self._lock:
            if ticket.session.is_closed:
                # Its puts were already aborted; this one came too late for that.
                raise LeaseExpiredError(f"session_id={session_id}: closed; open a session")
            owned = self._by_session.setdefault(session_id, set())
            if len(owned) >= limit:
                raise QuotaExceededError(
                    "max_reservations_per_session", limit, f"session {session_id}"
                )
            owned.add(ticket.ticket_id)
            self._tickets[ticket.ticket_id] = ticket

    def view(self, ticket: PutTicket) -> Bytes:
        """Return the reserved memory to write the frame into."""
        return self._transfers.cpu_tier.view(ticket.reservation)

    def claim(self, session: Session, ticket_id: int) -> PutTicket:
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

    def _disown(self, ticket: PutTicket) -> None:
        del self._tickets[ticket.ticket_id]
        owned = self._by_session[ticket.session.session_id]
        owned.discard(ticket.ticket_id)
        if not owned:
            del self._by_session[ticket.session.session_id]

    def discard(self, ticket: PutTicket) -> None:
        """Give back the room of a claimed put."""
        self._transfers.cpu_tier.abort(ticket.reservation)
        self._catalog.end_put(ticket.reservation.info.key)

    def abort(self, session: Session, ticket_id: int) -> bool:
        """Give up a put. Return whether the session had it."""
        try:
            ticket = self.claim(session, ticket_id)
        except LeaseExpiredError:
            return False
        self.discard(ticket)
        return True

    def commit(self, ticket: PutTicket) -> PutResult:
        """Verify what was written into a claimed put and make it visible, or abort it.

        Raises InvalidFrameError, ChunkCorruptError, UnknownCodecError, InvalidRequestError
        for frames that are not what was reserved; nothing of them stays.
        """
        return self._finish(ticket, check_frame)

    def _finish(
        self, ticket: PutTicket, receive: Callable[[Bytes, ChunkKey], FrameHeader]
    ) -> PutResult:
        info = ticket.reservation.info
        try:
            header = receive(self.view(ticket), info.key)
            _check_put(header, info, ticket.session)
        except KVStoreError:
            self._counters.add("put_invalid_chunks")
            self.discard(ticket)
            raise
        sealed = self._transfers.cpu_tier.seal(ticket.reservation)
        if sealed:
            origin = Origin(ticket.session.tenant, ticket.hints)
            self._catalog.note_sealed(self._transfers.cpu.name, header.info(), origin)
            self._hint(info.key, ticket.hints)
        self._catalog.end_put(info.key)
        if not sealed:
            self._counters.add("put_existing_chunks")
            return PutResult(PutOutcome.exists)
        self._counters.add("put_stored_chunks")
        self._counters.add("put_bytes", info.size_bytes)
        self._transfers.settle_quota(self._transfers.cpu, info.key)
        self._copy_through(info.key)
        return PutResult(PutOutcome.stored)

    def _copy_through(self, key: ChunkKey) -> None:
        for shelf in self._transfers.lower_shelves():
            if not self._transfers.placement.admits(shelf, key, Moment.stored):
                continue
            if shelf.breaker.is_open or self._transfers.copy_down(key, shelf) is None:
                self._counters.add("skipped_copies")

    def ingest(self, tickets: Sequence[PutTicket], frames: Sequence[Bytes]) -> list[PutResult]:
        """Copy frames into claimed puts and commit them, in order.

        At the first bad frame its error is raised and the rest is aborted.
        """
        results: list[PutResult] = []
        try:
            for ticket, frame in zip(tickets, frames, strict=True):
                receive = partial(_copy_from, frame)
                results.append(self._finish(ticket, receive))
        except KVStoreError:
            for ticket in tickets[len(results) + 1 :]:
                self.discard(ticket)
            raise
        return results

    def abort_session(self, session: Session) -> None:
        """Give up every put of a session that ended."""
        with self._lock:
            owned = list(self._by_session.get(session.session_id, ()))
        for ticket_id in owned:
            self.abort(session, ticket_id)

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


def _copy_from(frame: Bytes, view: Bytes, key: ChunkKey) -> FrameHeader:
    return copy_frame(view, frame, key)


def _check_put(header: FrameHeader, info: ChunkInfo, session: Session) -> None:
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
