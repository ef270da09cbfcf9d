"""Moves: copies of chunks between slots, each in the codec of its target.

A lossy copy never replaces an exact one: it is an additional copy, marked as lossy, and a better
one replaces it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvstore.codecs.base import REMOVED, codec_name
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    ModelError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey
from kvstore.server.index.catalog import Catalog
from kvstore.server.telemetry.events import Fate
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import PromoteOnSecondHit
from kvstore.server.tiering.eviction import Eviction
from kvstore.server.tiering.placement import Placement
from kvstore.server.tiering.tier_slot import SpaceRequest, Tiers, TierSlot, verify
from kvstore.server.tiering.work_queue import Ticket, WorkQueue
from kvstore.tiers.base import DEFAULT_TENANT, Reservation

FULL_PERCENT = 90
"""CPU memory counts as full from this use on: chunks read from peers are dropped again."""
REMEMBERED_CHUNKS = 1 << 16
MAX_DUPLICATES = 4096
"""Copies that wait to be dropped; beyond it the oldest stay."""


class Moves:
    """Copies chunks between the slots of *tiers*. Thread-safe.

    Moves run in the queues ``load-TIER`` and ``store-TIER``. A queue only waits for the store queue
    of a slower tier, so queues cannot deadlock. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        tiers: Tiers,
        catalog: Catalog,
        work_queue: WorkQueue,
        counters: Counters,
        clock: Callable[[], float],
        move_timeout_ms: int,
    ) -> None:
        self.tiers = tiers
        self._cpu, self._gpu = tiers.cpu, tiers.gpu
        self.catalog = catalog
        self.work_queue = work_queue
        self.counters = counters
        self.clock = clock
        self.placement = Placement(tiers, catalog, work_queue, counters, clock)
        self.eviction = Eviction(self.placement, self.copy_to)
        self._move_timeout_s = move_timeout_ms / 1000
        self._duplicates: deque[tuple[ChunkKey, TierSlot, TierSlot, str]] = deque(
            maxlen=MAX_DUPLICATES
        )
        """Chunks on two slots: the slot to drop from, the slot to keep, and the counter."""
        self._remote_reads = PromoteOnSecondHit(REMEMBERED_CHUNKS)
        self._lock = threading.Lock()  # guards _remote_reads

    def copy_to(
        self, key: ChunkKey, target: TierSlot, tenant: str | None = None, *, urgent: bool = False
    ) -> Ticket | None:
        """Queue a copy of *key* for *tenant*, by default its owner; None when the queue is full.

        A copy to CPU memory reads GPU memory.
        """
        work = partial(self.copy_now, key, target, tenant)
        return self.work_queue.submit(f"store-{target.name}", key, work, urgent=urgent)

    def copy_now(self, key: ChunkKey, target: TierSlot, tenant: str | None = None) -> bool:
        """Copy *key*, in a thread of the store queue of *target*. Raises KVStoreErrors."""
        try:
            if target is self._cpu and self._gpu is not None:
                return self._promote(key, self._gpu, self._gpu.tier.tenant_of(key))
            return self._copy(key, target, tenant)
        except KVStoreError:
            self.counters.add("failed_copies")
            raise

    def load(
        self, key: ChunkKey, source: TierSlot, tenant: str, *, claimed: bool = False
    ) -> Ticket | None:
        """Queue a copy of *key* from another slot to CPU memory; None when its queue is full.

        A *claimed* one is cancelled when its last claim ends: see ``WorkQueue.submit``.
        """
        work, queue = partial(self._raise_up, key, source, tenant), f"load-{source.name}"
        batch_key = source.tier.batch_key(key)
        return self.work_queue.submit(queue, key, work, claimed=claimed, batch_key=batch_key)

    def unclaim_loads(self, tickets: Iterable[Ticket]) -> None:
        """End one claim on each of *tickets*."""
        for ticket in tickets:
            if not ticket.done and self.work_queue.unclaim(ticket):
                self.counters.add("given_up_loads")

    def _raise_up(self, key: ChunkKey, source: TierSlot, tenant: str) -> bool:
        cpu, remote = self._cpu, self.tiers.remote
        was_here = cpu.name in self.catalog.holders(key)
        is_here = self._promote(key, source, tenant)
        if is_here and source.is_exclusive:
            self._duplicates.append((key, source, cpu, "left_copies"))
        if is_here and not was_here and source is remote and not self._is_kept(key, source):
            self._duplicates.append((key, cpu, source, "peer_passed_chunks"))
        return is_here

    def _is_kept(self, key: ChunkKey, source: TierSlot) -> bool:
        """Whether CPU memory keeps a chunk read from a peer."""
        with self._lock:
            is_due = self._remote_reads.is_due(key)
        stats = self.tiers.cpu_tier.stats()
        has_space = 100 * stats.used_bytes < FULL_PERCENT * stats.capacity_bytes
        return has_space or (is_due and self.placement.promotes(key, source, self._cpu))

    def drop_duplicates(self) -> None:
        """Drop one of two copies: on exclusive slots, chunks promoted to CPU memory; in CPU memory,
        chunks of a peer that are not kept. Chunks being read wait for the next tick.
        """
        for _ in range(len(self._duplicates)):
            key, slot, other, counter = duplicate = self._duplicates.popleft()
            if self.catalog.leave(slot.name, key, other.name):
                self.counters.add(counter)
                self.eviction.delete_from(slot, key)
            elif {slot.name, other.name} <= set(self.catalog.holders(key)):
                self._duplicates.append(duplicate)

    def _copy(self, key: ChunkKey, target: TierSlot, tenant: str | None = None) -> bool:
        """Copy *key*; return whether *target* has it now, in the best accuracy it can store."""
        self._make_way(target, key)
        copies = self.catalog.hold(key)
        try:
            if target.name in copies:
                return not self._can_better(target, key, copies)
            tenant = tenant or self._owner(key, copies)
            frame = self._best_frame(key, copies)
            if frame is None:
                return False
            least = self.eviction.accuracy_on(target, key, tenant)
            frame = target.encoder.encode(frame, tenant, least)
            header = verify(frame, key)
            info = header.info()
            codec = target.encoder.of_tenant(tenant)
            if codec.accuracy is not Accuracy.exact and header.codec_id != codec.codec_id:
                self.counters.add("lossless_instead")
            self.eviction.purge(target)
            request = SpaceRequest(info, tenant, self.clock() + self._move_timeout_s)
            reservation = self.eviction.reserve(target, request)
            if self.write(target, reservation, frame):
                self.note_moved(info, self._best(copies)[0], target)
                return True
            return self._adopt(key, target)
        finally:
            self.catalog.release_hold(key)

    def note_moved(self, info: ChunkInfo, source: TierSlot, target: TierSlot) -> None:
        """Record a copy from *source* that is now on *target*."""
        self.catalog.note_sealed(target.name, info)
        is_up = target is self._gpu or (target is self._cpu and source is not self._gpu)
        self.counters.add("promoted_chunks" if is_up else "copied_chunks")
        self.counters.note_move(source.name, target.name, info.size_bytes)

    def _owner(self, key: ChunkKey, copies: Mapping[str, ChunkInfo]) -> str:
        """Return the tenant of the nearest of *copies*."""
        holder = next((slot for slot in self.tiers.sources if slot.name in copies), None)
        return DEFAULT_TENANT if holder is None else holder.tier.tenant_of(key)

    def _can_better(self, target: TierSlot, key: ChunkKey, copies: Mapping[str, ChunkInfo]) -> bool:
        """Whether *target* could store a more accurate copy than it has."""
        there = copies[target.name].accuracy
        best = max(info.accuracy for info in copies.values())
        kept = self.eviction.accuracy_on(target, key, self._owner(key, copies))
        return best > there and min(best, kept) > there

    def _make_way(self, target: TierSlot, key: ChunkKey) -> None:
        """Drop a copy on *target* that could be more accurate, unless it is being read."""
        copies = self.catalog.copies(key) if target.name in self.catalog.holders(key) else {}
        if target.name not in copies or not self._can_better(target, key, copies):
            return
        if self.catalog.drop_copy(target.name, key, even_if_held=False):
            self.counters.add("replaced_copies")
            if target is self._cpu:  # the store queues of others purge before they write
                self.eviction.discard(target, key)

    def _adopt(self, key: ChunkKey, target: TierSlot) -> bool:
        """Index a copy that another server sealed first; False when it is gone again."""
        if not target.tier.shared:
            raise TierUnavailableError(target.name, f"did not release {key.hex()}")
        (info,) = target.tier.find([key])
        # The next lookup indexes one that is more complete than ours.
        if info is None or self.catalog.is_less_complete(key, info.layout):
            return False
        self.catalog.note_sealed(target.name, info)
        return True

    def write(self, target: TierSlot, reservation: Reservation, frame: Bytes) -> bool:
        """Write and seal a frame; False when the tier has another of its key."""
        sealing = False

        def work() -> bool:
            nonlocal sealing
            target.tier.write(reservation, frame)
            sealing = True
            return target.tier.seal(reservation)

        started = self.clock()
        try:
            return target.guarded(work, "write")
        except BaseException:  # including MemoryError in encryption
            if not sealing:  # a failed seal has freed the reservation itself
                target.tier.abort(reservation)
            raise
        finally:
            taken_s = self.clock() - started
            self.placement.note_write(target.name, reservation.info.key, len(frame), taken_s)

    def _best(self, copies: Mapping[str, ChunkInfo]) -> list[TierSlot]:
        """Return the slots of *copies*, the most accurate first, of equal ones the nearest."""
        holders = [slot for slot in self.tiers.sources if slot.name in copies]
        return sorted(holders, key=lambda slot: -copies[slot.name].accuracy)

    def _best_frame(self, key: ChunkKey, copies: dict[str, ChunkInfo]) -> Bytes | None:
        """Return the frame of the best and nearest copy that verifies."""
        for slot in self._best(copies):
            try:
                if slot is not self._cpu:
                    frame = self.read_bypass(copies[slot.name], slot)
                elif (frame := self.tiers.cpu_tier.peek(key)) is not None:
                    verify(frame, key)
            except ChunkCorruptError:
                self.eviction.drop_corrupt(slot, key)
                continue
            if frame is not None:
                return frame
        return None

    def _promote(self, key: ChunkKey, source: TierSlot, tenant: str) -> bool:
        """Copy *key* into CPU memory. Return False when *source* lost it.

        Raises ChunkCorruptError after a drop_corrupt, TierFullError, TierUnavailableError.
        """
        self._make_way(self._cpu, key)
        copies = self.catalog.hold(key)
        try:
            if self._cpu.name in copies:
                return True
            if source.name not in copies:
                return False
            if self.work_queue.is_cancelled():
                raise DeadlineError(f"load from {source.name}: cancelled")
            stored = copies[source.name]
            size = raw_frame_bytes(stored.layout)
            info = replace(stored, codec_id=RawCodec.codec_id, size_bytes=size)
            deadline = self.clock() + self._move_timeout_s
            reservation = self.eviction.reserve(self._cpu, SpaceRequest(info, tenant, deadline))
            found = False
            try:
                found = self._fill(stored, source, self.tiers.cpu_tier.view(reservation))
            finally:
                if not found:
                    self.tiers.cpu_tier.abort(reservation)
            if not found:
                return False
            if self.tiers.cpu_tier.seal(reservation):
                self.note_moved(info, source, self._cpu)
            return True
        finally:
            self.catalog.release_hold(key)

    def _fill(self, stored: ChunkInfo, source: TierSlot, out: Bytes) -> bool:
        """Read, verify and decode the stored copy into *out* of a raw frame's size."""
        if stored.codec_id == RawCodec.codec_id and stored.size_bytes == len(out):
            return self._read(stored, source, out)
        scratch = np.empty(stored.size_bytes, np.uint8)
        if not self._read(stored, source, scratch):
            return False
        started = self.clock()
        try:
            transcode(scratch, RawCodec(), out)
            # The stored frame was verified; this verifies the one to serve.
            verify(out, stored.key)
            source.note_decode(stored.size_bytes, self.clock() - started)
        except UnknownCodecError as error:
            self._turn_away(source, stored)
            raise ChunkCorruptError(stored.key, str(error)) from None
        except (ChunkCorruptError, InvalidFrameError, ModelError) as error:
            # Its checksums match, but its codec cannot read it, now or later.
            self.eviction.drop_corrupt(source, stored.key)
            raise ChunkCorruptError(stored.key, str(error)) from None
        return True

    def _turn_away(self, source: TierSlot, stored: ChunkInfo) -> None:
        """Drop a copy that only servers with other codecs or tables can read, or none."""
        is_removed, key = stored.codec_id in REMOVED, stored.key
        if not (is_removed or source.tier.shared):
            self.eviction.drop_corrupt(source, key)
            return
        fate = Fate.codec_removed if is_removed else Fate.unreadable
        self.catalog.outcomes.note(key, fate, source.name, codec_name(stored.codec_id))
        self.counters.add("unreadable_chunks")
        if source.tier.shared:  # other servers may read it
            self.catalog.forget(source.name, key)
        elif self.catalog.drop_copy(source.name, key):
            self.eviction.delete_from(source, key)

    def read_bypass(self, stored: ChunkInfo, source: TierSlot) -> Bytes | None:
        """Return the verified frame in a new buffer; None when *source* lost it."""
        frame = np.empty(stored.size_bytes, np.uint8)
        return frame if self._read(stored, source, frame) else None

    def _read(self, stored: ChunkInfo, source: TierSlot, out: Bytes) -> bool:
        is_cancelled = self.work_queue.is_cancelled
        try:
            return self.read_from(
                source, stored.key, lambda: source.read_verified(stored, out, is_cancelled)
            )
        except ChunkCorruptError:
            self.eviction.drop_corrupt(source, stored.key)
            raise

    def read_from(self, source: TierSlot, key: ChunkKey, read: Callable[[], object]) -> bool:
        """Read a copy that the catalog lists; False when its medium has lost it."""
        try:
            if read():
                return True
        except InvalidRequestError:
            pass  # another server replaced it with a frame of another size
        self.catalog.forget(source.name, key)
        self.catalog.outcomes.note(key, Fate.lost, source.name)
        self.counters.add("lost_chunks")
        return False

    # --- read order

    def nearest(self, key: ChunkKey, holders: Sequence[str]) -> list[TierSlot]:
        """Return the slots of *holders* that are in use in read order of *key*: fastest first,
        by measurement where both a peer and a shared tier have it.
        """
        remote = self.tiers.remote
        usable = [s for s in self.tiers.sources if s.name in holders and not s.breaker.is_open]
        if remote is None or remote not in usable[:-1] or not usable[-1].tier.shared:
            return usable
        remote_s = remote.tier.load_s(key, self.catalog.size_bytes(remote.name, key))
        stored_bytes = self.catalog.size_bytes(usable[-1].name, key)
        if remote_s is None or usable[-1].load_s(stored_bytes) < remote_s:
            usable.remove(remote)
            usable.append(remote)
        return usable
