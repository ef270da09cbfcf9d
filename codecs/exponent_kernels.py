"""Frames of xans and xpack decoded where they lie in a device's memory, into an engine's pages.

The kernels stand in xans_kernels.cu and xpack_kernels.cu, behind exponent_kernels.cu and the
decoder of rans_kernels.cu. The host checks
that the records and planes are there, which the frame's header tells; the kernels check the rest,
so nothing is waited for before they run. torch is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvstore.codecs.base import codec_by_id
from kvstore.codecs.device_layers import (
    DeviceLayer,
    Wait,
    copy_rows,
    device_layers,
    first_tokens,
    page_arguments,
    page_pointers,
)
from kvstore.codecs.exponents import TILE_ITEMS, ExponentCodec, has_tiles
from kvstore.codecs.frame_kernels import (
    Argument,
    Launch,
    byte_strides,
    cuda_launcher,
    device_table,
    grid_cuts,
    grid_of,
)
from kvstore.codecs.paged import FrameAt, Paged, Pages
from kvstore.codecs.rans import LANES
from kvstore.codecs.rans_kernels import SOURCE as RANS_SOURCE
from kvstore.codecs.rans_kernels import check_status
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.types import Component

SOURCES = (
    RANS_SOURCE,
    *(Path(__file__).with_name(f"{name}_kernels.cu") for name in ("exponent", "xans", "xpack")),
)
THREADS = 256
UNIT = 8
"""Elements that an xpack thread takes at once where rows and pages are made of so many."""

_THREADS_A_TILE = {"xans": LANES, "xpack": THREADS}


class ExponentKernels:
    """The kernels, whatever *launch* runs them on. *device* is where their tables go.

    Thread-safe; works on torch's current stream of the device.
    """

    def __init__(self, device: torch.device, launch: Launch) -> None:
        self._device = device
        self._launch = launch

    def decode(self, memory: torch.Tensor, frames: Sequence[FrameAt], paged: Paged) -> Wait:
        """Begin to decode frames of one layout, all xans or all xpack, into the pages.

        Layers of types without such exponents are copied. Checksums are not looked at:
        ``FrameKernels.sums`` computes them, before or after.

        Raises LayoutMismatchError, InvalidRequestError, InvalidFrameError, UnknownCodecError
        before anything is written.
        """
        codec = codec_by_id(frames[0].header.codec_id)
        if not isinstance(codec, ExponentCodec):
            raise UnknownCodecError(codec.name, "xans, xpack")
        found = device_layers(codec, memory, frames, paged)
        components = frames[0].header.layout.components
        for component, layers in zip(components, found, strict=True):
            for layer in layers:
                _check(layer, component, least_bytes(component, codec))
        statuses = [
            self._launch_all(memory, layers, component, codec, pages, paged)
            if has_tiles(component)
            else _copy(memory, layers, component, pages, paged)
            for component, layers, pages in zip(components, found, paged.pages, strict=True)
        ]

        def wait() -> None:
            for status in statuses:
                check_status(status.cpu().numpy())

        return wait

    def _launch_all(
        self, memory: torch.Tensor, layers: Sequence[DeviceLayer], component: Component,
        codec: ExponentCodec, pages: Pages, paged: Paged,
    ) -> torch.Tensor:  # fmt: skip
        """Queue the kernels of one component; return the status of each layer, i32."""
        count, tiles, least = len(layers), tiles_of(component), least_bytes(component, codec)
        bases, payloads, tokens, places, ids = device_table(
            self._device,
            [layer.base for layer in layers],
            [layer.stored_bytes - least for layer in layers],
            first_tokens(layers),
            page_pointers(layers, pages),
            list(paged.tables[0]),
        )
        starts, escapes = (
            torch.empty(count * (tiles + 1), dtype=torch.int64, device=self._device)
            for _ in range(2)
        )
        status = torch.zeros(count, dtype=torch.int32, device=self._device)
        cut = cut_arguments(component, codec)
        given: list[Argument] = [
            memory, bases, payloads, *cut, np.uint32(count), starts, escapes, status,
        ]  # fmt: skip
        self._launch(f"{codec.name}_open", (grid_of(count * LANES, THREADS), 1), given)
        width = grid_of(tiles * _THREADS_A_TILE[codec.name], THREADS)
        for at in grid_cuts(count):
            records = slice(at.start * (tiles + 1), at.stop * (tiles + 1))
            views = slice(at.start * component.parts, at.stop * component.parts)
            given = [
                memory, bases[at], starts[records], escapes[records], status[at], places[views],
                tokens[at], ids, *cut, np.uint32(component.parts), _in_units(component, pages),
                *page_arguments(pages),
            ]  # fmt: skip
            grid = (width, at.stop - at.start)
            self._launch(f"{codec.name}_{component.dtype.name}", grid, given)
        return status


def _tile_rows(component: Component) -> int:
    return TILE_ITEMS // component.head_dim


def tiles_of(component: Component) -> int:
    """Return how many tiles a layer has."""
    return component.parts * -(-component.kv_heads * component.tokens // _tile_rows(component))


def cut_arguments(component: Component, codec: ExponentCodec) -> list[Argument]:
    """Return how a layer is cut, as the kernels are told."""
    return [
        np.uint32(number)
        for number in (
            tiles_of(component), component.kv_heads * component.tokens, _tile_rows(component),
            component.tokens, component.head_dim, component.dtype.item_bytes,
            codec.record.itemsize,
        )
    ]  # fmt: skip


def _in_units(component: Component, pages: Pages) -> np.uint32:
    addresses = [view.data_ptr() for parts in pages.views for view in parts]
    strides = [int(number) for number in byte_strides(pages)]
    is_aligned = int(np.gcd.reduce([16, *strides, *addresses])) == 16
    return np.uint32(is_aligned and component.head_dim % UNIT == 0)


def least_bytes(component: Component, codec: ExponentCodec) -> int:
    """Return the size of a layer's records and planes; of layers without tiles, of all."""
    if not has_tiles(component):
        return component.layer_bytes
    items = component.layer_bytes // component.dtype.item_bytes
    return codec.record.itemsize * tiles_of(component) + component.layer_bytes - items


def _check(layer: DeviceLayer, component: Component, least: int) -> None:
    if layer.stored_bytes < least or (not has_tiles(component) and layer.stored_bytes > least):
        raise InvalidFrameError("stored_bytes", layer.stored_bytes, f"there are {least}, and tiles")


def _copy(
    memory: torch.Tensor, layers: Sequence[DeviceLayer], component: Component, pages: Pages,
    paged: Paged,
) -> torch.Tensor:  # fmt: skip
    """Copy layers that are stored as they are; return that nothing is wrong."""
    for layer in layers:
        data = memory[layer.base : layer.base + component.layer_bytes]
        parts = data.view(component.parts, component.kv_heads, component.tokens, -1)
        copy_rows(list(parts), layer, pages, paged)
    return torch.zeros(0, dtype=torch.int32)


def open_exponent_kernels(device: torch.device) -> ExponentKernels:
    """Return the kernels of a CUDA *device*. Raises TierUnavailableError when not compilable."""
    return ExponentKernels(device, cuda_launcher(device.index or 0, SOURCES, THREADS))
