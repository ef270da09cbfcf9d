"""Moves: copies of chunks between slots, each under the codec of where it goes.

A lossy copy never takes the place of an exact one: it is made beside it, says what it is, and
gives way to a better one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from kvstore.codecs.base import REMOVED, codec_name
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    RepresentationError,
    TierFullError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import raw_frame_bytes, with_size
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.index.catalog import Catalog
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.telemetry.outcomes import Fate
from kvstore.server.tiering.eviction import Eviction
from kvstore.server.tiering.promotion import PromoteOnSecondHit
from kvstore.server.tiering.tier_slot import SpaceRequest, TierSlot, verify
from kvstore.server.tiering.work_queue import Ticket, WorkQueue
from kvstore.tiers.base import DEFAULT_TENANT, Reservation

FULL_PERCENT = 90
"""Of CPU memory in use, from which on room is given up again."""
REMEMBERED_CHUNKS = 1 << 16
MAX_PASS_THROUGH = 4096
"""Chunks that wait for their readers; of more, the oldest stay."""


class PassThroughCache:
    """Of chunks that come from *peers*. Thread-safe."""

    def __init__(self, moves: Moves, peers: TierSlot) -> None:
        self._moves = moves
        self._peers = peers
        self._reads = PromoteOnSecondHit(REMEMBERED_CHUNKS)
        self._waiting: deque[ChunkKey] = deque(maxlen=MAX_PASS_THROUGH)
        self._lock = threading.Lock()  # guards _reads

    def came(self, key: ChunkKey) -> None:
        """A chunk came into CPU memory from a peer."""
        if not self._is_kept(key):
            self._waiting.append(key)

    def _is_kept(self, key: ChunkKey) -> bool:
        moves = self._moves
        with self._lock:
            is_due = self._reads.is_due(key)
        stats = moves.cpu_tier.stats()
        if 100 * stats.used_bytes < FULL_PERCENT * stats.capacity_bytes:
            return True
        return is_due and moves.placement.promotes(key, self._peers, moves.cpu)

    def leave(self) -> None:
        """Free what nobody reads any more and a peer has. Called at every tick."""
        moves, catalog = self._moves, self._moves.catalog
        cpu, peers = moves.cpu, self._peers
        for _ in range(len(self._waiting)):
            key = self._waiting.popleft()
            if catalog.leave(cpu.name, key, peers.name):
                moves.counters.add("peer_passed_chunks")
                moves.delete_from(cpu, key)
            elif {cpu.name, peers.name} <= set(catalog.holders(key)):
                self._waiting.append(key)


MAX_DUPLICATES = 4096
"""Copies on exclusive slots that wait to be dropped; of more the oldest stay."""


class Moves(Eviction):
    """Moves chunks between slots.

    Moves run in the queues ``load-TIER`` and ``store-TIER``; a queue only ever waits for the store
    queue of a slower tier, so queues cannot wait in a circle.
    """

    def __init__(
        self,
        slots: Sequence[TierSlot],
        catalog: Catalog,
        work_queue: WorkQueue,
        counters: Counters,
        clock: Callable[[], float],
        move_timeout_ms: int,
    ) -> None:
        super().__init__(slots, catalog, work_queue, counters, clock)
        self._move_timeout_s = move_timeout_ms / 1000
        self._duplicates: deque[tuple[ChunkKey, TierSlot]] = deque(maxlen=MAX_DUPLICATES)
        self.pass_through = PassThroughCache(self, self.peers) if self.peers is not None else None

    # --- moves

    def copy_down(self, key: ChunkKey, target: TierSlot, *, urgent: bool = False) -> Ticket | None:
        """Queue a copy of *key* to a lower slot; None when its queue is full."""
        work = partial(self._counted, partial(self._copy, key, target))
        return self.work_queue.submit(f"store-{target.name}", key, work, urgent=urgent)

    def copy_now(self, key: ChunkKey, target: TierSlot) -> bool:
        """Copy *key* to a lower slot, in a thread of its store queue. Raises what that raises."""
        return self._counted(partial(self._copy, key, target))

    def copy_up(self, key: ChunkKey, tenant: str) -> Ticket | None:
        """Queue a copy of *key* to GPU memory; None without it or when its queue is full."""
        if self.gpu is None or self.gpu.breaker.is_open:
            return None
        work = partial(self._counted, partial(self._copy, key, self.gpu, tenant))
        return self.work_queue.submit(f"store-{self.gpu.name}", key, work)

    def _bring_down(self, key: ChunkKey, source: TierSlot) -> Ticket | None:
        """Queue a copy of a victim of GPU memory to CPU memory."""
        tenant = source.tier.tenant_of(key)
        work = partial(self._counted, partial(self._promote, key, source, tenant))
        return self.work_queue.submit(f"store-{self.cpu.name}", key, work, urgent=True)

    def _counted(self, copy: Callable[[], bool]) -> bool:
        try:
            return copy()
        except KVStoreError:
            self.counters.add("failed_copies")
            raise

    def load(
        self, key: ChunkKey, source: TierSlot, tenant: str, *, claimed: bool = False
    ) -> Ticket | None:
        """Queue a copy of *key* from another slot to CPU memory; None when its queue is full.

        One that is *claimed* ends when nobody wants it any more: see ``WorkQueue.submit``.
        """
        work = partial(self._raise_up, key, source, tenant)
        batch_key = source.tier.batch_key(key)
        return self.work_queue.submit(
            f"load-{source.name}", key, work, claimed=claimed, batch_key=batch_key
        )

    def let_go_of_loads(self, tickets: Iterable[Ticket]) -> None:
        """Whoever claimed these does not wait for them any more."""
        for ticket in tickets:
            if not ticket.done and self.work_queue.let_go(ticket):
                self.counters.add("given_up_loads")

    def _raise_up(self, key: ChunkKey, source: TierSlot, tenant: str) -> bool:
        was_here = self.cpu.name in self.catalog.holders(key)
        is_here = self._promote(key, source, tenant)
        if is_here and source.is_exclusive:
            self._duplicates.append((key, source))
        if is_here and not was_here and source is self.peers and self.pass_through is not None:
            self.pass_through.came(key)
        return is_here

    def drop_duplicates(self) -> None:
        """Drop one of two copies: from exclusive slots what came up to CPU memory, and from there
        what came from a peer and is not kept. What somebody reads waits for that.

        Called at every tick; what is read still is tried again at the next.
        """
        if self.pass_through is not None:
            self.pass_through.leave()
        for _ in range(len(self._duplicates)):
            key, source = self._duplicates.popleft()
            if self.catalog.leave(source.name, key, self.cpu.name):
                self.counters.add("left_copies")
                self.delete_from(source, key)
            elif {self.cpu.name, source.name} <= set(self.catalog.holders(key)):
                self._duplicates.append((key, source))

    def _copy(self, key: ChunkKey, target: TierSlot, tenant: str | None = None) -> bool:
        """Copy *key* to *target*, for *tenant* or whose it is.

        Return whether it is there now, as good as *target* can keep it.
        """
        self._make_way(target, key)
        copies = self.catalog.hold(key)
        try:
            if target.name in copies:
                return not self._can_better(target, key, copies)
            tenant = tenant or self._owner(key, copies)
            frame = self._best_frame(key, copies)
            if frame is None:
                return False
            least = self.fidelity_on(target, key, tenant)
            frame = target.encode_for(frame, tenant, least)
            header = verify(frame, key)
            info = header.info()
            if target.encoder.is_other(header, tenant):
                self.counters.add("lossless_instead")
            self._purge(target)
            request = SpaceRequest(info, tenant, self.clock() + self._move_timeout_s)
            reservation = self.reserve(target, request)
            if self._write(target, reservation, frame):
                self.catalog.note_sealed(target.name, info)
                self.counters.add("promoted_chunks" if target is self.gpu else "copied_chunks")
                self.counters.flows.note(self._best(copies)[0].name, target.name, info.size_bytes)
                return True
            return self._adopt(key, target)
        finally:
            self.catalog.let_go(key)

    def reserve_for_put(self, slot: TierSlot, request: SpaceRequest) -> Reservation:
        """Reserve in memory for an original, which a lossy copy there gives way to.

        Raises as ``reserve`` does, TierFullError while somebody reads that copy.
        """
        key = request.info.key
        if slot.name in self.catalog.holders(key):
            if not self.catalog.cast_out(slot.name, key, even_if_held=False):
                raise TierFullError(slot.name, request.info.size_bytes, 0)
            self.counters.add("replaced_copies")
            self._discard(slot, key)
        return self.reserve(slot, request)

    def replace(self, info: ChunkInfo) -> bool:
        """Cast out the copies of a chunk that has more of its end in *info*.

        False when somebody reads one.
        """
        for name in self.catalog.holders(info.key):
            if not self.catalog.cast_out(name, info.key, even_if_held=False):
                return not self.catalog.is_less_complete(info.key, info.layout)
            self.counters.add("replaced_copies")
            self.delete_from(self.slots[name], info.key)
        return True

    def _owner(self, key: ChunkKey, copies: Mapping[str, ChunkInfo]) -> str:
        """Return whose chunk it is, by the nearest of its *copies*."""
        holder = next((slot for slot in self.sources if slot.name in copies), None)
        return DEFAULT_TENANT if holder is None else holder.tier.tenant_of(key)

    def _can_better(self, target: TierSlot, key: ChunkKey, copies: Mapping[str, ChunkInfo]) -> bool:
        """Whether a copy elsewhere would be better on *target* than the one that is there."""
        there = copies[target.name].fidelity
        best = max(info.fidelity for info in copies.values())
        kept = self.fidelity_on(target, key, self._owner(key, copies))
        return best > there and min(best, kept) > there

    def _make_way(self, target: TierSlot, key: ChunkKey) -> None:
        """Cast out a copy on *target* that could be better, unless somebody reads it."""
        if target.name not in self.catalog.holders(key):
            return
        copies = self.catalog.copies(key)
        if target.name not in copies or not self._can_better(target, key, copies):
            return
        if self.catalog.cast_out(target.name, key, even_if_held=False):
            self.counters.add("replaced_copies")
            if target is self.cpu:  # the others sweep in their store queue, before they write
                self._discard(target, key)

    def _adopt(self, key: ChunkKey, target: TierSlot) -> bool:
        """Take note of a copy that somebody else sealed first; False when it is gone again."""
        if not target.tier.shared:
            raise TierUnavailableError(target.name, f"does not let go of {key.hex()}")
        (info,) = target.tier.find([key])
        if info is not None and self.catalog.is_less_complete(key, info.layout):
            return False  # it has more than ours, and is learned of when somebody asks
        if info is not None:
            self.catalog.note_sealed(target.name, info)
        return info is not None

    def _write(self, target: TierSlot, reservation: Reservation, frame: Bytes) -> bool:
        sealing = False

        def work() -> bool:
            nonlocal sealing
            target.tier.write(reservation, 0, frame)
            sealing = True
            return target.tier.seal(reservation)

        started = self.clock()
        try:
            return target.guarded(work, "write")
        except KVStoreError:
            if not sealing:  # a seal that fails has freed the room itself
                target.tier.abort(reservation)
            raise
        finally:
            taken_s = self.clock() - started
            self.placement.note_write(target.name, taken_s, reservation.info.key, len(frame))

    def _best(self, copies: Mapping[str, ChunkInfo]) -> list[TierSlot]:
        """Return the slots of *copies*, the best copy first and of equal ones the nearest."""
        holders = [slot for slot in self.sources if slot.name in copies]
        return sorted(holders, key=lambda slot: -copies[slot.name].fidelity)

    def _best_frame(self, key: ChunkKey, copies: dict[str, ChunkInfo]) -> Bytes | None:
        """Return the verified frame of the best and nearest copy that proves right."""
        for slot in self._best(copies):
            try:
                if slot is self.cpu:
                    frame = self.cpu_tier.peek(key)
                    if frame is not None:
                        verify(frame, key)
                else:
                    frame = self.read_bypass(copies[slot.name], slot)
            except ChunkCorruptError:
                self.drop_corrupt(slot, key)
                continue
            if frame is not None:
                return frame
        return None

    def _promote(self, key: ChunkKey, source: TierSlot, tenant: str) -> bool:
        """Copy *key* into CPU memory. Return False when *source* lost it.

        Raises ChunkCorruptError after a drop_corrupt, TierFullError, TierUnavailableError.
        """
        self._make_way(self.cpu, key)
        copies = self.catalog.hold(key)
        try:
            if self.cpu.name in copies:
                return True
            if source.name not in copies:
                return False
            self._check_wanted(source)
            stored = copies[source.name]
            info = with_size(stored, self.cpu.codec.codec_id, raw_frame_bytes(stored.layout))
            deadline = self.clock() + self._move_timeout_s
            reservation = self.reserve(self.cpu, SpaceRequest(info, tenant, deadline))
            try:
                found = self._fill(stored, source, self.cpu_tier.view(reservation))
            except BaseException:
                self.cpu_tier.abort(reservation)
                raise
            if not found:
                self.cpu_tier.abort(reservation)
                return False
            if self.cpu_tier.seal(reservation):
                self.catalog.note_sealed(self.cpu.name, info)
                self.counters.add("copied_chunks" if source is self.gpu else "promoted_chunks")
                self.counters.flows.note(source.name, self.cpu.name, info.size_bytes)
            return True
        finally:
            self.catalog.let_go(key)

    def _check_wanted(self, source: TierSlot) -> None:
        """Raise DeadlineError if nobody wants the load that this thread does."""
        if self.work_queue.is_given_up():
            raise DeadlineError(f"load from {source.name}: nobody waits for it any more")

    def _fill(self, stored: ChunkInfo, source: TierSlot, out: Bytes) -> bool:
        """Read, verify and decode the stored copy into *out* of a raw frame's size."""
        if stored.codec_id == self.cpu.codec.codec_id and stored.size_bytes == len(out):
            return self._read(stored, source, out)
        scratch = np.empty(stored.size_bytes, np.uint8)
        if not self._read(stored, source, scratch):
            return False
        started = self.clock()
        try:
            transcode(scratch, self.cpu.codec, out)
            # Verified as it was read; checked again as it will be served.
            verify(out, stored.key)
            source.note_decode(stored.size_bytes, self.clock() - started)
        except UnknownCodecError as error:
            self._turn_away(source, stored)
            raise ChunkCorruptError(stored.key, str(error)) from None
        except (ChunkCorruptError, InvalidFrameError, RepresentationError) as error:
            # Its checksums are right, and yet its codec cannot read it: it never will.
            self.drop_corrupt(source, stored.key)
            raise ChunkCorruptError(stored.key, str(error)) from None
        return True

    def _turn_away(self, source: TierSlot, stored: ChunkInfo) -> None:
        """Drop a copy that no server reads any more, or only one with other codecs or tables."""
        is_removed, key = stored.codec_id in REMOVED, stored.key
        if not (is_removed or source.tier.shared):
            self.drop_corrupt(source, key)
            return
        fate = Fate.codec_removed if is_removed else Fate.unreadable
        self.outcomes.note(key, fate, source.name, codec_name(stored.codec_id))
        self.counters.add("unreadable_chunks")
        if source.tier.shared:  # not ours alone to delete
            self.catalog.forget(source.name, key)
        elif self.catalog.cast_out(source.name, key):
            self.delete_from(source, key)

    def read_bypass(self, stored: ChunkInfo, source: TierSlot) -> Bytes | None:
        """Return the verified frame in memory of its own; None when *source* lost it."""
        frame = np.empty(stored.size_bytes, np.uint8)
        return frame if self._read(stored, source, frame) else None

    def _read(self, stored: ChunkInfo, source: TierSlot, out: Bytes) -> bool:
        try:
            header = source.read_verified(stored, out, self.work_queue.is_given_up)
        except ChunkCorruptError:
            self.drop_corrupt(source, stored.key)
            raise
        except InvalidRequestError:
            header = None  # others have put a frame of another size in its place
        if header is None:
            self.catalog.forget(source.name, stored.key)
            self.outcomes.note(stored.key, Fate.lost, source.name)
            self.counters.add("lost_chunks")
            return False
        return True

    def drop_corrupt(self, slot: TierSlot, key: ChunkKey) -> None:
        """Drop a copy that failed verification, so that the chunk can be put again at once."""
        self.counters.add("corrupt_chunks")
        slot.tier.note_corrupt(key)
        self.outcomes.note(key, Fate.corrupt, slot.name)
        if self.catalog.cast_out(slot.name, key):
            self.delete_from(slot, key)

    def delete_from(self, slot: TierSlot, key: ChunkKey, *, urgent: bool = False) -> Ticket | None:
        """Free a copy that was cast out; lower slots do that in their store queue.

        None when there is nothing to wait for.
        """
        if slot is self.cpu:
            self._discard(slot, key)
            return None
        work = partial(self._discard, slot, key)
        return self.work_queue.submit(f"store-{slot.name}", b"delete" + key, work, urgent=urgent)

    def _discard(self, slot: TierSlot, key: ChunkKey) -> None:
        """Delete an orphan. A medium that does not answer keeps it, unseen, until ``_purge``.

        Only the store queue deletes from a lower slot and writes to it, so no orphan can be
        replaced by a copy worth keeping in the meantime.
        """
        if self.catalog.is_orphan(slot.name, key):
            slot.guarded(lambda: slot.tier.delete(key), "delete")
            self.catalog.purged(slot.name, key)

    def _purge(self, slot: TierSlot) -> None:
        """Delete what earlier attempts left on *slot*, as far as it answers."""
        with suppress(TierUnavailableError):
            for key in self.catalog.orphans(slot.name):
                self._discard(slot, key)
