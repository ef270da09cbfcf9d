"""Frames on their way: straight into tensors, in a file, in parts, layer by layer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation
from helpers.bare_wire import reheaded
from helpers.prompts import SMALL, equal, frame_of, tensors_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.decode import Wanted, fresh
from kvstore.client.frames import (
    Arrival,
    DirectFrame,
    FileFrame,
    FrameAssembler,
    LayerStream,
    OpenFile,
    Range,
)
from kvstore.client.session import Session
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.frame import parse_header
from kvstore.proto.types import ChunkKey, KVLayout

# --- straight into tensors

FRAME = make_frame(1)[1]
HEADER = parse_header(FRAME)
KEY = ChunkKey(bytes(32))


def direct_frame() -> DirectFrame:
    head = FRAME[: HEADER.header_bytes]
    return DirectFrame(HEADER, head, empty_tensors(HEADER.layout))


def feed(ours: DirectFrame, frame: Bytes, cuts: list[int]) -> None:
    """Give *frame* in parts that end at *cuts*, each in memory that is overwritten after."""
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(frame)), len(frame)]
    for start, end in zip([0, *ends], ends, strict=False):
        part = frame[start:end].copy()
        ours.take(start, part)
        part[:] = 0xEE


CUTS = st.lists(st.integers(1, len(FRAME) - 1), unique=True, max_size=12)


@given(cuts=CUTS)
def test_tensors_are_what_the_parts_add_up_to_wherever_they_are_cut(cuts: list[int]) -> None:
    ours = direct_frame()
    feed(ours, FRAME, cuts)
    ours.check()
    assert equal(ours.tensors, RawCodec().views(HEADER, FRAME))


@given(cuts=CUTS, data=st.data())
def test_a_flipped_bit_of_any_layer_is_found(cuts: list[int], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(HEADER.segments.tolist()))
    *_, start, size, _ = row
    wrong = FRAME.copy()
    wrong[data.draw(st.integers(start, start + size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    ours = direct_frame()
    feed(ours, wrong, cuts)
    with pytest.raises(ChunkCorruptError, match="checksum"):
        ours.check()


def test_a_frame_whose_last_byte_did_not_come_is_not_right() -> None:
    ours = direct_frame()
    ours.take(0, FRAME[:-1])
    with pytest.raises(ChunkCorruptError, match="did not come"):
        ours.check()


def strided(_: int, layout: KVLayout) -> ChunkTensors:
    """Room that is not in one piece."""
    return [
        [[np.empty((*part.shape, 2), part.dtype)[..., 0] for part in parts] for parts in layers]
        for layers in empty_tensors(layout)
    ]


def other_shape(_: int, layout: KVLayout) -> ChunkTensors:
    """Room for a chunk of another model."""
    return [layers[:1] for layers in empty_tensors(layout)]


def test_a_raw_frame_is_taken_and_comes_out_of_decode(session: Session) -> None:
    frame = frame_of(KEY, SMALL)
    ours = Wanted(session, [KEY]).direct(0, len(frame), frame)
    assert ours is not None
    assert len(ours) == len(frame)
    feed(ours, frame, [700, 1100])
    found = Wanted(session, [KEY]).decode(Arrival(0, "cpu", len(ours), ours))
    assert equal(found.tensors, tensors_of(KEY, SMALL, 16))


def test_what_is_not_plainly_right_has_to_come_whole_and_is_judged_then(session: Session) -> None:
    frame = frame_of(KEY, SMALL)
    for room in (strided, other_shape):
        assert Wanted(session, [KEY], room).direct(0, len(frame), frame) is None
    wanted = Wanted(session, [KEY])
    for start, size in (
        (frame_of(ChunkKey(bytes(31) + b"x"), SMALL), len(frame)),
        (reheaded(frame, codec_id=1), len(frame)),
        (frame, len(frame) + 1),
        (frame[:200], len(frame)),
    ):
        assert wanted.direct(0, size, start) is None
    assert wanted.direct(1, len(frame), frame) is None, "nobody asked for a second one"


# --- in a file

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


def test_a_file_is_sliced_like_the_bytes_it_stands_for(file: OpenFile, frame: Bytes) -> None:
    ours = FileFrame(file, OFFSET, len(frame))
    assert len(ours) == len(frame)
    for piece in (slice(None), slice(0, 10), slice(5, 5), slice(100, None), slice(0, 1 << 40)):
        assert np.array_equal(ours[piece], frame[piece])
    assert parse_header(ours).key == parse_header(frame).key


@pytest.mark.parametrize("is_strided", [False, True])
def test_layers_are_read_into_the_caller_s_tensors(
    file: OpenFile, frame: Bytes, is_strided: bool
) -> None:
    ours = FileFrame(file, OFFSET, len(frame))
    header = parse_header(ours)
    out = (strided if is_strided else fresh)(0, header.layout)
    ours.decode_into(header, out)
    assert equal(out, RawCodec().views(header, frame))


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


# --- in parts

LIMIT_BYTES = 100


def part(chunk: int, frame_bytes: int, offset: int, data: bytes) -> Arrival:
    return Arrival(chunk, "disk", frame_bytes, as_bytes(data), offset=offset)


@given(
    frames=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5),
    cut_bytes=st.integers(1, 20),
)
def test_frames_are_what_their_parts_add_up_to(frames: list[bytes], cut_bytes: int) -> None:
    assembler = FrameAssembler(LIMIT_BYTES)
    parts = (
        part(number, len(frame), start, frame[start : start + cut_bytes])
        for number, frame in enumerate(frames)
        for start in range(0, len(frame), cut_bytes)
    )
    landed = list(assembler.frames(parts))
    assembler.end(len(frames))
    assert [(one.index, one.tier, one.frame_bytes, one.data.tobytes()) for one in landed] == [
        (number, "disk", len(frame), frame) for number, frame in enumerate(frames)
    ]


PART_LIES: dict[str, tuple[list[Arrival], str]] = {
    "no size": ([part(0, 0, 0, b"x")], "frame_bytes=0: over"),
    "over the limit": ([part(0, 101, 0, b"x")], "frame_bytes=101: over"),
    "2^63 bytes": ([part(0, 1 << 63, 0, b"x")], "frame_bytes=9223372036854775808: over"),
    "a start in the middle": ([part(0, 10, 5, b"x")], "frame_bytes=10: must not change"),
    "an offset of 2^63": (
        [part(0, 10, 0, b"ab"), part(0, 10, 1 << 63, b"x")], "offset=9223372036854775808",
    ),
    "a gap": ([part(0, 10, 0, b"ab"), part(0, 10, 3, b"x")], "offset=3: parts must follow"),
    "an overlap": ([part(0, 10, 0, b"ab"), part(0, 10, 1, b"x")], "offset=1: parts"),
    "another size": ([part(0, 10, 0, b"ab"), part(0, 11, 2, b"x")], "frame_bytes=11: must"),
    "too much": ([part(0, 3, 0, b"ab"), part(0, 3, 2, b"xy")], "offset=2: parts must"),
    "nothing": ([part(0, 3, 0, b"ab"), part(0, 3, 2, b"")], "offset=2: parts must"),
    "the second frame first": ([part(1, 3, 0, b"ab")], "offset=0: parts must"),
    "a frame twice": ([part(0, 1, 0, b"a"), part(0, 1, 0, b"a")], "offset=0: parts must"),
    "another frame inside one": ([part(0, 2, 0, b"a"), part(1, 2, 0, b"a")], "offset=0"),
}  # fmt: skip


def test_parts_that_lie_are_refused() -> None:
    for parts, match in PART_LIES.values():
        assembler = FrameAssembler(LIMIT_BYTES)
        for sent in parts[:-1]:
            assembler.take(sent)
        with pytest.raises(InvalidFrameError, match=match):
            assembler.take(parts[-1])


def test_a_frame_that_was_begun_when_the_time_was_up_is_no_frame_and_no_error() -> None:
    one = FrameAssembler(LIMIT_BYTES)
    assert one.take(part(0, 1, 0, b"a")) is not None
    assert one.take(part(1, 2, 0, b"a")) is None
    one.end(1)
    with pytest.raises(InvalidFrameError, match="frames=2: 1 came"):
        one.end(2)


HEAD = b"header"
FRAMES = [HEAD + b"aabbb", HEAD + b"ccddd"]
PLAN = [Range(0, 6, 8), Range(1, 6, 8), Range(0, 8, 11), Range(1, 8, 11)]


def reply(index: int, offset: int, data: bytes, frame_bytes: int = 11) -> Arrival:
    return Arrival(index, "cpu", frame_bytes, as_bytes(data), offset=offset)


HEADERS = [reply(0, 0, HEAD), reply(1, 0, HEAD)]


def segments(*plan: Range, cut: int = 100) -> list[Arrival]:
    return [
        reply(one.chunk, at, FRAMES[one.chunk][at : min(at + cut, one.stop)])
        for one in plan
        for at in range(one.start, one.stop, cut)
    ]


def stream_of(replies: Sequence[Arrival], error: KVStoreError | None = None) -> LayerStream:
    def drawn() -> Iterator[Arrival]:
        yield from replies
        if error is not None:
            raise error

    stream = LayerStream(drawn(), limit_bytes=100)
    assert len(list(stream.arriving())) == 2
    stream.expect(PLAN)
    return stream


def taken(stream: LayerStream, number: int) -> bytes | None:
    wanted = PLAN[number]
    data = stream.take(wanted.chunk, wanted.start)
    return None if data is None else data.tobytes()


def test_a_range_that_has_come_is_taken_while_another_thread_waits_for_the_next() -> None:
    goes_on, waits = threading.Event(), threading.Event()

    def drawn() -> Iterator[Arrival]:
        yield from [*HEADERS, *segments(*PLAN[:2])]
        waits.set()
        goes_on.wait()
        yield from segments(*PLAN[2:])

    stream = LayerStream(drawn(), limit_bytes=11)
    assert len(list(stream.arriving())) == 2
    stream.expect(PLAN)
    with ThreadPoolExecutor(2) as threads:
        last = threads.submit(taken, stream, 3)
        waits.wait()
        first = threads.submit(taken, stream, 0)
        try:
            assert first.result(timeout=10) == b"aa"
        finally:
            goes_on.set()
        assert last.result() == b"ddd"


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_ranges_are_what_their_parts_add_up_to_whoever_asks_first(cut: int) -> None:
    stream = LayerStream(iter([*HEADERS, *segments(*PLAN, cut=cut)]), limit_bytes=11)
    opened = list(stream.arriving())
    assert [(one.index, one.tier, one.frame_bytes) for one in opened] == [
        (0, "cpu", 11), (1, "cpu", 11)
    ]  # fmt: skip
    assert bytes(opened[0].data[:]) == HEAD
    stream.expect(PLAN)
    assert [taken(stream, number) for number in (2, 0, 3, 1)] == [b"bbb", b"aa", b"ddd", b"cc"]


def test_what_is_passed_over_does_not_come() -> None:
    stream = stream_of([*HEADERS, *segments(PLAN[0], PLAN[2])])
    assert [taken(stream, number) for number in range(4)] == [b"aa", None, b"bbb", None]
    assert taken(stream_of(HEADERS), 3) is None
    assert list(LayerStream(iter([]), 100).arriving()) == []


def test_what_nobody_wants_any_more_is_passed_by() -> None:
    stream = stream_of([*HEADERS, *segments(*PLAN)])
    stream.drop(1)
    assert [taken(stream, number) for number in (0, 1, 2)] == [b"aa", None, b"bbb"]
    assert stream._whole == {}


def test_an_error_reaches_whoever_waits() -> None:
    stream = stream_of([*HEADERS, *segments(PLAN[0])], DeadlineError("late"))
    assert taken(stream, 0) == b"aa"
    for number in (1, 2, 3):
        with pytest.raises(DeadlineError, match="late"):
            taken(stream, number)


LIES: dict[str, list[Arrival]] = {
    "a place that is no segment's": [reply(0, 7, b"x")],
    "a segment twice": segments(PLAN[0], PLAN[0]),
    "an earlier layer after a later one": segments(PLAN[2], PLAN[1]),
    "a gap": [reply(0, 8, b"b"), reply(0, 10, b"b")],
    "an overlap": [reply(0, 8, b"bb"), reply(0, 9, b"bb")],
    "another chunk inside a segment": [reply(0, 8, b"b"), reply(1, 9, b"d")],
    "too much": [reply(0, 6, b"aab")],
    "nothing": [reply(0, 6, b"")],
}


def test_segments_that_lie_are_refused() -> None:
    for lies in LIES.values():
        stream = stream_of([*HEADERS, *lies])
        with pytest.raises(InvalidFrameError, match="offset="):
            taken(stream, 3)


def test_headers_of_frames_that_cannot_be_are_refused() -> None:
    for size_bytes, head in ((101, HEAD), (1 << 63, HEAD), (5, HEAD), (11, b"")):
        replies = iter([reply(0, 0, head, size_bytes)])
        with pytest.raises(InvalidFrameError, match="frame_bytes="):
            list(LayerStream(replies, limit_bytes=100).arriving())
