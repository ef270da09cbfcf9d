"""Reservations: memory for chunks that are put, and the commit of complete frames."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import KVStoreError, TierFullError
from kvstore.proto.frame import FrameHeader, FrameWriter
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey, KVLayout, LayerKind, PutOutcome
from kvstore.server.index.hints import PutInfo
from kvstore.server.security.sessions import Session
from kvstore.server.telemetry.events import Fate
from kvstore.server.tiering.admission import StateAdmission, Trigger
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.tiers.base import Reservation

WITHOUT_STATE = "stored without its state: no prompt ended or branched here (--state-admission)"
_TRIM_S = 1.0
"""Longest wait for the smaller buffer of a trimmed chunk."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of one chunk of a put; ``reason`` is set when it was not stored."""

    outcome: PutOutcome
    reason: str = ""


@dataclass(slots=True, eq=False)
class PutTicket:
    """A chunk that is being put, and its space on ``slot``; owned by a session.

    A later call names it by ``ticket_id``, before ``until``; 0 if no later call is needed.
    """

    session: Session
    info: ChunkInfo
    slot: TierSlot
    reservation: Reservation
    hints: Hints
    buffer: Bytes | None
    """Where its frame is written; None on a device."""
    kept_layout: KVLayout | None = None
    """What is stored if its state was not admitted; None: all of it."""
    partition: int | None = None
    """Quota partition that its space counts against while pending; None: not counted."""
    ticket_id: int = 0
    until: float = math.inf


