"""Frames in this node's memory, in slabs that clients of the same host can map."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import Lock

import numpy as np
from typing_extensions import override

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import PLACE_ROW, Place, Reach
from kvstore.tiers.allocator import (
    BLOCK_HEADER_BYTES,
    PAGE_BYTES,
    Block,
    Slab,
    open_slab,
)
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range
from kvstore.tiers.locations import LocationTable

_MEMORY = int(Reach.memory)


class SlabTable(LocationTable):
    """A LocationTable whose areas are slabs. About 123 bytes a frame.

    Generations stand in the slabs too, where readers compare them. From there a prompt's would be
    fetched from as many pages as it has chunks; here they lie side by side.
    """

    def __init__(self) -> None:
        self.generations = array("Q")
        super().__init__()

    @override
    def _extend(self, count: int) -> None:
        super()._extend(count)
        self.generations.frombytes(bytes(count * self.generations.itemsize))

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return where readers find the frames, as rows of places; zeros for absent ones."""
        rows = np.zeros(len(keys), PLACE_ROW)
        at = self.find_all(keys)
        here: slice | np.ndarray[tuple[int], np.dtype[np.bool_]] = slice(None)
        if not at.all():
            here = at > 0
            at = at[here]
        rows["number"][here] = np.frombuffer(self._areas, np.uint32)[at]
        rows["reach"][here] = _MEMORY
        rows["offset"][here] = np.frombuffer(self._starts, np.int64)[at] + BLOCK_HEADER_BYTES
        rows["size_bytes"][here] = np.frombuffer(self._sizes, np.uint64)[at]
        rows["generation"][here] = np.frombuffer(self.generations, np.uint64)[at]
        return rows.tobytes()


GRANULE_BYTES = 64

_FIRST_GENERATION = 0x5EED_B10C_0000_0000
"""High, so that tensor bytes over a former generation word hardly ever look like one."""


