"""Frames in this node's memory, in slabs that clients of the same host can map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import Place, Reach
from kvstore.tiers.allocator import FreeList
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range
from kvstore.tiers.locations import LocationTable

PAGE_BYTES = 4096
GRANULE_BYTES = 64
BLOCK_HEADER_BYTES = 64
"""Precedes each frame; keeps frames 64-byte aligned and ends in the generation."""
_WORD_BYTES = 8
_FIRST_GENERATION = 0x5EED_B10C_0000_0000
"""High, so that tensor bytes over a former generation word are unlikely to match one."""

_slab_ids = count(1)
"""One per process: slab ids are never reused, as clients may cache them."""


@dataclass(slots=True)
class Slab:
    """One memfd. ``tenant`` is its owner; an empty slab keeps its last owner's name."""

    slab_id: int
    fd: int
    bytes: Bytes
    words: NDArray[np.uint64]
    tenant: str
    holes: FreeList
    is_announced: bool = False
    """Whether its memory was registered with a device; ``forget`` ends that."""
    forget: Callable[[], None] | None = None

    def release(self) -> None:
        """Release the memfd; readers that map it keep its pages until they unmap them."""
        if self.forget is not None:
            self.forget()
        # Our mapping ends with its last view: mmap.close() would raise while a caller holds one.
        os.close(self.fd)


def open_slab(slab_bytes: int, tenant: str) -> Slab:
    """Create a memfd that only this mapping can write to. Raises OSError."""
    fd = unix_socket.create_memfd("kvstore-slab", slab_bytes)
    try:
        memory = mmap.mmap(fd, slab_bytes)
        unix_socket.add_seals(fd, unix_socket.SIZE_SEALS | unix_socket.SEAL_FUTURE_WRITE)
    except OSError:
        os.close(fd)
        raise
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)
    holes = FreeList(slab_bytes, GRANULE_BYTES)
    return Slab(next(_slab_ids), fd, data, data.view("<u8"), tenant, holes)


