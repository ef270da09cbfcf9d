from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contracts.codec import (
    SMALL,
    encoded,
    filled,
    frame_of_bodies,
)
from contracts.codec import template as any_template
from golden.samples import template_of
from golden.strategies import costs, small_layouts
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.codecs.lossless import LosslessCodec
from kvstore.codecs.raw import RawCodec, raw_header
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    MAX_COMPONENTS,
    MAX_FRAME_BYTES,
    FrameHeader,
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


FIELD_AT = {
    "version": (4, "<H"), "flags": (6, "<H"), "header_bytes": (8, "<I"),
    "component_count": (12, "<H"), "codec_id": (14, "<H"), "codec_revision": (16, "<H"),
    "accuracy": (18, "<B"), "segment_count": (20, "<I"), "frame_bytes": (24, "<Q"),
    "raw_bytes": (32, "<Q"), "tokens": (40, "<I"), "position": (44, "<I"), "key": (48, "32s"),
    "parent": (80, "16s"), "representation": (96, "16s"), "content": (112, "16s"),
    "prefill_flops": (128, "<d"), "error_bound": (136, "<d"),
}  # fmt: skip


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


@st.composite
def written_frames(draw: st.DrawFn) -> tuple[FrameTemplate, list[bytes], tuple[int, ...], Bytes]:
    layout = draw(small_layouts)
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
    sizes = draw(st.lists(st.integers(0, 200), min_size=layout.segment_count,
                          max_size=layout.segment_count))  # fmt: skip
    bodies = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    out = np.full(header_bytes(layout) + 264 * len(bodies), 0x5A, np.uint8)
    writer = FrameWriter(template, out)
    for body in bodies:
        writer.reserve(200)[: len(body)] = np.frombuffer(body, np.uint8)
        writer.commit(len(body))
    ids = (draw(st.integers(0, 65535)), draw(st.integers(0, 65535)))
    accuracy, bound = draw(st.sampled_from(Accuracy)), draw(costs)
    header = writer.finish(*ids, accuracy, bound)
    return template, bodies, (*ids, accuracy), out[: header.frame_bytes]


@given(written_frames())
def test_what_was_written_is_read_back(
    case: tuple[FrameTemplate, list[bytes], tuple[int, ...], Bytes],
) -> None:
    template, bodies, ids, frame = case
    header = check_frame(frame, template.key)
    assert template_of(header) == template
    assert (header.codec_id, header.codec_revision, header.accuracy) == ids
    assert [header.segment(frame, i).tobytes() for i in range(len(bodies))] == bodies
    assert pack_header(header) == frame[: header.header_bytes].tobytes()
    info = header.info()
    assert (info.key, info.parent, info.layout, info.codec_id, info.size_bytes) == (
        template.key, template.parent, template.layout, ids[0], len(frame),
    )  # fmt: skip
    assert (info.accuracy, info.prefill_flops) == (header.accuracy, template.prefill_flops)
    covered = np.zeros(len(frame), bool)
    covered[: header.header_bytes] = True
    for row in header.segments:
        assert row["offset"] % 64 == 0
        covered[int(row["offset"]) : int(row["offset"] + row["stored_bytes"])] = True
    assert not frame[~covered].any()


@given(written_frames(), st.data(), st.integers(1, 255))
def test_a_changed_byte_is_found_unless_it_lies_in_a_gap(
    case: tuple[FrameTemplate, list[bytes], tuple[int, ...], Bytes],
    data: st.DataObject,
    mask: int,
) -> None:
    frame = case[3]
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


def test_a_header_cut_short_is_refused() -> None:
    for size in [0, 1, 191, 192, HEADER_BYTES - 1]:
        with pytest.raises(InvalidFrameError):
            parse_header(encoded(RawCodec(), filled(SMALL), SMALL)[:size])


def test_a_header_alone_can_be_parsed_and_the_missing_payload_is_found() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    assert parse_header(frame[:HEADER_BYTES]).frame_bytes == len(frame)
    with pytest.raises(ChunkCorruptError, match=f"{HEADER_BYTES} bytes of {len(frame)}"):
        check_frame(frame[:HEADER_BYTES])


def test_a_frame_longer_than_its_header_says_is_refused() -> None:
    for size in [1, 8, 4096]:
        frame = encoded(RawCodec(), filled(SMALL), SMALL)
        longer = np.concatenate([frame, np.zeros(size, np.uint8)])
        with pytest.raises(ChunkCorruptError, match=f"{len(longer)} bytes of {len(frame)}"):
            check_frame(longer)


def test_a_frame_in_anothers_place_is_refused_under_the_key_asked_for() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    with pytest.raises(ChunkCorruptError, match="its place holds chunk 000102") as caught:
        check_frame(frame, ChunkKey(b"k" * 32))
    assert caught.value.key == b"k" * 32


def test_a_frame_whose_key_differs_in_any_byte_is_another_chunks() -> None:
    for at in range(32):
        frame = encoded(RawCodec(), filled(SMALL), SMALL)
        key = bytearray(parse_header(frame).key)
        key[at] ^= 1
        with pytest.raises(ChunkCorruptError, match="its place holds chunk"):
            check_frame(frame, ChunkKey(bytes(key)))


def test_segments_of_a_parsed_header_cannot_be_changed() -> None:
    segments = parse_header(encoded(RawCodec(), filled(SMALL), SMALL)).segments
    with pytest.raises(ValueError, match="read-only"):
        segments["offset"][0] = 1


def big(layers: int, head_dim: int = 8, components: int = 1) -> KVLayout:
    one = Component(LayerKind.mla, DType.uint8, layers, 1, head_dim, 16)
    return KVLayout((one,) * components)


