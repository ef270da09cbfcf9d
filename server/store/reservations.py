"""Reservations: room in memory for what is put, and what follows when a frame there is whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import KVStoreError, TierFullError
from kvstore.proto.frame import FrameHeader, FrameTemplate, FrameWriter
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, KVLayout, LayerKind, PutOutcome
from kvstore.server.index.chunk_metadata import PutInfo
from kvstore.server.security.sessions import Session
from kvstore.server.telemetry.outcomes import Fate
from kvstore.server.tiering.admission import Trigger
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.refill import Refill
from kvstore.server.tiering.state_admission import StateAdmission
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


class Reservations:
    """Where puts land. Thread-safe.

    ``headroom_percent`` of CPU memory are kept for loads: stores give way to them. *states* says
    which recurrent states are kept; None: all of them.
    """

    def __init__(
        self,
        moves: Moves,
        headroom_percent: int,
        states: StateAdmission | None = None,
    ) -> None:
        self._moves = moves
        self._states = states
        # By the id of its reservation, what is kept of a chunk whose state was turned away.
        # Single operations on a dictionary: no lock.
        self._bare: dict[int, KVLayout] = {}
        self._catalog = moves.catalog
        self._reserved = moves.eviction.reserved
        shared = [slot for slot in moves.tiers.lower if slot.tier.shared]
        self._refills = [Refill(moves, slot) for slot in shared]
        self.counters = moves.counters
        self.clock = moves.clock
        cpu = moves.tiers.cpu_tier
        wanted_bytes = cpu.capacity_bytes * headroom_percent // 100
        self._headroom_bytes = min(wanted_bytes, cpu.capacity_bytes - cpu.slab_bytes)

    def tick(self) -> None:
        """Check what shared tiers may have lost. Called a few times a second."""
        for refill in self._refills:
            refill.tick()

    def reserve(
        self, session: Session, info: ChunkInfo, deadline: float, options: PutOptions
    ) -> Reservation | PutResult:
        """Take room for a frame, or say why there is nothing to write.

        From then on the chunk is pending, until ``seal`` or ``give_back``. Raises
        QuotaExceededError, InvalidRequestError.
        """
        bare = self._bare_layout(info, options)
        kept = info if bare is None else replace(info, layout=bare)
        answer = self._begin(kept, options.hints, "" if bare is None else WITHOUT_STATE)
        if answer is not None:
            return answer
        category = options.hints.category
        room = SpaceRequest(info, session.tenant, deadline, self._headroom_bytes, category)
        reserved = self._reserve(self._moves.tiers.cpu, room)
        if isinstance(reserved, Reservation):
            partition = self._catalog.eviction.partition(info.key, session.tenant, category)
            self._reserved.note(reserved, partition)
            if bare is not None:
                self._bare[id(reserved)] = bare
        return reserved

    def reserve_on(
        self, slot: TierSlot, session: Session, info: ChunkInfo, deadline: float, hints: Hints
    ) -> Reservation | PutResult:
        """The same on another slot of memory, for ``seal_on`` or ``give_back_on``."""
        if self._states is not None and info.layout.has(LayerKind.state):
            return self._refused(info.key, "whether its state is kept is judged in CPU memory")
        most_bytes = slot.tier.max_frame_bytes()
        if info.size_bytes > most_bytes:
            return self._refused(info.key, f"tier {slot.name!r} takes {most_bytes} at most")
        answer = self._begin(info, hints)
        if answer is not None:
            return answer
        room = SpaceRequest(info, session.tenant, deadline, category=hints.category)
        return self._reserve(slot, room)

    def _begin(self, kept: ChunkInfo, hints: Hints, note: str = "") -> PutResult | None:
        """Make the chunk pending; or say why there is nothing to write."""
        key = kept.key
        is_old = self._catalog.is_less_complete(key, kept.layout)
        if is_old and not self._moves.eviction.replace(kept):
            return self._refused(key, "somebody reads it as it is, without its checkpoint")
        self._forget_hearsay(key)
        if not self._catalog.in_flight.begin(key):
            self.counters.add("put_existing_chunks")
            self._hint(key, hints)
            for refill in self._refills:
                refill.put_again(key)
            return PutResult(PutOutcome.exists, note)
        return None

    def _reserve(self, slot: TierSlot, room: SpaceRequest) -> Reservation | PutResult:
        key = room.info.key
        try:
            return self._moves.eviction.reserve_for_put(slot, room)
        except TierFullError as error:
            self._catalog.in_flight.end(key)
            return self._refused(key, str(error))
        except KVStoreError as error:
            self._catalog.in_flight.end(key)
            self.record_refused(key, str(error))
            raise

    def _refused(self, key: ChunkKey, reason: str) -> PutResult:
        self.counters.add("put_refused_chunks")
        self.record_refused(key, reason)
        return PutResult(PutOutcome.refused, reason)

    def _forget_hearsay(self, key: ChunkKey) -> None:
        """What only another server has in its memory may be put here all the same."""
        peers = self._moves.tiers.remote
        if peers is None or self._catalog.holders(key) != [peers.name]:
            return
        if self._catalog.cast_out(peers.name, key, even_if_held=False):
            self._catalog.purged(peers.name, key)

    def _bare_layout(self, info: ChunkInfo, options: PutOptions) -> KVLayout | None:
        """Return what is kept of a chunk whose state is not worth it; None: all of it."""
        if self._states is None or not info.layout.has(LayerKind.state):
            return None
        bare = without_state(info.layout)
        if bare is None or not self._catalog.is_absent_or_less_complete(info.key, info.layout):
            return None
        # Of a chunk that is known, and whose end is not, somebody asks a second time.
        is_last = options.is_last is None and self._catalog.is_less_complete(info.key, info.layout)
        admitted = self._states.admits(info.key, is_end=bool(options.is_last or is_last))
        return None if admitted else bare

    def may_lose_state(self, reservation: Reservation) -> bool:
        """Whether the chunk that comes will be kept without its state."""
        return id(reservation) in self._bare

    def keep_state(self, reservation: Reservation) -> None:
        """Keep the state after all: nothing of the put continues the chunk."""
        if self._bare.pop(id(reservation), None) is not None and self._states is not None:
            self._states.forget(reservation.info.key)

    def record_refused(self, key: ChunkKey, reason: str) -> None:
        """Remember why a chunk was not taken, for who asks."""
        self._moves.catalog.outcomes.note(key, Fate.refused, detail=reason)

    def record_invalid(self, key: ChunkKey, error: KVStoreError) -> None:
        """Remember why a frame that came was no good, for who asks."""
        self._moves.catalog.outcomes.note(key, Fate.invalid, detail=str(error))

    def has(self, key: ChunkKey) -> bool:
        """Whether an exact copy of the chunk is there."""
        return bool(self._catalog.holders(key, Fidelity.exact))

    def view(self, reservation: Reservation) -> Bytes:
        """Return the reserved memory."""
        return self._moves.tiers.cpu_tier.view(reservation)

    def give_back(self, reservation: Reservation) -> None:
        """Free room that nothing comes into any more."""
        self.keep_state(reservation)
        self._reserved.forget(reservation)
        self.give_back_on(self._moves.tiers.cpu, reservation)

    def give_back_on(self, slot: TierSlot, reservation: Reservation) -> None:
        """The same on *slot*."""
        slot.tier.abort(reservation)
        self._catalog.in_flight.end(reservation.info.key)

    def seal(
        self, reservation: Reservation, header: FrameHeader, tenant: str, hints: Hints
    ) -> PutResult:
        """Make a verified frame visible, and have it copied on."""
        key, reason = reservation.info.key, ""
        self._reserved.forget(reservation)
        bare = self._bare.pop(id(reservation), None)
        if bare is not None and not header.levels:
            try:
                reservation, header = self._trim(reservation, header, bare, hints)
            except KVStoreError as error:
                self._catalog.in_flight.end(key)
                return self._refused(key, str(error))
            reason = WITHOUT_STATE
        return self.seal_on(self._moves.tiers.cpu, reservation, header, tenant, hints, reason)

    def seal_on(
        self,
        slot: TierSlot,
        reservation: Reservation,
        header: FrameHeader,
        tenant: str,
        hints: Hints,
        reason: str = "",
    ) -> PutResult:
        """The same on *slot*, of what is kept as it came."""
        key = reservation.info.key
        try:
            sealed = slot.tier.seal(reservation)
            if sealed:
                put_info = PutInfo(tenant, hints, header.content, header.position)
                self._catalog.note_sealed(slot.name, header.info(), put_info)
                self._hint(key, hints)
        finally:
            self._catalog.in_flight.end(key)
        if not sealed:
            self.counters.add("put_existing_chunks")
            return PutResult(PutOutcome.exists)
        self.counters.add("put_stored_chunks")
        self.counters.add("put_bytes", reservation.info.size_bytes)
        self._moves.eviction.settle_quota(slot, key)
        self._copy_through(key)
        return PutResult(PutOutcome.stored, reason)

    def _trim(
        self, reservation: Reservation, header: FrameHeader, layout: KVLayout, hints: Hints
    ) -> tuple[Reservation, FrameHeader]:
        """Put what is kept of a verified frame into room of its size; raise with neither left."""
        cpu = self._moves.tiers.cpu_tier
        try:
            fresh, frame = trimmed(header, cpu.view(reservation), layout)
        finally:
            cpu.abort(reservation)
        room = SpaceRequest(
            fresh.info(), reservation.tenant, self.clock() + _TRIM_S, self._headroom_bytes,
            hints.category,
        )  # fmt: skip
        smaller = self._moves.eviction.reserve_for_put(self._moves.tiers.cpu, room)
        copy_bytes(cpu.view(smaller), frame)
        self.counters.add("put_states_left_out")
        return smaller, fresh

    def _hint(self, key: ChunkKey, hints: Hints) -> None:
        if hints != NO_HINTS:
            self.counters.add("ignored_pins", self._catalog.hint([key], hints))

    def _copy_through(self, key: ChunkKey) -> None:
        for slot in self._moves.tiers.lower:
            if not self._moves.placement.admits(slot, key, Trigger.stored):
                continue
            if slot.breaker.is_open or self._moves.copy_down(key, slot) is None:
                self._moves.placement.cancelled(slot.name, key)
                self.counters.add("skipped_copies")


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
