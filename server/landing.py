"""Landing: room in CPU memory for what is put, and what follows when a frame there is whole."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import KVStoreError, TierFullError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.hints import NO_HINTS, Hints
from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity, PutOutcome
from kvstore.server.knowledge import Origin
from kvstore.server.outcomes import Fate
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


class Landing:
    """Where puts land. Thread-safe.

    ``headroom_percent`` of CPU memory are kept for loads: stores give way to them.
    """

    def __init__(self, transfers: Transfers, headroom_percent: int) -> None:
        self._transfers = transfers
        self._catalog = transfers.catalog
        self.counters = transfers.counters
        self.clock = transfers.clock
        cpu = transfers.cpu_tier
        wanted_bytes = cpu.capacity_bytes * headroom_percent // 100
        self._headroom_bytes = min(wanted_bytes, cpu.capacity_bytes - cpu.slab_bytes)

    def reserve(
        self, session: Session, info: ChunkInfo, deadline: float, hints: Hints
    ) -> Reservation | PutResult:
        """Take room for a frame, or say why there is nothing to write.

        From then on the chunk is pending, until ``seal`` or ``give_back``. Raises
        QuotaExceededError, InvalidRequestError.
        """
        if self._catalog.is_outgrown(info.key, info.layout) and not self._transfers.replace(info):
            reason = "somebody reads it as it is, without its checkpoint"
            self.counters.add("put_refused_chunks")
            self._transfers.outcomes.note(info.key, Fate.refused, detail=reason)
            return PutResult(PutOutcome.refused, reason)
        if not self._catalog.begin_put(info.key):
            self.counters.add("put_existing_chunks")
            self._hint(info.key, hints)
            return PutResult(PutOutcome.exists)
        try:
            room = Room(info, session.tenant, deadline, self._headroom_bytes, hints.category)
            return self._transfers.reserve_for_put(room)
        except TierFullError as error:
            self._catalog.end_put(info.key)
            self.counters.add("put_refused_chunks")
            self._transfers.outcomes.note(info.key, Fate.refused, detail=str(error))
            return PutResult(PutOutcome.refused, str(error))
        except KVStoreError as error:
            self._catalog.end_put(info.key)
            self._transfers.outcomes.note(info.key, Fate.refused, detail=str(error))
            raise

    def note_refused(self, key: ChunkKey, reason: str) -> None:
        """Remember why a chunk was not taken, for who asks."""
        self._transfers.outcomes.note(key, Fate.refused, detail=reason)

    def note_invalid(self, key: ChunkKey, error: KVStoreError) -> None:
        """Remember why a frame that came was no good, for who asks."""
        self._transfers.outcomes.note(key, Fate.invalid, detail=str(error))

    def has(self, key: ChunkKey) -> bool:
        """Whether an exact copy of the chunk is there."""
        return bool(self._catalog.holders(key, Fidelity.exact))

    def view(self, reservation: Reservation) -> Bytes:
        """Return the reserved memory."""
        return self._transfers.cpu_tier.view(reservation)

    def give_back(self, reservation: Reservation) -> None:
        """Free room that nothing comes into any more."""
        self._transfers.cpu_tier.abort(reservation)
        self._catalog.end_put(reservation.info.key)

    def seal(
        self, reservation: Reservation, header: FrameHeader, tenant: str, hints: Hints
    ) -> PutResult:
        """Make a verified frame visible, and have it copied on."""
        key = reservation.info.key
        sealed = self._transfers.cpu_tier.seal(reservation)
        if sealed:
            origin = Origin(tenant, hints, header.content, header.position)
            self._catalog.note_sealed(self._transfers.cpu.name, header.info(), origin)
            self._hint(key, hints)
        self._catalog.end_put(key)
        if not sealed:
            self.counters.add("put_existing_chunks")
            return PutResult(PutOutcome.exists)
        self.counters.add("put_stored_chunks")
        self.counters.add("put_bytes", reservation.info.size_bytes)
        self._transfers.settle_quota(self._transfers.cpu, key)
        self._copy_through(key)
        return PutResult(PutOutcome.stored)

    def _hint(self, key: ChunkKey, hints: Hints) -> None:
        if hints != NO_HINTS:
            self.counters.add("ignored_pins", self._catalog.hint([key], hints))

    def _copy_through(self, key: ChunkKey) -> None:
        for shelf in self._transfers.lower_shelves():
            if not self._transfers.placement.admits(shelf, key, Moment.stored):
                continue
            if shelf.breaker.is_open or self._transfers.copy_down(key, shelf) is None:
                self.counters.add("skipped_copies")
