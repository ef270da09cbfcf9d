"""One slab of shared memory, and the frames that lie in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.tiers.allocator import FreeList

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
