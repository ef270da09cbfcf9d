"""Reservations: room in memory for what is put, and the commit of a frame that is whole there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import KVStoreError, TierFullError
from kvstore.proto.frame import FrameHeader, FrameTemplate, FrameWriter
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, KVLayout, LayerKind, PutOutcome
from kvstore.server.index.hints import PutInfo
from kvstore.server.security.sessions import Session
from kvstore.server.telemetry.outcomes import Fate
from kvstore.server.tiering.admission import StateAdmission, Trigger
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.tiers.base import Reservation

WITHOUT_STATE = "kept without its state: no prompt ended or parted here (--state-admission)"
_TRIM_S = 1.0
"""What a chunk that gave its room back waits at most for the smaller one."""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one chunk of a put; ``reason`` says why when it was not stored."""

    outcome: PutOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PutOptions:
    """What a writer states of a chunk.

    ``is_last``: nothing of the put continues it; None: not known yet.
    """

    hints: Hints = NO_HINTS
    is_last: bool | None = True


NO_OPTIONS = PutOptions()


@dataclass(slots=True, eq=False)
class PutTicket:
    """A chunk that is being put, and its room on ``slot``; owned by a session.

    A later call names it by ``ticket_id``, before ``until``; of one that needs none that is 0.
    """

    session: Session
    slot: TierSlot
    reservation: Reservation
    hints: Hints
    room: Bytes | None
    """Where its frame is written; None on a device."""
    kept_layout: KVLayout | None = None
    """What is kept of it, where its state was turned away; None: all of it."""
    partition: int | None = None
    """Whose its room counts as, until it is filled or given back; None: it is not counted."""
    ticket_id: int = 0
    until: float = math.inf

    @property
    def key(self) -> ChunkKey:
        """The chunk's name."""
        return self.reservation.info.key

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that is to come."""
        return self.reservation.info.size_bytes


class Reservations:
    """Room for chunks that are put, which are pending from then on. Thread-safe.

    *headroom_percent* of CPU memory are kept for loads. *states* says which recurrent states are
    kept; None: all of them.
    """

    def __init__(
        self, moves: Moves, headroom_percent: int, states: StateAdmission | None = None
    ) -> None:
        self._moves = moves
        self._states = states
        self._catalog = moves.catalog
        self._counters = moves.counters
        self._lower = moves.tiers.lower
        self.on_existing: list[Callable[[ChunkKey], None]] = []
        """Called with each chunk that was put and is here."""
        cpu = moves.tiers.cpu_tier
        wanted_bytes = cpu.capacity_bytes * headroom_percent // 100
        self._headroom_bytes = min(wanted_bytes, cpu.capacity_bytes - cpu.slab_bytes)

    def reserve(
        self, session: Session, info: ChunkInfo, deadline: float, options: PutOptions
    ) -> PutTicket | PutResult:
        """Take room in CPU memory for a frame, or say why there is nothing to write.

        From then on the chunk is pending, until ``commit`` or ``discard``. Raises
        QuotaExceededError, InvalidRequestError.
        """
        moves, hints, bare = self._moves, options.hints, None
        if self._states is not None and info.layout.has(LayerKind.state):
            bare = self._layout_to_keep(info, options, self._states)
        kept = info if bare is None else replace(info, layout=bare)
        room = SpaceRequest(info, session.tenant, deadline, self._headroom_bytes, hints.category)
        reserved = self._begin(moves.tiers.cpu, kept, room, hints)
        if isinstance(reserved, PutResult):
            return reserved
        partition = self._catalog.eviction.partition(info.key, session.tenant, hints.category)
        moves.eviction.reserved.add(partition, info.size_bytes, 1)
        view = moves.tiers.cpu_tier.view(reserved)
        return PutTicket(session, moves.tiers.cpu, reserved, hints, view, bare, partition)

    def reserve_on(
        self, slot: TierSlot, session: Session, info: ChunkInfo, deadline: float, hints: Hints
    ) -> PutTicket | PutResult:
        """The same in the memory of a device, which keeps chunks as they are."""
        if self._states is not None and info.layout.has(LayerKind.state):
            return self.refuse(info.key, "whether its state is kept is judged in CPU memory")
        most_bytes = slot.tier.max_frame_bytes()
        if info.size_bytes > most_bytes:
            return self.refuse(info.key, f"tier {slot.name!r} takes {most_bytes} at most")
        room = SpaceRequest(info, session.tenant, deadline, category=hints.category)
        reserved = self._begin(slot, info, room, hints)
        if isinstance(reserved, PutResult):
            return reserved
        return PutTicket(session, slot, reserved, hints, None)

    def _begin(
        self, slot: TierSlot, kept: ChunkInfo, room: SpaceRequest, hints: Hints
    ) -> Reservation | PutResult:
        """Make the chunk pending, and reserve; or say why there is nothing to write."""
        key, in_flight = kept.key, self._catalog.in_flight
        if not in_flight.begin(key, kept.layout):
            note = "" if kept is room.info else WITHOUT_STATE
            if (answer := self._begin_anew(kept, hints, note)) is not None:
                return answer
        try:
            return self._moves.eviction.reserve_for_put(slot, room)
        except KVStoreError as error:
            in_flight.end(key)
            if isinstance(error, TierFullError):
                return self.refuse(key, str(error))
            self._catalog.outcomes.note(key, Fate.refused, detail=str(error))
            raise

    def _begin_anew(self, kept: ChunkInfo, hints: Hints, note: str) -> PutResult | None:
        """Begin a chunk that is here, where that is no reason not to; else say why it is."""
        key, catalog, peers = kept.key, self._catalog, self._moves.tiers.remote
        if catalog.is_less_complete(key, kept.layout) and not self._moves.eviction.replace(kept):
            return self.refuse(key, "somebody reads it as it is, without its checkpoint")
        # What only another server has in its memory may be put here all the same.
        far = "" if peers is None else peers.name
        if catalog.holders(key) == [far] and catalog.cast_out(far, key, even_if_held=False):
            catalog.purged(far, key)
        if catalog.in_flight.begin(key, kept.layout):
            return None
        self._counters.add("put_existing_chunks")
        self._hint(key, hints)
        for listener in self.on_existing:
            listener(key)
        return PutResult(PutOutcome.exists, note)

    def _layout_to_keep(
        self, info: ChunkInfo, options: PutOptions, states: StateAdmission
    ) -> KVLayout | None:
        """Return what is kept of a chunk whose state is not worth it; None: all of it."""
        bare = without_state(info.layout)
        if bare is None or not self._catalog.is_less_complete(info.key, info.layout, absent=True):
            return None
        # A chunk that is known, and whose end is not, is wanted a second time.
        is_last = options.is_last is None and self._catalog.is_less_complete(info.key, info.layout)
        return None if states.admits(info.key, is_end=bool(options.is_last or is_last)) else bare

    def keep_state(self, ticket: PutTicket) -> None:
        """Keep the state after all: nothing of the put continues the chunk."""
        if ticket.kept_layout is not None and self._states is not None:
            ticket.kept_layout = None
            self._states.forget(ticket.key)

    def has(self, key: ChunkKey) -> bool:
        """Whether an exact copy of the chunk is there."""
        return bool(self._catalog.holders(key, Fidelity.exact))

    def refuse(self, key: ChunkKey, reason: str) -> PutResult:
        """Count and record that a chunk is not taken; return the answer."""
        self._counters.add("put_refused_chunks")
        self._catalog.outcomes.note(key, Fate.refused, detail=reason)
        return PutResult(PutOutcome.refused, reason)

    def reject(self, key: ChunkKey, error: KVStoreError) -> None:
        """Count and record a frame that is not what it should be."""
        self._counters.add("put_invalid_chunks")
        self._catalog.outcomes.note(key, Fate.invalid, detail=str(error))

    def discard(self, ticket: PutTicket) -> None:
        """Free room that nothing is written into any more."""
        self.keep_state(ticket)
        self._uncount(ticket)
        ticket.slot.tier.abort(ticket.reservation)
        self._catalog.in_flight.end(ticket.key)

    def _uncount(self, ticket: PutTicket) -> None:
        if ticket.partition is not None:
            self._moves.eviction.reserved.add(ticket.partition, -ticket.frame_bytes, -1)
            ticket.partition = None

    def commit(self, ticket: PutTicket, header: FrameHeader) -> PutResult:
        """Make a verified frame visible, and have it copied on."""
        if ticket.kept_layout is not None and not header.levels:
            return self._commit_trimmed(ticket, header, ticket.kept_layout)
        moves, slot, info = self._moves, ticket.slot, ticket.reservation.info
        key = info.key
        self._uncount(ticket)
        try:
            sealed = slot.tier.seal(ticket.reservation)
            if sealed:
                hints = ticket.hints
                put_info = PutInfo(ticket.session.tenant, hints, header.content, header.position)
                self._catalog.note_sealed(slot.name, header.info(), put_info)
                if hints is not NO_HINTS:
                    self._hint(key, hints)
        finally:
            self._catalog.in_flight.end(key)
        if not sealed:
            self._counters.add("put_existing_chunks")
            return PutResult(PutOutcome.exists)
        self._counters.add("put_stored_chunks")
        self._counters.add("put_bytes", info.size_bytes)
        moves.eviction.settle_quota(slot, key)
        for lower in self._lower:
            if moves.placement.admits(lower, key, Trigger.stored) and (
                lower.breaker.is_open or moves.copy_down(key, lower) is None
            ):
                moves.placement.cancelled(lower.name, key)
                self._counters.add("skipped_copies")
        return PutResult(PutOutcome.stored)

    def _commit_trimmed(
        self, ticket: PutTicket, header: FrameHeader, layout: KVLayout
    ) -> PutResult:
        """The same of what is kept of a frame whose state was turned away, in room of its size."""
        moves, cpu = self._moves, self._moves.tiers.cpu_tier
        ticket.kept_layout = None
        self._uncount(ticket)
        try:
            try:
                fresh, frame = trimmed(header, cpu.view(ticket.reservation), layout)
            finally:
                cpu.abort(ticket.reservation)
            room = SpaceRequest(
                fresh.info(), ticket.session.tenant, moves.clock() + _TRIM_S,
                self._headroom_bytes, ticket.hints.category,
            )  # fmt: skip
            ticket.reservation = moves.eviction.reserve_for_put(moves.tiers.cpu, room)
        except KVStoreError as error:
            self._catalog.in_flight.end(ticket.key)
            return self.refuse(ticket.key, str(error))
        copy_bytes(cpu.view(ticket.reservation), frame)
        self._counters.add("put_states_left_out")
        result = self.commit(ticket, fresh)
        is_stored = result.outcome is PutOutcome.stored
        return replace(result, reason=WITHOUT_STATE) if is_stored else result

    def _hint(self, key: ChunkKey, hints: Hints) -> None:
        if hints != NO_HINTS:
            self._counters.add("ignored_pins", self._catalog.hint([key], hints))


def without_state(layout: KVLayout) -> KVLayout | None:
    """Return *layout* without its states; None when it has none, or nothing else.

    A chunk of nothing but states is kept whole: a chain with a gap is of no use behind it.
    """
    kept = tuple(one for one in layout.components if one.kind is not LayerKind.state)
    return KVLayout(kept) if 0 < len(kept) < len(layout.components) else None


def trimmed(header: FrameHeader, frame: Bytes, layout: KVLayout) -> tuple[FrameHeader, Bytes]:
    """Return a verified *frame* of one level with the components of *layout* only.

    Segments are copied as they are, with their checksums: nothing is decoded.
    """
    out = np.empty(header.frame_bytes, np.uint8)
    writer = FrameWriter(replace(FrameTemplate.of(header), layout=layout), out)
    kept = [one.kind is not LayerKind.state for one in header.layout.components]
    for index, row in enumerate(header.segments):
        if kept[row["component"]]:
            data = header.segment(frame, index)
            copy_bytes(writer.reserve(len(data)), data)
            writer.commit(len(data), int(row["checksum"]))
    fresh = writer.finish(
        header.codec_id, header.codec_revision, header.fidelity, header.error_bound, header.asset
    )
    return fresh, out[: fresh.frame_bytes]
