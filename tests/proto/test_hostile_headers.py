from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest
from contracts.codec import SMALL, encoded, filled, peak_bytes
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FIXED_BYTES,
    MAX_COMPONENTS,
    MAX_FRAME_BYTES,
    check_frame,
    header_bytes,
    parse_header,
)

HEADER_BYTES = header_bytes(SMALL)
SEGMENTS_AT = FIXED_BYTES + 48


def resigned(frame: Bytes, edits: dict[int, bytes]) -> Bytes:
    """Return *frame* with bytes of its header replaced and the header's checksum made right."""
    out = frame.copy()
    for at, data in edits.items():
        out[at : at + len(data)] = as_bytes(data)
    size = min(int.from_bytes(out[8:12].tobytes(), "little"), len(out))
    out[184:192] = 0
    out[184:192] = as_bytes(struct.pack("<Q", checksum(out[:size])))
    return out


def u16(value: int) -> bytes:
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


@given(st.data())
def test_any_header_with_a_right_checksum_is_read_or_refused(data: st.DataObject) -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    edits = data.draw(
        st.dictionaries(
            st.integers(4, HEADER_BYTES - 8),
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(7) + b"\x80"]),
            min_size=1,
            max_size=4,
        )
    )
    changed = resigned(frame, edits)
    try:
        header = check_frame(changed)
    except (InvalidFrameError, ChunkCorruptError):
        return
    assert header.frame_bytes == len(frame)
    assert header.layout.raw_bytes <= MAX_FRAME_BYTES
    assert all(len(header.segment(changed, i)) == int(row["stored_bytes"])
               for i, row in enumerate(header.segments))  # fmt: skip


NAN, INF = struct.pack("<d", float("nan")), struct.pack("<d", float("inf"))
MINUS = struct.pack("<d", -1.0)
ROW2 = SEGMENTS_AT + 32
LAYER_BYTES = SMALL.components[0].layer_bytes

