"""Eviction inside allocate: whoever needs room evicts exactly that much.

An evicted chunk of which no lower tier has a copy as good as it can get is demoted first.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.eviction_state import Wanted
from kvstore.server.index.importance import ImportanceTable
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.telemetry.outcomes import Fate, Outcomes
from kvstore.server.tiering.admission import Trigger
from kvstore.server.tiering.placement import Placement
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.server.tiering.work_queue import Ticket, WorkQueue
from kvstore.tiers.base import PeerPlace, Reservation
from kvstore.tiers.cpu import CpuTier


class Waiting(NamedTuple):
    """Room of one partition for chunks to come."""

    size_bytes: int
    chunks: int


NOTHING = Waiting(0, 0)


class ReservedRoom:
    """Room by partition, from its reservation until it is filled or given back. Thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        """Partitions by the id of a reservation."""
        self._waiting: dict[int, Waiting] = {}
        self._lock = threading.Lock()  # guards both

    def note(self, reservation: Reservation, partition: int) -> None:
        """Count a reservation as the partition's."""
        with self._lock:
            self._owners[id(reservation)] = partition
            self._add(partition, reservation.info.size_bytes, 1)

    def forget(self, reservation: Reservation) -> None:
        """Count it no longer. Idempotent."""
        with self._lock:
            partition = self._owners.pop(id(reservation), None)
            if partition is not None:
                self._add(partition, -reservation.info.size_bytes, -1)

    def of(self, partition: int) -> Waiting:
        """Return what is reserved for the partition."""
        return self._waiting.get(partition, NOTHING)

    def _add(self, partition: int, size_bytes: int, chunks: int) -> None:
        before = self._waiting.pop(partition, NOTHING)
        after = Waiting(before.size_bytes + size_bytes, before.chunks + chunks)
        if after != NOTHING:
            self._waiting[partition] = after


if TYPE_CHECKING:  # one of their files loads torch
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.tiers.gpu import GpuTier

PEER_TIER = "peer"
MAX_RECLAIM_ROUNDS = 1000
VICTIMS_PER_ROUND = 64


