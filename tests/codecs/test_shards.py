"""Shards of chunks come out of frames of ranks and of whole frames with the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.prompts import equal, frame_of, tensors_of
from helpers.shards import TWO_GROUPS, shard_frame, slices
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.slices import cut, decode_shard
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import FrameTemplate, parse_header
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import ROOT, ChunkKey, ChunkShard, Extent, KVLayout

LAYOUT = KVLayout.of(TWO_GROUPS, 16)
KEY = ChunkKey(bytes(range(32)))
TEMPLATE = FrameTemplate(KEY, ROOT, representation_digest(TWO_GROUPS), bytes(16), LAYOUT)
TENSORS = tensors_of(KEY, TWO_GROUPS, 16)
WHOLE = frame_of(KEY, TWO_GROUPS)


def spans(count: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda s: s[0] < s[1])


@st.composite
def shards(draw: st.DrawFn) -> ChunkShard:
    extents = [
        Extent(*draw(spans(c.layers)), *draw(spans(c.kv_heads))) if draw(st.booleans()) else None
        for c in LAYOUT.components
    ]
    return ChunkShard(LAYOUT, tuple(extents if any(extents) else (None, Extent(0, 3, 0, 1))))


@settings(max_examples=40)
@given(shards())
def test_what_a_rank_encodes_and_what_it_is_cut_are_the_same(shard: ChunkShard) -> None:
    frame = shard_frame(TEMPLATE, TWO_GROUPS, shard)
    wanted = slices(TENSORS, shard)
    decoded = empty_tensors(shard.layout)
    decode_shard(parse_header(frame, takes_shards=True), frame, decoded)
    assert equal(decoded, wanted)
    out = empty_tensors(shard.layout)
    cut(parse_header(WHOLE), WHOLE, shard, out)
    assert equal(out, wanted)


def test_compressed_frames_are_cut() -> None:
    codec = codec_by_name("lossless")
    frame = np.zeros(max_transcoded_bytes(LAYOUT, codec), np.uint8)
    header = transcode(WHOLE, codec, frame)
    shard = ChunkShard(LAYOUT, (Extent(1, 2, 1, 3), None))
    out = empty_tensors(shard.layout)
    cut(header, frame[: header.frame_bytes], shard, out)
    assert equal(out, slices(TENSORS, shard))


def test_a_byte_of_another_head_that_is_wrong_shows_and_one_of_another_layer_does_not() -> None:
    shard = ChunkShard(LAYOUT, (Extent(1, 2, 1, 3), None))
    out = empty_tensors(shard.layout)
    header = parse_header(WHOLE)
    damaged = WHOLE.copy()
    damaged[int(header.segments[0]["offset"])] ^= 1
    cut(header, damaged, shard, out)
    assert equal(out, slices(TENSORS, shard))
    damaged[int(header.segments[1]["offset"])] ^= 1
    with pytest.raises(ChunkCorruptError):
        cut(header, damaged, shard, out)


def test_a_chunk_of_another_layout_is_not_cut() -> None:
    other = ChunkShard(KVLayout.of(TWO_GROUPS, 32), (Extent(0, 1, 0, 4), None))
    with pytest.raises(InvalidFrameError, match="layout"):
        cut(parse_header(WHOLE), WHOLE, other, empty_tensors(other.layout))
