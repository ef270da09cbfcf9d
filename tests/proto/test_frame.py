from __future__ import annotations

import struct

import numpy as np
import pytest
from contracts.codec import (
    SMALL,
    encoded,
    filled,
    frame_of_bodies,
    peak_bytes,
    same,
)
from contracts.codec import template as any_template
from golden.samples import FOLDER, template, tensors, vectors
from golden.strategies import costs, small_layouts
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import transcode
from kvstore.codecs.zstd import ZstdCodec
from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FIXED_BYTES,
    MAX_COMPONENTS,
    MAX_FRAME_BYTES,
    FrameTemplate,
    FrameWriter,
    check_frame,
    header_bytes,
    pack_components,
    pack_header,
    parse_header,
    raw_frame_bytes,
    unpack_components,
    with_size,
)
from kvstore.proto.types import (
    ChainDigest,
    ChunkKey,
    Component,
    DType,
    Fidelity,
    KVLayout,
    LayerKind,
)

GOLDEN = ["raw-r1.frame", "zstd-r1.frame"]
HEADER_BYTES = header_bytes(SMALL)
SEGMENTS_AT = FIXED_BYTES + 48


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / name, np.uint8)


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


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_hold_what_was_put_into_them(name: str) -> None:
    frame = golden(name)
    header = check_frame(frame, template().key)
    assert FrameTemplate.of(header) == template()
    assert (header.position, header.prefill_flops, header.flags) == (16, 1.5e9, 0)
    assert (header.fidelity, header.error_bound, header.codec_revision) == (Fidelity.exact, 0, 1)
    assert header.frame_bytes == len(frame)
    out = empty_tensors(header.layout)
    codec = codec_by_id(header.codec_id)
    assert name.startswith(f"{codec.name}-r{codec.revision}")
    codec.decode_into(header, frame, out)
    assert same(out, tensors())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_are_those_of_the_format_page(name: str) -> None:
    frame, kind = golden(name), name.partition("-")[0]
    assert len(frame) == int(vectors()[f"{kind}_frame_bytes"])
    assert f"{checksum(frame):016x}" == vectors()[f"{kind}_frame_xxh3_64"]


def test_the_raw_golden_frame_is_written_again_byte_by_byte() -> None:
    frame = encoded_golden()
    assert np.array_equal(frame, golden("raw-r1.frame"))
    assert frame[: parse_header(frame).header_bytes].tobytes().hex() == vectors()["raw_header"]
    start = parse_header(frame).segment(frame, 0)[:16].tobytes()
    assert start.hex() == vectors()["raw_segment_0_start"]


def encoded_golden() -> Bytes:
    out = np.full(raw_frame_bytes(template().layout), 0x5A, np.uint8)
    assert RawCodec().encode(template(), tensors(), out).frame_bytes == len(out)
    return out


def test_the_zstd_golden_frame_becomes_the_raw_one() -> None:
    out = np.full(raw_frame_bytes(template().layout), 0x5A, np.uint8)
    transcode(golden("zstd-r1.frame"), RawCodec(), out)
    assert np.array_equal(out, golden("raw-r1.frame"))


def test_the_golden_words_are_counted_as_the_format_page_says() -> None:
    frame = golden("raw-r1.frame")
    header = check_frame(frame)
    body = b"".join(header.segment(frame, index).tobytes() for index in range(2))
    assert struct.unpack("<1024H", body) == tuple(
        0x8000 * (i % 2) + 0x3F80 + 0x80 * (i % 5) + (37 * i) % 128 for i in range(1024)
    )


FIELD_AT = {
    "version": (4, "<H"), "flags": (6, "<H"), "header_bytes": (8, "<I"),
    "component_count": (12, "<H"), "codec_id": (14, "<H"), "codec_revision": (16, "<H"),
    "fidelity": (18, "<B"), "segment_count": (20, "<I"), "frame_bytes": (24, "<Q"),
    "raw_bytes": (32, "<Q"), "tokens": (40, "<I"), "position": (44, "<I"), "key": (48, "32s"),
    "parent": (80, "16s"), "representation": (96, "16s"), "content": (112, "16s"),
    "prefill_flops": (128, "<d"), "error_bound": (136, "<d"),
}  # fmt: skip


