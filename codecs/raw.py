"""The raw codec: the tensors' own bytes, one part after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.codecs.base import ChunkTensors, Codec, Part
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import FrameHeader, raw_frame_bytes
from kvstore.proto.types import Component, Fidelity, KVLayout


class RawCodec(Codec):
    """Copy, nothing else: what memory tiers hold and zero-copy readers look into."""

    name = "raw"
    codec_id = 0
    revision = 1
    fidelity = Fidelity.exact

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer; raw layers always have exactly this size."""
        return component.layer_bytes

    def max_frame_bytes(self, layout: KVLayout) -> int:
        """Size of the frame of *layout*, exact for this codec."""
        return raw_frame_bytes(layout)

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Copy one layer into *out* and return its ``layer_bytes``."""
        room = out[: component.layer_bytes]
        for view, part in zip(part_views(room, component), parts, strict=True):
            np.copyto(view, part.view(view.dtype))
        return component.layer_bytes

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Copy one verified layer into *out*. Raises InvalidFrameError on a wrong size."""
        for view, part in zip(part_views(data, component), out, strict=True):
            np.copyto(part.view(view.dtype), view)

    def views(self, header: FrameHeader, frame: Bytes) -> ChunkTensors:
        """Return the tensors inside a raw *frame* without copying, writable when it is.

        Unsigned integers of the dtype's size, as in ``empty_tensors``. Nothing is verified
        but sizes: ``check_frame`` is the caller's. Raises InvalidFrameError,
        UnknownCodecError for a frame of another codec.
        """
        self.check_header(header)
        segments = iter(range(header.layout.segment_count))
        return [
            [
                list(part_views(header.segment(frame, next(segments)), component))
                for _ in range(component.layers)
            ]
            for component in header.layout.components
        ]


def part_views(data: Bytes, component: Component) -> Iterator[Part]:
    """Yield the parts of the raw layer *data* as typed views of it.

    Raises InvalidFrameError unless *data* has exactly ``layer_bytes``.
    """
    if len(data) != component.layer_bytes:
        raise InvalidFrameError("stored_bytes", len(data), f"a layer has {component.layer_bytes}")
    typed = data.view(f"<u{component.dtype.item_bytes}")
    yield from typed.reshape(component.parts, *component.shape)
