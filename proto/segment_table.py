"""The segment table: one row for each layer that a frame has, and where its bytes lie."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.portion import Portion
from kvstore.proto.types import KVLayout

ALIGN_BYTES = 64
MAX_SEGMENTS = 4096
MAX_FRAME_BYTES = 1 << 30

SEGMENT_DTYPE = np.dtype(
    [
        ("component", "<u2"),
        ("section", "<u2"),
        ("layer", "<u4"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""One row of the segment table. ``section`` is the level: 0 is the payload, 1 refines it."""

assert SEGMENT_DTYPE.itemsize == 32


@lru_cache(maxsize=64)
def empty_rows(layout: KVLayout, levels: int, portion: Portion | None = None) -> NDArray[Any]:
    """Return the segment table of *layout* with everything but the names still zero."""
    rows = np.zeros(layout.segment_count * (1 + levels), dtype=SEGMENT_DTYPE)
    layers = [component.layers for component in layout.components]
    spans = [(number, 0) for number in range(len(layers))]
    if portion is not None:
        spans = [(number, extent.first_layer) for number, extent in portion.numbered]
    rows["section"] = np.repeat(np.arange(1 + levels), layout.segment_count)
    rows["component"] = np.tile(np.repeat([number for number, _ in spans], layers), 1 + levels)
    numbers = [np.arange(at, at + n) for (_, at), n in zip(spans, layers, strict=True)]
    rows["layer"] = np.tile(np.concatenate(numbers), 1 + levels)
    rows.flags.writeable = False
    return rows


def check_segments(
    names: NDArray[Any], segments: NDArray[Any], size: int, frame_bytes: int
) -> None:
    """Raise InvalidFrameError unless *segments* have the names of *names* and follow each other.

    *size* is that of the header before them, *frame_bytes* that of the whole frame.
    """
    if frame_bytes > MAX_FRAME_BYTES:
        raise InvalidFrameError("frame_bytes", frame_bytes, f"at most {MAX_FRAME_BYTES}")
    # The first eight bytes of a row: component, section, layer.
    if not np.array_equal(segments.view("<u8")[::4], names.view("<u8")[::4]):
        raise InvalidFrameError("segments", len(segments), "must be one a layer, in order")
    offset, stored = segments["offset"], segments["stored_bytes"]
    if (offset > MAX_FRAME_BYTES).any() or (stored > MAX_FRAME_BYTES).any():
        raise InvalidFrameError("segments", int(stored.max()), f"at most {MAX_FRAME_BYTES} bytes")
    stop = offset + stored
    starts = np.concatenate([[size], -(-stop[:-1] // ALIGN_BYTES) * ALIGN_BYTES])
    if not np.array_equal(offset, starts.astype("<u8")) or int(stop[-1]) != frame_bytes:
        raise InvalidFrameError("segments", frame_bytes, "must follow each other, 64-byte aligned")
