"""Layers of encoded frames on a device: where each lies, and where in the pages its rows go.

torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvstore.codecs.base import Codec
from kvstore.codecs.frame_kernels import Argument, byte_strides
from kvstore.codecs.paged import FrameAt, Paged, Pages, check_frames
from kvstore.proto.errors import InvalidFrameError

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
