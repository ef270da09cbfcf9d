"""kvq frames decoded where they lie in a device's memory, into an engine's pages.

The kernels stand in kvq_kernels.cu, behind those of rans_kernels.cu. The host reads the head of
each layer, checks it as ``kvq_body`` does, and launches one warp a tile; what lies behind the
heads is checked by the kernels as they go. torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import Floats
from kvstore.codecs.frame_kernels import (
    MAX_GRID_Y,
    Argument,
    Launch,
    byte_strides,
    cuda_launcher,
    device_table,
    grid_cuts,
    grid_of,
)
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_body import HEAD, QUANTISED, Head
from kvstore.codecs.kvq_layer import is_quantised, sinks_moved
from kvstore.codecs.kvq_models import kvq_models
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Cut
from kvstore.codecs.paged import FrameAt, Paged, Pages, check_frames
from kvstore.codecs.rans import LANES, SLOTS, ModelTable
from kvstore.codecs.rope import rotation
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
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
"""What each bit of a status word says: a field and what it should be."""

Tables: TypeAlias = "tuple[NDArray[np.uint32], NDArray[np.uint8]]"


def search_tables(table: ModelTable) -> Tables:
    """Return start | frequency << 16 of each symbol, u32 (models, symbols), and the symbol of
    each 32nd slot, u8 (models, 128).

    A sixteenth of ``decode_slots``: from a bucket's symbol on, half a step on average finds the
    slot's own.
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
"""Waits for what was begun. Raises InvalidFrameError; the pages then hold rubbish."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
    """The base of layer ``number`` of a component: ``stored_bytes`` from byte ``base`` on."""

    frame: FrameAt
    number: int
    base: int
    stored_bytes: int


def device_layers(
    codec: Codec, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged
) -> list[list[DeviceLayer]]:
    """Return all layers of each component, of each frame in turn.

    Raises LayoutMismatchError, InvalidRequestError, InvalidFrameError, UnknownCodecError unless
    *frames* are of *codec*, of one layout and one level, and lie in *memory*.
    """
    check_frames(codec, memory, frames, paged)
    for frame in frames:
        if frame.header.levels:
            raise InvalidFrameError("levels", frame.header.levels, "only hosts read refinements")
    found: list[list[DeviceLayer]] = []
    first = 0
    for component in frames[0].header.layout.components:
        found.append([])
        for frame in frames:
            rows = frame.header.segments[first : first + component.layers]
            places = zip(rows["offset"].tolist(), rows["stored_bytes"].tolist(), strict=True)
            found[-1] += [
                DeviceLayer(frame, number, frame.offset + offset, size)
                for number, (offset, size) in enumerate(places)
            ]
        first += component.layers
    return found


def first_tokens(layers: Sequence[DeviceLayer]) -> list[int]:
    """Return each layer's first token in the request."""
    return [layer.frame.first_token for layer in layers]


def page_pointers(layers: Sequence[DeviceLayer], pages: Pages) -> list[int]:
    """Return where the pages of each part of each layer begin."""
    return [view.data_ptr() for layer in layers for view in pages.views[layer.number]]


def page_arguments(pages: Pages) -> list[Argument]:
    """Return what a kernel is told of pages: tokens of a block, strides in bytes."""
    return [np.uint32(pages.first.shape[2]), *byte_strides(pages)]