class CpuTier(Tier):
    """An arena of sealed memfd slabs.

    ``capacity_bytes`` is rounded down to whole slabs, created on demand. A slab belongs to one
    tenant at a time: TierFullError is possible while ``free_bytes`` is large, and evicting the
    ``chunks_sharing_block`` of one slab frees it for any tenant. A slab replaced for another tenant
    keeps its pages, beyond the capacity, until the last client unmaps it. A reserve checks each
    slab at most twice and a slab takes two file descriptors: prefer few large slabs.

    *register* is called with each slab's memory, before its first frame is written, to register it
    with a device, and returns the function that unregisters it. Raises InvalidRequestError unless
    slab_bytes is a positive multiple of 4096 and the capacity holds one slab.
    """

    name = "cpu"
    granule_bytes, overhead_bytes = GRANULE_BYTES, BLOCK_HEADER_BYTES

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        register: Callable[[Bytes], Callable[[], None] | None] | None = None,
    ) -> None:
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
            raise InvalidRequestError(
                "slab_bytes", slab_bytes, f"give a positive multiple of {PAGE_BYTES}"
            )
        if capacity_bytes < slab_bytes:
            raise InvalidRequestError(
                "capacity_bytes", capacity_bytes, f"give at least one slab, {slab_bytes} bytes"
            )
        self.slab_bytes = slab_bytes
        self.max_frame_bytes = slab_bytes - BLOCK_HEADER_BYTES
        self._register = register
        self._max_slabs = capacity_bytes // slab_bytes
        self.capacity_bytes = self._max_slabs * slab_bytes
        self._lock = Lock()
        self._slabs: dict[int, Slab] = {}
        self._sealed = LocationTable()
        self._reserved: dict[object, Place] = {}
        """Keyed by place: generations are unique."""
        self._generations = count(_FIRST_GENERATION, 2)
        self._closed = False

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        need_bytes = self.allocated_bytes(info.size_bytes)
        retired: list[Slab] = []
        with self._lock:
            if self._closed:
                raise TierUnavailableError(self.name, "closed")
            slab, start = self._allocate(need_bytes, tenant, retired)
            first, generation = start + BLOCK_HEADER_BYTES, next(self._generations)
            place = Place(slab.slab_id, Reach.memory, 0, first, info.size_bytes, generation)
            slab.words[first // _WORD_BYTES - 1] = generation
            self._reserved[place] = place
            is_new, slab.is_announced = not slab.is_announced, True
        # Outside the lock: both take the time to touch all pages of a large slab.
        for old in retired:
            old.release()
        if is_new and self._register is not None:
            slab.forget = self._register(slab.bytes)
        return Reservation(info, tenant, need_bytes, place)

    def _allocate(self, need_bytes: int, tenant: str, retired: list[Slab]) -> tuple[Slab, int]:
        for slab in self._slabs.values():
            if slab.tenant == tenant:
                start = slab.holes.allocate(need_bytes)
                if start is not None:
                    return slab, start
        slab = self._add_slab(need_bytes, tenant, retired)
        start = slab.holes.allocate(need_bytes)
        assert start is not None
        return slab, start

    def _add_slab(self, need_bytes: int, tenant: str, retired: list[Slab]) -> Slab:
        """Create a slab, which replaces another tenant's empty one at the limit of slabs."""
        empty = (slab for slab in self._slabs.values() if not slab.holes.used_bytes)
        old = next(empty, None) if len(self._slabs) == self._max_slabs else None
        full = len(self._slabs) == self._max_slabs and old is None
        if full or need_bytes > self.slab_bytes:
            raise TierFullError(self.name, need_bytes, self.capacity_bytes - self._used_bytes())
        try:
            slab = open_slab(self.slab_bytes, tenant)
        except OSError as error:
            raise TierUnavailableError(self.name, f"cannot create a slab: {error}") from error
        if old is not None:
            # A new memfd, as zeroing the old one is not enough: processes of the former tenant
            # may still map it, and would see the new tenant's bytes.
            retired.append(self._slabs.pop(old.slab_id))
        self._slabs[slab.slab_id] = slab
        return slab

    def _used_bytes(self) -> int:
        return sum(slab.holes.used_bytes for slab in self._slabs.values())

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        reservation.check(frame)
        copy_bytes(self.view(reservation), frame)

    def view(self, reservation: Reservation) -> Bytes:
        """Return the reserved frame's bytes, writable until it is sealed or aborted."""
        with self._lock:
            place = self._reserved.get(reservation.place)
            if place is None:
                raise reservation.spent()
            return self._frame(place)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        with self._lock:
            place = self._reserved.pop(reservation.place, None)
            if place is None:
                raise reservation.spent()
            if self._sealed.find(reservation.info.key):
                self._free(place)
                return False
            self._sealed.seal(reservation.info, place)
            return True

    @override
    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            place = self._reserved.pop(reservation.place, None)
            if place is not None:
                self._free(place)

    def _free(self, place: Place) -> None:
        slab = self._slabs[place.number]
        # Odd before the space can be reused: a reader that still copies detects it.
        slab.words[place.offset // _WORD_BYTES - 1] += np.uint64(1)
        start = place.offset - BLOCK_HEADER_BYTES
        slab.holes.free_range(start, self.allocated_bytes(place.size_bytes))

    def _frame(self, place: Place) -> Bytes:
        frame = self._slabs[place.number].bytes
        return frame[place.offset : place.offset + place.size_bytes]

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        frame = self.peek(key)
        if frame is None:
            return False
        check_range(len(frame), offset, len(out))
        copy_bytes(out, frame[offset : offset + len(out)])
        if verifier is not None:
            verifier.update(len(out))
        return True

    def peek(self, key: ChunkKey) -> Bytes | None:
        """Return a read-only view of the sealed frame; None when absent. Its bytes do not change
        while the caller keeps the chunk from being deleted.
        """
        with self._lock:
            place = self._sealed.location(key)
            if place is None:
                return None
            frame = self._frame(place)
        frame.flags.writeable = False
        return frame

    def locate(self, key: ChunkKey) -> Place | None:
        """Return the place of the sealed frame for clients; None when absent."""
        with self._lock:
            return self._sealed.location(key)

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return the places of the frames for clients, as rows; zeros for absent ones."""
        with self._lock:
            return self._sealed.place_rows(keys)

    def slab_file(self, slab_id: int, tenant: str) -> int:
        """Return a descriptor of the slab, for a process of *tenant* to map read-only.

        The caller closes it. It is a duplicate: the slab's own may be closed, and its number reused
        for another tenant's memfd, as soon as the slab is empty.
        Raises InvalidRequestError for an unknown slab, PermissionDeniedError for another tenant's.
        """
        with self._lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                raise InvalidRequestError("slab_id", slab_id, "it is gone: look the chunk up again")
            if slab.tenant != tenant:
                raise PermissionDeniedError(f"slab {slab_id} belongs to another tenant")
            return os.dup(slab.fd)

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        with self._lock:
            place = self._sealed.location(key)
            return DEFAULT_TENANT if place is None else self._slabs[place.number].tenant

    @override
    def chunks_sharing_block(self, key: ChunkKey) -> list[ChunkKey]:
        with self._lock:
            place = self._sealed.location(key)
            return [] if place is None else self._sealed.keys_in(place.number)

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        with self._lock:
            return [self._sealed.info_of(key) for key in keys]

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            place = self._sealed.pop(key)
            if place is not None:
                self._free(place)
            return place is not None

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        with self._lock:
            return iter(self._sealed.infos())

    @override
    def stats(self) -> TierStats:
        with self._lock:
            used_bytes, chunks = self._used_bytes(), len(self._sealed)
            return TierStats(self.capacity_bytes, used_bytes, chunks, len(self._reserved))

    @override
    def close(self) -> None:
        with self._lock:
            slabs = list(self._slabs.values())
            self._closed = True
            self._slabs.clear()
            self._sealed = LocationTable()
            self._reserved.clear()
        for slab in slabs:
            slab.release()
