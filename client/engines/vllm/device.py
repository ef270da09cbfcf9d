"""The worker side of the vLLM connector for pages on a device: stores and loads beside its work.

One launch on the engine's own stream gathers a step's completed chunks, after the forward pass
and before later work, into slots of a fixed ring: no page is read once the hook has returned.
Loads are copied to the device at once, and written to the pages after an event of the engine's
stream: after its zeroing, and after steps that still write the blocks. The host waits for the
device in separate threads, never in a hook.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from kvstore.client.chunk import Chunk, DeviceChunk, Shard
from kvstore.client.cuda import CudaClient, DeviceRing
from kvstore.client.device_reads import DeviceReader
from kvstore.client.engines.base import Connector
from kvstore.client.engines.vllm import blocks
from kvstore.client.engines.vllm.identity import KVCacheShape
from kvstore.client.engines.vllm.messages import BlockTables
from kvstore.client.transports.base import Put
from kvstore.codecs.base import AnyTensors, ChunkTensors
from kvstore.codecs.paged import SKIPPED_BLOCK, FrameAt, Paged, Pages
from kvstore.codecs.raw import RAW, raw_header
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, open_device, tensor_over
from kvstore.proto.errors import KVStoreError, LayoutMismatchError, TierUnavailableError
from kvstore.proto.frame import FrameHeader, FrameTemplate, raw_frame_bytes
from kvstore.proto.plans import Hints
from kvstore.proto.types import ROOT, ChunkKey, KVLayout, LayerKind, Model, PutOutcome

LOAD_SLOTS = 4
"""Chunks of a load in host memory at once, if they go through it."""
LEAST_SLOTS = 2
"""The least number of chunks in the ring."""
_ALIGN_BYTES = 256
_THERE = (PutOutcome.stored, PutOutcome.exists)

logger = structlog.get_logger(__name__)


class EngineDevicePages:
    """The pages of every layer on one device, and the places of chunks in them. Raises
    LayoutMismatchError for unsupported pages."""

    def __init__(
        self,
        shape: KVCacheShape,
        registered: Mapping[str, torch.Tensor],
        writer: Callable[[str], blocks.BlockWriter],
    ) -> None:
        layouts = blocks.block_layouts_of(shape, registered, writer)
        self.shape = shape
        sizes = sorted({pages.shape[2] for pages in registered.values()})
        if len(sizes) != 1:
            raise LayoutMismatchError("block_tokens", sizes, "kernel blocks must have one size")
        self.device = next(iter(registered.values())).device
        self._ratio = shape.block_tokens // int(sizes[0])
        groups = []
        for group, packing in zip(shape.groups, layouts, strict=True):
            dtype = getattr(torch, group.dtype.name)
            views = [
                tuple(part.view(dtype) for part in packing(registered[layer.name]))
                for layer in group.layers
            ]
            groups.append(Pages(tuple(views), tuple(layer.table for layer in group.layers)))
        self._groups = tuple(groups)
        self._of_kinds: dict[tuple[LayerKind, ...], tuple[Pages, ...]] = {}

    def of(self, layout: KVLayout) -> tuple[Pages, ...]:
        """Return the pages of *layout*'s components, the same object for the same kinds. Raises
        LayoutMismatchError if the engine lacks one."""
        kinds = tuple(component.kind for component in layout.components)
        if kinds not in self._of_kinds:
            pairs = zip(self.shape.groups, self._groups, strict=True)
            self._of_kinds[kinds] = tuple(pages for group, pages in pairs if group.kind in kinds)
        found = self._of_kinds[kinds]
        if len(found) != len(kinds):
            raise LayoutMismatchError("layout", [kind.name for kind in kinds], "not the engine's")
        return found

    def tables(
        self, chunks: Sequence[BlockTables], kept_blocks: int = 0
    ) -> list[NDArray[np.int64]]:
        """Return block tables of *chunks*, concatenated, in the kernels' blocks; the first
        *kept_blocks* and null blocks are skipped."""
        found = []
        for table in range(len(chunks[0])):
            ids = np.array([block for chunk in chunks for block in chunk[table]], np.int64)
            ids[:kept_blocks] = blocks.NULL_BLOCK
            skipped = ids == blocks.NULL_BLOCK
            if self._ratio > 1:
                ids = (ids[:, None] * self._ratio + np.arange(self._ratio)).ravel()
                skipped = np.repeat(skipped, self._ratio)
            ids[skipped] = SKIPPED_BLOCK
            found.append(ids)
        return found


class _Slot:
    """Host memory for the raw frame of one chunk, which the device copies directly."""

    def __init__(self, memory: Bytes) -> None:
        self.tensor = tensor_over(memory)
        self._memory = memory
        self._views: dict[KVLayout, ChunkTensors] = {}

    def tensors(self, header: FrameHeader) -> ChunkTensors:
        """Return views of the tensors of a raw frame with *header*."""
        if header.layout not in self._views:
            self._views[header.layout] = RAW.views(header, self._memory)
        return self._views[header.layout]


class DeviceCopy:
    """One chunk in a slot of the ring; *slot* None: the engine no longer had it."""

    def __init__(self, side: DeviceSide, slot: int | None, *, has_windows: bool = True) -> None:
        self.side = side
        self.slot = slot
        self.has_windows = has_windows
        self.gathered: Event | None = None
        self.result: blocks.Staged | None = None
        self._host: _Slot | None = None
        self._brought: Event | None = None

    def begin(self) -> None:
        """Queue the copy to host memory."""
        if self.slot is not None and self._brought is None:
            self._host, self._brought = self.side.bring(self.slot, self.gathered)

    def run(self) -> None:
        """Copy it to host memory; this frees its slot of the ring."""
        self.begin()
        if self._brought is None or self._host is None:
            return
        self._brought.synchronize()
        self._free_slot()
        header = self.side.headers[self.side.layouts[self.has_windows]]
        self.result = blocks.Staged(self._host.tensors(header), self.has_windows)

    def _free_slot(self) -> None:
        if self.slot is not None:
            self.side.slots.append(self.slot)
            self.slot = None

    def free(self) -> None:
        """Return its memory, which must be out of use."""
        if self._brought is not None and self.result is None:
            with suppress(KVStoreError):  # if the device still works
                self._brought.synchronize()
        self._free_slot()
        if self._host is not None:
            self.side.host.append(self._host)
        self.result = self._host = self._brought = None


class DeviceSide:
    """Stores and loads of one rank whose pages are on *device*.

    At most *ring_bytes* of its memory hold completed chunks, and at least LEAST_SLOTS chunks; less
    if memory is short. Raises TierUnavailableError with the fix if it cannot be allocated.
    """

    waits_in_pages = True

    def __init__(
        self,
        pages: EngineDevicePages,
        connector: Connector,
        ring_bytes: int,
        device: Device | None = None,
    ) -> None:
        self._pages = pages
        self._connector = connector
        client = connector.client
        tokens = client.options.chunk_tokens
        self._chunk_tokens = tokens
        shard = client.options.shard
        self.layouts = {
            has: _rank_layout(client.model, shard, tokens, has_windows=has)
            for has in ({True} if pages.shape.has_ends_only else {True, not pages.shape.has_ends})
        }
        pages.of(self.layouts[True])
        self.headers = {layout: _blank_header(layout) for layout in self.layouts.values()}
        self.chunk_bytes = -(-raw_frame_bytes(self.layouts[True]) // _ALIGN_BYTES) * _ALIGN_BYTES
        self.device = device or open_device(pages.device)
        whole = KVLayout.of(client.model, tokens)
        self._shard = None if shard is None else shard.in_chunk(client.model, whole)
        self._cuda = client if isinstance(client, CudaClient) else None
        self._straight = None if pages.shape.has_ends else self._cuda
        """Reads frames directly into the pages. Verifies a rank's frames as a whole, too."""
        frame_bytes = self.chunk_bytes if self._straight is None else raw_frame_bytes(whole)
        self.reader = DeviceReader(self.device, frame_bytes, LOAD_SLOTS)
        self._ring, slots = self._allocated(ring_bytes)
        self._puts = DeviceRing(self.device, self._ring)
        self.slots = list(range(slots))
        """Free slots of the ring; only the engine's thread takes them."""
        self._down = self.device.stream()
        self._ends: list[Callable[[], None]] = []
        self.host = self._host_slots(1 + blocks.batch_chunks(self.chunk_bytes))
        """Free host slots; only the storing thread takes them."""
        self._load_host = self._host_slots(LOAD_SLOTS)

    def _allocated(self, ring_bytes: int) -> tuple[torch.Tensor, int]:
        if self._pages.device.type == "cuda":
            _, total_bytes = torch.cuda.mem_get_info(self._pages.device)
            ring_bytes = min(ring_bytes, total_bytes // 64)
        slots = max(LEAST_SLOTS, ring_bytes // self.chunk_bytes)
        while True:
            try:
                return self.device.allocate(slots * self.chunk_bytes), slots
            except TierUnavailableError:
                if slots == LEAST_SLOTS:
                    self.device.release(self.reader.ring)
                    raise
                slots = max(LEAST_SLOTS, slots // 2)
                logger.warning("less device memory for stores", chunks=slots)

    def _host_slots(self, count: int) -> list[_Slot]:
        memory = np.frombuffer(mmap.mmap(-1, count * self.chunk_bytes), np.uint8)
        end = self.device.register(memory)
        if end is not None:  # else copies are only slower
            self._ends.append(end)
        size = self.chunk_bytes
        return [_Slot(memory[at * size : (at + 1) * size]) for at in range(count)]

    # --- stores

    def copies(self, chunks: Sequence[BlockTables]) -> list[DeviceCopy]:
        """Gather as many of *chunks* as slots allow; in the engine's thread."""
        found: list[DeviceCopy] = []
        gathered: list[tuple[DeviceCopy, int, BlockTables]] = []
        for tables in chunks:
            has_windows = blocks.windows_left(self._pages.shape, tables)
            if has_windows is None:
                found.append(DeviceCopy(self, None))
                continue
            if not self.slots:
                break
            slot = self.slots.pop()
            found.append(DeviceCopy(self, slot, has_windows=has_windows))
            gathered.append((found[-1], slot, tables))
        try:
            if gathered:
                self._gather(gathered)
        except BaseException:
            for copy, _, _ in gathered:
                copy.free()
            raise
        return found

    def _gather(self, gathered: Sequence[tuple[DeviceCopy, int, BlockTables]]) -> None:
        """Queue one launch on the engine's stream for all chunks of a step."""
        layout = self.layouts[True]
        # Null blocks are skipped: their place in a slot is not put.
        frames = [
            FrameAt(slot * self.chunk_bytes, self.headers[layout], at * self._chunk_tokens)
            for at, (_, slot, _) in enumerate(gathered)
        ]
        tables = self._pages.tables([one for _, _, one in gathered])
        paged = Paged(self._pages.of(layout), tables)
        stream = self.device.current_stream()
        stream.launch(partial(self.reader.kernels.move, self._ring, frames, paged, to_pages=False))
        event = stream.record()
        for copy, _, _ in gathered:
            copy.gathered = event

    def bring(self, slot: int, gathered: Event | None) -> tuple[_Slot, Event]:
        """Queue a copy of a ring slot to host memory; return it and the event of its end."""
        assert gathered is not None
        host = self.host.pop()
        try:
            self._down.wait(gathered)
            start = slot * self.chunk_bytes
            self._down.copy(host.tensor, self._ring[start : start + self.chunk_bytes])
            return host, self._down.record()
        except BaseException:
            self.host.append(host)
            raise

    def put_near(
        self, chunks: Callable[[], Sequence[Chunk]], copies: Sequence[Any], hints: Hints
    ) -> set[int]:
        """Have a server with a gpu tier on this device copy chunks directly from the ring."""
        client = self._cuda
        whole = [at for at, one in enumerate(copies) if one.slot is not None and one.has_windows]
        if client is None or client.options.shard or self._connector.durable or not whole:
            return set()

        def put() -> list[Put]:
            named = chunks()
            placed = [self._placed(named[at], copies[at].slot) for at in whole]
            return client.put_on_device(self._puts, placed, copies[whole[-1]].gathered, hints)

        outcomes = self._connector.guard(put, list[Put]())
        return {at for at, one in zip(whole, outcomes, strict=False) if one.outcome in _THERE}

    def _placed(self, chunk: Chunk, slot: int) -> DeviceChunk:
        return DeviceChunk(
            chunk.key, slot * self.chunk_bytes, self.layouts[True], parent=chunk.parent,
            position=chunk.position, prefill_flops=chunk.prefill_flops, content=chunk.content,
        )  # fmt: skip

    # --- loads

    def mark(self) -> Event | None:
        """Return an event after the engine's work so far."""
        return self.device.current_stream().record()

    def read(self, job: blocks.LoadJob) -> None:
        """Read chunks directly into the pages if possible, and the rest through host memory."""
        digests, client = job.spec.digests, self._connector.client
        if self._straight is not None and digests:
            keys = self._connector.keys_of(digests)
            paged = self._paged(self.layouts[True], job, 0, len(keys))
            paged = replace(paged, shard=self._shard)
            straight = partial(self._straight.read_on_device, keys, paged, self.reader)
            job.read = self._connector.guard(lambda: straight(job.after, job.arrived), 0)
        while job.read < len(digests) and not job.is_over() and not client.is_shut:
            some = min(LOAD_SLOTS, len(digests) - job.read)
            read = self._through_host(job, job.read, some)
            job.read += read
            if read < some:
                break

    def _paged(self, layout: KVLayout, job: blocks.LoadJob, first: int, count: int) -> Paged:
        """Return the target of *count* chunks of a load from index *first*."""
        kept = 0 if first else job.spec.kept_blocks
        tables = self._pages.tables(job.chunks[first : first + count], kept)
        return Paged(self._pages.of(layout), tables)

    def _through_host(self, job: blocks.LoadJob, first: int, count: int) -> int:
        """Read *count* chunks from index *first* into host memory, then into the pages."""
        layouts: dict[int, KVLayout] = {}

        def target(number: int, layout: KVLayout) -> AnyTensors:
            job.arrived()
            components = blocks.components_of(self._pages.shape, layout, job.chunks[first + number])
            header = self.headers.setdefault(layout, _blank_header(layout))
            layouts[number] = layout
            wanted = [is_wanted for component, is_wanted in components if component is not None]
            pairs = zip(self._load_host[number].tensors(header), wanted, strict=True)
            return [layers if is_wanted else [] for layers, is_wanted in pairs]

        read = self._connector.read_into(job.spec.digests[first : first + count], target)
        if read:
            with self.reader.lock:
                self._up(job, first, [layouts[number] for number in range(read)])
        return read

    def _up(self, job: blocks.LoadJob, first: int, layouts: Sequence[KVLayout]) -> None:
        """Copy chunks from host memory into the pages, and wait for that."""
        reader, size = self.reader, self.reader.frame_bytes
        try:
            for number in range(len(layouts)):
                slot = reader.ring[number * size : number * size + self.chunk_bytes]
                reader.copies.copy(slot, self._load_host[number].tensor)
            reader.work.wait(reader.copies.record())
            if job.after is not None:
                reader.work.wait(job.after)
            for layout, run in groupby(range(len(layouts)), layouts.__getitem__):
                start, *_ = slots = [*run]
                frames = [
                    FrameAt(at * size, self.headers[layout], (at - start) * self._chunk_tokens)
                    for at in slots
                ]
                paged = self._paged(layout, job, first + start, len(slots))
                move = partial(reader.kernels.move, reader.ring, frames, paged, to_pages=True)
                reader.work.launch(move)
        finally:
            reader.wait()  # after an error, too: queued work still writes

    def close(self) -> None:
        """Release memory: no load or store may follow."""
        self._down.record().synchronize()
        if self._cuda is not None:
            self._cuda.end_session()  # a server may map the ring
        self.reader.close()
        self.device.release(self._ring)
        while self._ends:
            self._ends.pop()()


def _rank_layout(model: Model, shard: Shard | None, tokens: int, *, has_windows: bool) -> KVLayout:
    layout = KVLayout.of(model, tokens, window=has_windows)
    return layout if shard is None else shard.in_chunk(model, layout).layout


def _blank_header(layout: KVLayout) -> FrameHeader:
    """Return a header with the segment positions of a raw frame of *layout*."""
    return raw_header(FrameTemplate(ChunkKey(bytes(32)), ROOT, bytes(16), bytes(32), layout))