def test_header_fields_lie_where_the_format_page_says() -> None:
    frame = encoded(ZstdCodec(), filled(SMALL), SMALL)
    header = parse_header(frame)
    found = {n: struct.unpack_from(f, frame.data, at)[0] for n, (at, f) in FIELD_AT.items()}
    layout = header.layout
    assert frame[:4].tobytes() == b"KVFR"
    assert found == {
        "version": 1, "flags": header.flags, "header_bytes": header.header_bytes,
        "component_count": 1, "codec_id": 1, "codec_revision": 1, "fidelity": 2,
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
    fidelity, bound = draw(st.sampled_from(Fidelity)), draw(costs)
    header = writer.finish(*ids, fidelity, bound)
    return template, bodies, (*ids, fidelity), out[: header.frame_bytes]


@given(written_frames())
def test_what_was_written_is_read_back(
    case: tuple[FrameTemplate, list[bytes], tuple[int, ...], Bytes],
) -> None:
    template, bodies, ids, frame = case
    header = check_frame(frame, template.key)
    assert FrameTemplate.of(header) == template
    assert (header.codec_id, header.codec_revision, header.fidelity) == ids
    assert [header.segment(frame, i).tobytes() for i in range(len(bodies))] == bodies
    assert pack_header(header) == frame[: header.header_bytes].tobytes()
    info = header.info()
    assert (info.key, info.parent, info.layout, info.codec_id, info.size_bytes) == (
        template.key, template.parent, template.layout, ids[0], len(frame),
    )  # fmt: skip
    assert (info.fidelity, info.prefill_flops) == (header.fidelity, template.prefill_flops)
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


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    for start in (b"", b"KVFR", b"KVFR\x01\0"):
        with pytest.raises(InvalidFrameError):
            parse_header(as_bytes(start + data))


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
    "fidelity 3": ({18: b"\x03"}, "flags"),
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
        {SEGMENTS_AT + 16: u64((1 << 64) - 64), ROW2 + 8: u64(HEADER_BYTES - 64)}, "segments",
    ),
    "stored_bytes one more": ({ROW2 + 16: u64(LAYER_BYTES + 1)}, "segments"),
}  # fmt: skip


@pytest.mark.parametrize(("edits", "field"), HOSTILE_HEADERS.values(), ids=list(HOSTILE_HEADERS))
def test_a_hostile_header_is_refused_without_allocation(
    edits: dict[int, bytes], field: str
) -> None:
    frame = resigned(encoded(RawCodec(), filled(SMALL), SMALL), edits)

    def refused() -> None:
        with pytest.raises(InvalidFrameError) as caught:
            parse_header(frame)
        assert caught.value.field == field

    assert peak_bytes(refused) < 1 << 18


def test_the_hostile_headers_fail_for_their_edits_alone() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    assert np.array_equal(resigned(frame, {}), frame)


def test_reserved_bytes_are_not_looked_at() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    for at in (19, 144, 183, 195, 228, 239, HEADER_BYTES - 1):
        assert check_frame(resigned(frame, {at: b"\x01"})).layout == SMALL


@pytest.mark.parametrize("size", [0, 1, 191, 192, HEADER_BYTES - 1])
def test_a_header_cut_short_is_refused(size: int) -> None:
    with pytest.raises(InvalidFrameError):
        parse_header(encoded(RawCodec(), filled(SMALL), SMALL)[:size])


def test_a_header_alone_can_be_parsed_and_the_missing_payload_is_found() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    assert parse_header(frame[:HEADER_BYTES]).frame_bytes == len(frame)
    with pytest.raises(ChunkCorruptError, match=f"{HEADER_BYTES} bytes of {len(frame)}"):
        check_frame(frame[:HEADER_BYTES])


def test_a_frame_in_anothers_place_is_refused_under_the_key_asked_for() -> None:
    frame = encoded(RawCodec(), filled(SMALL), SMALL)
    with pytest.raises(ChunkCorruptError, match="its place holds chunk 000102") as caught:
        check_frame(frame, ChunkKey(b"k" * 32))
    assert caught.value.key == b"k" * 32


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


def test_the_largest_tables_are_written_and_read() -> None:
    layout = big(MAX_COMPONENTS, components=MAX_COMPONENTS)
    frame = frame_of_bodies(RawCodec(), layout, [b""] * 4096)
    assert check_frame(frame).layout == layout


def test_a_frame_with_too_few_segments_is_not_finished() -> None:
    writer = FrameWriter(any_template(SMALL), np.zeros(4096, np.uint8))
    writer.reserve(10)
    writer.commit(10)
    with pytest.raises(InvalidFrameError, match="segments=1: commit all 2"):
        writer.finish(0, 1, Fidelity.exact)


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
    assert unpack_components(pack_components(layout)) == layout


@pytest.mark.parametrize("cut", [0, 1, 47, 49, 95])
def test_ragged_or_empty_component_tables_are_refused(cut: int) -> None:
    table = pack_components(KVLayout(SMALL.components * 2))
    with pytest.raises(InvalidFrameError, match="a row has 48 bytes"):
        unpack_components(table[:cut])


def test_component_tables_longer_than_any_header_holds_are_refused() -> None:
    row = pack_components(SMALL)
    assert len(unpack_components(row * MAX_COMPONENTS).components) == MAX_COMPONENTS
    with pytest.raises(InvalidFrameError, match="components"):
        unpack_components(row * (MAX_COMPONENTS + 1))


def test_an_info_under_another_codec_differs_in_codec_and_size_alone() -> None:
    info = parse_header(encoded(RawCodec(), filled(SMALL), SMALL)).info()
    other = with_size(info, 1, 777)
    assert (other.codec_id, other.size_bytes) == (1, 777)
    assert with_size(other, info.codec_id, info.size_bytes) == info
