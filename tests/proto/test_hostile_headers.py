"""Headers that lie under a right checksum, and those of shards of a chunk."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from contracts.codec import SMALL, encoded, filled, peak_bytes
from golden.samples import FOLDER, shard, shard_tensors, template, vectors
from helpers.disk_damage import resigned
from helpers.shards import TWO_GROUPS, WIDE, shard_frame, shard_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.raw import RawCodec
from kvstore.codecs.slices import encode_shard, shard_frame_bytes
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, LayoutMismatchError
from kvstore.proto.frame import (
    COMPONENT,
    FIXED_BYTES,
    MAX_COMPONENTS,
    MAX_FRAME_BYTES,
    FrameTemplate,
    check_frame,
    copy_frame,
    header_bytes,
    pack_components,
    pack_header,
    parse_header,
    unpack_table,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.messages import layout_from_message, layout_to_message, pack_info, unpack_info
from kvstore.proto.types import ROOT, ChunkInfo, ChunkKey, ChunkShard, Extent, KVLayout

HEADER_BYTES = header_bytes(SMALL)
SEGMENTS_AT = FIXED_BYTES + 48


u16, u32, u64 = (struct.Struct(f"<{kind}").pack for kind in "HIQ")


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
    whole = encoded(RawCodec(), filled(SMALL), SMALL)
    assert np.array_equal(resigned(whole, {}), whole)
    for name, (edits, field) in HOSTILE_HEADERS.items():
        frame = resigned(encoded(RawCodec(), filled(SMALL), SMALL), edits)
        assert field_refused(frame) == field, name
        assert peak_bytes(partial(field_refused, frame)) < 1 << 18, name


def test_reserved_bytes_are_not_looked_at() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    for at in (160, 183, 195, 232, 239, HEADER_BYTES - 1):
        assert check_frame(resigned(frame, {at: b"\x01"})).layout == SMALL


# --- shards

KEY = ChunkKey(bytes(range(32)))
LAYOUT = KVLayout.of(WIDE, 16)
BOTH = KVLayout.of(TWO_GROUPS, 16)
TEMPLATE = FrameTemplate(KEY, ROOT, bytes(16), bytes(16), LAYOUT, position=48)
RECTANGLE_AT = FIXED_BYTES + 20


def small_frame() -> Bytes:
    return shard_frame(TEMPLATE, WIDE, shard_of(LAYOUT, (1, 3), (2, 4)))


def test_a_frame_says_which_layers_and_heads_it_has_by_their_numbers_in_the_whole() -> None:
    frame = small_frame()
    whole = shard_of(LAYOUT, (0, 3))
    assert whole.is_whole
    assert pack_components(whole.layout, whole) == pack_components(LAYOUT)
    header = parse_header(frame, takes_shards=True)
    assert header.shard == ChunkShard(LAYOUT, (Extent(1, 3, 2, 4),))
    assert header.layout == header.shard.layout
    assert [(c.layers, c.kv_heads, c.tokens) for c in header.layout.components] == [(2, 2, 16)]
    assert header.segments["layer"].tolist() == [1, 2]
    assert header.frame_bytes == len(frame)
    assert pack_header(header) == frame[: header.header_bytes].tobytes()


def test_components_that_are_left_out_keep_their_rows_and_have_no_segments() -> None:
    latents = ChunkShard(BOTH, (None, Extent(1, 2, 0, 1)))
    frame = shard_frame(replace(TEMPLATE, layout=BOTH), TWO_GROUPS, latents)
    header = parse_header(frame, takes_shards=True)
    assert header.shard == latents
    assert header.segments["component"].tolist() == [1]
    assert header.layout.components == (replace(BOTH.components[1], layers=1),)


def test_whoever_takes_whole_chunks_takes_no_shard() -> None:
    frame = small_frame()
    room = np.zeros(len(frame), np.uint8)
    check = FrameVerifier(frame, KEY, 320)
    check.update(len(frame))
    table = frame[FIXED_BYTES : FIXED_BYTES + 48].tobytes()
    row = pack_info(ChunkInfo(KEY, ROOT, LAYOUT, 0, len(frame)))[: -len(pack_components(LAYOUT))]
    for read in (
        lambda: parse_header(frame),
        lambda: check_frame(frame, KEY),
        lambda: copy_frame(room, frame, KEY),
        check.finish,
        lambda: unpack_info(row + table),
    ):
        with pytest.raises(InvalidFrameError, match="rectangle"):
            read()


def test_a_rectangle_that_is_empty_or_outside_or_not_the_segments_is_refused() -> None:
    for rectangle in [
        (1, 1, 2, 4), (1, 4, 2, 4), (1, 3, 2, 5), (3, 1, 2, 4), (1, 3, 2, 2), (0, 0, 0, 1),
        (1, 2**32 - 1, 2, 4), (0, 0, 0, 0), (0, 2, 2, 4), (1, 3, 0, 4), (0, 3, 0, 4),
    ]:  # fmt: skip
        edits = {RECTANGLE_AT: struct.pack("<4I", *rectangle)}
        with pytest.raises(InvalidFrameError):
            parse_header(resigned(small_frame(), edits), takes_shards=True)


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 5), min_size=8, max_size=8))
def test_any_rectangles_in_a_table_are_read_back_or_refused(numbers: list[int]) -> None:
    table = bytearray(pack_components(BOTH))
    struct.pack_into("<4I", table, 20, *numbers[:4])
    struct.pack_into("<4I", table, COMPONENT.size + 20, *numbers[4:])
    try:
        layout, shard = unpack_table(bytes(table))
    except InvalidFrameError:
        return
    assert pack_components(layout, shard) == bytes(table)
    assert shard is None or layout_from_message(layout_to_message(shard)) == (shard.whole, shard)


def test_a_shard_of_nothing_or_of_too_few_components_is_none() -> None:
    for extents in ((), (None, None), (Extent(0, 1, 0, 1),)):
        with pytest.raises(LayoutMismatchError, match="rectangle"):
            ChunkShard(BOTH, extents)


def test_the_golden_rectangle_is_that_of_the_format_page_and_written_again() -> None:
    golden = np.fromfile(FOLDER / "shard-r1.frame", np.uint8)
    header = parse_header(golden, takes_shards=True)
    assert header.shard == shard()
    assert len(golden) == int(vectors()["shard_frame_bytes"])
    assert f"{checksum(golden):016x}" == vectors()["shard_frame_xxh3_64"]
    assert golden[: header.header_bytes].tobytes().hex() == vectors()["shard_header"]
    out = np.zeros(shard_frame_bytes(shard()), np.uint8)
    encode_shard(template(), shard(), shard_tensors(), out)
    assert np.array_equal(out, golden)
