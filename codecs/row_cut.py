"""Some token rows of a raw layer: cut out of a verified one, and put where they belong.

A layer has one checksum, so who cuts verifies all of it, and sums what is left. That sum is
bound to the layer and to the rows: rows of another layer, or others of this one, do not pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64

from kvstore.codecs.base import Part
from kvstore.codecs.raw import RawCodec, part_views
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError
from kvstore.proto.frame import FrameHeader, check_segment
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import Component, LayerKind

SUM_BYTES = 8
"""xxh3_64 behind the rows, little-endian."""

_ROWED = (LayerKind.attention, LayerKind.mla)
"""Kinds of layers that have a row for each token of their chunk."""


def kept_rows(header: FrameHeader, skipped: SkippedRows | None, chunk: int) -> Rows | None:
    """Return the rows of chunk number *chunk* that are read; None: its layers come whole.

    Whole ones are all but raw ones: only there is a row so many bytes of the layer.
    """
    if skipped is None or header.codec_id != RawCodec.codec_id or header.levels:
        return None
    if header.shard is not None or any(c.kind not in _ROWED for c in header.layout.components):
        return None
    return skipped.kept(chunk, header.layout.tokens)


def cut_bytes(header: FrameHeader, index: int, kept: Rows) -> int:
    """Return how many bytes the rows *kept* of segment *index* take, their sum included."""
    component = _component(header, index)
    return component.layer_bytes // component.tokens * len(kept) + SUM_BYTES


def cut_rows(header: FrameHeader, index: int, data: Bytes, kept: Rows) -> Bytes:
    """Verify *data*, segment *index* of a raw frame, and return its rows *kept* and their sum.

    Raises ChunkCorruptError.
    """
    check_segment(header, index, checksum(data))
    component = _component(header, index)
    out = np.empty(cut_bytes(header, index, kept), np.uint8)
    for view, room in zip(
        part_views(data, component), _cut_views(out, component, kept), strict=True
    ):
        np.take(view, kept, axis=1, out=room, mode="clip")
    out[-SUM_BYTES:] = as_bytes(_sum(header, index, out[:-SUM_BYTES], kept))
    return out


def place_cut(
    header: FrameHeader, index: int, data: Bytes, kept: Rows, out: Sequence[Part]
) -> None:
    """Verify *data*, what ``cut_rows`` made of segment *index*, and write its rows to *out*.

    *out*: (kv_heads, tokens, head_dim) each; other rows stay as they are. Raises
    ChunkCorruptError; nothing is written then.
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

    Raises ChunkCorruptError. Where the memory of *data* may be reused, confirm it afterwards.
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
