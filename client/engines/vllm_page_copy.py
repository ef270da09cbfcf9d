"""A PageCopy: what an engine keeps of one chunk, copied out of its pages in as few calls as can be.

Whoever copies shares the interpreter with the engine, and each time it has it for a moment the
engine may wait for it: a tenth of a millisecond for a wake-up where a step's own operations take
less. So the blocks of all layers are gathered into memory by one call, of the kernel's, and go from
there into a frame by one more for each part. torch would start its threads, which are the engine's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.client.engines.vllm_layout import EnginePages, LayerPages, Packing
from kvstore.client.tensors import LayerTensors, to_array
from kvstore.codecs.block_stack import BlockStack
from kvstore.proto import unix_socket
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import END_KINDS

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
