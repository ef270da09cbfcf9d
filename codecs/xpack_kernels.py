"""Chunks encoded by xpack where they lie in an engine's pages, into a frame in device memory.

Two passes over the pages: the first finds each tile's sixteen exponents and how much escapes,
which says where everything goes; the second packs. Between them the host reads two numbers a
layer. The bytes are those of ``XpackCodec``. torch is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codecs.device_layers import page_arguments
from kvstore.codecs.exponent_kernels import (
    SOURCES,
    THREADS,
    cut_arguments,
    least_bytes,
    tiles_of,
)
from kvstore.codecs.exponents import has_tiles
from kvstore.codecs.frame_kernels import (
    Argument,
    Launch,
    cuda_launcher,
    device_table,
    grid_cuts,
    grid_of,
    open_kernels,
)
from kvstore.codecs.paged import FrameAt, FrameKernels, Paged, Pages
from kvstore.codecs.rans import LANES
from kvstore.codecs.xpack import XpackCodec
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.frame import (
    ALIGN_BYTES,
    SEGMENT_DTYPE,
    FrameHeader,
    FrameTemplate,
    header_bytes,
    pack_header,
)
from kvstore.proto.types import Component, KVLayout

_CODEC = XpackCodec()
_ESCAPE_BYTES = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of one component of a chunk, in an engine's pages."""

    component: Component
    pages: Pages
    paged: Paged
    first_token: int


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """The tiles of one component: records, where they begin, and each layer's stored bytes."""

    records: torch.Tensor
    starts: torch.Tensor
    escape_starts: torch.Tensor
    stored_bytes: list[int]


class XpackEncoder:
    """The kernels, whatever *launch* runs them on; *frames* sums what they wrote.

    Thread-safe; works on torch's current stream of *device*.
    """

    def __init__(self, device: torch.device, launch: Launch, frames: FrameKernels) -> None:
        self._device = device
        self._launch = launch
        self._frames = frames

    def encode(
        self, template: FrameTemplate, first_token: int, paged: Paged, out: torch.Tensor
    ) -> FrameHeader:
        """Write the frame of a chunk's rows in the pages to the start of *out*; return its header.

        *out* (uint8) has ``XpackCodec.max_frame_bytes``. Waits for the device. Raises
        LayoutMismatchError for other pages, InvalidRequestError for other slots or less room.
        """
        layout = template.layout
        self._check(layout, first_token, paged, out)
        every = [
            _Rows(component, pages, paged, first_token)
            for component, pages in zip(layout.components, paged.pages, strict=True)
        ]
        counted = [self._count(rows) if has_tiles(rows.component) else None for rows in every]
        header = _header(template, _segments(layout, counted))
        out[: header.frame_bytes].zero_()
        first = 0
        for rows, each in zip(every, counted, strict=True):
            last = first + rows.component.layers
            bases = header.segments["offset"][first:last].tolist()
            first = last
            if each is None:
                _copy(rows, out, bases)
                continue
            (places,) = device_table(self._device, bases)
            of_layers = [places, each.starts, each.escape_starts, each.records]
            self._launch_rows("pack", rows, [out], of_layers)
        segments = header.segments.copy()
        segments["checksum"] = self._frames.sums(out, [FrameAt(0, header, first_token)])()[0]
        header = _header(template, segments)
        packed = np.frombuffer(bytearray(pack_header(header)), np.uint8)
        out[: len(packed)].copy_(torch.from_numpy(packed))
        return header

    def _check(self, layout: KVLayout, first_token: int, paged: Paged, out: torch.Tensor) -> None:
        paged.check(layout, [first_token])
        if any(pages.first.device != out.device for pages in paged.pages):
            raise LayoutMismatchError("pages", str(out.device), "be on the device of out")
        if len(out) < _CODEC.max_frame_bytes(layout) or out.data_ptr() % 16:
            fix = f"{_CODEC.max_frame_bytes(layout)} bytes, 16-byte aligned"
            raise InvalidRequestError("out", len(out), fix)

    def _count(self, rows: _Rows) -> _Counted:
        """Fill in the records of one component, and find where its tiles go."""
        component = rows.component
        layers, tiles, size = component.layers, tiles_of(component), _CODEC.record.itemsize
        records = torch.empty(layers * tiles * size, dtype=torch.uint8, device=self._device)
        self._launch_rows("count", rows, [], [records])
        starts, escapes = (
            torch.empty(layers * (tiles + 1), dtype=torch.int64, device=self._device)
            for _ in range(2)
        )
        bases, unknown = device_table(
            self._device, np.arange(layers) * tiles * size, np.zeros(layers)
        )
        given: list[Argument] = [
            records, bases, unknown, *cut_arguments(component, _CODEC), np.uint32(layers), starts,
            escapes, torch.empty(layers, dtype=torch.int32, device=self._device),
        ]  # fmt: skip
        self._launch("xpack_open", (grid_of(layers * LANES, THREADS), 1), given)
        ends = torch.stack([starts, escapes]).view(2, layers, tiles + 1)[:, :, -1].cpu().tolist()
        least = least_bytes(component, _CODEC)
        stored = [least + n + _ESCAPE_BYTES * m for n, m in zip(*ends, strict=True)]
        return _Counted(records, starts, escapes, stored)

    def _launch_rows(
        self, way: str, rows: _Rows, first: list[Argument], of_layers: list[torch.Tensor]
    ) -> None:
        """Queue a kernel that has a row of the grid for each layer, and a block for each tile.

        *first* are its first arguments, *of_layers* those that have as much for each layer.
        """
        component, pages = rows.component, rows.pages
        pointers = [view.data_ptr() for views in pages.views for view in views]
        places, ids = device_table(self._device, pointers, list(rows.paged.tables[0]))
        for cut in grid_cuts(component.layers):
            mine = [_rows_of(each, cut, component.layers) for each in (*of_layers, places)]
            given: list[Argument] = [
                *first, *mine, ids, np.uint32(rows.first_token),
                *cut_arguments(component, _CODEC), np.uint32(component.parts),
                *page_arguments(pages),
            ]  # fmt: skip
            grid = (grid_of(tiles_of(component), 1), cut.stop - cut.start)
            self._launch(f"xpack_{way}_{component.dtype.name}", grid, given)