class CpuTier(Tier):
    """An arena of sealed memfd slabs.

    ``capacity_bytes`` is rounded down to whole slabs; a slab is created when it is first
    needed, and its untouched pages cost nothing. A frame lies inside one slab. A slab belongs
    to one tenant at a time, so a tenant cannot use the holes in another's slabs: TierFullError
    may come while ``free_bytes`` is large, and evicting the ``chunks_sharing_block`` of one slab
    makes it anyone's.

    A reserve looks at each slab at most twice and a slab takes two file descriptors: prefer
    few large slabs. A slab that changes hands keeps its pages, beyond the capacity, until the
    last client unmaps it.

    *tell* announces each slab's memory, before its first frame is written, to a device that copies
    from it, and returns how to end that.

    Raises InvalidRequestError unless slab_bytes is a positive multiple of 4096 and the
    capacity holds one slab.
    """

    name = "cpu"

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        tell: Callable[[Bytes], Callable[[], None] | None] | None = None,
    ) -> None:
        if slab_bytes < PAGE_BYTES or slab_bytes % PAGE_BYTES:
            raise InvalidRequestError(
                "slab_bytes", slab_bytes, f"give a positive multiple of {PAGE_BYTES}"
            )
        if capacity_bytes < slab_bytes:
            raise InvalidRequestError(
                "capacity_bytes", capacity_bytes, f"give room for one slab, {slab_bytes} bytes"
            )
        self.slab_bytes = slab_bytes
        self._tell = tell
        self._max_slabs = capacity_bytes // slab_bytes
        self.capacity_bytes = self._max_slabs * slab_bytes
        self._lock = Lock()
        self._slabs: dict[int, Slab] = {}
        self._sealed = SlabTable()
        self._reserved: dict[object, Block] = {}
        """By place, whose generation no other reservation ever has."""
        self._used_bytes = 0
        self._generations = count(_FIRST_GENERATION, 2)
        self._closed = False

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        return -(-(size_bytes + BLOCK_HEADER_BYTES) // GRANULE_BYTES) * GRANULE_BYTES

    @override
    def max_frame_bytes(self) -> int:
        return self.slab_bytes - BLOCK_HEADER_BYTES

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        need_bytes = self.allocated_bytes(info.size_bytes)
        retired: list[Slab] = []
        with self._lock:
            if self._closed:
                raise TierUnavailableError(self.name, "closed")
            slab, start = self._allocate(need_bytes, tenant, retired)
            block = Block(slab, start, info.size_bytes)
            slab.words[block.word] = next(self._generations)
            place = block.place()
            self._reserved[place] = block
            self._used_bytes += need_bytes
            is_new, slab.is_announced = not slab.is_announced, True
        # Outside the lock: both take as long as touching all pages of a large slab.
        for old in retired:
            old.release()
        if is_new and self._tell is not None:
            slab.forget = self._tell(slab.bytes)
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
        """Create a slab, in the place of another tenant's empty one when there are enough."""
        old: Slab | None = None
        if len(self._slabs) == self._max_slabs:
            empty = (slab for slab in self._slabs.values() if not slab.holes.used_bytes)
            old = next(empty, None)
        full = len(self._slabs) == self._max_slabs and old is None
        if full or need_bytes > self.slab_bytes:
            raise TierFullError(self.name, need_bytes, self.capacity_bytes - self._used_bytes)
        try:
            slab = open_slab(self.slab_bytes, GRANULE_BYTES, tenant)
        except OSError as error:
            raise TierUnavailableError(self.name, f"cannot create a slab: {error}") from error
        if old is not None:
            # A new memfd and not the old one zeroed: processes of the former tenant may still
            # map that, and would see through their maps whatever the new tenant puts there.
            retired.append(self._slabs.pop(old.slab_id))
        self._slabs[slab.slab_id] = slab
        return slab

    @override
    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        """Copy *data* into the reserved frame at byte *offset*.

        Raises InvalidRequestError when it would not fit there or the reservation is spent.
        """
        frame = self.view(reservation)
        check_range(len(frame), offset, len(data))
        copy_bytes(frame[offset : offset + len(data)], data)

    def view(self, reservation: Reservation) -> Bytes:
        """Return the reserved frame's bytes, writable until it is sealed or aborted.

        Raises InvalidRequestError when the reservation is spent.
        """
        with self._lock:
            block = self._reserved.get(reservation.place)
        if block is None:
            raise _spent(reservation)
        return block.frame()

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Make the frame visible. Raises InvalidRequestError when the reservation is spent."""
        with self._lock:
            block = self._reserved.pop(reservation.place, None)
            if block is None:
                raise _spent(reservation)
            info = reservation.info
            if self._sealed.find(info.key):
                self._free(block)
                return False
            row = self._sealed.seal(info, block.slab.slab_id, block.start)
            self._sealed.generations[row] = int(block.slab.words[block.word])
            return True

    @override
    def abort(self, reservation: Reservation) -> None:
        """Free the room of a reservation; does nothing when it is spent."""
        with self._lock:
            block = self._reserved.pop(reservation.place, None)
            if block is not None:
                self._free(block)

    def _free(self, block: Block) -> None:
        # Odd before the room can be handed out: a reader that still copies will notice.
        block.slab.words[block.word] += np.uint64(1)
        size_bytes = self.allocated_bytes(block.size_bytes)
        block.slab.holes.free_range(block.start, size_bytes)
        self._used_bytes -= size_bytes

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        block = self._block(key)
        if block is None:
            return False
        frame = block.frame()
        check_range(len(frame), offset, len(out))
        copy_bytes(out, frame[offset : offset + len(out)])
        if verifier is not None:
            verifier.update(len(out))
        return True

    def peek(self, key: ChunkKey) -> Bytes | None:
        """Return the sealed frame's bytes, read-only and not copied; None when absent.

        They stay what they are while the caller keeps the chunk from being deleted.
        """
        block = self._block(key)
        if block is None:
            return None
        frame = block.frame()
        frame.flags.writeable = False
        return frame

    def locate(self, key: ChunkKey) -> Place | None:
        """Return where clients find the sealed frame; None when absent."""
        with self._lock:
            block = self._at(self._sealed.find(key))
            return None if block is None else block.place()

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return where clients find the frames, as rows of places; zeros for absent ones."""
        with self._lock:
            return self._sealed.place_rows(keys)

    def _at(self, row: int) -> Block | None:
        slab_id, start, size_bytes = self._sealed.location(row)
        return Block(self._slabs[slab_id], start, size_bytes) if slab_id else None

    def slab_file(self, slab_id: int, tenant: str) -> int:
        """Return a descriptor of the slab, for a process of *tenant* to map read-only.

        It is the caller's to close: the slab's own may be closed, and its number given to
        another tenant's slab, as soon as the slab is empty.
        Raises InvalidRequestError for an unknown slab, PermissionDeniedError for another's.
        """
        with self._lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                raise InvalidRequestError("slab_id", slab_id, "it is gone: look the chunk up anew")
            if slab.tenant != tenant:
                raise PermissionDeniedError(f"slab {slab_id} belongs to another tenant")
            return os.dup(slab.fd)

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        block = self._block(key)
        return DEFAULT_TENANT if block is None else block.slab.tenant

    def chunks_sharing_block(self, key: ChunkKey) -> list[ChunkKey]:
        """Return the sealed chunks of the slab that holds *key*, in order of sealing."""
        with self._lock:
            slab_id, _, _ = self._sealed.location(self._sealed.find(key))
            return self._sealed.keys_in(slab_id) if slab_id else []

    def _block(self, key: ChunkKey) -> Block | None:
        with self._lock:
            return self._at(self._sealed.find(key))

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        with self._lock:
            return [self._sealed.info_of(key) for key in keys]

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            row = self._sealed.find(key)
            block = self._at(row)
            if block is None:
                return False
            self._sealed.remove(row)
            self._free(block)
            return True

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        with self._lock:
            infos = self._sealed.infos()
        yield from infos

    @override
    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                self.capacity_bytes, self._used_bytes, len(self._sealed), len(self._reserved)
            )

    @override
    def flush(self) -> None:
        """Do nothing: memory survives no restart."""

    @override
    def close(self) -> None:
        with self._lock:
            slabs = list(self._slabs.values())
            self._closed = True
            self._slabs.clear()
            self._sealed = SlabTable()
            self._reserved.clear()
            self._used_bytes = 0
        for slab in slabs:
            slab.release()


def _spent(reservation: Reservation) -> InvalidRequestError:
    return InvalidRequestError("reservation", reservation.place, "it is spent: reserve anew")
