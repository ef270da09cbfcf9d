"""Decodes kvq frames in a device's memory into an engine's pages.

The kernels are in rans_kernels.cu and kvq_kernels.cu. The host reads the head of each layer, checks
it as ``kvq_layer`` does, and launches one warp per tile; the kernels check the data after the heads
as they decode it. torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats, has_floats
from kvstore.codecs.frame_kernels import (
    MAX_GRID_Y,
    Launch,
    byte_strides,
    cuda_launcher,
    device_table,
    grid_cuts,
    grid_of,
    run,
)
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_layer import HEAD, QUANTISED, Head
from kvstore.codecs.kvq_models import kvq_models
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Cut
from kvstore.codecs.paged import FrameAt, Paged, Pages, check_frames
from kvstore.codecs.rans import LANES, SLOTS, ModelTable
from kvstore.codecs.rope import rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component

BUCKETS = 128

FAULTS = {
    1: ("counts", "must sum up to the words and escapes"),
    2: ("steps", "finite and positive"),
    4: ("means", "finite"),
    8: ("models", "the table has fewer"),
    16: ("words", "the stream does not end where it must"),
    32: ("escapes", "not as many as coded"),
}
"""Meaning of each bit of a status word: a field and its requirement."""

Tables: TypeAlias = "tuple[NDArray[np.uint32], NDArray[np.uint8]]"


def search_tables(table: ModelTable) -> Tables:
    """Return start | frequency << 16 of each symbol, u32 (models, symbols), and the symbol of
    each 32nd slot, u8 (models, 128).

    A sixteenth of the size of ``decode_slots``: from a bucket's symbol on, the slot's own is found
    in half a step on average.
    """
    rows = table.frequencies.astype(np.uint32)
    starts = np.cumsum(rows, axis=1, dtype=np.uint32) - rows
    buckets = table.decode_slots[:, :: SLOTS // BUCKETS].astype(np.uint8)
    return starts | rows << np.uint32(16), np.ascontiguousarray(buckets)


def check_status(status: NDArray[np.int32]) -> None:
    """Raise InvalidFrameError for the first fault of any word of *status*."""
    for index in np.flatnonzero(status)[:1]:
        bits = int(status[index])
        field, fix = FAULTS[bits & -bits]
        raise InvalidFrameError(field, f"layer {index}", fix)


Wait: TypeAlias = Callable[[], None]
"""Waits for the decoding. Raises InvalidFrameError; the pages are then undefined."""


SOURCES = (Path(__file__).with_name("rans_kernels.cu"), Path(__file__).with_suffix(".cu"))
THREADS = 512
"""Sixteen tiles share a block's 40 KB of tables: those of a layer of eight heads of 128."""
SCRATCH_BYTES = 1 << 28
"""Device memory for symbols between the two kernels; one row of the grid may need more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Layer ``number`` of a component, from byte ``base`` of the memory on. ``head``: None if the
    host decodes it.
    """

    number: int
    base: int
    data: Bytes
    head: Head | None

    @classmethod
    def of(cls, number: int, base: int, data: Bytes, component: Component) -> _Layer:
        """Check the head of *data*. Raises InvalidFrameError."""
        head = None
        if len(data) and data[0] == QUANTISED:
            if not has_floats(component):
                name = component.dtype.name
                raise InvalidFrameError("method", QUANTISED, f"{name} is not quantised")
            head = Head.of(data, len(data), component)
        return cls(number, base, data, None if head is None or head.has_classes else head)

    @property
    def frequencies(self) -> Floats:
        """Frequencies of the rotation that was undone."""
        pairs = 0 if self.head is None else self.head.pairs
        found: Floats = self.data[HEAD.size : HEAD.size + 4 * pairs].view("<f4")
        if not np.isfinite(found).all():
            raise InvalidFrameError("frequencies", "NaN", "finite numbers")
        return found


