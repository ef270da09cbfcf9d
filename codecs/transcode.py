"""Transcodes a frame from one codec to another, for demotion and promotion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvstore.codecs.base import Codec, EncodeTerms, Part, codec_by_id
from kvstore.codecs.raw import RawCodec, part_views
from kvstore.proto.buffers import Bytes, as_bytes, checksum, copy_groups
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FLAG_RESTORED,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_segment,
    pack_header,
    parse_header,
)
from kvstore.proto.types import Accuracy, Component, KVLayout


def max_transcoded_bytes(layout: KVLayout, codec: Codec) -> int:
    """Return the buffer size that ``transcode`` of a frame of *layout* to *codec* needs."""
    return codec.max_frame_bytes(layout)


def transcode(
    frame: Bytes, codec: Codec, out: Bytes, terms: EncodeTerms | None = None
) -> FrameHeader:
    """Write *frame* under *codec* to the start of *out* and return the new header.

    Every segment is verified; key, identity, position, cost and flags are unchanged, accuracy
    becomes the lower of the two and error bounds add up; a frame decoded from a lossy one is marked
    as restored, with that frame's codec. The same codec makes a verified copy. Besides *frame* and
    *out*, which must not overlap, memory holds at most one decoded layer and the refinements that
    *codec* writes.
    Raises InvalidFrameError, ChunkCorruptError or UnknownCodecError; *out* is then undefined.
    """
    header = parse_header(frame)
    if header.frame_bytes != len(frame):
        raise ChunkCorruptError(header.key, f"{len(frame)} bytes of {header.frame_bytes}")
    source = codec_by_id(header.codec_id)
    source.check_header(header)
    template: FrameTemplate = header
    if source.codec_id == codec.codec_id:
        writer = FrameWriter(template, out, header.levels)
        _copy(header, frame, codec, writer)
        return writer.finish(
            codec.codec_id, header.codec_revision, header.accuracy, header.error_bound, header.asset
        )
    if header.accuracy is not Accuracy.exact:
        was_restored = header.flags & FLAG_RESTORED
        origin = header.origin if was_restored else header.codec_id
        if codec.accuracy < header.accuracy:
            origin = codec.codec_id
        template = replace(template, flags=template.flags | FLAG_RESTORED, origin=origin)
    if not isinstance(codec, RawCodec):
        encoded = codec.encode_layers(template, _decoded(header, frame, source), out, terms)
        return _lowered(encoded, header, out)
    writer = FrameWriter(template, out)
    for index, component in _layers(header):
        buffer = writer.reserve(component.layer_bytes)
        _fill(header, frame, index, source, list(part_views(buffer, component)))
        writer.commit(component.layer_bytes)
    return writer.finish(codec.codec_id, codec.revision, header.accuracy, header.error_bound)


def _lowered(encoded: FrameHeader, source: FrameHeader, out: Bytes) -> FrameHeader:
    """Return the header of *encoded* with an accuracy no better than its *source*'s."""
    if source.accuracy is Accuracy.exact:
        return encoded
    accuracy = min(encoded.accuracy, source.accuracy)
    is_bounded = accuracy is Accuracy.bounded or encoded.accuracy is Accuracy.exact
    error_bound = source.error_bound + encoded.error_bound if is_bounded else 0.0
    header = replace(encoded, accuracy=accuracy, error_bound=error_bound)
    out[: header.header_bytes] = as_bytes(pack_header(header))
    return header


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


def _fill(
    header: FrameHeader, frame: Bytes, index: int, source: Codec, parts: Sequence[Part]
) -> None:
    """Decode layer *index* of *frame*, with all levels, into *parts*."""
    count = header.layout.segment_count
    data = [_verified(header, frame, at) for at in range(index, len(header.segments), count)]
    component = header.layout.components[int(header.segments[index]["component"])]
    source.decode_layer(data, component, parts, None)


def _decoded(header: FrameHeader, frame: Bytes, source: Codec) -> Iterator[list[Part]]:
    """Yield each decoded layer of *frame*: views of a raw frame, else in one shared buffer."""
    is_raw = isinstance(source, RawCodec)
    size = 0 if is_raw else max(c.layer_bytes for c in header.layout.components)
    buffer = np.empty(size, np.uint8)
    for index, component in _layers(header):
        if is_raw:
            yield list(part_views(_verified(header, frame, index), component))
            continue
        parts = list(part_views(buffer[: component.layer_bytes], component))
        _fill(header, frame, index, source, parts)
        yield parts


def _copy(header: FrameHeader, frame: Bytes, codec: Codec, writer: FrameWriter) -> None:
    limits = [codec.max_segment_bytes(component) for _, component in _layers(header)]
    more = [codec.max_refinement_bytes(component) for _, component in _layers(header)]
    limits += more * header.levels
    for index, most_bytes in enumerate(limits):
        data = header.segment(frame, index)
        if len(data) > most_bytes:
            raise InvalidFrameError("stored_bytes", len(data), f"too long for {codec.name}")
        found = copy_groups([[(writer.reserve(len(data)), data)]])[0]
        check_segment(header, index, found)
        writer.commit(len(data), found)
