"""The raw codec, its views, and what is cut out of its layers: rows, and shards for ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contracts.codec import (
    SMALL,
    CodecContract,
    Tensors,
    decoded,
    encoded,
    filled,
    frame_of_bodies,
    layouts,
    random_bits,
    same,
    strided,
    template,
)
from golden.samples import FOLDER, vectors
from helpers.prompts import equal, frame_of, tensors_of
from helpers.shards import TWO_GROUPS, shard_frame, slices
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_name, empty_tensors
from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec, pieces_in
from kvstore.codecs.slices import (
    copy_kept,
    cut,
    cut_bytes,
    cut_rows,
    decode_shard,
    kept_rows,
    place_cut,
)
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto import native
from kvstore.proto.buffers import LOOP_FROM_BYTES, Bytes, as_bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FLAG_UNSUMMED, FrameTemplate, check_frame, copy_frame, parse_header
from kvstore.proto.keys import representation_digest
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import (
    ROOT,
    ChunkKey,
    ChunkShard,
    Component,
    DType,
    Extent,
    KVLayout,
    LayerKind,
)

LAYER_BYTES = SMALL.components[0].layer_bytes


class TestRawCodec(CodecContract):
    codec = RawCodec()


LARGE = KVLayout((Component(LayerKind.attention, DType.bfloat16, 3, 4, 128, 128),))
assert 2 * LARGE.components[0].layer_bytes >= LOOP_FROM_BYTES


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("from_pages", [0, 1, 3])
def test_a_frame_left_to_its_receiver_to_sum_is_the_same_when_that_did(
    layout: KVLayout, from_pages: int
) -> None:
    whole = filled(layout, random_bits)
    tensors = [[*strided(whole)[0][:from_pages], *whole[0][from_pages:]]]
    wanted = encoded(RawCodec(), whole, layout)
    left, out = np.full_like(wanted, 0xA5), np.full_like(wanted, 0x5A)
    RawCodec().encode(template(layout, flags=1 | FLAG_UNSUMMED), tensors, left)
    copy_frame(out, left, template(layout).key)
    assert np.array_equal(out, wanted)


TWO_KINDS = KVLayout(
    (
        Component(LayerKind.attention, DType.float16, 2, 2, 64, 16),
        Component(LayerKind.window, DType.float16, 3, 1, 64, 8, 16),
        Component(LayerKind.mla, DType.float32, 2, 1, 64, 16),
    )
)


def _moved(tensors: Tensors, by: int) -> Tensors:
    """Return a copy of *tensors* of which each part begins *by* bytes off a boundary of 64."""

    def copy(part: np.ndarray) -> np.ndarray:
        memory = np.zeros(part.nbytes + 128, np.uint8)
        start = -memory.ctypes.data % 64 + by
        moved = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
        np.copyto(moved, part)
        return moved

    return [[list(map(copy, parts)) for parts in layers] for layers in tensors]


@pytest.mark.parametrize("path", native.paths())
@pytest.mark.parametrize("layout", [TWO_KINDS, LARGE], ids=["kinds", "large"])
def test_every_path_of_the_loop_copies_and_sums_a_frame_as_is_done_layer_by_layer(
    path: str, layout: KVLayout
) -> None:
    loops, whole = native.loops(path), filled(layout, random_bits)
    wanted = encoded(RawCodec(), strided(whole), layout)
    header = parse_header(wanted)
    stated = header.segments["checksum"].tolist()
    for by, lacks in [(0, False), (4, False), (0, layout is TWO_KINDS)]:
        tensors = _moved(whole, by)
        if lacks:
            tensors[1] = []
        found = pieces_in(layout, tensors, is_target=True)
        assert found is not None
        pieces, places = found
        sums = [stated[segment] for segment in pieces.segments]
        framed = np.full(len(wanted) + 64, 7, np.uint8)
        assert pieces.copy(framed, places, is_encode=True, native=loops) == sums
        start = header.header_bytes
        assert lacks or np.array_equal(framed[start : len(wanted)], wanted[start:])
        assert set(framed[len(wanted) :].tolist()) == {7}
        out = _moved([[[np.zeros_like(p) for p in ps] for ps in ls] for ls in tensors], by)
        found = pieces_in(layout, out, is_target=True)
        assert found is not None
        assert found[0].copy(wanted, found[1], native=loops) == sums
        assert same(out, tensors)


@pytest.mark.parametrize("layout", [SMALL, TWO_KINDS, LARGE], ids=["small", "kinds", "large"])
def test_a_byte_of_any_layer_that_changed_is_found(layout: KVLayout) -> None:
    frame = encoded(RawCodec(), filled(layout, random_bits), layout)
    header = parse_header(frame)
    for row in header.segments:
        damaged = frame.copy()
        damaged[int(row["offset"]) + int(row["stored_bytes"]) - 1] ^= 1
        with pytest.raises(ChunkCorruptError, match="fails its checksum"):
            RawCodec().decode_into(header, damaged, empty_tensors(layout))


def test_a_frame_that_is_cut_short_is_not_read_past_its_end() -> None:
    frame = encoded(RawCodec(), filled(LARGE, random_bits), LARGE)
    with pytest.raises(InvalidFrameError, match="stored_bytes"):
        RawCodec().decode_into(parse_header(frame), frame[:-1], empty_tensors(LARGE))


@pytest.mark.parametrize("size", [0, LAYER_BYTES - 2, LAYER_BYTES - 1, LAYER_BYTES + 64])
def test_a_layer_of_another_size_is_refused(size: int) -> None:
    frame = frame_of_bodies(RawCodec(), SMALL, [bytes(LAYER_BYTES), bytes(size)])
    with pytest.raises(InvalidFrameError, match=f"stored_bytes={size}"):
        decoded(frame)
    with pytest.raises(InvalidFrameError, match=f"stored_bytes={size}"):
        RawCodec().views(check_frame(frame), frame)


def views_of(frame: Bytes) -> Tensors:
    views = RawCodec().views(parse_header(frame), frame)
    return [[list(parts) for parts in layers] for layers in views]


def test_views_share_the_memory_of_the_frame() -> None:
    layout = layouts(DType.float16)["several"]
    tensors = filled(layout, random_bits)
    frame = encoded(RawCodec(), tensors, layout)
    views = views_of(frame)
    assert same(views, tensors)
    assert all(np.shares_memory(part, frame) for part in views[1][0])
    views[0][0][0][0, 0, 0] ^= 1
    assert not same(views_of(frame), tensors)
    fixed = np.frombuffer(frame.tobytes(), np.uint8)
    assert not views_of(fixed)[0][0][0].flags.writeable


def test_views_of_a_cut_frame_or_of_another_codec_are_refused() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    with pytest.raises(InvalidFrameError, match="stored_bytes"):
        RawCodec().views(parse_header(frame), frame[:-1])
    other = encoded(LosslessCodec(), filled(SMALL), SMALL)
    with pytest.raises(UnknownCodecError):
        RawCodec().views(parse_header(other), other)


RAW = codec_by_name("raw")
LAYOUT = layouts(DType.bfloat16)["gqa"]
TENSORS = filled(LAYOUT)
FRAME = encoded(RAW, TENSORS, LAYOUT)
HEADER = parse_header(FRAME)
KEPT: Rows = np.array([0, 1, 5, 63])


def segment(index: int, frame: Bytes = FRAME) -> Bytes:
    return HEADER.segment(frame, index)


@given(st.sets(st.integers(0, 63)).map(sorted), st.sampled_from(["mha", "gqa", "mla"]))
def test_rows_that_are_kept_arrive_and_the_others_stay(rows: list[int], name: str) -> None:
    layout = layouts(DType.float16)[name]
    tokens = layout.tokens
    kept = np.array([row for row in rows if row < tokens], np.intp)
    tensors = filled(layout)
    frame = encoded(RAW, tensors, layout)
    header = parse_header(frame)
    for way in ("cut", "whole"):
        out = strided(filled(layout, seed=9))
        before = [[[part.copy() for part in parts] for parts in layers] for layers in out]
        index = 0
        for number, layers in enumerate(out):
            for layer, parts in enumerate(layers):
                data = header.segment(frame, index)
                if way == "cut":
                    sent = cut_rows(header, index, data, kept)
                    assert len(sent) == cut_bytes(header, index, kept)
                    place_cut(header, index, sent, kept, parts)
                else:
                    copy_kept(header, index, data, kept, parts)
                others = np.setdiff1d(np.arange(tokens), kept)
                wanted, old = tensors[number][layer], before[number][layer]
                for part, right, was in zip(parts, wanted, old, strict=True):
                    assert np.array_equal(part[:, kept], right[:, kept])
                    assert np.array_equal(part[:, others], was[:, others])
                index += 1


def test_a_damaged_layer_is_neither_cut_nor_copied() -> None:
    """Also where the damage is in rows that nobody wants."""
    damaged, first = FRAME.copy(), np.array([0])
    segment(1, damaged)[-1] ^= 1
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        cut_rows(HEADER, 1, segment(1, damaged), first)
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        copy_kept(HEADER, 1, segment(1, damaged), first, empty_tensors(LAYOUT)[0][1])


def test_what_was_cut_passes_as_itself_only_and_leaves_the_room_as_it_was() -> None:
    sent = cut_rows(HEADER, 1, segment(1), KEPT)
    flipped, others = sent.copy(), HEADER.segments.copy()
    flipped[100] ^= 1
    others["checksum"] += 1
    for header, index, data, kept in [
        (HEADER, 2, sent, KEPT),
        (HEADER, 1, sent, np.array([0, 1, 6, 63])),
        (replace(HEADER, segments=others), 1, sent, KEPT),
        (HEADER, 1, flipped, KEPT),
        (HEADER, 1, sent[:-1], KEPT),
        (HEADER, 1, sent[:0], KEPT),
    ]:
        out = filled(LAYOUT, seed=3)[0][1]
        before = [part.copy() for part in out]
        with pytest.raises(ChunkCorruptError, match="rows of segment"):
            place_cut(header, index, data, kept, out)
        assert all(map(np.array_equal, out, before))


def test_only_raw_layers_with_a_row_for_each_token_are_cut() -> None:
    skipped = SkippedRows.of({0: [1]})
    assert kept_rows(HEADER, skipped, 0) is not None
    assert kept_rows(HEADER, skipped, 1) is None
    assert kept_rows(HEADER, None, 0) is None
    coded = parse_header(encoded(codec_by_name("lossless"), TENSORS, LAYOUT))
    assert kept_rows(coded, skipped, 0) is None
    ended = layouts(DType.bfloat16)["several"]
    header = parse_header(encoded(RAW, filled(ended), ended))
    assert kept_rows(header, skipped, 0) is None
    assert template(LAYOUT).layout == HEADER.layout


def test_the_cut_of_the_page_is_what_is_sent() -> None:
    frame = as_bytes((FOLDER / "raw-r1.frame").read_bytes())
    header = parse_header(frame)
    kept = SkippedRows.of({0: [*range(1, 9), *range(10, 16)]}).kept(0, 16)
    assert kept is not None
    sent = cut_rows(header, 1, header.segment(frame, 1), kept)
    assert sent.tobytes().hex() == vectors()["cut_layer"]


# --- shards


def spans(count: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda s: s[0] < s[1])


GROUPS = KVLayout.of(TWO_GROUPS, 16)
KEY = ChunkKey(bytes(range(32)))
TEMPLATE = FrameTemplate(KEY, ROOT, representation_digest(TWO_GROUPS), bytes(16), GROUPS)
WHOLE = frame_of(KEY, TWO_GROUPS)


@st.composite
def shards(draw: st.DrawFn) -> ChunkShard:
    extents = [
        Extent(*draw(spans(c.layers)), *draw(spans(c.kv_heads))) if draw(st.booleans()) else None
        for c in GROUPS.components
    ]
    return ChunkShard(GROUPS, tuple(extents if any(extents) else (None, Extent(0, 3, 0, 1))))


@settings(max_examples=40)
@example(ChunkShard(GROUPS, (Extent(0, 2, 0, 4), None)))
@given(shards())
def test_what_a_rank_encodes_and_what_it_is_cut_are_the_same(shard: ChunkShard) -> None:
    frame = shard_frame(TEMPLATE, TWO_GROUPS, shard)
    wanted = slices(tensors_of(KEY, TWO_GROUPS, 16), shard)
    decoded = empty_tensors(shard.layout)
    decode_shard(parse_header(frame, takes_shards=True), frame, decoded)
    assert equal(decoded, wanted)
    out = empty_tensors(shard.layout)
    cut(parse_header(WHOLE), WHOLE, shard, out)
    assert equal(out, wanted)
    codec = codec_by_name("lossless")
    packed = np.zeros(max_transcoded_bytes(GROUPS, codec), np.uint8)
    header = transcode(WHOLE, codec, packed)
    out = empty_tensors(shard.layout)
    cut(header, packed[: header.frame_bytes], shard, out)
    assert equal(out, wanted)


def test_a_byte_of_another_head_that_is_wrong_shows_and_one_of_another_layer_does_not() -> None:
    shard = ChunkShard(GROUPS, (Extent(1, 2, 1, 3), None))
    out, header, damaged = empty_tensors(shard.layout), parse_header(WHOLE), WHOLE.copy()
    damaged[int(header.segments[0]["offset"])] ^= 1
    cut(header, damaged, shard, out)
    assert equal(out, slices(tensors_of(KEY, TWO_GROUPS, 16), shard))
    damaged[int(header.segments[1]["offset"])] ^= 1
    with pytest.raises(ChunkCorruptError):
        cut(header, damaged, shard, out)
    other = ChunkShard(KVLayout.of(TWO_GROUPS, 32), (Extent(0, 1, 0, 4), None))
    with pytest.raises(InvalidFrameError, match="layout"):
        cut(header, WHOLE, other, empty_tensors(other.layout))
