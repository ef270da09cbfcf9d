"""Copies of what is to be stored, made beside the engine, before its blocks are another request's.

vLLM gives a block that nobody needs any more to another request, but says so at the beginning of
the step that writes to it. Until then what was computed lies where it was.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.blocks import (
    NULL_BLOCK,
    ChunkRoom,
    EnginePages,
    LayerPages,
    Packing,
)
from kvstore.client.engines.vllm.messages import BlockTables, NamedChunk
from kvstore.client.levels import PlanTerms
from kvstore.client.tensors import LayerTensors, to_array
from kvstore.codecs.base import AnyTensors
from kvstore.codecs.block_stack import BlockStack
from kvstore.proto import unix_socket
from kvstore.proto.device import Event
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.plans import Hints
from kvstore.proto.types import END_KINDS, ChainDigest, KVLayout, Stated

BATCH_BYTES = 64 << 20
"""What several requests put together at most: a call for each would hold the engine up."""

MOST_COPIES = 4096
"""Chunks that wait to be stored, however small they are: each has a mapping of its own."""


class Whole(Protocol):
    """A chunk that was copied."""

    @property
    def tensors(self) -> LayerTensors:
        """What is put."""

    @property
    def has_windows(self) -> bool:
        """Whether its windows are among them."""


class Copy(Protocol):
    """What is to be stored of one chunk. ``whole`` is the copy once it is made; None if the engine
    had given up what it is of."""

    @property
    def whole(self) -> Whole | None:
        """The copy."""

    def begin(self) -> None:
        """Have it copied, where that goes on beside its caller."""

    def make(self) -> None:
        """Copy it, unless that was done; return when nobody reads the blocks any more."""

    def free(self) -> None:
        """Give the memory of the copy back, which nobody reads any more."""


@dataclass(frozen=True, slots=True)
class LoadWork:
    """One load: the chunks *digests*, each into the blocks that its ``chunks`` entry names.

    The first ``kept_blocks`` are not written to, and none before ``after``. ``arrived`` is to be
    called when something came, ``is_over`` says that there is no more time. ``stated`` is to be
    filled by a side that reads lossy ones, as ``Connector.read_into`` does. ``terms``: of a load
    with a deadline, for a side that can read in part.
    """

    digests: Sequence[ChainDigest]
    chunks: Sequence[BlockTables]
    kept_blocks: int
    after: Event | None
    arrived: Callable[[], None]
    is_over: Callable[[], bool]
    stated: list[Stated] = field(default_factory=list)
    terms: PlanTerms | None = None


class Side(ABC):
    """Where an engine's pages lie, as a worker loads into them and stores out of them."""

    chunk_bytes: int
    waits_in_pages: bool = False
    """Whether what there is no room for waits in the engine's pages, and takes no memory."""

    @property
    def is_gpu_tier_far(self) -> bool:
        """Whether the server has a gpu tier that this side does not reach."""
        return False

    @abstractmethod
    def copies(self, chunks: Sequence[BlockTables]) -> Sequence[Copy]:
        """Begin to copy *chunks*, or the first of them that there is room for.

        For the engine's thread, at the end of a step.
        """

    @abstractmethod
    def mark(self) -> Event | None:
        """Return an event behind the engine's work so far, if it does any beside the host."""

    @abstractmethod
    def read(self, work: LoadWork) -> int:
        """Return how many chunks of a load were read: its blocks have them now."""

    def put_near(
        self, chunks: Callable[[], Sequence[Chunk]], copies: Sequence[Copy], hints: Hints
    ) -> set[int]:
        """Put copies that no host memory has to have; return the numbers of those that are there.

        *chunks* returns what they are, without tensors.
        """
        return set()

    @abstractmethod
    def close(self) -> None:
        """Let go of memory. Nothing is loaded or stored any more."""