def copy_rows(
    parts: Sequence[torch.Tensor], layer: DeviceLayer, pages: Pages, paged: Paged
) -> None:
    """Copy the *parts* of a layer, bytes (kv_heads, tokens, row), into their slots."""
    views = pages.views[layer.number]
    slots = torch.arange(parts[0].shape[1], device=views[0].device) + layer.frame.first_token
    blocks = torch.tensor(list(paged.tables[0]), device=views[0].device)[slots // views[0].shape[2]]
    for part, view in zip(parts, views, strict=True):
        rows = part.to(view.device).transpose(0, 1)
        view.view(torch.uint8).transpose(1, 2)[blocks, slots % view.shape[2]] = rows


SOURCES = (Path(__file__).with_name("rans_kernels.cu"), Path(__file__).with_suffix(".cu"))
THREADS = 512
"""Sixteen tiles share a block's 40 KB of tables: those of a layer of eight heads of 128."""
SCRATCH_BYTES = 1 << 28
"""Device memory for symbols between the two kernels; one row of the grid may need more."""
_READ_BYTES = 1 << 20

Angles: TypeAlias = "tuple[list[int], torch.Tensor, torch.Tensor]"
"""Where each layer's angles begin, their cosines and sines."""
Sinks: TypeAlias = "tuple[list[int], list[torch.Tensor]]"
"""The addresses of each layer's exact tokens, and what holds those that lie in no frame."""


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """A quantised layer: what its head says, and where its keys are to be rotated to."""

    at: DeviceLayer
    head: Head
    place: int

    @property
    def sinks_at(self) -> int:
        """Where in the memory of the frames its exact tokens begin."""
        return self.at.base + self.head.sinks_at


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a component's layers lie in the grid: a row is one block of tokens of one layer."""

    component: Component
    blocks: int
    block_tokens: int
    row_tiles: int

    @classmethod
    def of(cls, component: Component) -> _Shape:
        cut = Cut.of(component)
        row_tiles = component.parts * cut.columns
        return cls(component, len(cut.blocks), cut.blocks[0].stop, row_tiles)

    @property
    def tiles(self) -> int:
        """Tiles of a layer."""
        return self.blocks * self.row_tiles

    @property
    def row_numbers(self) -> int:
        """Symbols of a row, padding included."""
        return self.row_tiles * self.block_tokens * TILE_CHANNELS

    @property
    def part_numbers(self) -> int:
        """Numbers of one part of a row."""
        return self.component.kv_heads * self.block_tokens * self.component.head_dim

    @property
    def rows_a_launch(self) -> int:
        """Rows whose symbols fit the scratch, and whose parts fit the grid; one at least."""
        fitting = SCRATCH_BYTES * TILE_CHANNELS // (self.row_numbers * (TILE_CHANNELS + 4))
        return max(1, min(fitting, MAX_GRID_Y // self.component.parts))

    @property
    def sizes(self) -> list[Argument]:
        """What both kernels are told."""
        numbers = (self.tiles, self.row_tiles, self.component.tokens, self.block_tokens)
        return [np.uint32(number) for number in numbers]

    @property
    def part_sizes(self) -> list[Argument]:
        """What the second is told besides."""
        component = self.component
        return [np.uint32(n) for n in (component.parts, component.kv_heads, component.head_dim)]


class KvqKernels:
    """The kernels, whatever *launch* runs them on. *device* is where their tables go.

    Thread-safe; works on torch's current stream of the device.
    """

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch
        entries, buckets = search_tables(kvq_models().table)
        self._entries = torch.from_numpy(entries.reshape(-1).view(np.int32)).to(device)
        self._buckets = torch.from_numpy(buckets.reshape(-1)).to(device)

    def decode(
        self,
        memory: torch.Tensor,
        frames: Sequence[FrameAt],
        paged: Paged,
        positions: Sequence[int] | None = None,
        host: torch.Tensor | None = None,
    ) -> Wait:
        """Begin to decode kvq frames of one layout in *memory* (uint8) into the pages.

        Keys come back as they were, or rotated as if each chunk began at its of *positions*.
        Layers that were kept exactly, and those whose tokens have classes, are decoded by the
        host and copied. Where the caller has
        the bytes of *memory* in host memory too, *host*, their heads are read there, and
        nothing that is queued is waited for. Checksums are not looked at: ``FrameKernels.sums``
        computes them, before or after.

        Raises LayoutMismatchError, InvalidRequestError, UnknownCodecError before anything is
        written, and InvalidFrameError: for frames that have levels too, which only hosts read.
        """
        found = device_layers(KvqCodec(), memory, frames, paged)
        if positions is not None and len(positions) != len(frames):
            raise InvalidRequestError("positions", len(positions), f"give {len(frames)}")
        components = frames[0].header.layout.components
        source = memory if host is None else host
        coded = [
            self._coded(source, layers, component, positions)
            for component, layers in zip(components, found, strict=True)
        ]
        statuses = []
        for component, pages, layers in zip(components, paged.pages, coded, strict=True):
            for sinks in sorted({each.head.sinks for each in layers if isinstance(each, _Coded)}):
                mine = [e for e in layers if isinstance(e, _Coded) and e.head.sinks == sinks]
                frequencies = self._frequencies(source, mine)
                angles = self._angles(mine, frequencies)
                places = self._sinks(source, memory, mine, frequencies)
                statuses.append(self._launch_all(memory, mine, pages, paged, (angles, places)))
            for index, layer in enumerate(layers):
                if isinstance(layer, DeviceLayer):
                    place = _place(positions, index, component)
                    parts = _host_parts(source, layer, component, place)
                    copy_rows(parts, layer, pages, paged)

        def wait() -> None:
            for status in statuses:
                check_status(status.cpu().numpy())

        return wait

    # --- on the host

    def _coded(
        self, memory: torch.Tensor, layers: Sequence[DeviceLayer], component: Component,
        positions: Sequence[int] | None,
    ) -> list[_Coded | DeviceLayer]:  # fmt: skip
        """Return *layers*, of each frame in turn, by what their heads say: coded, or exact."""
        heads = self._read(memory, [layer.base for layer in layers], HEAD.size)
        found: list[_Coded | DeviceLayer] = []
        for index, (layer, head) in enumerate(zip(layers, heads, strict=True)):
            checked = _checked(layer, head, component)
            if checked is None:
                found.append(layer)
                continue
            place = _place(positions, index, component)
            start = checked.position if place is None else place + checked.sinks
            found.append(_Coded(layer, checked, start))
        return found

    def _read(self, memory: torch.Tensor, starts: Sequence[int], width: int) -> NDArray[Any]:
        """Return *width* bytes of *memory* from each of *starts*: u8 (starts, width).

        What would lie behind its end is rubbish.
        """
        out, device = np.empty((len(starts), width), np.uint8), memory.device
        step = max(1, _READ_BYTES // width)
        for cut in grid_cuts(len(starts), step):
            at = torch.tensor(starts[cut], device=device)
            places = at[:, None] + torch.arange(width, device=device)
            out[cut] = memory[places.clamp_(max=len(memory) - 1)].cpu().numpy()
        return out

    def _frequencies(self, memory: torch.Tensor, layers: Sequence[_Coded]) -> list[Floats]:
        """Return what the keys of each layer were turned back by."""
        width = max(layer.head.pairs for layer in layers)
        starts = [layer.at.base + HEAD.size for layer in layers]
        rows = self._read(memory, starts, 4 * max(1, width)).view("<f4")
        return [row[: layer.head.pairs] for row, layer in zip(rows, layers, strict=True)]

    def _sinks(
        self, source: torch.Tensor, memory: torch.Tensor, layers: Sequence[_Coded],
        frequencies: Sequence[Floats],
    ) -> Sinks:  # fmt: skip
        """Return where the exact tokens lie: in *memory*, but for keys that move on by turning."""
        places = [memory.data_ptr() + layer.sinks_at for layer in layers]
        turned: list[torch.Tensor] = []
        for index, (layer, mine) in enumerate(zip(layers, frequencies, strict=True)):
            head, distance = layer.head, layer.place - layer.head.position
            if not (distance and head.sinks and head.pairs):
                continue
            size = head.classes_at - head.sinks_at
            bits = self._read(source, [layer.sinks_at], size).view(
                f"<u{head.coded.dtype.item_bytes}"
            )
            heads, _, dim = head.coded.shape
            shape = (head.coded.parts, head.sinks, heads, dim)
            moved_on = sinks_moved(bits.reshape(shape), mine, distance, head.coded.dtype)
            turned.append(torch.from_numpy(moved_on.view(np.uint8)).to(self._device))
            places[index] = turned[-1].data_ptr()
        return places, turned

    def _angles(self, layers: Sequence[_Coded], every: Sequence[Floats]) -> Angles:
        """Return where each layer's angles begin, cosines and sines, f32 on the device."""
        tokens = layers[0].head.coded.tokens
        known: dict[tuple[bytes, int], int] = {}
        tables: list[tuple[Floats, Floats]] = [(np.zeros((1, 1), np.float32),) * 2]
        places, end = [], 1
        for layer, frequencies in zip(layers, every, strict=True):
            if not np.isfinite(frequencies).all():
                raise InvalidFrameError("frequencies", "NaN", "finite numbers")
            key = (frequencies.tobytes(), layer.place)
            if len(frequencies) and key not in known:
                known[key] = end
                tables.append(rotation(frequencies, layer.place, tokens))
                end += tokens * len(frequencies)
            places.append(known.get(key, 0))
        size = sum(cosines.size for cosines, _ in tables)
        both = torch.empty((2, size), pin_memory=self._device.type == "cuda")
        for out, each in zip(both.numpy(), zip(*tables, strict=True), strict=True):
            np.concatenate([table.reshape(-1) for table in each], out=out)
        cosines, sines = both.to(self._device, non_blocking=True)
        return places, cosines, sines

    # --- on the device

    def _launch_all(
        self, memory: torch.Tensor, layers: Sequence[_Coded], pages: Pages, paged: Paged,
        made: tuple[Angles, Sinks],
    ) -> torch.Tensor:  # fmt: skip
        """Queue the kernels of layers of one shape; return the status of each, i32."""
        (angle_starts, cosines, sines), (sink_places, _) = made
        heads, at = [layer.head for layer in layers], [layer.at for layer in layers]
        component, shape, count = heads[0].coded, _Shape.of(heads[0].coded), len(layers)
        *columns, sinks, angle_at, chunk_tokens, places, row_layers, row_blocks, ids = device_table(
            self._device,
            [layer.base for layer in at],
            *([getattr(head, name) for head in heads] for name in ("pairs", "words", "values")),
            sink_places,
            angle_starts,
            first_tokens(at),
            page_pointers(at, pages),
            np.repeat(np.arange(count), shape.blocks),
            np.tile(np.arange(shape.blocks), count),
            list(paged.tables[0]),
        )
        starts, value_starts = (self._empty(count * shape.tiles, torch.int64) for _ in range(2))
        status = torch.zeros(count, dtype=torch.int32, device=self._device)
        given: list[Argument] = [
            memory, *columns, np.uint32(shape.tiles), np.uint32(count), starts, value_starts,
            status,
        ]  # fmt: skip
        self._launch("kvq_open", (grid_of(count * LANES, THREADS), 1), given)
        most = min(shape.rows_a_launch, count * shape.blocks)
        symbols = self._empty(most * shape.row_numbers, torch.uint8)
        firsts = self._empty(most * shape.row_numbers // TILE_CHANNELS, torch.int32)
        for rows in grid_cuts(count * shape.blocks, most):
            mine: list[Argument] = [row_layers[rows], row_blocks[rows]]
            given = [
                memory, *columns[:3], starts, *mine, self._entries, self._buckets, *shape.sizes,
                symbols, firsts, status,
            ]  # fmt: skip
            height = rows.stop - rows.start
            self._launch("kvq_symbols", (grid_of(shape.row_tiles * LANES, THREADS), height), given)
            given = [
                memory, *columns, value_starts, *mine, symbols, firsts, angle_at, cosines, sines,
                places, chunk_tokens, ids, sinks, np.uint32(heads[0].sinks), *shape.sizes,
                *shape.part_sizes, *page_arguments(pages),
            ]  # fmt: skip
            grid = (grid_of(shape.part_numbers, THREADS), height * component.parts)
            self._launch(f"kvq_numbers_{component.dtype.name}", grid, given)
        return status

    def _empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=self._device)


def _place(positions: Sequence[int] | None, index: int, component: Component) -> int | None:
    """Return where layer number *index* of all frames begins, None for where it was."""
    if positions is None:
        return None
    return positions[index // component.layers] + component.first_token


def _checked(layer: DeviceLayer, data: NDArray[Any], component: Component) -> Head | None:
    """Return the head of a layer that the kernels read, None for those left to the host."""
    if not layer.stored_bytes or data[0] != QUANTISED:
        return None
    if not is_quantised(component):
        raise InvalidFrameError("method", QUANTISED, f"{component.dtype.name} is not quantised")
    head = Head.of(data, layer.stored_bytes, component)
    return None if head.has_classes else head


def _host_parts(
    memory: torch.Tensor, layer: DeviceLayer, component: Component, position: int | None
) -> list[torch.Tensor]:
    """Return the bytes of a layer that is decoded here."""
    data = memory[layer.base : layer.base + layer.stored_bytes].cpu().numpy()
    parts = [
        np.empty(component.shape, f"u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    KvqCodec().decode_layer([data], component, parts, position)
    return [torch.from_numpy(part.view(np.uint8)) for part in parts]


def open_kvq_kernels(device: torch.device) -> KvqKernels:
    """Return the kernels of a CUDA *device*. Raises TierUnavailableError when not compilable."""
    return KvqKernels(device, cuda_launcher(device.index or 0, SOURCES, THREADS))