class Reservations:
    """Space for chunks that are put; a reserved chunk is pending. Thread-safe.

    *headroom_percent* of CPU memory is reserved for loads. *states* decides which recurrent states
    are stored; None: all of them.
    """

    def __init__(
        self, moves: Moves, headroom_percent: int, states: StateAdmission | None = None
    ) -> None:
        self._moves = moves
        self._states = states
        self._catalog = moves.catalog
        self.counters = moves.counters
        self.clock = moves.clock
        self.on_existing: list[Callable[[ChunkKey], None]] = []
        """Called with each chunk of a put that already exists."""
        self._cpu, self._cpu_tier = moves.tiers.cpu, moves.tiers.cpu_tier
        cpu = self._cpu_tier
        wanted_bytes = cpu.capacity_bytes * headroom_percent // 100
        self._headroom_bytes = min(wanted_bytes, cpu.capacity_bytes - cpu.slab_bytes)

    def reserve(
        self,
        session: Session,
        info: ChunkInfo,
        deadline: float,
        hints: Hints = NO_HINTS,
        *,
        is_last: bool | None = True,
        device: TierSlot | None = None,
    ) -> PutTicket | PutResult:
        """Reserve space for a frame in CPU memory, or on *device*, which stores chunks exactly; or
        return the result of a put that needs no write. *is_last*: no chunk of the put continues
        this one; None: not known yet.

        The chunk is pending until ``commit`` or ``discard``. Raises QuotaExceededError,
        InvalidRequestError.
        """
        eviction, catalog = self._moves.eviction, self._catalog
        slot, key, kept, bare = device or self._cpu, info.key, info, None
        if device is None and self._states is not None and info.layout.has(LayerKind.state):
            bare = self._layout_to_keep(info, self._states, is_last=is_last)
            kept = info if bare is None else replace(info, layout=bare)
        if not catalog.in_flight.begin(key, kept.layout):
            note = "" if bare is None else WITHOUT_STATE
            if (answer := self._begin_anew(kept, hints, note)) is not None:
                return answer
        headroom_bytes = 0 if device else self._headroom_bytes
        request = SpaceRequest(
            info, session.tenant, deadline, headroom_bytes, hints.category, is_original=True
        )
        try:
            reserved = eviction.reserve(slot, request)
        except KVStoreError as error:
            catalog.in_flight.end(key)
            if isinstance(error, TierFullError):
                return self.refuse(key, str(error))
            catalog.outcomes.note(key, Fate.refused, detail=str(error))
            raise
        view = None if device else self._cpu_tier.view(reserved)
        ticket = PutTicket(session, info, slot, reserved, hints, view, bare)
        if device is None and slot.has_quotas:
            ticket.partition = eviction.partition(request)
            eviction.count_awaited(ticket.partition, info.size_bytes, 1)
        return ticket

    def _begin_anew(self, kept: ChunkInfo, hints: Hints, note: str) -> PutResult | None:
        """Begin the put of a chunk that exists if it may be replaced; else return the result."""
        key, catalog, peers = kept.key, self._catalog, self._moves.tiers.remote
        if catalog.is_less_complete(key, kept.layout) and not self._moves.eviction.replace(kept):
            return self.refuse(key, "a copy without its checkpoint is being read")
        # A copy in the memory of a peer does not prevent a put here.
        far = "" if peers is None else peers.name
        if catalog.holders(key) == [far] and catalog.drop_copy(far, key, even_if_held=False):
            catalog.purged(far, key)
        if catalog.in_flight.begin(key, kept.layout, self._away()):
            return None
        self.counters.add("put_existing_chunks")
        self._hint(key, hints)
        for listener in self.on_existing:
            listener(key)
        return PutResult(PutOutcome.exists, note)

    def _layout_to_keep(
        self, info: ChunkInfo, states: StateAdmission, *, is_last: bool | None
    ) -> KVLayout | None:
        """Return the layout to store when the state is not admitted; None: all of it."""
        bare = without_state(info.layout)
        if bare is None or not self._catalog.is_less_complete(info.key, info.layout, absent=True):
            return None
        # A chunk that is known without its state is put a second time.
        if is_last is None:
            is_last = self._catalog.is_less_complete(info.key, info.layout)
        return None if states.admits(info.key, is_end=is_last) else bare

    def keep_state(self, ticket: PutTicket) -> None:
        """Store the state after all: no chunk of the put continues this one."""
        if ticket.kept_layout is not None and self._states is not None:
            ticket.kept_layout = None
            self._states.forget(ticket.info.key)

    def has(self, key: ChunkKey) -> bool:
        """Whether an exact copy of the chunk exists, on a tier that can be read."""
        return not self._away().issuperset(self._catalog.holders(key, Accuracy.exact))

    def _away(self) -> set[str]:
        """Return the tiers whose breaker is open: lookups pass over their copies."""
        return {one.name for one in self._moves.tiers.slots.values() if one.breaker.is_open}

    def refuse(self, key: ChunkKey, reason: str) -> PutResult:
        """Count and record a refused chunk; return the result."""
        self.counters.add("put_refused_chunks")
        self._catalog.outcomes.note(key, Fate.refused, detail=reason)
        return PutResult(PutOutcome.refused, reason)

    def reject(self, key: ChunkKey, error: KVStoreError) -> None:
        """Count and record an invalid frame."""
        self.counters.add("put_invalid_chunks")
        self._catalog.outcomes.note(key, Fate.invalid, detail=str(error))

    def discard(self, ticket: PutTicket) -> None:
        """Free space that is no longer written to."""
        self.keep_state(ticket)
        self._uncount(ticket)
        ticket.slot.tier.abort(ticket.reservation)
        self._catalog.in_flight.end(ticket.info.key)

    def commit(self, ticket: PutTicket, header: FrameHeader) -> PutResult:
        """Make a verified frame visible, and queue its copies to lower tiers."""
        if ticket.kept_layout is not None and not header.levels:
            return self._commit_trimmed(ticket, header, ticket.kept_layout)
        moves, catalog, slot, key = self._moves, self._catalog, ticket.slot, ticket.info.key
        if ticket.partition is not None:
            self._uncount(ticket)
        try:
            sealed = slot.tier.seal(ticket.reservation)
            if sealed:
                hints, tenant = ticket.hints, ticket.session.tenant
                put_info = PutInfo(tenant, hints, header.content, header.position)
                catalog.note_sealed(slot.name, header.info(), put_info)
                if hints is not NO_HINTS:
                    self._hint(key, hints)
        finally:
            catalog.in_flight.end(key)
        if not sealed:
            self.counters.add("put_existing_chunks")
            return PutResult(PutOutcome.exists)
        self.counters.add("put_stored_chunks")
        self.counters.add("put_bytes", ticket.info.size_bytes)
        if slot.has_quotas:
            moves.eviction.settle_quota(slot, key)
        for lower in moves.tiers.lower:
            if moves.placement.admits(lower, key, Trigger.stored) and (
                lower.breaker.is_open or moves.copy_to(key, lower) is None
            ):
                moves.placement.note_write(lower.name, key)
                self.counters.add("skipped_copies")
        return PutResult(PutOutcome.stored)

    def _uncount(self, ticket: PutTicket) -> None:
        if ticket.partition is not None:
            size_bytes = ticket.info.size_bytes
            self._moves.eviction.count_awaited(ticket.partition, -size_bytes, -1)
            ticket.partition = None

    def _commit_trimmed(
        self, ticket: PutTicket, header: FrameHeader, layout: KVLayout
    ) -> PutResult:
        """Commit a frame without its state, which was not admitted, in a buffer of its size."""
        cpu, tenant = self._cpu_tier, ticket.session.tenant
        ticket.kept_layout = None
        self._uncount(ticket)
        try:
            try:
                fresh, frame = trimmed(header, cpu.view(ticket.reservation), layout)
            finally:
                cpu.abort(ticket.reservation)
            ticket.info, deadline = fresh.info(), self.clock() + _TRIM_S
            request = SpaceRequest(
                ticket.info, tenant, deadline, self._headroom_bytes, ticket.hints.category,
                is_original=True,
            )  # fmt: skip
            ticket.reservation = self._moves.eviction.reserve(self._cpu, request)
        except KVStoreError as error:
            self._catalog.in_flight.end(ticket.info.key)
            return self.refuse(ticket.info.key, str(error))
        copy_bytes(cpu.view(ticket.reservation), frame)
        self.counters.add("put_states_left_out")
        result = self.commit(ticket, fresh)
        is_stored = result.outcome is PutOutcome.stored
        return replace(result, reason=WITHOUT_STATE) if is_stored else result

    def _hint(self, key: ChunkKey, hints: Hints) -> None:
        if hints != NO_HINTS:
            self.counters.add("ignored_pins", self._catalog.hint([key], hints))


def without_state(layout: KVLayout) -> KVLayout | None:
    """Return *layout* without its states; None when it has none, or nothing else.

    A chunk of states only is stored whole: a gap makes the rest of the chain useless.
    """
    kept = tuple(one for one in layout.components if one.kind is not LayerKind.state)
    return KVLayout(kept) if 0 < len(kept) < len(layout.components) else None


def trimmed(header: FrameHeader, frame: Bytes, layout: KVLayout) -> tuple[FrameHeader, Bytes]:
    """Return a verified *frame* of one level with the components of *layout* only.

    Segments are copied as they are, with their checksums: nothing is decoded.
    """
    out = np.empty(header.frame_bytes, np.uint8)
    writer = FrameWriter(replace(header, layout=layout), out)
    kept = [one.kind is not LayerKind.state for one in header.layout.components]
    for index, row in enumerate(header.segments):
        if kept[row["component"]]:
            data = header.segment(frame, index)
            copy_bytes(writer.reserve(len(data)), data)
            writer.commit(len(data), int(row["checksum"]))
    fresh = writer.finish(
        header.codec_id, header.codec_revision, header.accuracy, header.error_bound, header.asset
    )
    return fresh, out[: fresh.frame_bytes]