class HostSide(Side):
    """Pages in CPU memory: copied beside the engine, read straight into the blocks."""

    def __init__(self, pages: EnginePages, connector: Connector, chunk_blocks: int) -> None:
        """Raises TierUnavailableError where memory cannot be had as a file."""
        self._pages = pages
        self._connector = connector
        self.pool = CopyPool(pages, chunk_blocks)
        self.chunk_bytes = self.pool.chunk_bytes

    @override
    def copies(self, chunks: Sequence[BlockTables]) -> list[ChunkCopy]:
        return [ChunkCopy(self.pool, tables) for tables in chunks]

    @override
    def mark(self) -> None:
        return None

    @override
    def read(self, work: LoadWork) -> int:
        rooms = [
            ChunkRoom(self._pages, tables, 0 if number else work.kept_blocks)
            for number, tables in enumerate(work.chunks)
        ]
        if not rooms:
            return 0

        def room(number: int, layout: KVLayout) -> AnyTensors:
            work.arrived()
            return rooms[number].tensors(layout)

        read = self._connector.read_into(work.digests, room, work.stated, work.terms)
        for one in rooms[:read]:
            one.settle()
        return read

    @override
    def close(self) -> None:
        self.pool.close()


class CopyPool:
    """Memory for copies of chunks of *chunk_blocks* blocks, used again and again. Thread-safe.

    Raises TierUnavailableError where memory cannot be had as a file.
    """

    def __init__(self, pages: EnginePages, chunk_blocks: int) -> None:
        self._pages = pages
        self._chunk_blocks = chunk_blocks
        self.chunk_bytes = pages.chunk_bytes(chunk_blocks)
        self._file = CopyFile()
        self._idle: list[PageCopy] = []
        self._lock = threading.Lock()  # guards _idle, and the file's end while it grows

    def take(self) -> PageCopy:
        """Return memory for one chunk. Raises OSError when there is no more."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            return PageCopy(self._pages, self._chunk_blocks, self._file)

    def give(self, copied: PageCopy) -> None:
        """Take memory back."""
        with self._lock:
            self._idle.append(copied)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        with self._lock:
            self._idle.clear()
            self._file.close()


class ChunkCopy:
    """One chunk that lies in the blocks *tables* name, to be copied by whoever comes first.

    ``whole`` is the copy once it is made; None if the engine had given up what it is of.
    """

    def __init__(self, pool: CopyPool, tables: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        self._tables = tables
        self._blocks = {block for table in tables for block in table} - {NULL_BLOCK}
        self._claim = threading.Lock()  # taken for good by who makes the copy
        self._over = threading.Event()
        self.whole: PageCopy | None = None

    def lies_in(self, blocks: Collection[int] | None) -> bool:
        """Whether any of *blocks* is its; None: those of every chunk."""
        return blocks is None or not self._blocks.isdisjoint(blocks)

    def begin(self) -> None:
        """Do nothing: it is copied by who makes it."""

    def make(self) -> None:
        """Copy it, unless that was done; return when nobody reads the blocks any more."""
        if not self._claim.acquire(blocking=False):
            self._over.wait()
            return
        try:
            self.whole = self._copied(self._pool.take())
        finally:
            self._over.set()

    def _copied(self, room: PageCopy) -> PageCopy | None:
        is_taken = False
        try:
            is_taken = room.take(self._tables)
        finally:
            if not is_taken:
                self._pool.give(room)
        return room if is_taken else None

    def free(self) -> None:
        """Give the memory of the copy back, which nobody reads any more."""
        if self.whole is not None:
            self._pool.give(self.whole)
            self.whole = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that are put together, with their copies and what is said of all of them."""

    chunks: Sequence[NamedChunk]
    copies: Sequence[Copy]
    hints: Hints

    def joined(self, other: Batch, chunk_bytes: int) -> Batch | None:
        """Return both in one; None where that is too much, or other things are said of them."""
        chunks = [*self.chunks, *other.chunks]
        if other.hints != self.hints or len(chunks) * chunk_bytes > BATCH_BYTES:
            return None
        return Batch(chunks, [*self.copies, *other.copies], self.hints)


MOST_PIECES = 1024
"""What the kernel takes in one call: IOV_MAX of Linux."""
MOST_BYTES = 1 << 30
"""Half of what it writes in one."""


