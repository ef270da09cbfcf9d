"""Direct copies between raw frames on a device and an engine's paged KV.

An engine keeps K and V in blocks of a few tokens, with all layers in one or a few large tensors
(vLLM's paged attention: Kwon et al., arXiv 2309.06180, section 4). Rows of head_dim elements move
between such pages and a frame on the same device, without an intermediate copy. This file imports
torch, so only users of pages import it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.base import Codec
from kvstore.codecs.block_part import check_block_ids
from kvstore.codecs.raw import RAW
from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, LayoutMismatchError
from kvstore.proto.frame import FrameHeader, check_segment
from kvstore.proto.types import ChunkShard, Component, DType, Extent, KVLayout, LayerKind

SKIPPED_BLOCK = -1
"""Stands for no block in a block table."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one component. ``views[layer][part]``: (blocks, kv_heads, block_tokens,
    head_dim), of one device, dtype and strides, with contiguous rows.

    The constructor raises LayoutMismatchError.
    """

    views: tuple[tuple[torch.Tensor, ...], ...]
    tables: tuple[int, ...] = ()
    """Index of each layer's block table among the request's; empty: the first for all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", self.tables or (0,) * len(self.views))
        if not self.views or not self.views[0]:
            raise LayoutMismatchError("pages", (), "give a view of each part of each layer")
        first = self.views[0][0]
        if first.dim() != 4 or first.stride(-1) != 1 or not first.numel():
            raise LayoutMismatchError(
                "pages", (tuple(first.shape), first.stride()),
                "give (blocks, kv_heads, block_tokens, head_dim), head_dim contiguous",
            )  # fmt: skip
        wanted = (first.shape, first.stride(), first.dtype, first.device)
        for parts in self.views:
            for view in parts:
                if (view.shape, view.stride(), view.dtype, view.device) != wanted:
                    raise LayoutMismatchError("pages", tuple(view.shape), f"all must be {wanted}")

    @property
    def first(self) -> torch.Tensor:
        """A view with the shape, strides and dtype of all."""
        return self.views[0][0]

    def check(self, component: Component) -> None:
        """Raise LayoutMismatchError unless these are pages of *component*."""
        heads, _, head_dim = self.first.shape[1:]
        found = (len(self.views), len(self.views[0]), heads, head_dim)
        wanted = (component.layers, component.parts, component.kv_heads, component.head_dim)
        if found != wanted or DType.parse(str(self.first.dtype)) is not component.dtype:
            raise LayoutMismatchError(
                "pages", (*found, str(self.first.dtype)), f"wanted {wanted} {component.dtype.name}"
            )


