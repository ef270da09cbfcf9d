"""Transfers: copies of chunks between shelves, and the room they need.

Reclaim happens inside allocate: whoever needs room evicts exactly that much, and an evicted
chunk of which no lower tier has a copy is demoted first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    TierFullError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import raw_frame_bytes, with_size
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.catalog import Catalog
from kvstore.server.metrics import Counters
from kvstore.server.mover import Mover, Ticket
from kvstore.server.shelf import Room, Shelf, verify
from kvstore.tiers.base import DEFAULT_TENANT, Reservation
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:  # its file loads torch
    from kvstore.tiers.gpu import GpuTier

MAX_RECLAIM_ROUNDS = 1000
VICTIMS_PER_ROUND = 64


class Transfers:
    """Moves chunks between shelves. *shelves* are ordered from the fastest to the slowest.

    One of them is CPU memory, which frames are served from; only GPU memory is faster.
    Thread-safe; *clock* returns monotonic seconds. Moves run in the Mover's lanes ``load-TIER``
    and ``store-TIER``; a lane only ever waits for the store lane of a slower tier, so lanes
    cannot wait in a circle.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        catalog: Catalog,
        mover: Mover,
        counters: Counters,
        clock: Callable[[], float],
        move_timeout_ms: int,
    ) -> None:
        self.shelves = {shelf.name: shelf for shelf in shelves}
        self._order = list(shelves)
        self.cpu = next(shelf for shelf in shelves if isinstance(shelf.tier, CpuTier))
        self.cpu_tier = cast("CpuTier", self.cpu.tier)
        self.gpu = None if shelves[0] is self.cpu else shelves[0]
        self.gpu_tier = None if self.gpu is None else cast("GpuTier", self.gpu.tier)
        self.sources = [self.cpu, *(shelf for shelf in shelves if shelf is not self.cpu)]
        """The shelves in the order in which frames are looked for: first where they are served."""
        local = (s for s in self.lower_shelves() if s.tier.survives_restart and not s.tier.shared)
        self.filed = next(local, None)
        """The shelf whose frames lie in files that a reader on this host may open."""
        self.catalog = catalog
        self.mover = mover
        self.counters = counters
        self.clock = clock
        self._move_timeout_s = move_timeout_ms / 1000

    # --- room

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
        for attempt in range(MAX_RECLAIM_ROUNDS):
            missing = tier.stats().used_bytes + need - limit
            if is_scattered := missing <= 0:
                try:
                    return tier.reserve(room.info, room.tenant)
                except TierFullError:
                    missing = need
                except TierUnavailableError as error:
                    shelf.breaker.fail(str(error))
                    raise
            claimed = self._claim(shelf, missing, room if is_scattered else None, attempt)
            self._evict(shelf, claimed, missing, room.deadline)
        raise TierFullError(tier.name, size, limit - tier.stats().used_bytes)

    def _claim(
        self, shelf: Shelf, need_bytes: int, room: Room | None, attempt: int
    ) -> list[ChunkKey]:
        """Claim a round of victims; for *room* that is free but scattered, ones side by side."""
        claim, tier = self.catalog.claim_victims, shelf.tier
        victims = self._enough(shelf, claim(shelf.name, need_bytes, VICTIMS_PER_ROUND), need_bytes)
        if victims and room is not None:
            near = tier.in_the_way(victims[0], room.info.size_bytes, room.tenant)
            if near:
                self.catalog.unclaim(victims[1:])
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
            self.catalog.unclaim(victims)

    def _enough(self, shelf: Shelf, victims: list[ChunkKey], need_bytes: int) -> list[ChunkKey]:
        """Spare the last victims when the slack of the first frees enough: policies see frames."""
        freed_bytes = 0
        for at, key in enumerate(victims, start=1):
            size_bytes = self.catalog.size_bytes(shelf.name, key)
            freed_bytes += shelf.tier.allocated_bytes(size_bytes) if size_bytes else 0
            if freed_bytes >= need_bytes:
                self.catalog.unclaim(victims[at:])
                return victims[:at]
        return victims

    def _await_progress(self, shelf: Shelf, deadline: float) -> bool:
        """Wait until something that keeps chunks on *shelf* is done; False if nothing does.

        Only evictions from this shelf and moves to lower ones count, as only these end
        without our help.
        """
        if self.catalog.await_unclaimed(shelf.name, deadline):
            return True
        lanes = [f"store-{target.name}" for target in self._below(shelf)]
        return self.mover.await_any(lanes, deadline)

    def _demote(self, shelf: Shelf, key: ChunkKey) -> Ticket | None:
        """Queue a copy to the next lower shelf that is in use, unless one has the chunk."""
        lower = self._below(shelf)
        held = self.catalog.holders(key)
        if any(target.name in held for target in lower):
            return None
        for target in lower:
            if target is self.cpu:
                return self._bring_down(key, shelf)
            if not target.breaker.is_open:
                return self.copy_down(key, target, urgent=True)
        return None

    def _give_up(self, shelf: Shelf, key: ChunkKey, ticket: Ticket | None, deadline: float) -> None:
        if ticket is not None:
            try:
                self.mover.wait(ticket, deadline)
            except KVStoreError as error:
                if isinstance(error, DeadlineError):
                    raise
                # Counted where it failed; the victim has to go all the same.
        holders = self.catalog.holders(key)
        if shelf.name not in holders:
            return
        if self.catalog.cast_out(shelf.name, key, even_if_held=False):
            self._discard(shelf, key)
            self.counters.add("evicted_chunks")
            if len(holders) == 1:
                self.counters.add("dropped_victims")

    # --- moves

    def copy_down(self, key: ChunkKey, target: Shelf, *, urgent: bool = False) -> Ticket | None:
        """Queue a copy of *key* to a lower shelf; None when its lane is full."""
        work = partial(self._counted, partial(self._copy, key, target))
        return self.mover.submit(f"store-{target.name}", key, work, urgent=urgent)

    def copy_up(self, key: ChunkKey, tenant: str) -> Ticket | None:
        """Queue a copy of *key* to GPU memory; None without it or when its lane is full."""
        if self.gpu is None or self.gpu.breaker.is_open:
            return None
        work = partial(self._counted, partial(self._copy, key, self.gpu, tenant))
        return self.mover.submit(f"store-{self.gpu.name}", key, work)

    def _bring_down(self, key: ChunkKey, source: Shelf) -> Ticket | None:
        """Queue a copy of a victim of GPU memory to CPU memory."""
        tenant = source.tier.tenant_of(key)
        work = partial(self._counted, partial(self._promote, key, source, tenant))
        return self.mover.submit(f"store-{self.cpu.name}", key, work, urgent=True)

    def _counted(self, copy: Callable[[], bool]) -> bool:
        try:
            return copy()
        except KVStoreError:
            self.counters.add("failed_copies")
            raise

    def load(self, key: ChunkKey, source: Shelf, tenant: str) -> Ticket | None:
        """Queue a copy of *key* from another shelf to CPU memory; None when its lane is full."""
        work = partial(self._promote, key, source, tenant)
        return self.mover.submit(f"load-{source.name}", key, work)

    def _copy(self, key: ChunkKey, target: Shelf, tenant: str | None = None) -> bool:
        """Copy *key* to *target*, for *tenant* or whose it is. Return whether it is there now."""
        copies = self.catalog.hold(key)
        try:
            if target.name in copies:
                return True
            if tenant is None and copies:
                holder = next(shelf for shelf in self.sources if shelf.name in copies)
                tenant = holder.tier.tenant_of(key)
            frame = self._best_frame(key, copies)
            if frame is None:
                return False
            frame = target.encode_for(frame)
            info = verify(frame, key).info()
            self._sweep(target)
            room = Room(info, tenant or DEFAULT_TENANT, self.clock() + self._move_timeout_s)
            reservation = self.reserve(target, room)
            if self._write(target, reservation, frame):
                self.catalog.note_sealed(target.name, info)
                self.counters.add("promoted_chunks" if target is self.gpu else "copied_chunks")
                return True
            return self._adopt(key, target)
        finally:
            self.catalog.let_go(key)

    def _adopt(self, key: ChunkKey, target: Shelf) -> bool:
        """Take note of a copy that somebody else sealed first; False when it is gone again."""
        if not target.tier.shared:
            raise TierUnavailableError(target.name, f"does not let go of {key.hex()}")
        (info,) = target.tier.find([key])
        if info is not None:
            self.catalog.note_sealed(target.name, info)
        return info is not None

    def _write(self, target: Shelf, reservation: Reservation, frame: Bytes) -> bool:
        sealing = False

        def work() -> bool:
            nonlocal sealing
            target.tier.write(reservation, 0, frame)
            sealing = True
            return target.tier.seal(reservation)

        try:
            return target.guarded(work)
        except KVStoreError:
            if not sealing:  # a seal that fails has freed the room itself
                target.tier.abort(reservation)
            raise

    def _best_frame(self, key: ChunkKey, copies: dict[str, ChunkInfo]) -> Bytes | None:
        """Return the verified frame of the nearest copy that proves right."""
        for shelf in self.sources:
            if shelf.name not in copies:
                continue
            try:
                if shelf is self.cpu:
                    frame = self.cpu_tier.peek(key)
                    if frame is not None:
                        verify(frame, key)
                else:
                    frame = self.read_loose(copies[shelf.name], shelf)
            except ChunkCorruptError:
                self.quarantine(shelf, key)
                continue
            if frame is not None:
                return frame
        return None

    def _promote(self, key: ChunkKey, source: Shelf, tenant: str) -> bool:
        """Copy *key* into CPU memory. Return False when *source* lost it.

        Raises ChunkCorruptError after a quarantine, TierFullError, TierUnavailableError.
        """
        copies = self.catalog.hold(key)
        try:
            if self.cpu.name in copies:
                return True
            if source.name not in copies:
                return False
            stored = copies[source.name]
            info = with_size(stored, self.cpu.codec.codec_id, raw_frame_bytes(stored.layout))
            deadline = self.clock() + self._move_timeout_s
            reservation = self.reserve(self.cpu, Room(info, tenant, deadline))
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
            return True
        finally:
            self.catalog.let_go(key)

    def _fill(self, stored: ChunkInfo, source: Shelf, out: Bytes) -> bool:
        """Read, verify and decode the stored copy into *out* of a raw frame's size."""
        if stored.codec_id == self.cpu.codec.codec_id and stored.size_bytes == len(out):
            return self._read(stored, source, out)
        scratch = np.empty(stored.size_bytes, np.uint8)
        if not self._read(stored, source, scratch):
            return False
        try:
            transcode(scratch, self.cpu.codec, out)
            # Verified as it was read; checked again as it will be served.
            verify(out, stored.key)
        except (ChunkCorruptError, InvalidFrameError, UnknownCodecError) as error:
            # Its checksums are right, and yet its codec cannot read it: it never will.
            self.quarantine(source, stored.key)
            raise ChunkCorruptError(stored.key, str(error)) from None
        return True

    def read_loose(self, stored: ChunkInfo, source: Shelf) -> Bytes | None:
        """Return the verified frame in memory of its own; None when *source* lost it."""
        frame = np.empty(stored.size_bytes, np.uint8)
        return frame if self._read(stored, source, frame) else None

    def _read(self, stored: ChunkInfo, source: Shelf, out: Bytes) -> bool:
        try:
            header = source.read_verified(stored, out)
        except ChunkCorruptError:
            self.quarantine(source, stored.key)
            raise
        except InvalidRequestError:
            header = None  # others have put a frame of another size in its place
        if header is None:
            self.catalog.forget(source.name, stored.key)
            self.counters.add("lost_chunks")
            return False
        return True

    def quarantine(self, shelf: Shelf, key: ChunkKey) -> None:
        """Drop a copy that failed verification, so that the chunk can be put again at once."""
        self.counters.add("corrupt_chunks")
        if self.catalog.cast_out(shelf.name, key):
            self.delete_from(shelf, key)

    def delete_from(self, shelf: Shelf, key: ChunkKey, *, urgent: bool = False) -> Ticket | None:
        """Free a copy that was cast out; lower shelves do that in their store lane.

        None when there is nothing to wait for.
        """
        if shelf is self.cpu:
            self._discard(shelf, key)
            return None
        work = partial(self._discard, shelf, key)
        return self.mover.submit(f"store-{shelf.name}", b"delete" + key, work, urgent=urgent)

    def _discard(self, shelf: Shelf, key: ChunkKey) -> None:
        """Delete a stray. A medium that does not answer keeps it, unseen, until ``_sweep``.

        Only the store lane deletes from a lower shelf and writes to it, so no stray can be
        replaced by a copy worth keeping in the meantime.
        """
        if self.catalog.is_stray(shelf.name, key):
            shelf.guarded(lambda: shelf.tier.delete(key))
            self.catalog.swept(shelf.name, key)

    def _sweep(self, shelf: Shelf) -> None:
        """Delete what earlier attempts left on *shelf*, as far as it answers."""
        with suppress(TierUnavailableError):
            for key in self.catalog.strays(shelf.name):
                self._discard(shelf, key)

    def lower_shelves(self) -> list[Shelf]:
        """Return the shelves below CPU memory, fastest first."""
        return self._below(self.cpu)

    def _below(self, shelf: Shelf) -> list[Shelf]:
        return self._order[self._order.index(shelf) + 1 :]
