"""Frames without what is of no use: a chunk is kept without its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.frame import FrameHeader, FrameTemplate, FrameWriter
from kvstore.proto.types import KVLayout, LayerKind


def without_state(layout: KVLayout) -> KVLayout | None:
    """Return *layout* without its states; None when it has none, or nothing else.

    A chunk of nothing but states is kept whole: a chain with a gap is of no use behind it.
    """
    kept = tuple(one for one in layout.components if one.kind is not LayerKind.state)
    return KVLayout(kept) if 0 < len(kept) < len(layout.components) else None


def trimmed(header: FrameHeader, frame: Bytes, layout: KVLayout) -> tuple[FrameHeader, Bytes]:
    """Return a verified *frame* of one level with the components of *layout* only.

    Segments are copied as they are, with their checksums: nothing is decoded.
    """
    out = np.empty(header.frame_bytes, np.uint8)
    writer = FrameWriter(replace(FrameTemplate.of(header), layout=layout), out)
    kept = [one.kind is not LayerKind.state for one in header.layout.components]
    for index, row in enumerate(header.segments):
        if kept[row["component"]]:
            data = header.segment(frame, index)
            copy_bytes(writer.reserve(len(data)), data)
            writer.commit(len(data), int(row["checksum"]))
    fresh = writer.finish(
        header.codec_id, header.codec_revision, header.fidelity, header.error_bound, header.asset
    )
    return fresh, out[: fresh.frame_bytes]
