"""The segment table: one row for each layer that a frame has, and where its bytes lie."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.component_table import unpack_table
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import KVLayout, Portion

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


class Sizes(NamedTuple):
    """What a frame's header says of its own length, the frame's, and the chunk's."""

    header_bytes: int
    frame_bytes: int
    raw_bytes: int
    tokens: int


def shape_of(segments: NDArray[Any]) -> bytes:
    """Return the rows without their checksums: frames of one layout have the same, if not coded."""
    return segments.view("<u8").reshape(-1, 4)[:, :3].tobytes()


@lru_cache(maxsize=32)
def check_shape(table: bytes, shape: bytes, levels: int, sizes: Sizes) -> None:
    """Raise InvalidFrameError unless *shape*, of ``shape_of``, is one of the component *table*.

    Its rows have the names of the layout's and follow each other. Frames of one shape are
    looked at once: it takes as long as the checksum of a mebibyte.
    """
    layout, portion = unpack_table(table)
    rows = np.frombuffer(shape, "<u8").reshape(-1, 3)
    if (layout.segment_count * (1 + levels), layout.raw_bytes, layout.tokens) != (
        len(rows), sizes.raw_bytes, sizes.tokens,
    ):  # fmt: skip
        found = (len(rows), sizes.raw_bytes, sizes.tokens)
        raise InvalidFrameError("layout", found, "contradicts itself")
    if sizes.frame_bytes > MAX_FRAME_BYTES:
        raise InvalidFrameError("frame_bytes", sizes.frame_bytes, f"at most {MAX_FRAME_BYTES}")
    names, offset, stored = rows.T
    # The first eight bytes of a row: component, section, layer.
    if not np.array_equal(names, empty_rows(layout, levels, portion).view("<u8")[::4]):
        raise InvalidFrameError("segments", len(rows), "must be one a layer, in order")
    if (offset > MAX_FRAME_BYTES).any() or (stored > MAX_FRAME_BYTES).any():
        raise InvalidFrameError("segments", int(stored.max()), f"at most {MAX_FRAME_BYTES} bytes")
    stop = offset + stored
    starts = np.concatenate([[sizes.header_bytes], -(-stop[:-1] // ALIGN_BYTES) * ALIGN_BYTES])
    if not np.array_equal(offset, starts.astype("<u8")) or int(stop[-1]) != sizes.frame_bytes:
        raise InvalidFrameError(
            "segments", sizes.frame_bytes, "must follow each other, 64-byte aligned"
        )
