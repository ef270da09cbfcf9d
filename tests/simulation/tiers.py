"""Media made of dictionaries, which fail as disks and networks do: by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import ClassVar

import numpy as np
from simulation.clock import FakeClock
from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats

GRANULE_BYTES = 64


@dataclass(slots=True)
class Faults:
    """How often each kind of trouble comes, as probabilities of one verb."""

    draw: random.Random
    clock: FakeClock
    fail: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
    full: float = 0.0
    raised: int = 0
    """Verbs that failed so far."""

    def strikes(self) -> bool:
        """Let time pass as it may, and say whether the verb fails."""
        if self.slow and self.draw.random() < self.slow:
            self.clock.advance(self.draw.random() * self.slow_s)
        if self.fail and self.draw.random() < self.fail:
            self.raised += 1
            return True
        return False

    def fills(self) -> bool:
        """Whether a reserve finds no room, although there is."""
        return bool(self.full) and self.draw.random() < self.full

    def chance(self, probability: float) -> bool:
        """Whether something that is no failure happens on the side."""
        return (self.fail or self.slow) > 0 and self.draw.random() < probability

    def end(self) -> None:
        """From now on nothing goes wrong."""
        self.fail = self.slow = self.full = 0.0


def no_faults() -> Faults:
    return Faults(random.Random(0), FakeClock())


@dataclass(slots=True, eq=False)
class Stored:
    """A frame on a medium."""

    info: ChunkInfo
    frame: Bytes
    is_damaged: bool = False


@dataclass(slots=True)
class Medium:
    """What is stored, whoever looks at it, in order of sealing."""

    chunks: dict[ChunkKey, Stored] = field(default_factory=dict)
    used_bytes: int = 0
    lock: Lock = field(default_factory=Lock)


class DictTier(Tier):
    """Frames in a dictionary. Sizes are rounded up; room never scatters."""

    granule_bytes = GRANULE_BYTES

    def __init__(self, capacity_bytes: int, faults: Faults, medium: Medium | None = None) -> None:
        self.capacity_bytes = self.max_frame_bytes = capacity_bytes
        self.faults = faults
        self.medium = medium or Medium()
        self._open: dict[object, Bytes] = {}
        self._open_bytes = 0
        self.lost: set[ChunkKey] = set()
        """What the medium lost or damaged by itself, until it is sealed anew."""
        self.gone: set[ChunkKey] = set()
        """What was deleted, lost or damaged since somebody last emptied this."""

    def _try(self, verb: str) -> None:
        if self.faults.strikes():
            raise TierUnavailableError(self.name, f"{verb} fails on purpose")

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        self._try("reserve")
        need_bytes = self.allocated_bytes(info.size_bytes)
        with self.medium.lock:
            free_bytes = self.capacity_bytes - self.medium.used_bytes - self._open_bytes
            if need_bytes > free_bytes or self.faults.fills():
                raise TierFullError(self.name, need_bytes, free_bytes)
            place = object()
            self._open[place] = np.zeros(info.size_bytes, np.uint8)
            self._open_bytes += need_bytes
        return Reservation(info, tenant, need_bytes, place)

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        self._try("write")
        room = self._open.get(reservation.place)
        if room is None:
            raise reservation.spent()
        reservation.check(frame)
        room[:] = frame

    def _close_reservation(self, reservation: Reservation) -> Bytes:
        frame = self._open.pop(reservation.place, None)
        if frame is None:
            raise InvalidRequestError("reservation", "spent", "reserve again")
        self._open_bytes -= reservation.reserved_bytes
        return frame

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        fails = self.faults.strikes()
        with self.medium.lock:
            frame = self._close_reservation(reservation)
            if not fails or self._publishes_unheard():
                stored = Stored(reservation.info, frame)
                sealed = self._publish(stored, durable=durable)
        if fails:
            raise TierUnavailableError(self.name, "seal fails on purpose")
        return sealed

    def _publishes_unheard(self) -> bool:
        """Whether a seal that fails did its work and only the answer was lost."""
        return False

    def _publish(self, stored: Stored, *, durable: bool) -> bool:
        if stored.info.key in self.medium.chunks:
            return False
        self.medium.chunks[stored.info.key] = stored
        self.lost.discard(stored.info.key)
        self.medium.used_bytes += self.allocated_bytes(stored.info.size_bytes)
        return True

    @override
    def abort(self, reservation: Reservation) -> None:
        with self.medium.lock:
            self._close_reservation(reservation)

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        if self.faults.strikes():
            out[: len(out) // 2] = 0xEE
            raise TierUnavailableError(self.name, "read fails on purpose")
        stored = self.medium.chunks.get(key)
        if stored is None:
            return False
        if not 0 <= offset <= len(stored.frame) - len(out):
            raise InvalidRequestError("offset", offset, "outside the frame")
        out[:] = stored.frame[offset : offset + len(out)]
        if verifier is not None:
            verifier.update(len(out))
        return True

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        self._try("find")
        held = [self.medium.chunks.get(key) for key in keys]
        return [None if stored is None else stored.info for stored in held]

    @override
    def delete(self, key: ChunkKey) -> bool:
        fails = self.faults.strikes()
        with self.medium.lock:
            self.gone.add(key)
            gone = (not fails or self.faults.chance(0.5)) and self._remove(key)
        if fails:
            raise TierUnavailableError(self.name, "delete fails on purpose")
        return gone

    def _remove(self, key: ChunkKey) -> bool:
        stored = self.medium.chunks.pop(key, None)
        if stored is not None:
            self.medium.used_bytes -= self.allocated_bytes(stored.info.size_bytes)
        return stored is not None

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        return iter([stored.info for stored in list(self.medium.chunks.values())])

    @override
    def stats(self) -> TierStats:
        with self.medium.lock:
            used_bytes = self.medium.used_bytes + self._open_bytes
            return TierStats(
                self.capacity_bytes, used_bytes, len(self.medium.chunks), len(self._open)
            )

    @override
    def flush(self) -> None:
        self._try("flush")

    @override
    def close(self) -> None:
        """Leave the medium as it is."""

    def lose(self, key: ChunkKey) -> None:
        """Forget a chunk without a word, as a medium may."""
        self._spoil(key)
        self._remove(key)

    def _spoil(self, key: ChunkKey) -> None:
        self.lost.add(key)
        self.gone.add(key)

    def flip(self, key: ChunkKey, bit: int) -> None:
        """Flip one bit of a stored frame."""
        self._spoil(key)
        self.medium.chunks[key].is_damaged = True
        frame = self.medium.chunks[key].frame
        frame[bit // 8 % len(frame)] ^= np.uint8(1 << bit % 8)


class SimDisk(DictTier):
    """A disk: what is not flushed goes with the power, and so do deletes.

    A flush that fails drops what it should have made durable, as the real one does.
    """

    name = "disk"
    survives_restart: ClassVar[bool] = True

    def __init__(self, capacity_bytes: int, faults: Faults, medium: Medium | None = None) -> None:
        super().__init__(capacity_bytes, faults, medium)
        self.durable = dict(self.medium.chunks)

    @override
    def _publish(self, stored: Stored, *, durable: bool) -> bool:
        sealed = super()._publish(stored, durable=durable)
        if durable or self.faults.chance(0.2):
            self.durable = dict(self.medium.chunks)
        elif self.faults.chance(self.faults.fail):
            self._drop_unflushed()
        return sealed

    def _drop_unflushed(self) -> None:
        for key, stored in list(self.medium.chunks.items()):
            if self.durable.get(key) is not stored:
                self.lose(key)

    @override
    def flush(self) -> None:
        fails = self.faults.strikes()
        with self.medium.lock:
            if fails:
                self._drop_unflushed()
            self.durable = dict(self.medium.chunks)
        if fails:
            raise TierUnavailableError(self.name, "flush fails on purpose")

    def restarted(self) -> SimDisk:
        """Return the disk as it is after a power cut."""
        used_bytes = sum(self.allocated_bytes(s.info.size_bytes) for s in self.durable.values())
        again = SimDisk(self.capacity_bytes, self.faults, Medium(dict(self.durable), used_bytes))
        again.lost = {key for key, stored in self.durable.items() if stored.is_damaged}
        return again


class GatedDisk(SimDisk):
    """A disk that reads and writes only while its gate is open, for tests with real threads."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, no_faults())
        self.gate = Event()
        self.gate.set()
        self.reached = Event()
        """Set once somebody came to the gate."""

    def _pass(self) -> None:
        self.reached.set()
        self.gate.wait()

    def shut(self) -> None:
        self.gate.clear()
        self.reached.clear()

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        self._pass()
        super().write(reservation, frame)

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        self._pass()
        return super().read(key, out, offset, verifier)


class SimRedis(DictTier):
    """A store that other nodes put into. A seal whose answer is lost may have worked."""

    name = "redis"
    survives_restart: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    @override
    def _publishes_unheard(self) -> bool:
        return self.faults.chance(0.5)

    def others_put(self, info: ChunkInfo, frame: Bytes) -> bool:
        """Put as another node would: over what is there, when that leaves enough room."""
        with self.medium.lock:
            free_bytes = self.capacity_bytes - self.medium.used_bytes - self._open_bytes
            if self.allocated_bytes(info.size_bytes) > free_bytes:
                return False
            self._remove(info.key)
            self._publish(Stored(info, frame.copy()), durable=False)
            self._spoil(info.key)
            return True