class Eviction(ABC):
    """The slots and the room on them. *slots* are ordered from the fastest to the slowest.

    One of them is CPU memory, which frames are served from; only GPU memory is faster.
    Thread-safe; *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        slots: Sequence[TierSlot],
        catalog: Catalog,
        work_queue: WorkQueue,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._order = [slot for slot in slots if not slot.tier.read_only]
        self.cpu = next(slot for slot in slots if isinstance(slot.tier, CpuTier))
        self.cpu_tier = cast("CpuTier", self.cpu.tier)
        self.gpu = None if slots[0] is self.cpu else slots[0]
        self.gpu_tier = None if self.gpu is None else cast("GpuTier", self.gpu.tier)
        self.sources = [self.cpu, *(slot for slot in slots if slot is not self.cpu)]
        """The slots in the order in which frames are looked for: first where they are served."""
        local = (s for s in self.lower_slots() if s.tier.survives_restart and not s.tier.shared)
        open_to_all = (s for s in local if s.tier.shows_files and not s.encoder.needs_assets)
        self.filed = next(open_to_all, None)
        """The slot whose frames lie in files that a reader on this host may open."""
        self.peers = next((s for s in slots if s.name == PEER_TIER), None)
        """The memory of other servers."""
        self.catalog = catalog
        self.work_queue = work_queue
        self.counters = counters
        self.clock = clock
        self.placement = Placement(slots, catalog, work_queue, clock)
        self.outcomes = Outcomes(clock)
        self.reserved = ReservedRoom()
        """In CPU memory, for chunks that are on their way in."""
        self.importance = ImportanceTable()
        """Which tokens of chunks matter; whoever encodes is given the same one."""

    def reserve(self, slot: TierSlot, request: SpaceRequest) -> Reservation:
        """Reserve on *slot*, evicting what is in the way.

        Raises TierFullError when everything else is held or the deadline passes first,
        InvalidRequestError for a frame that no empty tier could hold.
        """
        tier = slot.tier
        size = request.info.size_bytes
        if size > tier.max_frame_bytes():
            raise InvalidRequestError(
                "frame_bytes", size, f"tier {tier.name!r} takes {tier.max_frame_bytes()} at most"
            )
        need = tier.allocated_bytes(size)
        limit = tier.capacity_bytes - request.headroom_bytes
        partition = self.catalog.eviction.partition(
            request.info.key, request.tenant, request.category
        )
        self._free_own(slot, Wanted(partition, is_own=True), request)
        for attempt in range(MAX_RECLAIM_ROUNDS):
            missing = tier.stats().used_bytes + need - limit
            if is_scattered := missing <= 0:
                try:
                    return tier.reserve(request.info, request.tenant)
                except TierFullError:
                    missing = need
                except TierUnavailableError as error:
                    if not error.is_partial:
                        slot.breaker.fail(str(error))
                    raise
            around = request if is_scattered else None
            claimed = self._claim(slot, missing, around, attempt, Wanted(partition))
            self._evict(slot, claimed, missing, request.deadline)
        raise TierFullError(tier.name, size, limit - tier.stats().used_bytes)

    def _free_own(self, slot: TierSlot, own: Wanted, request: SpaceRequest) -> None:
        """Evict of a partition what it would be over its quota. Raises TierFullError."""
        size, catalog = request.info.size_bytes, self.catalog
        waits = self.reserved.of(own.partition) if slot is self.cpu else NOTHING
        for _ in range(MAX_RECLAIM_ROUNDS):
            need_bytes, need_chunks = size + waits.size_bytes, 1 + waits.chunks
            owed = catalog.eviction.owed_bytes(slot.name, own.partition, need_bytes, need_chunks)
            if not owed:
                return
            victims = catalog.eviction.claim_victims(slot.name, owed, VICTIMS_PER_ROUND, wanted=own)
            self._evict(slot, victims, owed, request.deadline)
            self.counters.add("evicted_for_quota_chunks", len(victims))
        raise TierFullError(slot.name, size, 0)

    def settle_quota(self, slot: TierSlot, key: ChunkKey) -> None:
        """Evict what the partition of a chunk that came is over its quota, as far as may go.

        Threads that reserve side by side look before each other's room counts.
        """
        partition = self.catalog.eviction.partition(key, "", "")
        owed = self.catalog.eviction.owed_bytes(slot.name, partition, 0)
        if owed:
            own = Wanted(partition, is_own=True)
            victims = self.catalog.eviction.claim_victims(
                slot.name, owed, VICTIMS_PER_ROUND, wanted=own
            )
            if victims:
                with suppress(TierFullError):  # their demotions go on
                    self._evict(slot, victims, owed, self.clock())
                    self.counters.add("evicted_for_quota_chunks", len(victims))

    def _claim(
        self,
        slot: TierSlot,
        need_bytes: int,
        request: SpaceRequest | None,
        attempt: int,
        wanted: Wanted,
    ) -> list[ChunkKey]:
        """Claim a round of victims; for *request* that is free but scattered, ones side by side."""
        claim, tier = self.catalog.eviction.claim_victims, slot.tier
        victims = claim(slot.name, need_bytes, VICTIMS_PER_ROUND, wanted=wanted)
        victims = self._enough(slot, victims, need_bytes)
        if victims and request is not None:
            near = tier.in_the_way(victims[0], request.info.size_bytes, request.tenant)
            if near:
                self.catalog.eviction.unclaim(victims[1:])
                return [victims[0], *claim(slot.name, 0, 0, near)]
        if victims and attempt % 4 == 3:
            victims += claim(slot.name, 0, 0, tier.residents(victims[0]))
        return victims

    def _evict(
        self, slot: TierSlot, victims: list[ChunkKey], need_bytes: int, deadline: float
    ) -> None:
        """Evict claimed victims, or wait for others' moves when there are none."""
        if not victims:
            if self._await_progress(slot, deadline):
                return
            stats = slot.tier.stats()
            raise TierFullError(slot.name, need_bytes, stats.capacity_bytes - stats.used_bytes)
        try:
            tickets = [(key, self._demote(slot, key)) for key in victims]
            for key, ticket in tickets:
                self._give_up(slot, key, ticket, deadline)
        except DeadlineError:
            # Demotions go on; their victims stay until they have a copy elsewhere.
            raise TierFullError(slot.name, need_bytes, 0) from None
        finally:
            self.catalog.eviction.unclaim(victims)

    def _enough(self, slot: TierSlot, victims: list[ChunkKey], need_bytes: int) -> list[ChunkKey]:
        """Spare the last victims when the slack of the first frees enough: policies see frames."""
        freed_bytes = 0
        for at, key in enumerate(victims, start=1):
            size_bytes = self.catalog.size_bytes(slot.name, key)
            freed_bytes += slot.tier.allocated_bytes(size_bytes) if size_bytes else 0
            if freed_bytes >= need_bytes:
                self.catalog.eviction.unclaim(victims[at:])
                return victims[:at]
        return victims

    def _await_progress(self, slot: TierSlot, deadline: float) -> bool:
        """Wait until something that keeps chunks on *slot* is done; False if nothing does.

        Only evictions from this slot and moves to lower ones count, as only these end
        without our help.
        """
        if self.catalog.eviction.await_unclaimed(slot.name, deadline):
            return True
        queues = [f"store-{target.name}" for target in self._below(slot)]
        return self.work_queue.await_any(queues, deadline)

    def _demote(self, slot: TierSlot, key: ChunkKey) -> Ticket | None:
        """Queue a copy to a lower slot that is in use, unless one has the chunk.

        The one that it would load from soonest gets it, of those whose admission wants it.
        What is exact goes to the nearest that keeps it so, if there is one, and a lossy copy
        further down does not count.
        """
        lower = self._below(slot)
        tenant = slot.tier.tenant_of(key)
        targets = [t for t in lower if t is self.cpu or not t.breaker.is_open]
        least = Fidelity.none
        if slot.name in self.catalog.holders(key, Fidelity.exact):
            exact = [t for t in targets if self.fidelity_on(t, key, tenant) is Fidelity.exact]
            targets, least = exact or targets, Fidelity.exact if exact else least
        held = self.catalog.holders(key, least)
        if targets:
            self.placement.evicting(slot, key, targets[0])
        if not targets or any(target.name in held for target in lower):
            return None
        if targets[0] is self.cpu:
            return self._bring_down(key, slot)
        for target in self.placement.by_load(targets, key):
            if self.placement.admits(target, key, Trigger.leaving):
                return self.copy_down(key, target, urgent=True)
        self.counters.add("unworthy_copies")
        return None

    def fidelity_on(self, target: TierSlot, key: ChunkKey, tenant: str) -> Fidelity:
        """Return what becomes at least of an exact *key* of *tenant* on *target*.

        What several prompts have stays exact: it steers all their answers.
        """
        return Fidelity.exact if self.catalog.is_common(key) else target.fidelity_for(tenant)

    def _give_up(
        self, slot: TierSlot, key: ChunkKey, ticket: Ticket | None, deadline: float
    ) -> None:
        why = "no tier below took a copy" if self._below(slot) else ""
        if ticket is not None:
            try:
                self.work_queue.wait(ticket, deadline)
            except KVStoreError as error:
                if isinstance(error, DeadlineError):
                    raise
                # Counted where it failed; the victim has to go all the same.
                why = str(error)
        holders, exact = (self.catalog.holders(key, f) for f in (Fidelity.none, Fidelity.exact))
        if slot.name not in holders:
            return
        if slot not in (self.cpu, self.gpu):
            self.catalog.gave_up(key)
        if self.catalog.cast_out(slot.name, key, even_if_held=False):
            self.outcomes.note(key, Fate.evicted, slot.name, why if len(holders) == 1 else "")
            self._discard(slot, key)
            self.counters.add("evicted_chunks")
            if len(holders) == 1:
                self.counters.add("dropped_victims")
            elif exact == [slot.name]:
                self.counters.add("lossy_victims")

    def nearest(self, key: ChunkKey, holders: Sequence[str]) -> list[TierSlot]:
        """Return the slots of *holders* that are in use, in the order in which *key* is read.

        That is from the fastest on; of another server's memory and a shared tier the one goes
        first that would have sent this chunk sooner, as it is measured.
        """
        usable = [s for s in self.sources if s.name in holders and not s.breaker.is_open]
        if self.peers is None or self.peers not in usable[:-1] or not usable[-1].tier.shared:
            return usable
        tier = cast("PeerTier", self.peers.tier)
        peer_s = tier.load_s(key, self.catalog.size_bytes(tier.name, key))
        stored_bytes = self.catalog.size_bytes(usable[-1].name, key)
        if peer_s is None or float(usable[-1].load_s(np.array([stored_bytes]))[0]) < peer_s:
            usable.remove(self.peers)
            usable.append(self.peers)
        return usable

    def peer_place(self, slot: TierSlot, key: ChunkKey, peers: Collection[int]) -> PeerPlace | None:
        """Return from where who reads from *peers* itself has *key* of *slot*; None: from none."""
        if not peers or slot is not self.peers:
            return None
        return cast("PeerTier", slot.tier).peer_place(key, peers)

    def lent_place(
        self, key: ChunkKey, holders: Sequence[str], peers: Collection[int]
    ) -> PeerPlace | None:
        """Return the same of the nearest of *holders*; None where that is another tier."""
        nearest = self.nearest(key, holders)[:1] if peers else []
        return next((self.peer_place(slot, key, peers) for slot in nearest), None)

    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        """Return the numbers of other servers from which readers may read some of *keys*."""
        return set() if self.peers is None else cast("PeerTier", self.peers.tier).lenders(keys)

    def lower_slots(self) -> list[TierSlot]:
        """Return the slots below CPU memory that can be written, fastest first."""
        return self._below(self.cpu)

    def _below(self, slot: TierSlot) -> list[TierSlot]:
        return self._order[self._order.index(slot) + 1 :]

    # --- what evicting asks of the moves

    @abstractmethod
    def copy_down(self, key: ChunkKey, target: TierSlot, *, urgent: bool = False) -> Ticket | None:
        """Queue a copy of *key* to a lower slot; None when its queue is full."""

    @abstractmethod
    def _bring_down(self, key: ChunkKey, source: TierSlot) -> Ticket | None:
        """Queue a copy of a victim of GPU memory to CPU memory."""

    @abstractmethod
    def _discard(self, slot: TierSlot, key: ChunkKey) -> None:
        """Delete an orphan."""
