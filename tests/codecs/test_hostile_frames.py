"""Frames of every codec, changed by somebody who sets the checksums right again.

``--fuzz-frames`` says how many; ``make soak`` takes a million.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from contracts.codec import peak_bytes
from golden.samples import FOLDER

from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.codecs.slices import decode_shard
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, ModelError, UnknownCodecError
from kvstore.proto.frame import (
    COMPONENT,
    FIXED_BYTES,
    FrameHeader,
    check_frame,
    check_identity,
    parse_header,
)

pytestmark = pytest.mark.usefixtures("golden_assets")
FRAMES = sorted(path.name for path in FOLDER.glob("*.frame"))
REFUSALS = (InvalidFrameError, ChunkCorruptError, UnknownCodecError, ModelError)
_MOST_BYTES = 16 << 20
HOSTILE_BYTES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


def hostile_span(draw: random.Random, size: int) -> bytes:
    """Return up to eight bytes that lengths and offsets would be least expected to be."""
    count = draw.choice((1, 1, 2, 4, 8))
    if draw.random() < 0.5:
        return bytes(draw.choice(HOSTILE_BYTES) for _ in range(count))
    near = max(0, draw.choice((size, 0, 1 << 31, 1 << 32)) + draw.randint(-2, 2))
    return near.to_bytes(8, "little")[:count]


def change_payload(draw: random.Random, frame: Bytes, header: FrameHeader) -> None:
    """Change a few spans of one segment, near its start above all: tables lie there."""
    segment = header.segment(frame, draw.randrange(len(header.segments)))
    if not len(segment):
        return
    for _ in range(draw.choice((1, 1, 2, 5))):
        reach = draw.choice((8, 64, 512, len(segment)))
        at = draw.randrange(min(reach, len(segment)))
        span = as_bytes(hostile_span(draw, len(segment)))[: len(segment) - at]
        segment[at : at + len(span)] = span


def change_header(draw: random.Random, frame: Bytes, header: FrameHeader) -> None:
    at = draw.randrange(4, header.header_bytes - 8)
    span = as_bytes(hostile_span(draw, len(frame)))[: header.header_bytes - at]
    frame[at : at + len(span)] = span


def seal(frame: Bytes, header: FrameHeader) -> None:
    """Set right the checksums of the segments, where they were, and that of the header."""
    whole = header.layout if header.shard is None else header.shard.whole
    table_at = FIXED_BYTES + COMPONENT.size * len(whole.components)
    for index in range(len(header.segments)):
        found = checksum(header.segment(frame, index)).to_bytes(8, "little")
        frame[table_at + 32 * index + 24 :][:8] = as_bytes(found)
    size = min(int.from_bytes(frame[8:12].tobytes(), "little"), len(frame))
    frame[FIXED_BYTES - 8 : FIXED_BYTES] = 0
    frame[FIXED_BYTES - 8 : FIXED_BYTES] = as_bytes(checksum(frame[:size]).to_bytes(8, "little"))


def changed(draw: random.Random, frame: Bytes, header: FrameHeader) -> Bytes:
    """Return a copy of *frame* with something else in it and all checksums right."""
    other = frame.copy()
    if draw.random() < 0.8:
        change_payload(draw, other, header)
    else:
        change_header(draw, other, header)
    seal(other, header)
    return other


def read(frame: Bytes) -> int:
    """Read *frame* as a server or a client would; return the bytes that came of it, 0 of none."""
    try:
        header = parse_header(frame, takes_shards=True)
        if header.layout.raw_bytes > _MOST_BYTES:  # whoever reads has made that room before
            return 0
        check_identity(header, len(frame), None)
        if header.shard is not None:
            decode_shard(header, frame, empty_tensors(header.layout))
            return header.layout.raw_bytes
        check_frame(frame)
        codec = codec_by_id(header.codec_id)
        codec.check_header(header)
        codec.decode_into(header, frame, empty_tensors(header.layout))
    except REFUSALS:
        return 0
    return header.layout.raw_bytes


@pytest.mark.parametrize("name", FRAMES)
def test_changed_frames_are_read_or_refused_by_name(name: str, pytestconfig: pytest.Config) -> None:
    frame = np.fromfile(FOLDER / name, np.uint8)
    header = parse_header(frame, takes_shards=True)
    assert read(frame) == header.layout.raw_bytes
    count = -(-pytestconfig.getoption("--fuzz-frames") // len(FRAMES))
    taken = 0
    for number in range(count):
        other = changed(random.Random(f"{name} {number}"), frame, header)
        taken += read(other) > 0
    assert taken < count, "nothing was ever refused"


@pytest.mark.parametrize("name", FRAMES)
def test_a_changed_frame_takes_no_more_memory_than_a_whole_one(name: str) -> None:
    frame = np.fromfile(FOLDER / name, np.uint8)
    header = parse_header(frame, takes_shards=True)
    read(frame)
    most = peak_bytes(lambda: read(frame)) + header.layout.raw_bytes + (64 << 10)
    for number in range(100):
        draw = random.Random(f"{name} memory {number}")
        other = frame.copy()
        change_payload(draw, other, header)
        seal(other, header)
        found = peak_bytes(partial(read, other))
        assert found <= most, f"change {number}: {found} bytes"
