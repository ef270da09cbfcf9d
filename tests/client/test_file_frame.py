"""Frames read straight out of a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation

from kvstore.client.file_frame import FileFrame, OpenFile
from kvstore.codecs.base import empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidRequestError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.frame import parse_header

OFFSET = 4096 + 64


@pytest.fixture(params=["small", "large"])
def frame(request: pytest.FixtureRequest) -> Bytes:
    """A frame that is read step by step, or by the loop where it is large."""
    if request.param == "small":
        return make_frame(1)[1]
    return make_frame(1, 256, representation=make_representation(3, 2, 128))[1]


@pytest.fixture
def file(tmp_path: Path, frame: Bytes) -> OpenFile:
    path = tmp_path / "extent"
    path.write_bytes(bytes(OFFSET) + frame.tobytes() + bytes(100))
    return OpenFile(os.open(path, os.O_RDWR), path.stat().st_size)


def test_it_is_sliced_like_the_bytes_it_stands_for(file: OpenFile, frame: Bytes) -> None:
    ours = FileFrame(file, OFFSET, len(frame))
    assert len(ours) == len(frame)
    for piece in (slice(None), slice(0, 10), slice(5, 5), slice(100, None), slice(0, 1 << 40)):
        assert np.array_equal(ours[piece], frame[piece])
    assert parse_header(ours).key == parse_header(frame).key


@pytest.mark.parametrize("strided", [False, True])
def test_layers_are_read_into_the_caller_s_tensors(
    file: OpenFile, frame: Bytes, strided: bool
) -> None:
    ours = FileFrame(file, OFFSET, len(frame))
    header = parse_header(ours)
    out = empty_tensors(header.layout)
    if strided:
        out = [
            [[np.empty((*p.shape, 2), p.dtype)[..., 0] for p in parts] for parts in layers]
            for layers in out
        ]
    ours.decode_into(header, out)
    wanted = RawCodec().views(header, frame)
    for layers, want_layers in zip(out, wanted, strict=True):
        for parts, want_parts in zip(layers, want_layers, strict=True):
            for part, want in zip(parts, want_parts, strict=True):
                assert np.array_equal(part, want)


def test_a_flipped_byte_is_found(file: OpenFile, frame: Bytes) -> None:
    header = parse_header(frame)
    at = int(header.segments[1]["offset"]) + 3
    os.pwrite(file.descriptor, bytes([frame[at] ^ 1]), OFFSET + at)
    ours = FileFrame(file, OFFSET, len(frame))
    with pytest.raises(ChunkCorruptError, match="layer 1 fails its checksum"):
        ours.decode_into(header, empty_tensors(header.layout))


def test_a_file_that_ends_early_is_an_error_of_the_store(file: OpenFile, frame: Bytes) -> None:
    header = parse_header(frame)
    os.ftruncate(file.descriptor, OFFSET + len(frame) - 10)
    ours = FileFrame(file, OFFSET, len(frame))
    with pytest.raises(TierUnavailableError, match="tier 'disk': its file ends at byte"):
        ours.decode_into(header, empty_tensors(header.layout))


def test_a_file_that_cannot_be_read_is_an_error_of_the_store(tmp_path: Path, frame: Bytes) -> None:
    only_written = OpenFile(os.open(tmp_path / "extent", os.O_WRONLY | os.O_CREAT), len(frame))
    with pytest.raises(TierUnavailableError, match=r"cannot be read: .*Bad file descriptor"):
        FileFrame(only_written, 0, len(frame))[:10]


def test_a_place_beyond_the_file_is_refused(file: OpenFile) -> None:
    with pytest.raises(InvalidRequestError, match="the file has"):
        FileFrame(file, OFFSET, file.size_bytes)


def test_a_file_closes_with_the_last_frame_that_reads_from_it(file: OpenFile, frame: Bytes) -> None:
    mine = OpenFile(os.dup(file.descriptor), file.size_bytes)
    descriptor = mine.descriptor
    ours = FileFrame(mine, OFFSET, len(frame))
    del mine
    assert np.array_equal(ours[:], frame)
    del ours
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_tensors_of_another_layout_are_refused(file: OpenFile, frame: Bytes) -> None:
    ours = FileFrame(file, OFFSET, len(frame))
    with pytest.raises(LayoutMismatchError):
        ours.decode_into(parse_header(ours), [])
