"""Portions of chunks: raw frames of what a rank holds, and what a rank needs of whole frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import AnyPart, AnyTensors, Part, check_room, codec_by_id, each_wanted
from kvstore.codecs.block_part import BlockPart
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes, Sliced, as_bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import (
    FrameHeader,
    FrameTemplate,
    empty_rows,
    header_bytes,
    pack_header,
    raw_frame_bytes,
)
from kvstore.proto.types import Component, Extent, Portion

_RAW = RawCodec()


@lru_cache(maxsize=64)
def portion_frame_bytes(portion: Portion) -> int:
    """Size of the raw frame of *portion*."""
    return raw_frame_bytes(portion.layout) + _longer_header(portion)


def _longer_header(portion: Portion) -> int:
    """Return what rows of components that are left out add to a header."""
    return header_bytes(portion.layout, 0, portion) - header_bytes(portion.layout)


def encode_portion(
    template: FrameTemplate, portion: Portion, tensors: AnyTensors, out: Bytes
) -> FrameHeader:
    """Write the raw frame of *portion* to the start of *out* and return its header.

    *template* is that of the chunk, *tensors* those of ``portion.layout``. Raises
    LayoutMismatchError, InvalidFrameError when *out* is too short.
    """
    shift = _longer_header(portion)
    plain = _RAW.encode(replace(template, layout=portion.layout), tensors, out[shift:])
    segments = _named(plain, empty_rows(portion.layout, 0, portion))
    segments["offset"] += np.uint64(shift)
    header = replace(
        plain, portion=portion, segments=segments, frame_bytes=plain.frame_bytes + shift
    )
    copy_bytes(out[: header.header_bytes], as_bytes(pack_header(header)))
    return header


def _named(header: FrameHeader, names: NDArray[Any]) -> NDArray[Any]:
    """Return the segments of *header*, called as *names* are."""
    segments = header.segments.copy()
    segments["component"], segments["layer"] = names["component"], names["layer"]
    return segments


def decode_portion(header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
    """Verify the frame of a portion and decode it into *out*, tensors of its layout.

    Raises as ``Codec.decode_into``.
    """
    segments = _named(header, empty_rows(header.layout, header.levels))
    plain = replace(header, portion=None, segments=segments)
    codec_by_id(header.codec_id).decode_into(plain, frame, out)


def cut(header: FrameHeader, frame: Sliced, portion: Portion, out: AnyTensors) -> None:
    """Decode what *portion* covers of the whole chunk in *frame* into *out*.

    Layers that it does not reach are not looked at. Of the others every byte is verified, those
    of other heads too, as a layer has one checksum. A window or state that *out* has no layers
    for is not looked at either. Raises as ``Codec.decode_into``, and
    InvalidFrameError for a frame of another layout.
    """
    if header.portion is not None or header.layout != portion.whole:
        raise InvalidFrameError("layout", header.layout, f"expected {portion.whole}")
    codec = codec_by_id(header.codec_id)
    codec.check_header(header)
    check_room(portion.layout, out)
    if header.levels:
        raise InvalidFrameError("levels", header.levels, "such frames are read whole")
    segments = list(_segments(portion))
    for number, _, parts in each_wanted(portion.layout, out):
        index, component, extent = segments[number]
        data = header.segment(frame, index)
        if extent.heads == component.kv_heads:
            codec.decode_checked(header, index, data, parts)
        else:
            whole = [np.empty(component.shape, f"u{component.dtype.item_bytes}") for _ in parts]
            codec.decode_checked(header, index, data, whole)
            _place([part[extent.first_head : extent.head_stop] for part in whole], parts)


def _segments(portion: Portion) -> Iterator[tuple[int, Component, Extent]]:
    """Yield the segment of each layer that *portion* reaches, its component and extent."""
    start = 0
    for component, extent in zip(portion.whole.components, portion.extents, strict=True):
        if extent is not None:
            for layer in range(extent.first_layer, extent.layer_stop):
                yield start + layer, component, extent
        start += component.layers


def _place(parts: Sequence[Part], out: Sequence[AnyPart]) -> None:
    for part, room in zip(parts, out, strict=True):
        if isinstance(room, BlockPart):
            room.scatter(part)
        else:
            np.copyto(room.view(part.dtype), part)