def _rows_of(table: torch.Tensor, cut: slice, layers: int) -> torch.Tensor:
    """Return the part of *table*, which has as much for each of *layers*, that is of *cut*."""
    width = len(table) // layers
    return table[cut.start * width : cut.stop * width]


def _copy(rows: _Rows, out: torch.Tensor, bases: Sequence[int]) -> None:
    """Copy layers of types that are not packed."""
    component, block_tokens = rows.component, rows.pages.first.shape[2]
    slots = torch.arange(component.tokens, device=out.device) + rows.first_token
    ids = torch.tensor(list(rows.paged.tables[0]), device=out.device)
    blocks, places = ids[slots // block_tokens], slots % block_tokens
    for base, views in zip(bases, rows.pages.views, strict=True):
        for number, view in enumerate(views):
            start = base + number * component.part_bytes
            part = out[start : start + component.part_bytes]
            packed = part.view(component.kv_heads, component.tokens, -1).transpose(0, 1)
            packed.copy_(view.view(torch.uint8).transpose(1, 2)[blocks, places])


def _segments(layout: KVLayout, counted: Sequence[_Counted | None]) -> NDArray[np.void]:
    """Return the segment table, checksums still zero."""
    rows = np.zeros(layout.segment_count, SEGMENT_DTYPE)
    at, index = header_bytes(layout), 0
    for number, (component, each) in enumerate(zip(layout.components, counted, strict=True)):
        for layer in range(component.layers):
            size = component.layer_bytes if each is None else each.stored_bytes[layer]
            rows[index] = (number, 0, layer, at, size, 0)
            at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
            index += 1
    return rows


def _header(template: FrameTemplate, segments: NDArray[np.void]) -> FrameHeader:
    t, last = template, segments[-1]
    return FrameHeader(
        t.key, t.parent, t.representation, t.content, t.layout, _CODEC.codec_id, _CODEC.revision,
        _CODEC.fidelity, t.position, t.prefill_flops, 0.0, t.flags,
        int(last["offset"]) + int(last["stored_bytes"]), segments,
    )  # fmt: skip


def open_xpack_encoder(device: torch.device) -> XpackEncoder:
    """Return the encoder of a CUDA *device*. Raises TierUnavailableError when not compilable."""
    launch = cuda_launcher(device.index or 0, SOURCES, THREADS)
    return XpackEncoder(device, launch, open_kernels(device))
