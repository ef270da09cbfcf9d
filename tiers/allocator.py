"""Where things lie in a fixed range of bytes."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey

_SUBCLASS_BITS = 3
"""Each power of two is cut into 2**3 classes, so holes of one class differ by at most 1/8."""

_Hole: TypeAlias = tuple[int, int]
"""(size_bytes, offset): sorts by size, then by place."""


class FreeList:
    """What is free of 0..capacity_bytes, in multiples of granule_bytes. Owns no memory.

    The owner remembers what it took, and how much: see OffsetAllocator for one that does not.

    Holes are kept in size classes (powers of two cut into eight), each sorted by size and
    then by offset, with a bitmap of the classes in use. An allocation takes the smallest hole
    that fits, so every hole that truly fits is found; a free joins both neighbours at once, so
    two holes never touch. Each costs O(log n) comparisons and no work per byte.

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
        self._capacity = capacity_bytes
        self._granule = granule_bytes
        self._used_bytes = 0
        self._holes: dict[int, int] = {}
        """Size of each hole by its offset."""
        self._hole_ends: dict[int, int] = {}
        """Offset of each hole by its end."""
        self._classes: list[list[_Hole]] = [
            [] for _ in range(_class_of(capacity_bytes // granule_bytes) + 1)
        ]
        self._nonempty = 0
        """Bit i is set while class i has a hole."""
        self._hole_starts: list[int] | None = None
        """Offsets of the holes, ascending; kept only from one reserve_at to the next."""
        self._add_hole(0, capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, rounding included."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes together."""
        return self._capacity - self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest hole: whatever is not larger can be allocated."""
        if not self._nonempty:
            return 0
        return self._classes[self._nonempty.bit_length() - 1][-1][0]

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
        hole = self._smallest_hole(size_bytes)
        if hole is None:
            return None
        hole_bytes, offset = hole
        self._hole_starts = None
        self._take_hole(offset, hole_bytes)
        self._used_bytes += size_bytes
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
        starts = self._sorted_starts()
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
        self._used_bytes += size_bytes
        return True

    def free_range(self, offset: int, size_bytes: int) -> None:
        """Free what was allocated as *size_bytes* at *offset*; anything else corrupts the list."""
        size_bytes = self.rounded(size_bytes)
        self._used_bytes -= size_bytes
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

    def _sorted_starts(self) -> list[int]:
        if self._hole_starts is None:
            self._hole_starts = sorted(self._holes)
        return self._hole_starts

    def _smallest_hole(self, size_bytes: int) -> _Hole | None:
        """Return the smallest hole of at least *size_bytes*, the lowest of equals."""
        own = _class_of(size_bytes // self._granule)
        if self._nonempty >> own & 1:
            holes = self._classes[own]
            at = bisect_left(holes, (size_bytes, 0))
            if at < len(holes):
                return holes[at]
        above = self._nonempty >> (own + 1)
        if not above:
            return None
        return self._classes[own + (above & -above).bit_length()][0]

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        self._holes[offset] = size_bytes
        self._hole_ends[offset + size_bytes] = offset
        index = _class_of(size_bytes // self._granule)
        insort(self._classes[index], (size_bytes, offset))
        self._nonempty |= 1 << index

    def _take_hole(self, offset: int, size_bytes: int) -> None:
        del self._holes[offset]
        del self._hole_ends[offset + size_bytes]
        index = _class_of(size_bytes // self._granule)
        holes = self._classes[index]
        del holes[bisect_left(holes, (size_bytes, offset))]
        if not holes:
            self._nonempty &= ~(1 << index)


class OffsetAllocator(FreeList):
    """A free list that remembers each allocation, in one dictionary entry of about 150 bytes."""

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        super().__init__(capacity_bytes, granule_bytes)
        self._used: dict[int, int] = {}
        """Size of each allocation by its offset."""

    @override
    def allocate(self, size_bytes: int) -> int | None:
        offset = super().allocate(size_bytes)
        if offset is not None:
            self._used[offset] = size_bytes
        return offset

    @override
    def reserve_at(self, offset: int, size_bytes: int) -> bool:
        is_free = super().reserve_at(offset, size_bytes)
        if is_free:
            self._used[offset] = size_bytes
        return is_free

    def free(self, offset: int) -> None:
        """Give back the allocation at *offset*. Raises KeyError when there is none."""
        self.free_range(offset, self._used.pop(offset))


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


def _class_of(granules: int) -> int:
    """Return the size class of a hole; a larger hole never has a smaller class.

    Sizes below 16 granules have a class each; above, the class is the power of two and the
    three bits after the leading one.
    """
    if granules < 1 << _SUBCLASS_BITS:
        return granules
    power = granules.bit_length() - 1
    subclass = granules >> (power - _SUBCLASS_BITS) & ((1 << _SUBCLASS_BITS) - 1)
    return ((power - _SUBCLASS_BITS + 1) << _SUBCLASS_BITS) + subclass


PAGE_BYTES = 4096
BLOCK_HEADER_BYTES = 64
"""Before each frame; keeps frames 64-byte aligned and ends in the generation."""
WORD_BYTES = 8

_slab_ids = count(1)
"""One for the process: a slab_id means one memfd for as long as any client may remember it."""


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Where a frame lies. ``offset`` is that of its first byte within the slab.

    The eight bytes before ``offset`` hold ``generation`` (uint64, little-endian) for as long
    as the frame is there: a reader of shared memory compares them before and after it copies.
    """

    slab_id: int
    offset: int
    size_bytes: int
    generation: int


@dataclass(slots=True)
class Slab:
    """One memfd. ``tenant`` is its owner; of an empty slab, which nobody owns, its last."""

    slab_id: int
    fd: int
    bytes: Bytes
    words: NDArray[np.uint64]
    tenant: str
    holes: FreeList
    is_told: bool = False
    """Whether a device was told of it; ``forget`` ends that."""
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

    def place(self) -> SlabPlace:
        """Return where clients find the frame."""
        return SlabPlace(
            self.slab.slab_id,
            self.start + BLOCK_HEADER_BYTES,
            self.size_bytes,
            int(self.slab.words[self.word]),
        )


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