@pytest.mark.parametrize(
    ("layout", "field"),
    [(big(4097), "counts"), (big(1, components=65), "counts"), (big(1, 1 << 23), ""),
     (big(2, (1 << 22) + 1, 8), "raw_bytes"), (big(9, 1 << 23), "raw_bytes")],
    ids=["layers", "components", "fits", "sum", "bytes"],
)  # fmt: skip
def test_what_no_reader_would_take_is_not_written(layout: KVLayout, field: str) -> None:
    if not field:
        FrameWriter(any_template(layout), np.empty(1024, np.uint8))
        return
    with pytest.raises(InvalidFrameError) as caught:
        FrameWriter(any_template(layout), np.empty(1024, np.uint8))
    assert caught.value.field == field


def test_a_frame_above_the_limit_is_not_finished() -> None:
    writer = FrameWriter(any_template(SMALL), np.empty(MAX_FRAME_BYTES + 4096, np.uint8))
    for size in (MAX_FRAME_BYTES - 4096, 4096):
        writer.reserve(size)
        writer.commit(size, segment_checksum=0)
    with pytest.raises(InvalidFrameError, match=r"^frame_bytes="):
        writer.finish(0, 1, Accuracy.exact)


def test_the_largest_tables_are_written_and_read() -> None:
    layout = big(MAX_COMPONENTS, components=MAX_COMPONENTS)
    frame = frame_of_bodies(RawCodec(), layout, [b""] * 4096)
    assert check_frame(frame).layout == layout


def test_a_frame_with_too_few_segments_is_not_finished() -> None:
    writer = FrameWriter(any_template(SMALL), np.zeros(4096, np.uint8))
    writer.reserve(10)
    writer.commit(10)
    with pytest.raises(InvalidFrameError, match="segments=1: commit all 2"):
        writer.finish(0, 1, Accuracy.exact)


def test_room_that_ends_too_early_is_refused_with_the_size_it_should_have() -> None:
    writer = FrameWriter(any_template(SMALL), np.zeros(HEADER_BYTES + 9, np.uint8))
    assert len(writer.reserve(9)) == 9
    with pytest.raises(InvalidFrameError, match=f"give {HEADER_BYTES + 10} bytes"):
        writer.reserve(10)


@given(small_layouts)
def test_the_size_of_a_raw_frame_is_known_before_it_is_written(layout: KVLayout) -> None:
    assert len(encoded(RawCodec(), filled(layout), layout)) == raw_frame_bytes(layout)


@given(small_layouts)
def test_component_tables_are_read_back(layout: KVLayout) -> None:
    assert unpack_table(pack_components(layout)) == (layout, None)


def test_ragged_or_empty_component_tables_are_refused() -> None:
    for cut in [0, 1, 47, 49, 95]:
        table = pack_components(KVLayout(SMALL.components * 2))
        with pytest.raises(InvalidFrameError, match="a row has 48 bytes"):
            unpack_table(table[:cut])


def test_component_tables_longer_than_any_header_holds_are_refused() -> None:
    row = pack_components(SMALL)
    assert len(unpack_table(row * MAX_COMPONENTS)[0].components) == MAX_COMPONENTS
    with pytest.raises(InvalidFrameError, match="components"):
        unpack_table(row * (MAX_COMPONENTS + 1))


# --- headers like one that was parsed


def heads_of(*headers: FrameHeader) -> NDArray[np.uint8]:
    return np.stack([as_bytes(pack_header(header)) for header in headers])


def some_header() -> FrameHeader:
    return raw_header(any_template(SMALL), range(SMALL.segment_count))


def test_headers_like_another_differ_in_what_is_a_frames_own() -> None:
    header = some_header()
    other = replace(
        header, key=ChunkKey(b"k" * 32), parent=ChainDigest(b"p" * 16), content=b"c" * 16,
        position=77, prefill_flops=1e12,
    )  # fmt: skip
    other = replace(other, segments=header.segments.copy())
    other.segments["checksum"] += 5
    heads = heads_of(header, other)
    is_alike, stated = like_header(heads[0], header, heads)
    assert is_alike.tolist() == [True, True]
    assert stated.tolist() == [one.segments["checksum"].tolist() for one in (header, other)]


def test_headers_of_another_shape_or_out_of_bounds_are_not_alike() -> None:
    changes: list[dict[str, Any]] = [
        {"representation": b"r" * 16}, {"codec_id": 3}, {"codec_revision": 9},
        {"accuracy": Accuracy.bounded}, {"flags": 0}, {"error_bound": 0.5}, {"asset": b"a" * 16},
        {"frame_bytes": 1 << 20}, {"prefill_flops": -1.0}, {"prefill_flops": math.inf},
        {"prefill_flops": math.nan},
    ]  # fmt: skip
    for change in changes:
        header = some_header()
        heads = heads_of(header, replace(header, **change))
        assert like_header(heads[0], header, heads)[0].tolist() == [True, False]


def test_headers_with_other_segments_are_not_alike() -> None:
    for field in ["component", "section", "layer", "offset", "stored_bytes"]:
        header = some_header()
        segments = header.segments.copy()
        segments[field][-1] += 1
        heads = heads_of(header, replace(header, segments=segments))
        assert like_header(heads[0], header, heads)[0].tolist() == [True, False]


def test_no_changed_byte_of_a_header_passes_for_alike() -> None:
    header = some_header()
    (head,) = heads_of(header)
    heads = np.repeat(head[None], len(head), 0)
    heads[np.arange(len(head)), np.arange(len(head))] ^= 1
    assert not like_header(head, header, heads)[0].any()
