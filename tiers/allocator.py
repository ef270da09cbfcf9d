"""Where things lie in a fixed range of bytes."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import Place, Reach


class FreeList:
    """What is free of 0..capacity_bytes, in multiples of granule_bytes. Owns no memory.

    The owner remembers what it took, and how much. An allocation takes the smallest hole that
    fits, so every hole that truly fits is found; a free joins both neighbours at once, so two
    holes never touch. Each costs O(log n) comparisons and moves a part of one list of the holes.

    Not thread-safe: the owner locks. Raises InvalidRequestError at construction unless both
    sizes are positive and the capacity is a multiple of the granule.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        if granule_bytes < 1:
            raise InvalidRequestError("granule_bytes", granule_bytes, "give a positive size")
        if capacity_bytes < granule_bytes or capacity_bytes % granule_bytes:
            raise InvalidRequestError(
                "capacity_bytes", capacity_bytes, f"give a multiple of {granule_bytes}"
            )
        self._granule = granule_bytes
        self.used_bytes = 0
        """Bytes handed out, rounding included."""
        self._holes: dict[int, int] = {}
        """Size of each hole by its offset."""
        self._hole_ends: dict[int, int] = {}
        """Offset of each hole by its end."""
        self._by_size: list[tuple[int, int]] = []
        """Size and offset of each hole, ascending."""
        self._hole_starts: list[int] | None = None
        """Offsets of the holes, ascending; kept only from one reserve_at to the next."""
        self._add_hole(0, capacity_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest hole: whatever is not larger can be allocated."""
        return self._by_size[-1][0] if self._by_size else 0

    def spans(self) -> dict[int, int]:
        """Return the size of each hole by its offset, as they are now."""
        return dict(self._holes)

    def rounded(self, size_bytes: int) -> int:
        """Return what an allocation of *size_bytes* takes. Raises InvalidRequestError below 1."""
        if size_bytes < 1:
            raise InvalidRequestError("size_bytes", size_bytes, "give a positive size")
        return -(-size_bytes // self._granule) * self._granule

    def allocate(self, size_bytes: int) -> int | None:
        """Take the smallest hole that fits and return its offset; None when none fits.

        Raises InvalidRequestError when *size_bytes* is below 1.
        """
        size_bytes = self.rounded(size_bytes)
        at = bisect_left(self._by_size, (size_bytes, 0))
        if at == len(self._by_size):
            return None
        hole_bytes, offset = self._by_size[at]
        self._hole_starts = None
        self._take_hole(offset, hole_bytes)
        self.used_bytes += size_bytes
        if hole_bytes > size_bytes:
            self._add_hole(offset + size_bytes, hole_bytes - size_bytes)
        return offset

    def reserve_at(self, offset: int, size_bytes: int) -> bool:
        """Take exactly the range that was allocated as *size_bytes* at *offset* before.

        False, changing nothing, when any of it is taken or outside, or when no allocation
        could lie there. Calls made one after the other in ascending order cost O(log n);
        in any other order each also moves a part of a sorted list of the holes.
        """
        if size_bytes < 1 or offset < 0 or offset % self._granule:
            return False
        size_bytes = self.rounded(size_bytes)
        if self._hole_starts is None:
            self._hole_starts = sorted(self._holes)
        starts = self._hole_starts
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return False
        start = starts[at]
        end = start + self._holes[start]
        stop = offset + size_bytes
        if stop > end:
            return False
        left = [start] if offset > start else []
        right = [stop] if stop < end else []
        self._take_hole(start, end - start)
        if left:
            self._add_hole(start, offset - start)
        if right:
            self._add_hole(stop, end - stop)
        starts[at : at + 1] = left + right
        self.used_bytes += size_bytes
        return True

    def free_range(self, offset: int, size_bytes: int) -> None:
        """Free what was allocated as *size_bytes* at *offset*; anything else corrupts the list."""
        size_bytes = self.rounded(size_bytes)
        self.used_bytes -= size_bytes
        self._hole_starts = None
        start, end = offset, offset + size_bytes
        right_bytes = self._holes.get(end)
        if right_bytes is not None:
            self._take_hole(end, right_bytes)
            end += right_bytes
        left_start = self._hole_ends.get(start)
        if left_start is not None:
            self._take_hole(left_start, start - left_start)
            start = left_start
        self._add_hole(start, end - start)

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        self._holes[offset] = size_bytes
        self._hole_ends[offset + size_bytes] = offset
        insort(self._by_size, (size_bytes, offset))

    def _take_hole(self, offset: int, size_bytes: int) -> None:
        del self._holes[offset]
        del self._hole_ends[offset + size_bytes]
        del self._by_size[bisect_left(self._by_size, (size_bytes, offset))]


class Neighbour(NamedTuple):
    """A chunk among those of its range of bytes: where it lies, and what is allocated for it."""

    offset: int
    reserved_bytes: int
    key: ChunkKey


def adjacent_run(
    chunks: Sequence[Neighbour], holes: Mapping[int, int], key: ChunkKey, size_bytes: int
) -> list[ChunkKey]:
    """Return *key* and the neighbours that, with the holes between them, are *size_bytes* long.

    *chunks* are all of one free list's range, and *holes* its ``spans``. The run grows towards
    the smaller neighbour; it may stay too short, between reservations or the range's ends.
    """
    found = sorted(chunks)
    low = high = [chunk.key for chunk in found].index(key)
    start, end = found[low].offset, found[low].offset + found[low].reserved_bytes
    ends = {offset + size: offset for offset, size in holes.items()}
    while True:
        start, end = ends.get(start, start), end + holes.get(end, 0)
        if end - start >= size_bytes:
            break
        before = found[low - 1] if low else None
        after = found[high + 1] if high + 1 < len(found) else None
        if before is not None and before.offset + before.reserved_bytes != start:
            before = None
        if after is not None and after.offset != end:
            after = None
        if before is not None and (after is None or before.reserved_bytes <= after.reserved_bytes):
            low, start = low - 1, before.offset
        elif after is not None:
            high, end = high + 1, after.offset + after.reserved_bytes
        else:
            break
    return [chunk.key for chunk in found[low : high + 1]]


PAGE_BYTES = 4096
BLOCK_HEADER_BYTES = 64
"""Before each frame; keeps frames 64-byte aligned and ends in the generation."""
WORD_BYTES = 8

_slab_ids = count(1)
"""One for the process: a slab_id means one memfd for as long as any client may remember it."""


@dataclass(slots=True)
class Slab:
    """One memfd. ``tenant`` is its owner; of an empty slab, which nobody owns, its last."""

    slab_id: int
    fd: int
    bytes: Bytes
    words: NDArray[np.uint64]
    tenant: str
    holes: FreeList
    is_announced: bool = False
    """Whether its memory was announced to a device; ``forget`` ends that."""
    forget: Callable[[], None] | None = None

    def release(self) -> None:
        """Let go of it; readers that map it keep its pages until they unmap them."""
        if self.forget is not None:
            self.forget()
        # Our map goes with its last view: mmap.close() would raise while a caller holds one.
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Block:
    """A frame and its header in a slab. Made when asked for: what is kept is a row of numbers."""

    slab: Slab
    start: int
    size_bytes: int

    @property
    def word(self) -> int:
        """Index of the generation among the slab's words."""
        return (self.start + BLOCK_HEADER_BYTES) // WORD_BYTES - 1

    def frame(self) -> Bytes:
        """Return the frame's bytes, writable."""
        first = self.start + BLOCK_HEADER_BYTES
        return self.slab.bytes[first : first + self.size_bytes]

    def place(self) -> Place:
        """Return where clients find the frame."""
        first, generation = self.start + BLOCK_HEADER_BYTES, int(self.slab.words[self.word])
        return Place(self.slab.slab_id, Reach.memory, 0, first, self.size_bytes, generation)


def open_slab(slab_bytes: int, granule_bytes: int, tenant: str) -> Slab:
    """Create a memfd that nobody but this mapping will ever write to. Raises OSError."""
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
    holes = FreeList(slab_bytes, granule_bytes)
    return Slab(next(_slab_ids), fd, data, data.view("<u8"), tenant, holes)
