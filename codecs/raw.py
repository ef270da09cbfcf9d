"""The raw codec: the tensors' own bytes, one part after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from xxhash import xxh3_64

from kvstore.codecs.base import ChunkTensors, Codec, Part, check_tensors
from kvstore.proto.buffers import BLOCK_BYTES, Bytes, copy_summed
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import FrameHeader, check_segment, raw_frame_bytes
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

    def encode_checked(
        self, parts: Sequence[Part], component: Component, out: Bytes
    ) -> tuple[int, int]:
        """Copy one layer into *out*, summing what arrived while it is in cache."""
        room = out[: component.layer_bytes]
        digest = xxh3_64()
        for view, part in zip(part_views(room, component), parts, strict=True):
            for ours, theirs in _blocks(view, part):
                np.copyto(ours, theirs)
                digest.update(ours)  # type: ignore[arg-type]
        return component.layer_bytes, digest.intdigest()

    def decode_into(self, header: FrameHeader, frame: Bytes, out: ChunkTensors) -> None:
        """Copy each segment into *out*, summing what was copied while it is in cache.

        Raises as ``Codec.decode_into`` does. One loop for all layers: a call for each costs a
        tenth of the copies of a chunk.
        """
        self.check_header(header)
        check_tensors(header.layout, out)
        rows = header.segments
        starts, sizes = rows["offset"].tolist(), rows["stored_bytes"].tolist()
        index = 0
        for component, layers in zip(header.layout.components, out, strict=True):
            layer_bytes, part_bytes = component.layer_bytes, component.part_bytes
            for parts in layers:
                start = starts[index]
                if sizes[index] != layer_bytes:
                    raise _wrong_size(frame[start : start + sizes[index]], component)
                digest = xxh3_64()
                for part in parts:
                    _copy_part(frame[start : start + part_bytes], part, digest)
                    start += part_bytes
                check_segment(header, index, digest.intdigest())
                index += 1

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


def _copy_part(data: Bytes, part: Part, digest: xxh3_64) -> None:
    if part.flags.c_contiguous:
        copy_summed(part.reshape(-1).view(np.uint8), data, digest)
        return
    typed = data.view(f"<u{part.itemsize}").reshape(part.shape)
    for block, theirs in _blocks(typed, part):
        np.copyto(theirs, block)
        digest.update(block)  # type: ignore[arg-type]


def _blocks(view: Part, part: Part) -> Iterator[tuple[Part, Part]]:
    """Yield matching blocks of a frame's part and a caller's, each of a few heads.

    A block stays in the second-level cache, so that its checksum costs next to nothing.
    """
    theirs = part.view(view.dtype)
    heads = max(1, BLOCK_BYTES * len(view) // max(1, view.nbytes))
    for start in range(0, len(view), heads):
        yield view[start : start + heads], theirs[start : start + heads]


def part_views(data: Bytes, component: Component) -> Iterator[Part]:
    """Yield the parts of the raw layer *data* as typed views of it.

    Raises InvalidFrameError unless *data* has exactly ``layer_bytes``.
    """
    if len(data) != component.layer_bytes:
        raise _wrong_size(data, component)
    typed = data.view(f"<u{component.dtype.item_bytes}")
    yield from typed.reshape(component.parts, *component.shape)


def _wrong_size(data: Bytes, component: Component) -> InvalidFrameError:
    return InvalidFrameError("stored_bytes", len(data), f"a layer has {component.layer_bytes}")
