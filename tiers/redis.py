"""The tier that all nodes share: frames in one Redis or Valkey.

A frame is cut into parts of a few megabytes, and a manifest, written last and only where
there is none, makes them a chunk. All names of a key share one hash slot. Parts carry their
writer's random id, so that a reader never mixes two versions, and everything has a lifetime,
so that what a killed writer left behind ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import structlog
from redis.exceptions import OutOfMemoryError
from typing_extensions import override

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.frame_check import FrameCheck
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats
from kvstore.tiers.expected import Expected
from kvstore.tiers.redis_account import RedisAccount
from kvstore.tiers.redis_health import concerns
from kvstore.tiers.redis_lines import DEFAULT_CONNECTIONS
from kvstore.tiers.redis_link import Lost, RedisLink
from kvstore.tiers.redis_manifest import (
    DEFAULT_PREFIX,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    WRITE_ID_BYTES,
    KeyNames,
    Manifest,
)
from kvstore.tiers.redis_remote import RemoteChunks

logger = structlog.get_logger(__name__)

CHUNK_OVERHEAD_BYTES = 512
"""Accounted for each chunk's manifest and the names of its parts."""

LINES_FOR_ROWS = 4
"""With fewer connections none is kept from one frame to the next: three threads load, and while
they wait for room another may have to store.
"""


def _random_write_id() -> bytes:
    return os.urandom(WRITE_ID_BYTES)


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Stamps:
    """Where write ids (8 bytes, never the same twice) and sealing times come from."""

    write_id: Callable[[], bytes] = _random_write_id
    now_us: Callable[[], int] = _wall_clock_us


class _Draft:
    """A reserved frame, in this process until it is sealed. ``frame`` is None once spent."""

    __slots__ = ("frame", "write_id")

    def __init__(self, size_bytes: int, write_id: bytes) -> None:
        self.frame: Bytes | None = np.zeros(size_bytes, dtype=np.uint8)
        self.write_id = write_id

    def spend(self) -> Bytes | None:
        frame, self.frame = self.frame, None
        return frame


class _Telling:
    """Has a check follow what comes."""

    def __init__(self, check: FrameCheck) -> None:
        self.is_told = False
        self._check = check

    def __call__(self, size_bytes: int) -> None:
        """So much of the frame has come, from its start."""
        self.is_told = True
        self._check.follow((size_bytes,))


