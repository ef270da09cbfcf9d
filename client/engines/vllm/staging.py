"""What a worker stores is copied out of an engine's pages first, and what it loads goes into them:
where the pages lie in CPU memory.

vLLM gives a block that nobody needs any more to another request, but says so at the beginning of
the step that writes to it. Until then what was computed lies where it was.

Whoever copies shares the interpreter with the engine, and each time it has it for a moment the
engine may wait for it: a tenth of a millisecond for a wake-up where a step's own operations take
less. So the blocks of all layers are gathered by one call of a compiled loop, and go from there
into a frame by one more for each part. torch would start its threads, which are the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvstore.client.chunk import Chunk
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm.blocks import (
    BlockLayout,
    BlockTarget,
    EnginePages,
    LayerPages,
    windows_left,
)
from kvstore.client.engines.vllm.messages import BlockTables
from kvstore.client.planning import PlanTerms
from kvstore.client.tensors import LayerTensors, to_array
from kvstore.codecs.base import AnyTensors
from kvstore.codecs.block_stack import BlockStack
from kvstore.proto.buffers import LOOP_UNIT_BYTES, address
from kvstore.proto.device import Event
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.native import loops
from kvstore.proto.plans import Hints
from kvstore.proto.types import END_KINDS, ChainDigest, KVLayout, Stated

BATCH_BYTES = 64 << 20
"""What several requests put together at most: a call for each would hold the engine up."""


def batch_chunks(chunk_bytes: int) -> int:
    """Return how many chunks of so many bytes are put together at most."""
    return max(1, BATCH_BYTES // chunk_bytes)


class Staged(NamedTuple):
    """A chunk that was copied: what is put, and whether its windows are among that."""

    tensors: LayerTensors
    has_windows: bool


@dataclass(slots=True)
class LoadJob:
    """One load: the chunks *digests*, each into the blocks that its ``chunks`` entry names.

    The first ``kept_blocks`` are not written to, and none before ``after``. ``arrived`` is to be
    called when something came, ``is_over`` says that there is no more time. ``terms``: of a load
    with a deadline, for a side that can read in part.
    """

    digests: Sequence[ChainDigest]
    chunks: Sequence[BlockTables]
    kept_blocks: int
    after: Event | None
    arrived: Callable[[], None]
    is_over: Callable[[], bool]
    terms: PlanTerms | None = None
    read: int = 0
    """How many chunks were read so far: their blocks have them."""
    stated: list[Stated] = field(default_factory=list)
    """Of a side that reads lossy copies: as ``Connector.read_into`` fills it."""


class HostSide:
    """Where an engine's pages lie, as a worker loads into them and stores out of them: in CPU
    memory. Copied beside the engine, read straight into the blocks. ``DeviceSide`` is the other.
    """

    waits_in_pages = False
    """Whether what cannot be copied yet waits in the engine's pages, and takes no memory."""
    is_gpu_tier_far = False
    """Whether the server has a gpu tier that this side does not reach."""

    def __init__(self, pages: EnginePages, connector: Connector, chunk_blocks: int) -> None:
        self._pages = pages
        self._connector = connector
        self._chunk_blocks = chunk_blocks
        self.chunk_bytes = pages.chunk_bytes(chunk_blocks)
        self._idle: list[BlockGather] = []
        self._lock = threading.Lock()  # guards _idle

    def copies(self, chunks: Sequence[BlockTables]) -> list[BlockCopy]:
        """Begin to copy *chunks*, or the first of them that there is memory for.

        For the engine's thread, at the end of a step.
        """
        return [BlockCopy(self, tables) for tables in chunks]

    def mark(self) -> Event | None:
        """Return an event behind the engine's work so far, if it does any beside the host."""
        return None

    def read(self, job: LoadJob) -> None:
        """Read what can be read of a load."""
        targets = [
            BlockTarget(self._pages, tables, 0 if number else job.kept_blocks)
            for number, tables in enumerate(job.chunks)
        ]

        def target(number: int, layout: KVLayout) -> AnyTensors:
            job.arrived()
            return targets[number].tensors(layout)

        if targets:
            read = self._connector.read_into(job.digests, target, job.stated, job.terms)
            for one in targets[:read]:
                one.finish()
            job.read = read

    def put_near(
        self, chunks: Callable[[], Sequence[Chunk]], copies: Sequence[object], hints: Hints
    ) -> set[int]:
        """Put copies that no host memory has to have; return the numbers of those that are there.

        *chunks* returns what they are, without tensors.
        """
        return set()

    def take(self) -> BlockGather:
        """Return memory for one chunk."""
        with self._lock:
            return self._idle.pop() if self._idle else BlockGather(self._pages, self._chunk_blocks)

    def give(self, memory: BlockGather) -> None:
        """Take memory back."""
        with self._lock:
            self._idle.append(memory)

    def close(self) -> None:
        """Let go of memory: nothing is loaded or stored any more."""
        self._idle.clear()