class CopyFile:
    """A file in memory that copies lie in, one behind the other."""

    def __init__(self) -> None:
        """Raises TierUnavailableError where there are no such files."""
        try:
            self.descriptor = unix_socket.create_memfd("kvstore-copies", 0)
        except OSError as error:
            raise TierUnavailableError("copies", f"no file in memory: {error}") from None
        self._end = 0

    def add(self, size_bytes: int) -> tuple[int, mmap.mmap]:
        """Make it longer; return where *size_bytes* more begin, and their memory. For one user at
        a time. Raises OSError.
        """
        start, stop = self._end, self._end + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, stop)
        memory = mmap.mmap(self.descriptor, stop - start, offset=start)
        self._end = stop
        return start, memory

    def close(self) -> None:
        """Take no more copies; what was copied stays as long as it is held. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PageCopy:
    """Room in *file* for one chunk of *chunk_blocks* blocks, used again and again.

    ``tensors``: those of the chunk that was taken last, ``has_windows`` whether its windows are
    among them. Raises OSError at birth when there is no more memory.
    """

    def __init__(self, pages: EnginePages, chunk_blocks: int, file: CopyFile) -> None:
        self._shape = pages.shape
        every = zip(pages.shape.groups, pages.groups, pages.packings, strict=True)
        self._groups = [
            _GroupCopy(layers, packing, pages.shape.kept_blocks(group, chunk_blocks), file)
            for group, layers, packing in every
        ]
        self.tensors: LayerTensors = [group.stack for group in self._groups]
        self.has_windows = True

    def take(self, tables: Sequence[Sequence[int]]) -> bool:
        """Copy the chunk whose blocks *tables* name; return whether there is any of it.

        Windows that the engine has given up already are left out. Raises OSError.
        """
        taken: list[BlockStack] = []
        for group, copied in zip(self._shape.groups, self._groups, strict=True):
            if copied.take(tables):
                taken.append(copied.stack)
            elif group.kind not in END_KINDS:
                return False
        self.tensors, self.has_windows = taken, len(taken) == len(self._groups)
        return bool(taken)


class _GroupCopy:
    """Room for the last *kept* blocks of a chunk, of each of *layers*."""

    def __init__(
        self, layers: Sequence[LayerPages], packing: Packing, kept: int, file: CopyFile
    ) -> None:
        self._kept = kept
        self._tables = [layer.table for layer in layers]
        self._pages = [to_array(layer.whole) for layer in layers]
        whole = layers[0].whole
        self._block_bytes = whole[0].nbytes
        self._file = file
        self._start, memory = file.add(len(layers) * kept * self._block_bytes)
        used = np.frombuffer(memory, np.uint8)[: len(layers) * kept * self._block_bytes]
        copied = torch.from_numpy(used).view(whole.dtype).view(-1, *whole.shape[1:])
        self._copies = to_array(copied).reshape(len(layers), kept, *whole.shape[1:])
        parts = [to_array(part) for part in packing(copied)]
        self.stack = BlockStack(
            [p.view(f"u{p.itemsize}").reshape(len(layers), kept, *p.shape[1:]) for p in parts]
        )
        self._flat: list[memoryview] = []
        if all(pages.flags.c_contiguous for pages in self._pages):
            self._flat = [pages.reshape(-1).view(np.uint8).data for pages in self._pages]

    def take(self, tables: Sequence[Sequence[int]]) -> bool:
        """Copy; return whether the engine still has all of it."""
        named = {table: tables[table][-self._kept :] for table in set(self._tables)}
        if not all(all(blocks) for blocks in named.values()):
            return False
        if self._flat:
            self._gather(named)
        else:
            for pages, copied, table in zip(self._pages, self._copies, self._tables, strict=True):
                np.take(pages, named[table], 0, out=copied, mode="clip")
        return True

    def _gather(self, named: dict[int, Sequence[int]]) -> None:
        size = self._block_bytes
        pieces = [
            pages[block * size : (block + 1) * size]
            for pages, table in zip(self._flat, self._tables, strict=True)
            for block in named[table]
        ]
        at_once = min(MOST_PIECES, max(1, MOST_BYTES // size))
        for first in range(0, len(pieces), at_once):
            some = pieces[first : first + at_once]
            written = os.pwritev(self._file.descriptor, some, self._start + first * size)
            if written != len(some) * size:
                raise OSError(f"{written} bytes of {len(some) * size} were copied")
