"""Eviction: frees exactly the space that a frame needs.

A victim is demoted first unless a lower tier has the best copy that it can store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey
from kvstore.server.index.eviction_state import EVERYBODY, Wanted
from kvstore.server.telemetry.events import Fate
from kvstore.server.tiering.admission import Trigger
from kvstore.server.tiering.placement import Placement
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot
from kvstore.server.tiering.work_queue import Ticket
from kvstore.tiers.base import Reservation

MAX_ROUNDS = 1000
VICTIMS_PER_ROUND = 64


class Eviction:
    """Frees space on the slots of *placement*, and deletes orphaned copies. Thread-safe.

    *copy_to* demotes a victim that no slower tier has.
    """

    def __init__(self, placement: Placement, copy_to: Callable[..., Ticket | None]) -> None:
        self._placement, self._copy_to = placement, copy_to
        self._tiers, self._catalog = placement.tiers, placement.catalog
        self._work_queue, self._counters = placement.work_queue, placement.counters
        self._awaited: dict[int, tuple[int, int]] = {}
        """Bytes and chunks that puts have reserved in CPU memory, by partition."""
        self._lock = threading.Lock()  # guards it

    def reserve(self, slot: TierSlot, request: SpaceRequest) -> Reservation:
        """Reserve space on *slot*, evicting as needed.

        Raises TierFullError when all other chunks are held, the deadline passes or a lossy copy in
        the place of an original is being read, InvalidRequestError for a frame larger than the
        tier can hold.
        """
        tier = slot.tier
        size = request.info.size_bytes
        if size > (most := tier.max_frame_bytes):
            fix = f"tier {tier.name!r} takes at most {most}"
            raise InvalidRequestError("frame_bytes", size, fix)
        key = request.info.key
        if request.is_original and slot.name in self._catalog.holders(key):  # a lossy copy
            if not self._catalog.drop_copy(slot.name, key, even_if_held=False):
                raise TierFullError(slot.name, size, 0)
            self._counters.add("replaced_copies")
            self.discard(slot, key)
        need = tier.allocated_bytes(size)
        limit = tier.capacity_bytes - request.headroom_bytes
        wanted = EVERYBODY
        if slot.has_quotas:
            wanted = Wanted(self.partition(request))
            self._free_own(slot, Wanted(wanted.partition, is_own=True), request)
        for attempt in range(MAX_ROUNDS):
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
            claimed = self._claim(slot, missing, around, attempt, wanted)
            self._evict(slot, claimed, missing, request.deadline)
        raise TierFullError(tier.name, size, limit - tier.stats().used_bytes)

    def _free_own(self, slot: TierSlot, own: Wanted, request: SpaceRequest) -> None:
        """Evict what a partition would exceed its quota by. Raises TierFullError."""
        size = request.info.size_bytes
        awaited = self._awaited if slot is self._tiers.cpu else {}
        awaited_bytes, chunks = awaited.get(own.partition, (0, 0))
        for _ in range(MAX_ROUNDS):
            if not self._free_owed(slot, own, size + awaited_bytes, 1 + chunks, request.deadline):
                return
        raise TierFullError(slot.name, size, 0)

    def _free_owed(
        self, slot: TierSlot, own: Wanted, need_bytes: int, need_chunks: int, deadline: float
    ) -> bool:
        """Evict one round of a partition's excess over its quota; return False without excess."""
        eviction = self._catalog.eviction
        owed = eviction.owed_bytes(slot.name, own.partition, need_bytes, need_chunks)
        if owed:
            victims = eviction.claim_victims(slot.name, owed, VICTIMS_PER_ROUND, own)
            self._evict(slot, victims, owed, deadline)
            self._counters.add("evicted_for_quota_chunks", len(victims))
        return owed > 0

    def partition(self, request: SpaceRequest) -> int:
        """Return the partition whose quota a request counts against."""
        key = request.info.key
        return self._catalog.eviction.partition(key, request.tenant, request.category)

    def count_awaited(self, partition: int, size_bytes: int, chunks: int) -> None:
        """Count reserved CPU memory against the partition; negative amounts once it is filled."""
        with self._lock:
            before_bytes, before = self._awaited.pop(partition, (0, 0))
            if chunks + before:
                self._awaited[partition] = before_bytes + size_bytes, before + chunks

    def settle_quota(self, slot: TierSlot, key: ChunkKey) -> None:
        """Evict what the partition of a stored chunk exceeds its quota by, as far as possible:
        concurrent reservations do not see each other's space in time.
        """
        own = Wanted(self._catalog.eviction.partition(key, "", ""), is_own=True)
        with suppress(TierFullError):  # the demotions continue
            self._free_owed(slot, own, 0, 1, slot.clock())

    def _claim(
        self,
        slot: TierSlot,
        need_bytes: int,
        request: SpaceRequest | None,
        attempt: int,
        wanted: Wanted,
    ) -> list[ChunkKey]:
        """Claim a round of victims; adjacent ones if the free space for *request* is scattered."""
        eviction, tier, name = self._catalog.eviction, slot.tier, slot.name
        allocated = tier.allocated_bytes
        victims = eviction.claim_victims(name, need_bytes, VICTIMS_PER_ROUND, wanted, allocated)
        near: Sequence[ChunkKey] = ()
        if victims and request is not None:
            near = tier.eviction_run(victims[0], request.info.size_bytes, request.tenant)
        if near:
            eviction.unclaim(victims[1:])
            return [victims[0], *eviction.claim(name, near)]
        if victims and attempt % 4 == 3:
            victims += eviction.claim(name, tier.chunks_sharing_block(victims[0]))
        return victims

    def _evict(
        self, slot: TierSlot, victims: list[ChunkKey], need_bytes: int, deadline: float
    ) -> None:
        """Evict claimed victims, or wait for moves of other threads when there are none."""
        if not victims:
            # Other evictions from it and moves to lower slots end without this thread.
            if self._catalog.eviction.await_unclaimed(slot.name, deadline):
                return
            queues = [f"store-{target.name}" for target in self._tiers.below(slot)]
            if self._work_queue.await_any(queues, deadline):
                return
            stats = slot.tier.stats()
            raise TierFullError(slot.name, need_bytes, stats.capacity_bytes - stats.used_bytes)
        try:
            tickets = [(key, self._demote(slot, key)) for key in victims]
            for key, ticket in tickets:
                self._drop_victim(slot, key, ticket, deadline)
        except DeadlineError:
            # Demotions continue; their victims stay until they have a copy elsewhere.
            raise TierFullError(slot.name, need_bytes, 0) from None
        finally:
            self._catalog.eviction.unclaim(victims)

    def _demote(self, slot: TierSlot, key: ChunkKey) -> Ticket | None:
        """Queue a copy to a lower slot that is in use, unless one has the chunk.

        The target is the fastest slot that admits it. An exact chunk goes to the nearest slot that
        stores it exactly, if there is one; a lossy copy further down does not count.
        """
        lower = self._tiers.below(slot)
        tenant = slot.tier.tenant_of(key)
        targets = [t for t in lower if t is self._tiers.cpu or not t.breaker.is_open]
        least = Accuracy.approximate
        if slot.name in self._catalog.holders(key, Accuracy.exact):
            exact = [t for t in targets if self.accuracy_on(t, key, tenant) is Accuracy.exact]
            targets, least = exact or targets, Accuracy.exact if exact else least
        held = self._catalog.holders(key, least)
        if targets:
            self._placement.evicting(slot, key, targets[0])
        if not targets or any(target.name in held for target in lower):
            return None
        if targets[0] is self._tiers.cpu:
            return self._copy_to(key, targets[0], urgent=True)
        size_bytes = self._catalog.size_bytes(slot.name, key)
        for target in self._placement.by_load(targets, size_bytes):
            if self._placement.admits(target, key, Trigger.leaving):
                return self._copy_to(key, target, urgent=True)
        self._counters.add("unworthy_copies")
        return None

    def accuracy_on(self, target: TierSlot, key: ChunkKey, tenant: str) -> Accuracy:
        """Return the accuracy *target* stores an exact *key* with; shared prefixes stay exact."""
        kept = target.encoder.of_tenant(tenant).accuracy
        return Accuracy.exact if self._catalog.is_common(key) else kept

    def _drop_victim(
        self, slot: TierSlot, key: ChunkKey, ticket: Ticket | None, deadline: float
    ) -> None:
        why = "no tier below took a copy" if self._tiers.below(slot) else ""
        if ticket is not None:
            try:
                self._work_queue.wait(ticket, deadline)
            except KVStoreError as error:
                if isinstance(error, DeadlineError):
                    raise
                # Counted where it failed; the victim is evicted all the same.
                why = str(error)
        holders, exact = (
            self._catalog.holders(key, f) for f in (Accuracy.approximate, Accuracy.exact)
        )
        if slot.name not in holders:
            return
        if slot not in (self._tiers.cpu, self._tiers.gpu):
            self._catalog.evicted_below(key)
        if self._catalog.drop_copy(slot.name, key, even_if_held=False):
            why = why if len(holders) == 1 else ""
            self._catalog.outcomes.note(key, Fate.evicted, slot.name, why)
            self.discard(slot, key)
            self._counters.add("evicted_chunks")
            if len(holders) == 1:
                self._counters.add("dropped_victims")
            elif exact == [slot.name]:
                self._counters.add("lossy_victims")

    def replace(self, info: ChunkInfo) -> bool:
        """Drop copies with less of a chunk's end state than *info*; False if one is being read."""
        for name in self._catalog.holders(info.key):
            if not self._catalog.drop_copy(name, info.key, even_if_held=False):
                return not self._catalog.is_less_complete(info.key, info.layout)
            self._counters.add("replaced_copies")
            self.delete_from(self._tiers.slots[name], info.key)
        return True

    def drop_corrupt(self, slot: TierSlot, key: ChunkKey) -> None:
        """Drop a copy that failed verification, so that the chunk can be put again at once."""
        self._counters.add("corrupt_chunks")
        slot.tier.note_corrupt(key)
        self._catalog.outcomes.note(key, Fate.corrupt, slot.name)
        if self._catalog.drop_copy(slot.name, key):
            self.delete_from(slot, key)

    def delete_from(self, slot: TierSlot, key: ChunkKey, *, urgent: bool = False) -> Ticket | None:
        """Free an orphaned copy; on lower slots through their store queue, with a ticket."""
        if slot is self._tiers.cpu:
            self.discard(slot, key)
            return None
        work = partial(self.discard, slot, key)
        return self._work_queue.submit(f"store-{slot.name}", b"delete" + key, work, urgent=urgent)

    def discard(self, slot: TierSlot, key: ChunkKey) -> None:
        """Delete an orphan. A medium that does not answer keeps it, invisible, until ``purge``.

        Only the store queue deletes from a lower slot and writes to it, so that no valid copy can
        replace an orphan in the meantime.
        """
        if key in self._catalog.orphans[slot.name]:
            slot.guarded(lambda: slot.tier.delete(key), "delete")
            self._catalog.purged(slot.name, key)

    def purge(self, slot: TierSlot) -> None:
        """Delete the orphans that earlier attempts left on *slot*, while it answers."""
        with suppress(TierUnavailableError):
            for key in list(self._catalog.orphans[slot.name]):
                self.discard(slot, key)
