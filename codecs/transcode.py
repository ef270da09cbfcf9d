"""Moving a frame from one codec to another, as demotion and promotion do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.codecs.base import Codec, Part, codec_by_id
from kvstore.codecs.raw import RawCodec, part_views
from kvstore.proto.buffers import Bytes, checksum, copy_checked
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_segment,
    parse_header,
)
from kvstore.proto.types import Component, KVLayout


def max_transcoded_bytes(layout: KVLayout, codec: Codec) -> int:
    """Room that ``transcode`` of a frame of *layout* to *codec* asks for."""
    return codec.max_frame_bytes(layout)


def transcode(frame: Bytes, codec: Codec, out: Bytes) -> FrameHeader:
    """Write *frame* under *codec* to the start of *out* and return the new header.

    Every segment is verified on the way; key, identity, position, cost and flags stay as they
    are, fidelity becomes the lower of the two. The same codec makes a checked copy. At most
    one decoded layer is held beside *frame* and *out*, which must not overlap.
    Raises InvalidFrameError, ChunkCorruptError or UnknownCodecError; *out* then holds rubbish.
    """
    header = parse_header(frame)
    if header.frame_bytes != len(frame):
        raise ChunkCorruptError(header.key, f"{len(frame)} bytes of {header.frame_bytes}")
    source = codec_by_id(header.codec_id)
    source.check_header(header)
    writer = FrameWriter(FrameTemplate.of(header), out)
    if source.codec_id == codec.codec_id:
        _copy(header, frame, codec, writer)
    elif isinstance(codec, RawCodec):
        _decode(header, frame, source, writer)
    else:
        _recode(header, frame, source, codec, writer)
    fidelity = min(header.fidelity, codec.fidelity)
    return writer.finish(codec.codec_id, codec.revision, fidelity, header.error_bound)


def _layers(header: FrameHeader) -> Iterator[tuple[int, Component]]:
    """Yield the index and the component of each segment."""
    index = 0
    for component in header.layout.components:
        for _ in range(component.layers):
            yield index, component
            index += 1


def _verified(header: FrameHeader, frame: Bytes, index: int) -> Bytes:
    data = header.segment(frame, index)
    check_segment(header, index, checksum(data))
    return data


def _copy(header: FrameHeader, frame: Bytes, codec: Codec, writer: FrameWriter) -> None:
    for index, component in _layers(header):
        data = header.segment(frame, index)
        if len(data) > codec.max_segment_bytes(component):
            raise InvalidFrameError("stored_bytes", len(data), f"too long for {codec.name}")
        found = copy_checked(writer.reserve(len(data)), data)
        check_segment(header, index, found)
        writer.commit(len(data), found)


def _decode(header: FrameHeader, frame: Bytes, source: Codec, writer: FrameWriter) -> None:
    for index, component in _layers(header):
        room = writer.reserve(component.layer_bytes)
        views = list(part_views(room, component))
        source.decode_segment(_verified(header, frame, index), component, views)
        writer.commit(component.layer_bytes)


def _recode(
    header: FrameHeader, frame: Bytes, source: Codec, codec: Codec, writer: FrameWriter
) -> None:
    layer = np.empty(
        0 if isinstance(source, RawCodec) else max(c.layer_bytes for c in header.layout.components),
        dtype=np.uint8,
    )
    for index, component in _layers(header):
        data = _verified(header, frame, index)
        parts: Sequence[Part]
        if isinstance(source, RawCodec):
            parts = list(part_views(data, component))
        else:
            parts = list(part_views(layer[: component.layer_bytes], component))
            source.decode_segment(data, component, parts)
        room = writer.reserve(codec.max_segment_bytes(component))
        writer.commit(codec.encode_segment(parts, component, room))
