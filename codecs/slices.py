"""Parts of chunks: token rows of raw layers, and shards, the part of one rank of an engine.

A layer has one checksum, so the sender of rows verifies the whole layer, and sums the rows. That
sum depends on the layer and the row numbers: rows of another layer, or other rows, do not match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from kvstore.codecs.base import AnyPart, AnyTensors, Part, check_tensors, codec_by_id, each_wanted
from kvstore.codecs.block_part import BlockPart
from kvstore.codecs.raw import RAW, part_views
from kvstore.proto.buffers import Bytes, Sliced, as_bytes, checksum, copy_bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FrameHeader,
    FrameTemplate,
    check_segment,
    empty_rows,
    header_bytes,
    pack_header,
    raw_frame_bytes,
)
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import ChunkShard, Component, Extent, LayerKind

SUM_BYTES = 8
"""xxh3_64 after the rows, little-endian."""

_ROWED = (LayerKind.attention, LayerKind.mla)
"""Kinds of layers with a row for each token of the chunk."""


def kept_rows(header: FrameHeader, skipped: SkippedRows | None, chunk: int) -> Rows | None:
    """Return the rows to read of chunk number *chunk*; None: whole layers.

    Only raw layers are cut, as only their rows have a fixed size.
    """
    if skipped is None or header.codec_id != RAW.codec_id or header.levels:
        return None
    if header.shard is not None or any(c.kind not in _ROWED for c in header.layout.components):
        return None
    return skipped.kept(chunk, header.layout.tokens)


def cut_bytes(header: FrameHeader, index: int, kept: Rows) -> int:
    """Return the size of the rows *kept* of segment *index*, including their sum."""
    component = _component(header, index)
    return component.layer_bytes // component.tokens * len(kept) + SUM_BYTES


def cut_rows(header: FrameHeader, index: int, data: Bytes, kept: Rows) -> Bytes:
    """Verify *data*, segment *index* of a raw frame; return its rows *kept* and their sum.

    Raises ChunkCorruptError.
    """
    check_segment(header, index, checksum(data))
    component = _component(header, index)
    out = np.empty(cut_bytes(header, index, kept), np.uint8)
    for view, target in zip(
        part_views(data, component), _cut_views(out, component, kept), strict=True
    ):
        np.take(view, kept, axis=1, out=target, mode="clip")
    out[-SUM_BYTES:] = as_bytes(_sum(header, index, out[:-SUM_BYTES], kept))
    return out


def place_cut(
    header: FrameHeader, index: int, data: Bytes, kept: Rows, out: Sequence[Part]
) -> None:
    """Verify *data*, from ``cut_rows`` of segment *index*, and write its rows to *out*.

    *out*: (kv_heads, tokens, head_dim) each; other rows are unchanged. Raises ChunkCorruptError
    before writing anything.
    """
    is_long = len(data) == cut_bytes(header, index, kept)
    if not is_long or data[-SUM_BYTES:].tobytes() != _sum(header, index, data[:-SUM_BYTES], kept):
        raise ChunkCorruptError(header.key, f"rows of segment {index} fail their checksum")
    component = _component(header, index)
    for rows, part in zip(_cut_views(data, component, kept), out, strict=True):
        part.view(rows.dtype)[:, kept] = rows


def copy_kept(
    header: FrameHeader, index: int, data: Bytes, kept: Rows, out: Sequence[Part]
) -> None:
    """Verify *data*, segment *index* of a raw frame, and copy its rows *kept* to *out*.

    Raises ChunkCorruptError. If the memory of *data* may be reused, confirm it afterwards.
    """
    check_segment(header, index, checksum(data))
    for view, part in zip(part_views(data, _component(header, index)), out, strict=True):
        part.view(view.dtype)[:, kept] = view[:, kept]


def _component(header: FrameHeader, index: int) -> Component:
    return header.layout.components[int(header.segments[index]["component"])]


def _cut_views(data: Bytes, component: Component, kept: Rows) -> Part:
    """Return the parts in *data* as views of it: (parts, kv_heads, rows, head_dim)."""
    heads, _, width = component.shape
    typed = data[:-SUM_BYTES].view(f"<u{component.dtype.item_bytes}")
    return typed.reshape(component.parts, heads, len(kept), width)


def _sum(header: FrameHeader, index: int, rows: Bytes, kept: Rows) -> bytes:
    state = xxh3_64(seed=int(header.segments[index]["checksum"]))
    state.update(kept.astype("<u4").tobytes())
    state.update(rows)  # type: ignore[arg-type,unused-ignore]
    return state.intdigest().to_bytes(SUM_BYTES, "little")


@lru_cache(maxsize=64)
def shard_frame_bytes(shard: ChunkShard) -> int:
    """Return the size of the raw frame of *shard*."""
    return raw_frame_bytes(shard.layout) + _longer_header(shard)


def _longer_header(shard: ChunkShard) -> int:
    """Return the header bytes for components that *shard* does not cover."""
    return header_bytes(shard.layout, 0, shard) - header_bytes(shard.layout)


def encode_shard(
    template: FrameTemplate, shard: ChunkShard, tensors: AnyTensors, out: Bytes
) -> FrameHeader:
    """Write the raw frame of *shard* to the start of *out* and return its header.

    *template* is the chunk's, *tensors* have ``shard.layout``. Raises LayoutMismatchError,
    InvalidFrameError when *out* is too short.
    """
    shift = _longer_header(shard)
    plain = RAW.encode(replace(template, layout=shard.layout), tensors, out[shift:])
    segments = _named(plain, empty_rows(shard.layout, 0, shard))
    segments["offset"] += np.uint64(shift)
    header = replace(plain, shard=shard, segments=segments, frame_bytes=plain.frame_bytes + shift)
    copy_bytes(out[: header.header_bytes], as_bytes(pack_header(header)))
    return header


def _named(header: FrameHeader, names: NDArray[Any]) -> NDArray[Any]:
    """Return the segments of *header* with the component and layer numbers of *names*."""
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
    """Decode the part of the whole chunk in *frame* that *shard* covers into *out*.

    Layers outside the shard are not read. Of the others every byte is verified, including other
    heads, as a layer has one checksum. A window or state for which *out* has no layers is not read
    either. Raises as ``Codec.decode_into``, and InvalidFrameError for a frame of another layout.
    """
    if header.shard is not None or header.layout != shard.whole:
        raise InvalidFrameError("layout", header.layout, f"expected {shard.whole}")
    codec = codec_by_id(header.codec_id)
    codec.check_header(header)
    check_tensors(shard.layout, out, is_target=True)
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
    """Yield the segment of each layer that *shard* covers, its component and extent."""
    start = 0
    for component, extent in zip(shard.whole.components, shard.extents, strict=True):
        if extent is not None:
            for layer in range(extent.first_layer, extent.layer_stop):
                yield start + layer, component, extent
        start += component.layers


def _place(parts: Sequence[Part], out: Sequence[AnyPart]) -> None:
    for part, target in zip(parts, out, strict=True):
        if isinstance(target, BlockPart):
            target.scatter(part)
        else:
            np.copyto(target.view(part.dtype), part)