@dataclass(frozen=True, slots=True)
class Paged:
    """A request in an engine: the pages of each component, and the request's block tables.

    Token t of the request lies in slot ``t % block_tokens`` of ``table[t // block_tokens]``, of
    each layer's table. All tables have one length. Tokens of a ``SKIPPED_BLOCK`` are neither read
    nor written. ``shard``: the part of each chunk in the pages, as for a rank of a parallel engine;
    None: everything.
    """

    pages: tuple[Pages, ...]
    tables: Sequence[Sequence[int] | NDArray[np.int64]]
    shard: ChunkShard | None = None

    @property
    def table_blocks(self) -> int:
        """Blocks of each table."""
        return len(self.tables[0])

    def check(self, layout: KVLayout, first_tokens: Sequence[int]) -> None:
        """Raise unless chunks of *layout* that begin at *first_tokens* have distinct slots.

        LayoutMismatchError for pages of another layout, InvalidRequestError for invalid slots.
        """
        components = layout.components
        if self.shard is not None:
            if self.shard.whole != layout:
                raise LayoutMismatchError("rectangle", self.shard.whole, "must be of this chunk")
            components = self.shard.layout.components
        if len(self.pages) != len(components):
            raise LayoutMismatchError("pages", len(self.pages), f"give {len(components)}")
        if len({len(table) for table in self.tables}) != 1:
            raise InvalidRequestError("tables", [*map(len, self.tables)], "give one length")
        for pages, component in zip(self.pages, components, strict=True):
            if component.kind is LayerKind.state:
                fix = "pages hold tokens: move states through tensors"
                raise LayoutMismatchError("kind", component.kind.name, fix)
            pages.check(component)
            count = pages.first.shape[0]
            for number in set(pages.tables):
                ids = np.asarray(self.tables[number])
                check_block_ids(ids[ids != SKIPPED_BLOCK], count)
        self.check_slots(layout, first_tokens)

    def check_slots(self, layout: KVLayout, first_tokens: Sequence[int]) -> None:
        """Raise InvalidRequestError unless chunks that begin at *first_tokens* have slots."""
        block_tokens = min(pages.first.shape[2] for pages in self.pages)
        for first_token in (min(first_tokens), max(first_tokens)):
            if first_token < 0 or first_token + layout.tokens > self.table_blocks * block_tokens:
                raise InvalidRequestError(
                    "first_token", first_token,
                    f"{layout.tokens} tokens do not fit {self.table_blocks} blocks"
                    f" of {block_tokens}",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FrameAt:
    """A raw frame in device memory, from byte ``offset``; its chunk begins at ``first_token``.

    The header was parsed, and thereby checked, from host memory.
    """

    offset: int
    header: FrameHeader
    first_token: int

    def part_offsets(
        self, shard: ChunkShard | None = None
    ) -> Iterator[tuple[Component, list[int]]]:
        """Yield each component, and the offset in memory of each part of each of its layers.

        With a *shard*: of its layers, from its first head on.
        """
        offsets = iter(self.header.segments["offset"].tolist())
        components = self.header.layout.components
        extents = map(Extent.whole, components) if shard is None else shard.extents
        for component, extent in zip(components, extents, strict=True):
            starts = [self.offset + next(offsets) for _ in range(component.layers)]
            if extent is None:
                continue
            cut = replace(component, layers=extent.layers, kv_heads=extent.heads)
            head_bytes = component.part_bytes // component.kv_heads
            firsts = [part * component.part_bytes for part in range(component.parts)]
            firsts = [first + extent.first_head * head_bytes for first in firsts]
            layers = starts[extent.first_layer : extent.layer_stop]
            yield cut, [start + first for start in layers for first in firsts]


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Frame starts and a request's blocks, int64 on the device, copied there once for many calls.
    ``starts`` are from ``frame_starts``, ``blocks`` all tables concatenated.
    """

    starts: torch.Tensor
    blocks: torch.Tensor

    def cut(self, first: int, stop: int) -> DeviceTables:
        """Return the tables of frames *first* to *stop*."""
        return DeviceTables(self.starts[2 * first : 2 * stop], self.blocks)


def frame_starts(frames: Sequence[FrameAt]) -> NDArray[np.int64]:
    """Return a row for each frame: its offset in memory, and its first token."""
    return np.array([(frame.offset, frame.first_token) for frame in frames], np.int64)


Sums = Callable[[], list[list[int]]]
"""Waits for queued checksums; returns those of each frame, in order of segments."""


class FrameKernels(ABC):
    """Operations on raw frames on one device, on its current torch stream.

    Several frames of one layout in one piece of memory (uint8) take hardly more calls than one.
    Thread-safe.
    """

    @abstractmethod
    def sums(self, memory: torch.Tensor, frames: Sequence[FrameAt]) -> Sums:
        """Queue the computation of xxh3_64 of every segment of *frames*, at least one."""

    @abstractmethod
    def tables(self, starts: NDArray[np.int64], paged: Paged) -> DeviceTables:
        """Copy *starts*, from ``frame_starts``, and the tables of *paged* to the device.

        The caller keeps them until all work that reads them is done.
        """

    @abstractmethod
    def words(
        self, memory: torch.Tensor, tables: DeviceTables, before: int, count: int
    ) -> Callable[[], NDArray[np.int64]]:
        """Queue a read of *count* words of eight bytes, from *before* bytes before each frame on.

        The returned function waits for them, a row for each frame; zeros past the end of memory.
        Offsets of frames and *before* are multiples of eight.
        """

    @abstractmethod
    def move(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        tables: DeviceTables | None = None,
        *,
        to_pages: bool,
    ) -> None:
        """Copy all rows to the pages, or from them; arguments were checked.

        *tables* are those of *frames* and *paged*, if they are already on the device.
        """

    def scatter(self, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged) -> Sums:
        """Queue copies of frames of one layout into the pages, and their sums: in the same pass or
        after it, so that the sums cover the copied bytes. Raises as ``check`` does, before that.
        """
        self.check(memory, frames, paged)
        return self.start(memory, frames, paged)

    def check(self, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged) -> None:
        """Raise unless *frames* are raw, alike, in *memory*, and their tokens have slots.

        LayoutMismatchError, InvalidRequestError, InvalidFrameError, UnknownCodecError.
        """
        check_frames(RAW, memory, frames, paged)
        offsets = frames[0].header.segments["offset"]
        for frame in frames[1:]:
            if not np.array_equal(frame.header.segments["offset"], offsets):
                raise InvalidFrameError("segments", "offset", "the same in all frames of a call")

    def start(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        tables: DeviceTables | None = None,
    ) -> Sums:
        """Do what ``scatter`` does, without checks; *tables* as in ``move``."""
        self.move(memory, frames, paged, tables, to_pages=True)
        return self.sums(memory, frames)


def check_sums(header: FrameHeader, found: Sequence[int]) -> None:
    """Compare computed checksums with the header's. Raises ChunkCorruptError."""
    if header.segments["checksum"].tolist() == list(found):
        return
    for index, value in enumerate(found):
        check_segment(header, index, value)


def check_frames(
    codec: Codec, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged
) -> None:
    """Raise unless *frames* of *codec* lie in *memory* and their rows have slots in the pages.

    LayoutMismatchError, InvalidRequestError, InvalidFrameError, UnknownCodecError.
    """
    for frame in frames:
        codec.check_header(frame.header)
        stop = frame.offset + frame.header.frame_bytes
        if frame.offset < 0 or stop > len(memory) or (memory.data_ptr() + frame.offset) % 16:
            raise InvalidFrameError(
                "offset", (frame.offset, stop), f"16-byte aligned, within {len(memory)} bytes"
            )
        if frame.header.layout != frames[0].header.layout:
            raise LayoutMismatchError("frames", len(frames), "give frames of one layout")
    paged.check(frames[0].header.layout, [frame.first_token for frame in frames])
    for pages in paged.pages:
        if pages.first.device != memory.device:
            raise LayoutMismatchError("pages", str(pages.first.device), f"use {memory.device}")


class HostKernels(FrameKernels):
    """The kernels on the CPU, by torch's indexing: for tests and as a reference."""

    @override
    def sums(self, memory: torch.Tensor, frames: Sequence[FrameAt]) -> Sums:
        found = []
        for frame in frames:
            data = as_bytes(memory.numpy())[frame.offset :]
            segments = range(len(frame.header.segments))
            found.append([checksum(frame.header.segment(data, at)) for at in segments])
        return lambda: found

    @override
    def tables(self, starts: NDArray[np.int64], paged: Paged) -> DeviceTables:
        blocks = np.concatenate([np.asarray(table, np.int64) for table in paged.tables])
        return DeviceTables(torch.from_numpy(starts.ravel()), torch.from_numpy(blocks))

    @override
    def words(
        self, memory: torch.Tensor, tables: DeviceTables, before: int, count: int
    ) -> Callable[[], NDArray[np.int64]]:
        data = as_bytes(memory.numpy())
        firsts = tables.starts[::2].tolist()
        rows = [data[first - before :][: 8 * count].tobytes() for first in firsts]
        whole = b"".join(row.ljust(8 * count, b"\0") for row in rows)
        return lambda: np.frombuffer(whole, np.int64).reshape(len(rows), count)

    @override
    def move(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        tables: DeviceTables | None = None,
        *,
        to_pages: bool,
    ) -> None:
        ids_of = [torch.tensor([*table]) for table in paged.tables]
        for frame in frames:
            offsets = frame.part_offsets(paged.shard)
            for pages, (component, starts) in zip(paged.pages, offsets, strict=True):
                first_slot = frame.first_token + component.first_token
                slots = torch.arange(component.tokens) + first_slot
                block_tokens = pages.first.shape[2]
                places = slots % block_tokens
                numbers = [n for n in pages.tables for _ in range(component.parts)]
                views = [view.view(torch.uint8) for parts in pages.views for view in parts]
                for view, start, number in zip(views, starts, numbers, strict=True):
                    blocks = ids_of[number][slots // block_tokens]
                    kept = blocks != SKIPPED_BLOCK
                    part = memory[start : start + component.part_bytes]
                    rows = part.view(component.kv_heads, component.tokens, -1).transpose(0, 1)
                    if to_pages:
                        view.transpose(1, 2)[blocks[kept], places[kept]] = rows[kept]
                    else:
                        rows[kept] = view.transpose(1, 2)[blocks[kept], places[kept]]
