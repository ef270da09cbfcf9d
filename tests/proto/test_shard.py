"""Shards: which layers and heads of a chunk a frame covers, and tables that lie about it."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from golden.samples import FOLDER, shard, shard_tensors, template, vectors
from helpers.shards import TWO_GROUPS, WIDE, shard_frame, shard_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.slices import encode_shard, shard_frame_bytes
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError, LayoutMismatchError
from kvstore.proto.frame import (
    COMPONENT,
    FIXED_BYTES,
    FrameTemplate,
    check_frame,
    copy_frame,
    pack_components,
    pack_header,
    parse_header,
    unpack_table,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.messages import layout_from_message, layout_to_message, pack_info, unpack_info
from kvstore.proto.types import ROOT, ChunkInfo, ChunkKey, ChunkShard, Extent, KVLayout

LAYOUT = KVLayout.of(WIDE, 16)
BOTH = KVLayout.of(TWO_GROUPS, 16)
KEY = ChunkKey(bytes(range(32)))
TEMPLATE = FrameTemplate(KEY, ROOT, bytes(16), bytes(16), LAYOUT, position=48)
RECTANGLE_AT = FIXED_BYTES + 20


def small_frame() -> Bytes:
    return shard_frame(TEMPLATE, WIDE, shard_of(LAYOUT, (1, 3), (2, 4)))


def resigned(frame: Bytes, rectangle: tuple[int, int, int, int]) -> Bytes:
    """Return *frame* with another rectangle in its table, and the header's checksum made right."""
    out = frame.copy()
    out[RECTANGLE_AT : RECTANGLE_AT + 16] = as_bytes(struct.pack("<4I", *rectangle))
    size = int.from_bytes(out[8:12].tobytes(), "little")
    out[184:192] = 0
    out[184:192] = as_bytes(struct.pack("<Q", checksum(out[:size])))
    return out


def test_a_table_of_all_layers_and_heads_is_that_of_the_whole_chunk() -> None:
    whole = shard_of(LAYOUT, (0, 3))
    assert whole.is_whole
    assert pack_components(whole.layout, whole) == pack_components(LAYOUT)
    assert unpack_table(pack_components(LAYOUT)) == (LAYOUT, None)


def test_a_frame_says_which_layers_and_heads_it_has_by_their_numbers_in_the_whole() -> None:
    frame = small_frame()
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
        (1, 1, 2, 4),
        (1, 4, 2, 4),
        (1, 3, 2, 5),
        (3, 1, 2, 4),
        (1, 3, 2, 2),
        (0, 0, 0, 1),
        (1, 2**32 - 1, 2, 4),
        (0, 0, 0, 0),
        (0, 2, 2, 4),
        (1, 3, 0, 4),
        (0, 3, 0, 4),
    ]:
        with pytest.raises(InvalidFrameError):
            parse_header(resigned(small_frame(), rectangle), takes_shards=True)


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
