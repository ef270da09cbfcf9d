from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import SMALL
from contracts.codec import template as any_template
from golden.strategies import small_layouts
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_id
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import (
    MAX_SEGMENTS,
    NO_ASSET,
    FrameWriter,
    check_frame,
    header_bytes,
    pack_header,
    parse_header,
)
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout

ASSET = bytes(range(30, 46))
LEVEL_AT, SECTION_AT, ASSET_AT = 19, 2, 144


def layered(layout: KVLayout, levels: int, sizes: list[int], codec_id: int = 900) -> Bytes:
    """Return a frame whose segment i is *sizes[i]* bytes of i."""
    out = np.full(header_bytes(layout, levels) + 264 * len(sizes), 0x5A, np.uint8)
    writer = FrameWriter(any_template(layout), out, levels)
    for index, size in enumerate(sizes):
        writer.reserve(200)[:size] = index % 251
        writer.commit(size)
    header = writer.finish(codec_id, 1, Accuracy.bounded, 0.5, ASSET)
    return out[: header.frame_bytes]


@st.composite
def layered_frames(draw: st.DrawFn) -> Bytes:
    layout, levels = draw(small_layouts), draw(st.integers(0, 4))
    count = layout.segment_count * (1 + levels)
    sizes = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    return layered(layout, levels, sizes)


@given(layered_frames())
def test_levels_are_written_one_behind_the_other_and_read_back(frame: Bytes) -> None:
    header = check_frame(frame)
    count = header.layout.segment_count
    rows = header.segments
    assert len(rows) == count * (1 + header.levels)
    assert rows["section"].tolist() == [n for n in range(1 + header.levels) for _ in range(count)]
    for level in range(1 + header.levels):
        of_level = rows[level * count : (level + 1) * count]
        assert np.array_equal(of_level["component"], rows["component"][:count])
        assert np.array_equal(of_level["layer"], rows["layer"][:count])
    for index in range(len(rows)):
        assert (header.segment(frame, index) == index % 251).all()
    assert (header.asset, header.error_bound) == (ASSET, 0.5)
    assert frame[LEVEL_AT] == header.levels
    assert frame[ASSET_AT : ASSET_AT + 16].tobytes() == ASSET
    assert pack_header(header) == frame[: header.header_bytes].tobytes()
    assert header.level_end(header.levels) == len(frame)


@given(layered_frames(), st.data())
def test_a_prefix_that_ends_with_a_level_is_checked_up_to_it(
    frame: Bytes, data: st.DataObject
) -> None:
    header = parse_header(frame)
    level = data.draw(st.integers(0, header.levels))
    end = header.level_end(level)
    assert np.array_equal(check_frame(frame[:end], header.key, level).segments, header.segments)
    with pytest.raises(ChunkCorruptError, match=f"bytes of {end}"):
        check_frame(np.append(frame[:end], np.uint8(0)), level=level)
    with pytest.raises((ChunkCorruptError, InvalidFrameError)):
        check_frame(frame[: end - 1], level=level)
    with pytest.raises(ChunkCorruptError, match="its place holds"):
        check_frame(frame[:end], ChunkKey(b"k" * 32), level)
    last = header.segments[(level + 1) * header.layout.segment_count - 1]
    if last["stored_bytes"]:
        changed = frame[:end].copy()
        changed[-1] ^= 1
        with pytest.raises(ChunkCorruptError, match="checksum"):
            check_frame(changed, level=level)


def test_a_level_that_the_frame_does_not_have_is_refused() -> None:
    for level in [-1, 2, 255]:
        frame = layered(SMALL, 1, [9] * 4)
        with pytest.raises(InvalidFrameError, match=f"level={level}: the frame has 0 to 1"):
            check_frame(frame, level=level)


@given(layered_frames(), st.data())
def test_frames_with_levels_are_checked_as_they_come_in(frame: Bytes, data: st.DataObject) -> None:
    header = parse_header(frame)
    steps = sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=9)))
    check = FrameVerifier(frame, header.key, header_bytes(header.layout))
    for arrived in (*steps, len(frame)):
        check.update(arrived)
    assert np.array_equal(check.finish().segments, header.segments)


def test_a_frame_shorter_than_its_header_says_is_refused_as_it_comes_in() -> None:
    for size in [1, 9, 192, 300]:
        frame = layered(SMALL, 3, [9] * 8)
        check = FrameVerifier(frame[:size], parse_header(frame).key, header_bytes(SMALL))
        check.update(size)
        with pytest.raises(InvalidFrameError):
            check.finish()


def test_a_codec_without_levels_or_assets_refuses_frames_that_have_them() -> None:
    for levels in [1, 2, 255]:
        for codec_id in (0, 2):
            frame = layered(SMALL, levels, [9] * 2 * (1 + levels), codec_id)
            with pytest.raises(UnknownCodecError, match=ASSET.hex()):
                codec_by_id(codec_id).check_header(parse_header(frame))
            frame[ASSET_AT : ASSET_AT + 16] = 0
            header = parse_header(resummed(frame))
            assert header.asset == NO_ASSET
            with pytest.raises(InvalidFrameError, match=f"levels={levels}"):
                codec_by_id(codec_id).check_header(header)


def resummed(frame: Bytes) -> Bytes:
    """Return *frame* with the header's checksum made right."""
    out = frame.copy()
    out[184:192] = 0
    size = int.from_bytes(out[8:12].tobytes(), "little")
    out[184:192] = as_bytes(checksum(out[:size]).to_bytes(8, "little"))
    return out


def test_levels_that_contradict_the_segments_are_refused() -> None:
    for at, value in [
        (LEVEL_AT, 0),
        (LEVEL_AT, 2),
        (LEVEL_AT, 255),
        (240 + SECTION_AT, 1),
        (304 + SECTION_AT, 0),
    ]:
        frame = layered(SMALL, 1, [9] * 4)
        frame[at] = value
        with pytest.raises(InvalidFrameError) as caught:
            parse_header(resummed(frame))
        assert caught.value.field == ("layout" if at == LEVEL_AT else "segments")


def test_levels_count_towards_the_limit_of_segments() -> None:
    levels = MAX_SEGMENTS // SMALL.segment_count
    FrameWriter(any_template(SMALL), np.empty(1 << 18, np.uint8), levels - 1)
    with pytest.raises(InvalidFrameError, match=r"^counts="):
        FrameWriter(any_template(SMALL), np.empty(1 << 18, np.uint8), levels)