HOSTILE_HEADERS: dict[str, tuple[dict[int, bytes], str]] = {
    "another magic": ({0: b"KVFS"}, "magic"),
    "version 0": ({4: u16(0)}, "version"),
    "version 2": ({4: u16(2)}, "version"),
    "an unknown flag": ({6: u16(2)}, "flags"),
    "all flags": ({6: u16(0xFFFF)}, "flags"),
    "header_bytes 0": ({8: u32(0)}, "header_bytes"),
    "header_bytes one more": ({8: u32(HEADER_BYTES + 64)}, "header_bytes"),
    "header_bytes 2^32-1": ({8: u32(0xFFFFFFFF)}, "header_bytes"),
    "no components": ({12: u16(0)}, "counts"),
    "65 components": ({12: u16(MAX_COMPONENTS + 1)}, "counts"),
    "65535 components": ({12: u16(65535)}, "counts"),
    "accuracy 3": ({18: b"\x03"}, "flags"),
    "no segments": ({20: u32(0)}, "counts"),
    "one segment": ({20: u32(1)}, "layout"),
    "4097 segments": ({20: u32(4097)}, "counts"),
    "2^32-1 segments": ({20: u32(0xFFFFFFFF)}, "counts"),
    "4096 segments": ({20: u32(4096)}, "header_bytes"),
    "frame_bytes 2^63": ({24: u64(1 << 63)}, "frame_bytes"),
    "frame_bytes 2^30+1": ({24: u64((1 << 30) + 1)}, "frame_bytes"),
    "frame_bytes one more": ({24: u64(HEADER_BYTES + 2 * LAYER_BYTES + 1)}, "segments"),
    "raw_bytes 2^63": ({32: u64(1 << 63)}, "raw_bytes"),
    "raw_bytes 2^30+1": ({32: u64((1 << 30) + 1)}, "raw_bytes"),
    "raw_bytes 0": ({32: u64(0)}, "layout"),
    "tokens 17": ({40: u32(17)}, "layout"),
    "a cost of NaN": ({128: NAN}, "cost or bound"),
    "an infinite cost": ({128: INF}, "cost or bound"),
    "a negative cost": ({128: MINUS}, "cost or bound"),
    "a bound of NaN": ({136: NAN}, "cost or bound"),
    "a negative bound": ({136: MINUS}, "cost or bound"),
    "kind 4": ({192: b"\x04"}, "component"),
    "kind 255": ({192: b"\xff"}, "component"),
    "dtype 7": ({193: b"\x07"}, "component"),
    "three parts": ({194: b"\x03"}, "parts"),
    "one part of attention": ({194: b"\x01"}, "parts"),
    "no layers": ({196: u32(0), 216: u32(0)}, "component"),
    "2^24 layers": ({196: u32(1 << 24), 216: u32(1 << 24)}, "component"),
    "2^24-1 layers": ({196: u32((1 << 24) - 1), 216: u32((1 << 24) - 1)}, "layout"),
    "2^24-1 of everything": (
        {196: u32(0xFFFFFF) * 4, 216: u32(0xFFFFFF), 224: u32(0xFFFFFF)}, "layout",
    ),
    "no heads": ({200: u32(0), 224: u32(0)}, "component"),
    "a head_dim of 2^32-1": ({204: u32(0xFFFFFFFF)}, "component"),
    "no tokens": ({208: u32(0)}, "component"),
    "half the layers": ({216: u32(1)}, "rectangle"),
    "a later first layer": ({212: u32(1)}, "rectangle"),
    "half the heads": ({224: u32(1)}, "rectangle"),
    "a segment of component 1": ({SEGMENTS_AT: u16(1)}, "segments"),
    "section 1": ({SEGMENTS_AT + 2: u16(1)}, "segments"),
    "layers out of order": ({SEGMENTS_AT + 4: u32(1), ROW2 + 4: u32(0)}, "segments"),
    "a layer twice": ({ROW2 + 4: u32(0)}, "segments"),
    "an offset of 2^63": ({ROW2 + 8: u64(1 << 63)}, "segments"),
    "an offset of 2^64-1": ({ROW2 + 8: u64((1 << 64) - 1)}, "segments"),
    "an offset into the header": ({SEGMENTS_AT + 8: u64(0)}, "segments"),
    "overlapping segments": ({ROW2 + 8: u64(HEADER_BYTES)}, "segments"),
    "a hole between segments": ({ROW2 + 8: u64(HEADER_BYTES + LAYER_BYTES + 64)}, "segments"),
    "an offset off the grid": ({SEGMENTS_AT + 8: u64(HEADER_BYTES + 1)}, "segments"),
    "stored_bytes 2^63": ({ROW2 + 16: u64(1 << 63)}, "segments"),
    "stored_bytes 2^64-1": ({SEGMENTS_AT + 16: u64((1 << 64) - 1)}, "segments"),
    "sizes that wrap to the right sum": (
        {
            SEGMENTS_AT + 16: u64((1 << 64) - 64),
            ROW2 + 8: u64(HEADER_BYTES - 64),
            ROW2 + 16: u64(2 * LAYER_BYTES + 64),
        },
        "segments",
    ),
    "stored_bytes one more": ({ROW2 + 16: u64(LAYER_BYTES + 1)}, "segments"),
}  # fmt: skip


def field_refused(frame: Bytes) -> str:
    with pytest.raises(InvalidFrameError) as caught:
        parse_header(frame)
    return caught.value.field


def test_a_hostile_header_is_refused_without_allocation() -> None:
    for name, (edits, field) in HOSTILE_HEADERS.items():
        frame = resigned(encoded(RawCodec(), filled(SMALL), SMALL), edits)
        assert field_refused(frame) == field, name
        assert peak_bytes(partial(field_refused, frame)) < 1 << 18, name


def test_the_hostile_headers_fail_for_their_edits_alone() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    assert np.array_equal(resigned(frame, {}), frame)


def test_reserved_bytes_are_not_looked_at() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    for at in (160, 183, 195, 232, 239, HEADER_BYTES - 1):
        assert check_frame(resigned(frame, {at: b"\x01"})).layout == SMALL
