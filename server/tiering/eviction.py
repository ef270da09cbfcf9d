"""Reclaim inside allocate: whoever needs room evicts exactly that much.

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
from kvstore.server.tiering.admission import Moment
from kvstore.server.tiering.placement import Placement
from kvstore.server.tiering.tier_slot import Room, Shelf
from kvstore.server.tiering.work_queue import Mover, Ticket
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


class Reclaim(ABC):
    """The shelves and the room on them. *shelves* are ordered from the fastest to the slowest.

    One of them is CPU memory, which frames are served from; only GPU memory is faster.
    Thread-safe; *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        catalog: Catalog,
        mover: Mover,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.shelves = {shelf.name: shelf for shelf in shelves}
        self._order = [shelf for shelf in shelves if not shelf.tier.read_only]
        self.cpu = next(shelf for shelf in shelves if isinstance(shelf.tier, CpuTier))
        self.cpu_tier = cast("CpuTier", self.cpu.tier)
        self.gpu = None if shelves[0] is self.cpu else shelves[0]
        self.gpu_tier = None if self.gpu is None else cast("GpuTier", self.gpu.tier)
        self.sources = [self.cpu, *(shelf for shelf in shelves if shelf is not self.cpu)]
        """The shelves in the order in which frames are looked for: first where they are served."""
        local = (s for s in self.lower_shelves() if s.tier.survives_restart and not s.tier.shared)
        open_to_all = (s for s in local if s.tier.shows_files and not s.encoder.needs_assets)
        self.filed = next(open_to_all, None)
        """The shelf whose frames lie in files that a reader on this host may open."""
        self.peers = next((s for s in shelves if s.name == PEER_TIER), None)
        """The memory of other servers."""
        self.catalog = catalog
        self.mover = mover
        self.counters = counters
        self.clock = clock
        self.placement = Placement(shelves, catalog, mover, clock)
        self.outcomes = Outcomes(clock)
        self.reserved = ReservedRoom()
        """In CPU memory, for chunks that are on their way in."""
        self.importance = ImportanceTable()
        """Which tokens of chunks matter; whoever encodes is given the same one."""

    def reserve(self, shelf: Shelf, room: Room) -> Reservation:
        """Reserve on *shelf*, evicting what is in the way.

        Raises TierFullError when everything else is held or the deadline passes first,
        InvalidRequestError for a frame that no empty tier could hold.
        """
        tier = shelf.tier
        size = room.info.size_bytes
        if size > tier.max_frame_bytes():
            raise InvalidRequestError(
                "frame_bytes", size, f"tier {tier.name!r} takes {tier.max_frame_bytes()} at most"
            )
        need = tier.allocated_bytes(size)
        limit = tier.capacity_bytes - room.headroom_bytes
        partition = self.catalog.eviction.partition(room.info.key, room.tenant, room.category)
        self._free_own(shelf, Wanted(partition, is_own=True), room)
        for attempt in range(MAX_RECLAIM_ROUNDS):
            missing = tier.stats().used_bytes + need - limit
            if is_scattered := missing <= 0:
                try:
                    return tier.reserve(room.info, room.tenant)
                except TierFullError:
                    missing = need
                except TierUnavailableError as error:
                    if not error.is_partial:
                        shelf.breaker.fail(str(error))
                    raise
            around = room if is_scattered else None
            claimed = self._claim(shelf, missing, around, attempt, Wanted(partition))
            self._evict(shelf, claimed, missing, room.deadline)
        raise TierFullError(tier.name, size, limit - tier.stats().used_bytes)

    def _free_own(self, shelf: Shelf, own: Wanted, room: Room) -> None:
        """Evict of a partition what it would be over its quota. Raises TierFullError."""
        size, catalog = room.info.size_bytes, self.catalog
        waits = self.reserved.of(own.partition) if shelf is self.cpu else NOTHING
        for _ in range(MAX_RECLAIM_ROUNDS):
            need_bytes, need_chunks = size + waits.size_bytes, 1 + waits.chunks
            owed = catalog.eviction.owed_bytes(shelf.name, own.partition, need_bytes, need_chunks)
            if not owed:
                return
            victims = catalog.eviction.claim_victims(
                shelf.name, owed, VICTIMS_PER_ROUND, wanted=own
            )
            self._evict(shelf, victims, owed, room.deadline)
            self.counters.add("evicted_for_quota_chunks", len(victims))
        raise TierFullError(shelf.name, size, 0)

    def settle_quota(self, shelf: Shelf, key: ChunkKey) -> None:
        """Evict what the partition of a chunk that came is over its quota, as far as may go.

        Threads that reserve side by side look before each other's room counts.
        """
        partition = self.catalog.eviction.partition(key, "", "")
        owed = self.catalog.eviction.owed_bytes(shelf.name, partition, 0)
        if owed:
            own = Wanted(partition, is_own=True)
            victims = self.catalog.eviction.claim_victims(
                shelf.name, owed, VICTIMS_PER_ROUND, wanted=own
            )
            if victims:
                with suppress(TierFullError):  # their demotions go on
                    self._evict(shelf, victims, owed, self.clock())
                    self.counters.add("evicted_for_quota_chunks", len(victims))

    def _claim(
        self, shelf: Shelf, need_bytes: int, room: Room | None, attempt: int, wanted: Wanted
    ) -> list[ChunkKey]:
        """Claim a round of victims; for *room* that is free but scattered, ones side by side."""
        claim, tier = self.catalog.eviction.claim_victims, shelf.tier
        victims = claim(shelf.name, need_bytes, VICTIMS_PER_ROUND, wanted=wanted)
        victims = self._enough(shelf, victims, need_bytes)
        if victims and room is not None:
            near = tier.in_the_way(victims[0], room.info.size_bytes, room.tenant)
            if near:
                self.catalog.eviction.unclaim(victims[1:])
                return [victims[0], *claim(shelf.name, 0, 0, near)]
        if victims and attempt % 4 == 3:
            victims += claim(shelf.name, 0, 0, tier.residents(victims[0]))
        return victims

    def _evict(
        self, shelf: Shelf, victims: list[ChunkKey], need_bytes: int, deadline: float
    ) -> None:
        """Evict claimed victims, or wait for others' moves when there are none."""
        if not victims:
            if self._await_progress(shelf, deadline):
                return
            stats = shelf.tier.stats()
            raise TierFullError(shelf.name, need_bytes, stats.capacity_bytes - stats.used_bytes)
        try:
            tickets = [(key, self._demote(shelf, key)) for key in victims]
            for key, ticket in tickets:
                self._give_up(shelf, key, ticket, deadline)
        except DeadlineError:
            # Demotions go on; their victims stay until they have a copy elsewhere.
            raise TierFullError(shelf.name, need_bytes, 0) from None
        finally:
            self.catalog.eviction.unclaim(victims)

    def _enough(self, shelf: Shelf, victims: list[ChunkKey], need_bytes: int) -> list[ChunkKey]:
        """Spare the last victims when the slack of the first frees enough: policies see frames."""
        freed_bytes = 0
        for at, key in enumerate(victims, start=1):
            size_bytes = self.catalog.size_bytes(shelf.name, key)
            freed_bytes += shelf.tier.allocated_bytes(size_bytes) if size_bytes else 0
            if freed_bytes >= need_bytes:
                self.catalog.eviction.unclaim(victims[at:])
                return victims[:at]
        return victims

    def _await_progress(self, shelf: Shelf, deadline: float) -> bool:
        """Wait until something that keeps chunks on *shelf* is done; False if nothing does.

        Only evictions from this shelf and moves to lower ones count, as only these end
        without our help.
        """
        if self.catalog.eviction.await_unclaimed(shelf.name, deadline):
            return True
        lanes = [f"store-{target.name}" for target in self._below(shelf)]
        return self.mover.await_any(lanes, deadline)

    def _demote(self, shelf: Shelf, key: ChunkKey) -> Ticket | None:
        """Queue a copy to a lower shelf that is in use, unless one has the chunk.

        The one that it would load from soonest gets it, of those whose admission wants it.
        What is exact goes to the nearest that keeps it so, if there is one, and a lossy copy
        further down does not count.
        """
        lower = self._below(shelf)
        tenant = shelf.tier.tenant_of(key)
        targets = [t for t in lower if t is self.cpu or not t.breaker.is_open]
        least = Fidelity.none
        if shelf.name in self.catalog.holders(key, Fidelity.exact):
            exact = [t for t in targets if self.fidelity_on(t, key, tenant) is Fidelity.exact]
            targets, least = exact or targets, Fidelity.exact if exact else least
        held = self.catalog.holders(key, least)
        if targets:
            self.placement.leaves(shelf, key, targets[0])
        if not targets or any(target.name in held for target in lower):
            return None
        if targets[0] is self.cpu:
            return self._bring_down(key, shelf)
        for target in self.placement.by_load(targets, key):
            if self.placement.admits(target, key, Moment.leaving):
                return self.copy_down(key, target, urgent=True)
        self.counters.add("unworthy_copies")
        return None

    def fidelity_on(self, target: Shelf, key: ChunkKey, tenant: str) -> Fidelity:
        """Return what becomes at least of an exact *key* of *tenant* on *target*.

        What several prompts have stays exact: it steers all their answers.
        """
        return Fidelity.exact if self.catalog.is_common(key) else target.fidelity_for(tenant)

    def _give_up(self, shelf: Shelf, key: ChunkKey, ticket: Ticket | None, deadline: float) -> None:
        why = "no tier below took a copy" if self._below(shelf) else ""
        if ticket is not None:
            try:
                self.mover.wait(ticket, deadline)
            except KVStoreError as error:
                if isinstance(error, DeadlineError):
                    raise
                # Counted where it failed; the victim has to go all the same.
                why = str(error)
        holders, exact = (self.catalog.holders(key, f) for f in (Fidelity.none, Fidelity.exact))
        if shelf.name not in holders:
            return
        if shelf not in (self.cpu, self.gpu):
            self.catalog.gave_up(key)
        if self.catalog.cast_out(shelf.name, key, even_if_held=False):
            self.outcomes.note(key, Fate.evicted, shelf.name, why if len(holders) == 1 else "")
            self._discard(shelf, key)
            self.counters.add("evicted_chunks")
            if len(holders) == 1:
                self.counters.add("dropped_victims")
            elif exact == [shelf.name]:
                self.counters.add("lossy_victims")

    def nearest(self, key: ChunkKey, holders: Sequence[str]) -> list[Shelf]:
        """Return the shelves of *holders* that are in use, in the order in which *key* is read.

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

    def peer_place(self, shelf: Shelf, key: ChunkKey, peers: Collection[int]) -> PeerPlace | None:
        """Return from where who reads from *peers* itself has *key* of *shelf*; None: from none."""
        if not peers or shelf is not self.peers:
            return None
        return cast("PeerTier", shelf.tier).peer_place(key, peers)

    def lent_place(
        self, key: ChunkKey, holders: Sequence[str], peers: Collection[int]
    ) -> PeerPlace | None:
        """Return the same of the nearest of *holders*; None where that is another tier."""
        nearest = self.nearest(key, holders)[:1] if peers else []
        return next((self.peer_place(shelf, key, peers) for shelf in nearest), None)

    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        """Return the numbers of other servers from which readers may read some of *keys*."""
        return set() if self.peers is None else cast("PeerTier", self.peers.tier).lenders(keys)

    def lower_shelves(self) -> list[Shelf]:
        """Return the shelves below CPU memory that can be written, fastest first."""
        return self._below(self.cpu)

    def _below(self, shelf: Shelf) -> list[Shelf]:
        return self._order[self._order.index(shelf) + 1 :]

    # --- what evicting asks of the moves

    @abstractmethod
    def copy_down(self, key: ChunkKey, target: Shelf, *, urgent: bool = False) -> Ticket | None:
        """Queue a copy of *key* to a lower shelf; None when its lane is full."""

    @abstractmethod
    def _bring_down(self, key: ChunkKey, source: Shelf) -> Ticket | None:
        """Queue a copy of a victim of GPU memory to CPU memory."""

    @abstractmethod
    def _discard(self, shelf: Shelf, key: ChunkKey) -> None:
        """Delete a stray."""