class KvqKernels:
    """The kernels, run by *launch*. *device* holds their tables.

    Thread-safe; works on torch's current stream of the device.
    """

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch
        entries, buckets = search_tables(kvq_models().table)
        self._entries = torch.from_numpy(entries.reshape(-1).view(np.int32)).to(device)
        self._buckets = torch.from_numpy(buckets.reshape(-1)).to(device)

    def decode(self, memory: torch.Tensor, frame: FrameAt, paged: Paged, data: Bytes) -> Wait:
        """Queue decoding a kvq *frame* in *memory* (uint8) to pages; *data* is its host copy.

        Layers that are stored exactly, and those whose tokens have classes, are decoded by the
        host and copied. Checksums are not verified: ``FrameKernels.sums`` computes them, before or
        after. This does not wait for queued work.

        Raises LayoutMismatchError, InvalidRequestError, UnknownCodecError before anything is
        written, and InvalidFrameError, also for frames with levels, which only hosts read.
        """
        check_frames(KvqCodec(), memory, [frame], paged)
        header = frame.header
        if header.levels:
            raise InvalidFrameError("levels", header.levels, "only hosts read refinements")
        offsets, at = header.segments["offset"].tolist(), 0
        coded: list[tuple[Pages, list[_Layer]]] = []
        for component, pages in zip(header.layout.components, paged.pages, strict=True):
            by_sinks: dict[int | None, list[_Layer]] = {}
            for number in range(component.layers):
                stored, base = header.segment(data, at), frame.offset + offsets[at]
                layer = _Layer.of(number, base, stored, component)
                sinks = None if layer.head is None else layer.head.sinks
                by_sinks.setdefault(sinks, []).append(layer)
                at += 1
            for layer in by_sinks.pop(None, []):
                _copy(layer, component, frame, pages, paged)
            coded += [(pages, layers) for layers in by_sinks.values()]
        statuses = [
            self._launch_all(memory, frame, layers, pages, paged) for pages, layers in coded
        ]

        def wait() -> None:
            for status in statuses:
                check_status(status.cpu().numpy())

        return wait

    def _angles(self, layers: Sequence[_Layer], heads: Sequence[Head]) -> list[Any]:
        """Return the start of each layer's angles, and cosines and sines, f32 on the device."""
        known: dict[tuple[bytes, int], int] = {}
        tables: list[tuple[Floats, Floats]] = [(np.zeros((1, 1), np.float32),) * 2]
        places, end = [], 1
        for layer, head in zip(layers, heads, strict=True):
            frequencies = layer.frequencies
            key = (frequencies.tobytes(), head.position)
            if len(frequencies) and key not in known:
                known[key] = end
                tables.append(rotation(frequencies, head.position, head.coded.tokens))
                end += tables[-1][0].size
            places.append(known.get(key, 0))
        both = torch.empty((2, end), pin_memory=self._device.type == "cuda")
        for out, each in zip(both.numpy(), zip(*tables, strict=True), strict=True):
            np.concatenate([table.reshape(-1) for table in each], out=out)
        return [places, *both.to(self._device, non_blocking=True)]

    # --- on the device

    def _launch_all(
        self, memory: torch.Tensor, frame: FrameAt, layers: Sequence[_Layer], pages: Pages,
        paged: Paged,
    ) -> torch.Tensor:  # fmt: skip
        """Queue the kernels of layers of one shape; return the status of each, i32."""
        heads = [layer.head for layer in layers if layer.head is not None]
        angle_starts, cosines, sines = self._angles(layers, heads)
        component, count = heads[0].coded, len(layers)
        cut = Cut.of(component)
        blocks, block_tokens = len(cut.blocks), cut.blocks[0].stop
        parts, row_tiles = component.parts, component.parts * cut.columns
        both = zip(layers, heads, strict=True)
        *columns, sinks, angle_at, chunk_tokens, places, row_layers, row_blocks, ids = device_table(
            self._device,
            [layer.base for layer in layers],
            *([getattr(head, name) for head in heads] for name in ("pairs", "words", "values")),
            [memory.data_ptr() + layer.base + head.sinks_at for layer, head in both],
            angle_starts,
            [frame.first_token] * count,
            [view.data_ptr() for layer in layers for view in pages.views[layer.number]],
            np.repeat(np.arange(count), blocks),
            np.tile(np.arange(blocks), count),
            list(paged.tables[0]),
        )
        tiles = blocks * row_tiles
        starts, value_starts = (self._empty(count * tiles, torch.int64) for _ in range(2))
        status = torch.zeros(count, dtype=torch.int32, device=self._device)
        run(
            self._launch, "kvq_open", (grid_of(count * LANES, THREADS), 1), memory, *columns, tiles,
            count, starts, value_starts, status,
        )  # fmt: skip
        # A row of the grid is one block of tokens of one layer. A launch takes as many, at least
        # one, as have symbols that fit the scratch and parts that fit the grid.
        row_lines = row_tiles * block_tokens
        fitting = SCRATCH_BYTES // (row_lines * (TILE_CHANNELS + 4))
        most = min(max(1, min(fitting, MAX_GRID_Y // parts)), count * blocks)
        symbols = self._empty(most * row_lines * TILE_CHANNELS, torch.uint8)
        firsts = self._empty(most * row_lines, torch.int32)
        sizes = (tiles, row_tiles, component.tokens, block_tokens)
        heads_and_dim = (component.kv_heads, component.head_dim)
        numbers = component.kv_heads * block_tokens * component.head_dim
        for rows in grid_cuts(count * blocks, most):
            mine, height = (row_layers[rows], row_blocks[rows]), rows.stop - rows.start
            run(
                self._launch, "kvq_symbols", (grid_of(row_tiles * LANES, THREADS), height), memory,
                *columns[:3], starts, *mine, self._entries, self._buckets, *sizes, symbols, firsts,
                status,
            )  # fmt: skip
            run(
                self._launch, f"kvq_numbers_{component.dtype.name}",
                (grid_of(numbers, THREADS), height * parts), memory, *columns, value_starts, *mine,
                symbols, firsts, angle_at, cosines, sines, places, chunk_tokens, ids, sinks,
                heads[0].sinks, *sizes, parts, *heads_and_dim, pages.first.shape[2],
                *byte_strides(pages),
            )  # fmt: skip
        return status

    def _empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=self._device)


def _copy(layer: _Layer, component: Component, frame: FrameAt, pages: Pages, paged: Paged) -> None:
    """Decode a layer on the host, and copy its rows to their slots."""
    parts = [
        np.empty(component.shape, f"u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    KvqCodec().decode_layer([layer.data], component, parts, None)
    views = pages.views[layer.number]
    device, block_tokens = views[0].device, views[0].shape[2]
    slots = torch.arange(component.tokens, device=device) + frame.first_token
    blocks = torch.tensor(list(paged.tables[0]), device=device)[slots // block_tokens]
    for part, view in zip(parts, views, strict=True):
        rows = torch.from_numpy(part.view(np.uint8)).to(device).transpose(0, 1)
        view.view(torch.uint8).transpose(1, 2)[blocks, slots % block_tokens] = rows


def open_kvq_kernels(device: torch.device) -> KvqKernels:
    """Return the kernels of a CUDA *device*. Raises TierUnavailableError when not compilable."""
    return KvqKernels(device, cuda_launcher(device.index or 0, SOURCES, THREADS))