class RedisTier(Tier):
    """Frames in a Redis that other nodes put into as well.

    ``capacity_bytes`` bounds what this process reserved and sealed plus what a listing
    showed, at construction and by ``scan``; what others put later is found but not counted.
    Redis may be down at construction: calls then raise TierUnavailableError, and the first
    ``reserve`` that reaches it lists what is there. A reserved frame lies in this process
    until it is sealed.

    Durable means acknowledged by the server, which keeps it in memory: what survives a power
    cut there is up to its own replication and persistence. A seal whose answer is lost
    raises, and what it left is removed before the next seal or ends by its lifetime; until
    then the chunk may show, whole.

    *ttl_s* is a chunk's life from its sealing. *timeout_ms* bounds each connect, send and
    receive. Parts of *part_bytes* limit a frame to 1024 of them; a little
    below a power of two, as Redis' allocator rounds what is above it up by a quarter.
    """

    name = "redis"
    survives_restart: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913 - all but the last are the operator's settings
        self,
        url: str,
        capacity_bytes: int,
        *,
        timeout_ms: int = 500,
        connections: int = DEFAULT_CONNECTIONS,
        part_bytes: int = (2 << 20) - 64,
        ttl_s: int = 86_400,
        prefix: str = DEFAULT_PREFIX,
        stamps: Stamps | None = None,
    ) -> None:
        for field, value in (("timeout_ms", timeout_ms), ("ttl_s", ttl_s)):
            if not 1 <= value < 1 << 31:
                raise InvalidRequestError(field, value, "give a positive number")
        if not MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES:
            raise InvalidRequestError(
                "part_bytes", part_bytes, f"use {MIN_PART_BYTES} to {MAX_PART_BYTES}"
            )
        if capacity_bytes <= CHUNK_OVERHEAD_BYTES:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give room for a chunk")
        self.capacity_bytes = capacity_bytes
        self._part_bytes = part_bytes
        self._stamps = stamps or Stamps()
        self._keeps_lines = connections >= LINES_FOR_ROWS
        self._link = RedisLink(self.name, url, timeout_ms, connections)
        self._remote = RemoteChunks(self._link, KeyNames(prefix), ttl_s)
        self._account = RedisAccount(capacity_bytes, self.allocated_bytes)
        self._listed = False
        self._expected = Expected()
        self._never_answered = ""
        try:
            self._list()
        except TierUnavailableError as error:
            self._never_answered = f"has not answered since the start: {error}"

    @property
    @override
    def trouble(self) -> str:
        return self._never_answered

    def __repr__(self) -> str:
        return f"RedisTier({self._link.url!r}, capacity_bytes={self.capacity_bytes})"

    def allocated_bytes(self, size_bytes: int) -> int:
        """Bytes a frame of *size_bytes* takes here: itself, its manifest and its names."""
        return size_bytes + CHUNK_OVERHEAD_BYTES

    def max_frame_bytes(self) -> int:
        """The largest frame that fits an empty tier."""
        room_bytes = self.capacity_bytes - CHUNK_OVERHEAD_BYTES
        return min(room_bytes, MAX_FRAME_BYTES, self._part_bytes * MAX_PARTS)

    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Take room for a frame of ``info.size_bytes``.

        Raises TierFullError, and TierUnavailableError as long as Redis has never answered
        what it holds.
        """
        if info.size_bytes < 1:
            raise InvalidRequestError("size_bytes", info.size_bytes, "a frame has bytes")
        if not self._listed:
            self._list()
        need_bytes = self.allocated_bytes(info.size_bytes)
        fits = info.size_bytes <= self.max_frame_bytes()
        if not fits or not self._account.reserve(need_bytes):
            used_bytes = self._account.stats().used_bytes
            raise TierFullError(self.name, need_bytes, max(0, self.capacity_bytes - used_bytes))
        try:
            draft = _Draft(info.size_bytes, self._stamps.write_id())
        except MemoryError:
            self._account.settle(need_bytes, None)
            raise TierFullError(self.name, need_bytes, 0) from None
        return Reservation(info, tenant, need_bytes, draft)

    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        """Copy *data* into the reserved frame at byte *offset*."""
        frame = _draft(reservation).frame
        if frame is None:
            raise InvalidRequestError("reservation", "spent", "reserve again")
        if not 0 <= offset <= len(frame) - len(data):
            raise InvalidRequestError(
                "offset", offset, f"{len(data)} bytes from there exceed {len(frame)}"
            )
        copy_bytes(frame[offset : offset + len(data)], data)

    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Send the frame, then make it visible unless another version of its key is.

        Raises TierFullError, freeing the room, when the server itself takes no more.
        """
        draft = _draft(reservation)
        frame = draft.spend()
        if frame is None:
            raise InvalidRequestError("reservation", "spent", "reserve again")
        manifest = Manifest.of(
            reservation.info, self._part_bytes, draft.write_id, self._stamps.now_us()
        )
        sealed = False
        try:
            sealed = self._remote.publish(manifest, frame)
        except OutOfMemoryError:
            raise TierFullError(self.name, reservation.reserved_bytes, 0) from None
        finally:
            self._account.settle(reservation.reserved_bytes, manifest if sealed else None)
        return sealed

    def abort(self, reservation: Reservation) -> None:
        """Free the room of a reservation that will not be sealed. Idempotent."""
        if _draft(reservation).spend() is not None:
            self._account.settle(reservation.reserved_bytes, None)

    def read_into(self, key: ChunkKey, out: Bytes, offset: int = 0) -> bool:
        """Fill *out* with the frame's bytes from *offset*. False when *key* is absent.

        One round trip when the chunk is known here, straight into *out*. A chunk with a
        missing or short part is removed, and absent; so is one on a part of a Cluster that is
        down, as long as that lasts. *out* then holds rubbish. Never takes more memory than
        *out* does, whatever stands in Redis.
        """
        try:
            return self._read_into(key, out, offset)
        except TierUnavailableError as error:
            if not error.is_partial:
                raise
            return False

    @override
    def read_checked(self, key: ChunkKey, out: Bytes, check: FrameCheck) -> Iterator[int]:
        """Do what ``read_into`` does, while *check* follows what comes."""
        try:
            is_here = self._read_into(key, out, 0, _Telling(check))
        except TierUnavailableError as error:
            if not error.is_partial:
                raise
            return
        if is_here:
            yield len(out)

    def _read_into(
        self, key: ChunkKey, out: Bytes, offset: int, telling: _Telling | None = None
    ) -> bool:
        known = self._account.known(key)
        if (
            known
            and known.covers(offset, len(out))
            and self._remote.pull(known, out, offset, self._following(key), arrived=telling)
        ):
            return True
        (current,) = self._look([key])
        if current is None:
            return False
        if not current.covers(offset, len(out)):
            raise InvalidRequestError(
                "offset", offset, f"{len(out)} bytes from there exceed {current.info.size_bytes}"
            )
        is_told = telling is not None and telling.is_told
        if self._remote.pull(current, out, offset, arrived=None if is_told else telling):
            # What was checked of one read says nothing of another: a miss, for once.
            return not is_told
        with contextlib.suppress(TierUnavailableError):
            self._remote.remove(key, current.raw)
        self._account.forget(key, [current])
        return False

    @override
    def kin(self, key: ChunkKey) -> object:
        """Return the tier: one server sends what one thread reads over one connection.

        What is to be decoded is better spread over threads, and a Cluster's chunks over servers.
        """
        known = None if self._link.is_cluster else self._account.known(key)
        return self if known is not None and not known.info.codec_id else None

    @override
    def expect(self, keys: Sequence[ChunkKey]) -> None:
        self._expected.note(keys)
        if not keys:
            self._remote.end_row()

    def _following(self, key: ChunkKey) -> Manifest | None:
        """Return what this thread reads after *key*, if that is known."""
        following = self._expected.after(key) if self._keeps_lines else ()
        return self._account.known(following[0]) if following else None

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return what is known of each key, whoever put it; one round trip for 512 keys.

        All nodes of a Cluster are asked at once; what a lost one holds is absent meanwhile.
        """
        return [row.info if row else None for row in self._look(keys)]

    def delete(self, key: ChunkKey) -> bool:
        """Forget *key*, whoever put it, and free its room. Return whether it was there."""
        before = self._account.counted([key])
        removed = self._remote.remove(key)
        self._account.forget(key, [*before, removed])
        return removed is not None

    def scan(self) -> Iterator[ChunkInfo]:
        """List all nodes' chunks, least recently sealed first, and count them from now on."""
        return iter([manifest.info for manifest in self._list()])

    def stats(self) -> TierStats:
        """Count the tier; what expired or was removed by others counts until noticed."""
        return self._account.stats()

    def flush(self) -> None:
        """Do nothing: a sealed frame is already as safe as the server makes it."""

    def close(self) -> None:
        """Disconnect, leaving the data. Idempotent."""
        self._link.close()

    def _look(self, keys: Sequence[ChunkKey]) -> list[Manifest | None]:
        before = self._account.counted(keys)
        rows = self._remote.look(keys)
        found = [None if isinstance(row, Lost) else row for row in rows]
        # what cannot be asked about stays counted
        seen = [at for at, row in enumerate(rows) if not isinstance(row, Lost)]
        if seen:
            self._never_answered = ""
        self._account.note(
            [keys[at] for at in seen], [before[at] for at in seen], [found[at] for at in seen]
        )
        return found

    def _list(self) -> list[Manifest]:
        before = self._account.everything()
        found, whole = self._remote.listing()
        self._never_answered = ""
        self._account.reconcile(before if whole else {}, found)
        if not self._listed:
            self._listed = True
            with contextlib.suppress(TierUnavailableError):
                for concern in concerns(self._link):
                    logger.warning(concern.saw, fix=concern.fix)
        return sorted(found.values(), key=lambda row: (row.sealed_us, row.info.key))


def _draft(reservation: Reservation) -> _Draft:
    if not isinstance(reservation.place, _Draft):
        raise InvalidRequestError("reservation", reservation.place, "it is another tier's")
    return reservation.place
