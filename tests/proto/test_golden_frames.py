from __future__ import annotations

import struct

import numpy as np
import pytest
from contracts.codec import same
from golden.samples import FOLDER, template, template_of, tensors, vectors

from kvstore.codecs.base import codec_by_id, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import transcode
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.frame import check_frame, parse_header, raw_frame_bytes
from kvstore.proto.types import Accuracy

GOLDEN = ["raw-r1.frame", "lossless-r1.frame", "lossless-r2.frame"]


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / name, np.uint8)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_hold_what_was_put_into_them(name: str) -> None:
    frame = golden(name)
    header = check_frame(frame, template().key)
    assert template_of(header) == template()
    assert (header.position, header.prefill_flops, header.flags) == (16, 1.5e9, 0)
    assert (header.accuracy, header.error_bound) == (Accuracy.exact, 0)
    assert header.frame_bytes == len(frame)
    out = empty_tensors(header.layout)
    codec = codec_by_id(header.codec_id)
    assert name == f"{codec.name}-r{header.codec_revision}.frame"
    assert header.codec_revision <= codec.revision
    codec.decode_into(header, frame, out)
    assert same(out, tensors())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames_are_those_of_the_format_page(name: str) -> None:
    frame = golden(name)
    kind = name.removesuffix(".frame").removesuffix("-r1").replace("-", "_")
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


def test_the_lossless_golden_frame_becomes_the_raw_one() -> None:
    out = np.full(raw_frame_bytes(template().layout), 0x5A, np.uint8)
    transcode(golden("lossless-r2.frame"), RawCodec(), out)
    assert np.array_equal(out, golden("raw-r1.frame"))


def test_the_golden_words_are_counted_as_the_format_page_says() -> None:
    frame = golden("raw-r1.frame")
    header = check_frame(frame)
    body = b"".join(header.segment(frame, index).tobytes() for index in range(2))
    assert struct.unpack("<1024H", body) == tuple(
        0x8000 * (i % 2) + 0x3F80 + 0x80 * (i % 5) + (37 * i) % 128 for i in range(1024)
    )