class BlockCopy:
    """One chunk that lies in the blocks *tables* name, to be copied by whoever comes first.

    ``result`` is the copy once it is made; None if the engine had given up what it is of.
    """

    def __init__(self, side: HostSide, tables: BlockTables) -> None:
        self._side = side
        self._tables: BlockTables | None = tables
        self._lock = threading.Lock()  # held by who makes the copy
        self._memory: BlockGather | None = None
        self.result: Staged | None = None

    def begin(self) -> None:
        """Do nothing: whoever runs it copies."""

    def run(self) -> None:
        """Copy it, unless that was done; return when nobody reads the blocks any more."""
        with self._lock:
            tables, self._tables = self._tables, None
            if tables is not None:
                self._memory = self._side.take()
                self.result = self._memory.take(tables)

    def free(self) -> None:
        """Give the memory of the copy back, which nobody reads any more."""
        if self._memory is not None:
            self._side.give(self._memory)
        self._memory = self.result = None


class BlockGather:
    """Memory for one chunk of *chunk_blocks* blocks, used again and again."""

    def __init__(self, pages: EnginePages, chunk_blocks: int) -> None:
        self._shape = pages.shape
        every = zip(pages.shape.groups, pages.groups, pages.layouts, strict=True)
        self._groups = [
            _GroupGather(layers, layout, pages.shape.kept_blocks(group, chunk_blocks))
            for group, layers, layout in every
        ]

    def take(self, tables: BlockTables) -> Staged | None:
        """Copy the chunk whose blocks *tables* name; return what there is of it, if anything.

        Windows that the engine has given up already are left out.
        """
        has_windows = windows_left(self._shape, tables)
        if has_windows is None:
            return None
        pairs = zip(self._shape.groups, self._groups, strict=True)
        taken = [one for group, one in pairs if has_windows or group.kind not in END_KINDS]
        return Staged([one.take(tables) for one in taken], has_windows)


class _GroupGather:
    """Memory for the last *kept* blocks of a chunk, of each of *layers*."""

    def __init__(self, layers: Sequence[LayerPages], layout: BlockLayout, kept: int) -> None:
        self._kept = kept
        self._tables = [layer.table for layer in layers]
        self._pages = [to_array(layer.whole) for layer in layers]
        block = layers[0].whole[0]
        count = len(layers) * kept
        reach = sum(
            (size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)
        )
        is_run = reach + 1 == block.numel() and not block.nbytes % LOOP_UNIT_BYTES
        copied = torch.empty((count, *block.shape), dtype=block.dtype)
        if is_run:  # its elements follow each other in whatever order
            copied = copied.as_strided(copied.shape, (block.numel(), *block.stride()))
        self._copies = to_array(copied).reshape(len(layers), kept, *block.shape)
        parts = [to_array(part) for part in layout(copied)]
        self._stack = BlockStack(
            [p.view(f"u{p.itemsize}").reshape(len(layers), kept, *p.shape[1:]) for p in parts]
        )
        self._rows: np.ndarray[tuple[int, int], np.dtype[np.uint64]] | None = None
        if is_run:  # as ``copy_summed`` takes them: where to, from where, units, size, sum
            self._rows = np.zeros((count, 5), np.uint64)
            self._rows[:, 0] = copied.data_ptr() + np.arange(count) * block.nbytes
            self._rows[:, 2] = block.nbytes // LOOP_UNIT_BYTES
            self._rows[-1, 3] = count * block.nbytes
            self._starts = np.array([[layer.whole.data_ptr()] for layer in layers])
            self._steps = np.array([[pages.strides[0]] for pages in self._pages])

    def take(self, tables: BlockTables) -> BlockStack:
        """Copy what the blocks have; return the copy."""
        ids = np.array([tables[table][-self._kept :] for table in self._tables])
        if ids.min() < 0 or ids.max() >= min(map(len, self._pages)):
            raise LayoutMismatchError("blocks", int(ids.max()), "the pages have no such block")
        if self._rows is not None:
            self._rows[:, 1] = (self._starts + ids * self._steps).ravel()
            loops().copy_summed(address(self._rows), len(self._rows), False)
        else:
            for pages, copied, table in zip(self._pages, self._copies, ids, strict=True):
                np.take(pages, table, 0, out=copied, mode="clip")
        return self._stack
