"""Frames: what was written is read back, whole, by its levels and as it comes in, or refused."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from contracts.codec import SMALL, encoded, filled, frame_of_bodies
from contracts.codec import template as any_template
from golden.samples import template_of, vectors
from golden.strategies import costs, small_layouts
from helpers.disk_damage import resigned
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_id
from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec, raw_header
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    UnknownCodecError,
)
from kvstore.proto.frame import (
    COMPONENT,
    MAX_COMPONENTS,
    MAX_FRAME_BYTES,
    MAX_SEGMENTS,
    NO_ASSET,
    FrameTemplate,
    FrameWriter,
    check_frame,
    header_bytes,
    like_header,
    pack_components,
    pack_header,
    parse_header,
    raw_frame_bytes,
    unpack_table,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.messages import layout_from_message, layout_to_message
from kvstore.proto.types import (
    Accuracy,
    ChainDigest,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
)

HEADER_BYTES = header_bytes(SMALL)
ASSET = bytes(range(30, 46))
LEVEL_AT, SECTION_AT, ASSET_AT = 19, 2, 144
FIELD_AT = {
    "version": (4, "<H"), "flags": (6, "<H"), "header_bytes": (8, "<I"),
    "component_count": (12, "<H"), "codec_id": (14, "<H"), "codec_revision": (16, "<H"),
    "accuracy": (18, "<B"), "segment_count": (20, "<I"), "frame_bytes": (24, "<Q"),
    "raw_bytes": (32, "<Q"), "tokens": (40, "<I"), "position": (44, "<I"), "key": (48, "32s"),
    "parent": (80, "16s"), "representation": (96, "16s"), "content": (112, "16s"),
    "prefill_flops": (128, "<d"), "error_bound": (136, "<d"),
}  # fmt: skip


def small_frame() -> Bytes:
    return encoded(RawCodec(), filled(SMALL), SMALL)


def layered(levels: int = 1, codec_id: int = 900) -> Bytes:
    """Return a frame of four segments a level, of nine bytes each."""
    count = SMALL.segment_count * (1 + levels)
    out = np.zeros(header_bytes(SMALL, levels) + 64 * count, np.uint8)
    writer = FrameWriter(any_template(SMALL), out, levels)
    for _ in range(count):
        writer.reserve(9)[:] = 1
        writer.commit(9)
    return out[: writer.finish(codec_id, 1, Accuracy.bounded, 0.5, ASSET).frame_bytes]


def test_header_fields_lie_where_the_format_page_says() -> None:
    frame = encoded(LosslessCodec(), filled(SMALL), SMALL)
    header = parse_header(frame)
    found = {n: struct.unpack_from(f, frame.data, at)[0] for n, (at, f) in FIELD_AT.items()}
    layout = header.layout
    assert frame[:4].tobytes() == b"KVFR"
    assert found == {
        "version": 1, "flags": header.flags, "header_bytes": header.header_bytes,
        "component_count": 1, "codec_id": 2, "codec_revision": 2, "accuracy": 2,
        "segment_count": 2, "frame_bytes": len(frame), "raw_bytes": layout.raw_bytes,
        "tokens": layout.tokens, "position": 512, "key": header.key, "parent": header.parent,
        "representation": header.representation, "content": header.content,
        "prefill_flops": 2.5e12, "error_bound": 0.0,
    }  # fmt: skip
    assert not frame[144:184].any()


class Written(NamedTuple):
    """A frame, and what went into it."""

    template: FrameTemplate
    bodies: list[bytes]
    stated: tuple[int, int, Accuracy, float]
    frame: Bytes


@st.composite
def written_frames(draw: st.DrawFn) -> Written:
    layout, levels = draw(small_layouts), draw(st.integers(0, 4))
    template = FrameTemplate(
        key=ChunkKey(draw(st.binary(min_size=32, max_size=32))),
        parent=ChainDigest(draw(st.binary(min_size=16, max_size=16))),
        representation=draw(st.binary(min_size=16, max_size=16)),
        content=draw(st.binary(min_size=16, max_size=16)),
        layout=layout,
        position=draw(st.integers(0, (1 << 32) - 1)),
        prefill_flops=draw(costs),
        flags=draw(st.integers(0, 1)),
    )
    count = layout.segment_count * (1 + levels)
    sizes = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    bodies = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    out = np.full(header_bytes(layout, levels) + 264 * count, 0x5A, np.uint8)
    writer = FrameWriter(template, out, levels)
    for body in bodies:
        writer.reserve(200)[: len(body)] = np.frombuffer(body, np.uint8)
        writer.commit(len(body))
    ids = (draw(st.integers(0, 65535)), draw(st.integers(0, 65535)))
    stated = (*ids, draw(st.sampled_from(Accuracy)), draw(costs))
    header = writer.finish(*stated, ASSET)
    return Written(template, bodies, stated, out[: header.frame_bytes])


@given(written_frames())
def test_what_was_written_is_read_back(case: Written) -> None:
    template, bodies, stated, frame = case
    header = check_frame(frame, template.key)
    assert template_of(header) == template
    found = (header.codec_id, header.codec_revision, header.accuracy, header.error_bound)
    assert (found, header.asset) == (stated, ASSET)
    assert [header.segment(frame, i).tobytes() for i in range(len(bodies))] == bodies
    assert pack_header(header) == frame[: header.header_bytes].tobytes()
    info = header.info()
    assert (info.key, info.parent, info.layout, info.codec_id, info.size_bytes) == (
        template.key, template.parent, template.layout, stated[0], len(frame),
    )  # fmt: skip
    assert (info.accuracy, info.prefill_flops) == (header.accuracy, template.prefill_flops)
    covered = np.zeros(len(frame), bool)
    covered[: header.header_bytes] = True
    for row in header.segments:
        assert row["offset"] % 64 == 0
        covered[int(row["offset"]) : int(row["offset"] + row["stored_bytes"])] = True
    assert not frame[~covered].any()
    count, rows = header.layout.segment_count, header.segments
    assert rows["section"].tolist() == [n for n in range(1 + header.levels) for _ in range(count)]
    for name in ("component", "layer"):
        assert np.array_equal(rows[name], np.tile(rows[name][:count], 1 + header.levels))
    assert frame[LEVEL_AT] == header.levels
    assert frame[ASSET_AT : ASSET_AT + 16].tobytes() == ASSET
    assert header.level_end(header.levels) == len(frame)


@given(written_frames(), st.data(), st.integers(1, 255))
def test_a_changed_byte_is_found_unless_it_lies_in_a_gap(
    case: Written, data: st.DataObject, mask: int
) -> None:
    frame = case.frame
    header = check_frame(frame)
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= mask
    if at < header.header_bytes:
        with pytest.raises(InvalidFrameError):
            parse_header(frame)
        return
    hits = (header.segments["offset"] <= at) & (
        at < header.segments["offset"] + header.segments["stored_bytes"]
    )
    if hits.any():
        with pytest.raises(ChunkCorruptError, match="checksum"):
            check_frame(frame)
    else:
        check_frame(frame)


@given(written_frames(), st.data())
def test_a_prefix_that_ends_with_a_level_is_checked_up_to_it(
    case: Written, data: st.DataObject
) -> None:
    frame = case.frame
    header = parse_header(frame)
    level = data.draw(st.integers(0, header.levels))
    end = header.level_end(level)
    assert np.array_equal(check_frame(frame[:end], header.key, level).segments, header.segments)
    with pytest.raises(ChunkCorruptError, match=f"bytes of {end}"):
        check_frame(np.append(frame[:end], np.uint8(0)), level=level)
    with pytest.raises((ChunkCorruptError, InvalidFrameError)):
        check_frame(frame[: end - 1], level=level)
    with pytest.raises(ChunkCorruptError, match="its place holds"):
        check_frame(frame[:end], ChunkKey(bytes(byte ^ 1 for byte in header.key)), level)
    if case.bodies[(level + 1) * header.layout.segment_count - 1]:
        changed = frame[:end].copy()
        changed[-1] ^= 1
        with pytest.raises(ChunkCorruptError, match="checksum"):
            check_frame(changed, level=level)


def test_a_level_that_the_frame_does_not_have_is_refused() -> None:
    for level in [-1, 2, 255]:
        with pytest.raises(InvalidFrameError, match=f"level={level}: the frame has 0 to 1"):
            check_frame(layered(), level=level)


def test_a_header_cut_short_is_refused_and_one_alone_can_be_parsed() -> None:
    frame = small_frame()
    for size in [0, 1, 191, 192, HEADER_BYTES - 1]:
        with pytest.raises(InvalidFrameError):
            parse_header(frame[:size])
    assert parse_header(frame[:HEADER_BYTES]).frame_bytes == len(frame)
    for other in (frame[:HEADER_BYTES], np.append(frame, np.zeros(8, np.uint8))):
        with pytest.raises(ChunkCorruptError, match=f"{len(other)} bytes of {len(frame)}"):
            check_frame(other)


def test_a_frame_whose_key_differs_in_any_byte_is_another_chunks() -> None:
    frame = small_frame()
    for at in range(32):
        key = bytearray(parse_header(frame).key)
        key[at] ^= 1
        with pytest.raises(ChunkCorruptError, match="its place holds chunk 000102") as caught:
            check_frame(frame, ChunkKey(bytes(key)))
        assert caught.value.key == key


def test_segments_of_a_parsed_header_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        parse_header(small_frame()).segments["offset"][0] = 1


def test_a_codec_without_levels_or_assets_refuses_frames_that_have_them() -> None:
    for levels in [1, 2, 255]:
        for codec_id in (0, 2):
            frame = layered(levels, codec_id)
            with pytest.raises(UnknownCodecError, match=ASSET.hex()):
                codec_by_id(codec_id).check_header(parse_header(frame))
            header = parse_header(resigned(frame, {ASSET_AT: bytes(16)}))
            assert header.asset == NO_ASSET
            with pytest.raises(InvalidFrameError, match=f"levels={levels}"):
                codec_by_id(codec_id).check_header(header)


def test_levels_that_contradict_the_segments_are_refused() -> None:
    rows = [(240 + SECTION_AT, 1), (304 + SECTION_AT, 0)]
    for at, value in [(LEVEL_AT, 0), (LEVEL_AT, 2), (LEVEL_AT, 255), *rows]:
        with pytest.raises(InvalidFrameError) as caught:
            parse_header(resigned(layered(), {at: bytes([value])}))
        assert caught.value.field == ("layout" if at == LEVEL_AT else "segments")


# --- what is not written


def big(layers: int, head_dim: int = 8, components: int = 1) -> KVLayout:
    one = Component(LayerKind.mla, DType.uint8, layers, 1, head_dim, 16)
    return KVLayout((one,) * components)


def test_what_no_reader_would_take_is_not_written() -> None:
    FrameWriter(any_template(big(1, 1 << 23)), np.empty(1024, np.uint8))
    for layout, field in [
        (big(4097), "counts"), (big(1, components=65), "counts"),
        (big(2, (1 << 22) + 1, 8), "raw_bytes"), (big(9, 1 << 23), "raw_bytes"),
    ]:  # fmt: skip
        with pytest.raises(InvalidFrameError) as caught:
            FrameWriter(any_template(layout), np.empty(1024, np.uint8))
        assert caught.value.field == field
    levels = MAX_SEGMENTS // SMALL.segment_count
    FrameWriter(any_template(SMALL), np.empty(1 << 18, np.uint8), levels - 1)
    with pytest.raises(InvalidFrameError, match=r"^counts="):
        FrameWriter(any_template(SMALL), np.empty(1 << 18, np.uint8), levels)


def test_a_frame_above_the_limit_or_with_too_few_segments_is_not_finished() -> None:
    writer = FrameWriter(any_template(SMALL), np.empty(MAX_FRAME_BYTES + 4096, np.uint8))
    writer.reserve(MAX_FRAME_BYTES - 4096)
    writer.commit(MAX_FRAME_BYTES - 4096, segment_checksum=0)
    with pytest.raises(InvalidFrameError, match="segments=1: commit all 2"):
        writer.finish(0, 1, Accuracy.exact)
    writer.reserve(4096)
    writer.commit(4096, segment_checksum=0)
    with pytest.raises(InvalidFrameError, match=r"^frame_bytes="):
        writer.finish(0, 1, Accuracy.exact)


def test_room_that_ends_too_early_is_refused_with_the_size_it_should_have() -> None:
    writer = FrameWriter(any_template(SMALL), np.zeros(HEADER_BYTES + 9, np.uint8))
    assert len(writer.reserve(9)) == 9
    with pytest.raises(InvalidFrameError, match=f"give {HEADER_BYTES + 10} bytes"):
        writer.reserve(10)


# --- tables of components


@given(small_layouts)
def test_component_tables_are_read_back_and_the_size_of_a_raw_frame_is_known(
    layout: KVLayout,
) -> None:
    assert unpack_table(pack_components(layout)) == (layout, None)
    assert len(encoded(RawCodec(), filled(layout), layout)) == raw_frame_bytes(layout)


def test_component_tables_ragged_empty_or_longer_than_any_header_holds_are_refused() -> None:
    for cut in [0, 1, 47, 49, 95]:
        table = pack_components(KVLayout(SMALL.components * 2))
        with pytest.raises(InvalidFrameError, match="a row has 48 bytes"):
            unpack_table(table[:cut])
    largest = big(MAX_COMPONENTS, components=MAX_COMPONENTS)
    assert check_frame(frame_of_bodies(RawCodec(), largest, [b""] * 4096)).layout == largest
    with pytest.raises(InvalidFrameError, match="components"):
        unpack_table(pack_components(SMALL) * (MAX_COMPONENTS + 1))


ATTENTION = Component(LayerKind.attention, DType.bfloat16, 2, 2, 8, 16)
WINDOW = Component(LayerKind.window, DType.bfloat16, 1, 2, 8, 11, 16)
STATE = Component(LayerKind.state, DType.uint8, 2, 1, 203, 1, 16)
ENDS = KVLayout((ATTENTION, WINDOW, STATE))


def test_the_table_of_a_chunk_s_end_is_that_of_the_format_page() -> None:
    assert pack_components(ENDS).hex() == vectors()["end_components"]
    assert unpack_table(bytes.fromhex(vectors()["end_components"]))[0] == ENDS
    assert layout_from_message(layout_to_message(ENDS)) == (ENDS, None)
    assert ENDS.tokens == 16
    assert ENDS.raw_bytes == 2 * 2 * 2 * 16 * 8 * 2 + 2 * 2 * 11 * 8 * 2 + 2 * 203
    assert KVLayout((STATE,)).tokens == KVLayout((WINDOW,)).tokens == 16


def row(c: Component, chunk_tokens: int, tokens: int | None = None) -> bytes:
    """Return the row of a component with other numbers in it."""
    return COMPONENT.pack(
        c.kind, c.dtype, c.parts, c.layers, c.kv_heads, c.head_dim,
        c.tokens if tokens is None else tokens, 0, c.layers, 0, c.kv_heads, chunk_tokens,
    )  # fmt: skip


def test_rows_that_keep_more_or_less_than_their_kind_are_refused() -> None:
    latents = replace(ATTENTION, kind=LayerKind.mla)
    for table in [
        row(ATTENTION, 32), row(latents, 17), row(WINDOW, 10), row(WINDOW, 1 << 24),
        row(STATE, (1 << 32) - 1), row(STATE, 16, tokens=0),
    ]:  # fmt: skip
        with pytest.raises(InvalidFrameError):
            unpack_table(table)
    whole = replace(WINDOW, tokens=16, chunk_tokens=0)
    assert unpack_table(row(whole, 16)) == unpack_table(row(whole, 0)), "said twice"


# --- headers like one that was parsed


def test_headers_like_another_differ_in_what_is_a_frames_own() -> None:
    header = raw_header(any_template(SMALL), range(SMALL.segment_count))
    head = as_bytes(pack_header(header))
    own = replace(
        header, key=ChunkKey(b"k" * 32), parent=ChainDigest(b"p" * 16), content=b"c" * 16,
        position=77, prefill_flops=1e12, segments=header.segments.copy(),
    )  # fmt: skip
    own.segments["checksum"] += 5
    changes: list[dict[str, Any]] = [
        {"representation": b"r" * 16}, {"codec_id": 3}, {"codec_revision": 9},
        {"accuracy": Accuracy.bounded}, {"flags": 0}, {"error_bound": 0.5}, {"asset": b"a" * 16},
        {"frame_bytes": 1 << 20}, {"prefill_flops": -1.0}, {"prefill_flops": math.inf},
        {"prefill_flops": math.nan},
    ]  # fmt: skip
    for field in ["component", "section", "layer", "offset", "stored_bytes"]:
        changes.append({"segments": header.segments.copy()})
        changes[-1]["segments"][field][-1] += 1
    others = [header, own, *(replace(header, **change) for change in changes)]
    heads = np.stack([as_bytes(pack_header(one)) for one in others])
    is_alike, stated = like_header(head, header, heads)
    assert is_alike.tolist() == [True, True] + [False] * len(changes)
    assert stated[:2].tolist() == [one.segments["checksum"].tolist() for one in (header, own)]
    flipped = np.repeat(head[None], len(head), 0)
    flipped[np.arange(len(head)), np.arange(len(head))] ^= 1
    assert not like_header(head, header, flipped)[0].any()


# --- as it comes in


def verdict(frame: Bytes, key: ChunkKey, steps: list[int], head: int = HEADER_BYTES) -> str:
    check = FrameVerifier(frame, key, head)
    for arrived in (*steps, len(frame)):
        check.update(arrived)
    try:
        return f"right {check.finish().key.hex()}"
    except (InvalidFrameError, ChunkCorruptError) as error:
        return str(error)


def whole_verdict(frame: Bytes, key: ChunkKey) -> str:
    try:
        return f"right {check_frame(frame, key).key.hex()}"
    except (InvalidFrameError, ChunkCorruptError) as error:
        return str(error)


@given(written_frames(), st.data(), st.integers(0, 255))
def test_any_changed_byte_gets_the_verdict_of_the_whole_frame(
    case: Written, data: st.DataObject, flip: int
) -> None:
    frame, key = case.frame, case.template.key
    head = header_bytes(case.template.layout)
    steps = sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=9)))
    at = data.draw(st.integers(0, len(frame) - 1))
    read = parse_header(frame).header_bytes
    frame[at] ^= flip
    ours, theirs = verdict(frame, key, steps, head), whole_verdict(frame, key)
    assert ours.startswith("right") == theirs.startswith("right")
    if at >= read:
        assert ours == theirs


def test_frames_of_another_key_or_length_get_the_verdict_of_the_whole() -> None:
    frame = small_frame()
    key = parse_header(frame).key
    for other in (
        frame[:50],
        frame[:-1],
        *(np.append(frame, np.zeros(n, "u1")) for n in (1, 4096)),
    ):
        found = verdict(other, key, [len(other) // 2])
        assert not found.startswith("right")
        if len(other) > len(frame):
            assert found == whole_verdict(other, key)
            assert f"{len(other)} bytes of {len(frame)}" in found
    assert not verdict(frame, ChunkKey(b"k" * 32), []).startswith("right")
    for size in [1, 9, 192, 300]:
        short = FrameVerifier(layered(3)[:size], key, HEADER_BYTES)
        short.update(size)
        with pytest.raises(InvalidFrameError):
            short.finish()
    for arrived in [0, 100, HEADER_BYTES, len(frame) - 100]:
        check = FrameVerifier(frame, key, HEADER_BYTES)
        check.update(arrived)
        with pytest.raises(ChunkCorruptError, match=f"of {len(frame)}"):
            check.finish()


def test_bytes_are_checked_as_they_were_when_they_came() -> None:
    right = small_frame()
    frame = np.zeros_like(right)
    check = FrameVerifier(frame, parse_header(right).key, HEADER_BYTES)
    for stop in range(100, len(frame) + 100, 100):
        frame[stop - 100 : stop] = right[stop - 100 : stop]
        check.update(min(stop, len(frame)))
    frame[HEADER_BYTES:] = 0
    assert check.finish().key == parse_header(right).key


def test_what_its_caller_raises_as_bytes_arrive_ends_the_read() -> None:
    def arriving(size_bytes: int) -> None:
        if size_bytes > 100:
            raise DeadlineError(f"after {size_bytes} bytes")

    check = FrameVerifier(small_frame(), ChunkKey(bytes(range(32))), HEADER_BYTES, arriving)
    check.update(100)
    with pytest.raises(DeadlineError, match="after 101 bytes"):
        check.update(101)


@pytest.mark.parametrize("wrong", [None, 0, 1])
@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_sums_that_a_reader_brings_along_get_the_verdict_that_ours_would(
    limit: int, wrong: int | None
) -> None:
    frame = small_frame()
    header = parse_header(frame)
    if wrong is not None:
        frame[int(header.segments[wrong]["offset"])] ^= 1
    check, told = FrameVerifier(frame, header.key, HEADER_BYTES), list[tuple[int, int]]()
    assert check.next_segments(0, limit) == []
    check.update(HEADER_BYTES)
    assert check.next_segments(HEADER_BYTES + 1, limit) == []
    done = HEADER_BYTES
    while segments := check.next_segments(done, limit):
        check.add_checksums(checksum(frame[start:stop]) for start, stop in segments)
        told.extend(segments)
        done = segments[-1][1]
        check.update(done)
    if wrong is None:
        assert check.finish().key == header.key
        assert told[-1][1] == len(frame)
    else:
        with pytest.raises(ChunkCorruptError) as found:
            check.finish()
        assert str(found.value) == whole_verdict(frame, header.key)
    other = FrameVerifier(frame, ChunkKey(b"k" * 32), HEADER_BYTES)
    other.update(HEADER_BYTES)
    assert other.next_segments(HEADER_BYTES, 1 << 30) == []
