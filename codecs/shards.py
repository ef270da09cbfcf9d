"""Shards of chunks: raw frames of what a rank holds, and what a rank needs of whole frames."""

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
from kvstore.proto.types import ChunkShard, Component, Extent

_RAW = RawCodec()


@lru_cache(maxsize=64)
def shard_frame_bytes(shard: ChunkShard) -> int:
    """Size of the raw frame of *shard*."""
    return raw_frame_bytes(shard.layout) + _longer_header(shard)


def _longer_header(shard: ChunkShard) -> int:
    """Return what rows of components that are left out add to a header."""
    return header_bytes(shard.layout, 0, shard) - header_bytes(shard.layout)


def encode_shard(
    template: FrameTemplate, shard: ChunkShard, tensors: AnyTensors, out: Bytes
) -> FrameHeader:
    """Write the raw frame of *shard* to the start of *out* and return its header.

    *template* is that of the chunk, *tensors* those of ``shard.layout``. Raises
    LayoutMismatchError, InvalidFrameError when *out* is too short.
    """
    shift = _longer_header(shard)
    plain = _RAW.encode(replace(template, layout=shard.layout), tensors, out[shift:])
    segments = _named(plain, empty_rows(shard.layout, 0, shard))
    segments["offset"] += np.uint64(shift)
    header = replace(plain, shard=shard, segments=segments, frame_bytes=plain.frame_bytes + shift)
    copy_bytes(out[: header.header_bytes], as_bytes(pack_header(header)))
    return header


def _named(header: FrameHeader, names: NDArray[Any]) -> NDArray[Any]:
    """Return the segments of *header*, called as *names* are."""
    segments = header.segments.copy()
    segments["component"], segments["layer"] = names["component"], names["layer"]
    return segments


def decode_shard(header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
    """Verify the frame of a shard and decode it into *out*, tensors of its layout.

    Raises as ``Codec.decode_into``.
    """
    segments = _named(header, empty_rows(header.layout, header.levels))
    plain = replace(header, shard=None, segments=segments)
    codec_by_id(header.codec_id).decode_into(plain, frame, out)


def cut(header: FrameHeader, frame: Sliced, shard: ChunkShard, out: AnyTensors) -> None:
    """Decode what *shard* covers of the whole chunk in *frame* into *out*.

    Layers that it does not reach are not looked at. Of the others every byte is verified, those
    of other heads too, as a layer has one checksum. A window or state that *out* has no layers
    for is not looked at either. Raises as ``Codec.decode_into``, and
    InvalidFrameError for a frame of another layout.
    """
    if header.shard is not None or header.layout != shard.whole:
        raise InvalidFrameError("layout", header.layout, f"expected {shard.whole}")
    codec = codec_by_id(header.codec_id)
    codec.check_header(header)
    check_room(shard.layout, out)
    if header.levels:
        raise InvalidFrameError("levels", header.levels, "such frames are read whole")
    segments = list(_segments(shard))
    for number, _, parts in each_wanted(shard.layout, out):
        index, component, extent = segments[number]
        data = header.segment(frame, index)
        if extent.heads == component.kv_heads:
            codec.decode_checked(header, index, data, parts)
        else:
            whole = [np.empty(component.shape, f"u{component.dtype.item_bytes}") for _ in parts]
            codec.decode_checked(header, index, data, whole)
            _place([part[extent.first_head : extent.head_stop] for part in whole], parts)


def _segments(shard: ChunkShard) -> Iterator[tuple[int, Component, Extent]]:
    """Yield the segment of each layer that *shard* reaches, its component and extent."""
    start = 0
    for component, extent in zip(shard.whole.components, shard.extents, strict=True):
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
