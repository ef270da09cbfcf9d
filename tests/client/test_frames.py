"""Frames on their way: into tensors, in a file, in parts, by layer; late, out of order or wrong."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation
from helpers.bare_wire import reheaded
from helpers.prompts import SMALL, equal, frame_of, tensors_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.decode import Decoded, LayerReader, Reader, Wanted, fresh
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
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import parse_header
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout

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
    ours = direct_frame()
    ours.take(0, FRAME[:-1])
    with pytest.raises(ChunkCorruptError, match="did not arrive"):
        ours.check()


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


def strided(_: int, layout: KVLayout) -> ChunkTensors:
    """Room that is not in one piece."""
    return [
        [[np.empty((*part.shape, 2), part.dtype)[..., 0] for part in parts] for parts in layers]
        for layers in empty_tensors(layout)
    ]


def other_shape(_: int, layout: KVLayout) -> ChunkTensors:
    """Room for a chunk of another model."""
    return [layers[:1] for layers in empty_tensors(layout)]


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


def test_a_file_that_ends_early_or_cannot_be_read_is_an_error_of_the_store(
    file: OpenFile, frame: Bytes, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match="the file has"):
        FileFrame(file, OFFSET, file.size_bytes)
    header = parse_header(frame)
    os.ftruncate(file.descriptor, OFFSET + len(frame) - 10)
    ours = FileFrame(file, OFFSET, len(frame))
    with pytest.raises(TierUnavailableError, match="tier 'disk': its file ends at byte"):
        ours.decode_into(header, empty_tensors(header.layout))
    only_written = OpenFile(os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT), len(frame))
    with pytest.raises(TierUnavailableError, match=r"cannot be read: .*Bad file descriptor"):
        FileFrame(only_written, 0, len(frame))[:10]


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


PART_LIES: list[tuple[list[Arrival], str]] = [
    ([part(0, 0, 0, b"x")], "frame_bytes=0: over"),
    ([part(0, 101, 0, b"x")], "frame_bytes=101: over"),
    ([part(0, 1 << 63, 0, b"x")], "frame_bytes=9223372036854775808: over"),
    ([part(0, 10, 5, b"x")], "frame_bytes=10: must not change"),
    (
        [part(0, 10, 0, b"ab"), part(0, 10, 1 << 63, b"x")], "offset=9223372036854775808",
    ),
    ([part(0, 10, 0, b"ab"), part(0, 10, 3, b"x")], "offset=3: parts must follow"),
    ([part(0, 10, 0, b"ab"), part(0, 10, 1, b"x")], "offset=1: parts"),
    ([part(0, 10, 0, b"ab"), part(0, 11, 2, b"x")], "frame_bytes=11: must"),
    ([part(0, 3, 0, b"ab"), part(0, 3, 2, b"xy")], "offset=2: parts must"),
    ([part(0, 3, 0, b"ab"), part(0, 3, 2, b"")], "offset=2: parts must"),
    ([part(1, 3, 0, b"ab")], "offset=0: parts must"),
    ([part(0, 1, 0, b"a"), part(0, 1, 0, b"a")], "offset=0: parts must"),
    ([part(0, 2, 0, b"a"), part(1, 2, 0, b"a")], "offset=0"),
]  # fmt: skip


def test_parts_that_lie_are_refused() -> None:
    for parts, match in PART_LIES:
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
    with pytest.raises(InvalidFrameError, match="frames=2: 1 arrived"):
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

    stream = LayerStream(drawn(), limit_bytes=100, most=2)
    assert len(list(stream.arriving())) == 2
    stream.expect(PLAN)
    return stream


def taken(stream: LayerStream, number: int) -> bytes | None:
    wanted = PLAN[number]
    data = stream.take(wanted.chunk, wanted.start)
    return None if data is None else data.tobytes()


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_ranges_are_what_their_parts_add_up_to_whoever_asks_first(cut: int) -> None:
    stream = LayerStream(iter([*HEADERS, *segments(*PLAN, cut=cut)]), limit_bytes=11, most=2)
    opened = list(stream.arriving())
    assert [(one.index, one.tier, one.frame_bytes) for one in opened] == [
        (0, "cpu", 11), (1, "cpu", 11)
    ]  # fmt: skip
    assert bytes(opened[0].data[:]) == HEAD
    stream.expect(PLAN)
    assert [taken(stream, number) for number in (2, 0, 3, 1)] == [b"bbb", b"aa", b"ddd", b"cc"]


def test_what_is_passed_over_or_wanted_by_nobody_does_not_come() -> None:
    stream = stream_of([*HEADERS, *segments(PLAN[0], PLAN[2])])
    assert [taken(stream, number) for number in range(4)] == [b"aa", None, b"bbb", None]
    assert taken(stream_of(HEADERS), 3) is None
    assert list(LayerStream(iter([]), 100, 2).arriving()) == []
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


LIES: list[list[Arrival]] = [
    [reply(0, 7, b"x")],
    segments(PLAN[0], PLAN[0]),
    segments(PLAN[2], PLAN[1]),
    [reply(0, 8, b"b"), reply(0, 10, b"b")],
    [reply(0, 8, b"bb"), reply(0, 9, b"bb")],
    [reply(0, 8, b"b"), reply(1, 9, b"d")],
    [reply(0, 6, b"aab")],
    [reply(0, 6, b"")],
]


def test_segments_that_lie_are_refused() -> None:
    for lies in LIES:
        stream = stream_of([*HEADERS, *lies])
        with pytest.raises(InvalidFrameError, match="offset="):
            taken(stream, 3)


def test_headers_of_frames_that_cannot_be_are_refused() -> None:
    for size_bytes, head in ((101, HEAD), (1 << 63, HEAD), (5, HEAD), (11, b"")):
        replies = iter([reply(0, 0, head, size_bytes)])
        with pytest.raises(InvalidFrameError, match="frame_bytes="):
            list(LayerStream(replies, limit_bytes=100, most=2).arriving())


def test_headers_without_end_are_refused_past_the_chunks_requested() -> None:
    endless = (reply(index, 0, HEAD) for index in itertools.count())
    with pytest.raises(InvalidFrameError, match="index=2: 2 were requested"):
        list(LayerStream(endless, limit_bytes=100, most=2).arriving())


def test_a_header_of_which_too_little_came_is_refused_whatever_the_frame_s_size() -> None:
    (cut,) = LayerStream(iter([reply(0, 0, HEAD, 500)]), 500, 1).arriving()
    with pytest.raises(InvalidFrameError, match="frame=6: a frame has at least"):
        parse_header(cut.data)


KEYS = [ChunkKey(bytes(31) + bytes([number])) for number in range(6)]


@pytest.fixture
def reader(no_leaks: None) -> Iterator[Reader]:
    reader = Reader(2)
    yield reader
    reader.close()


def stays() -> None:
    """The memory was not reused."""


def was_reused() -> None:
    raise LeaseExpiredError("the chunk was replaced while it was read")


def arrived(index: int, frame: Bytes | None = None, confirm: Callable[[], None] = stays) -> Arrival:
    frame = frame_of(KEYS[index], SMALL) if frame is None else frame
    return Arrival(index, "cpu", len(frame), frame, confirm)


def flipped(index: int) -> Bytes:
    frame = frame_of(KEYS[index], SMALL)
    frame[-1] ^= 1
    return frame


def assert_right(found: list[Decoded], count: int) -> None:
    """Fail unless *found* are the tensors of the first *count* keys."""
    assert len(found) == count
    for key, one in zip(KEYS, found, strict=False):
        assert equal(one.tensors, tensors_of(key, SMALL, 16))


@pytest.mark.parametrize("error", [DeadlineError("late"), TierUnavailableError("server", "died")])
def test_what_came_in_time_is_kept_and_nothing_at_all_is_an_error(
    reader: Reader, session: Session, error: KVStoreError
) -> None:
    def arriving(count: int) -> Iterator[Arrival]:
        yield from map(arrived, range(count))
        raise error

    found, broken = reader.read(Wanted(session, KEYS), arriving(3))
    assert_right(found, 3)
    assert broken is None
    with pytest.raises(type(error)):
        reader.read(Wanted(session, KEYS), arriving(0))


def test_prefix_ends_at_a_gap_and_before_what_is_wrong_which_it_names(
    reader: Reader, session: Session
) -> None:
    wrongs = [
        flipped(2),
        frame_of(KEYS[3], SMALL),
        frame_of(KEYS[2], SMALL)[:1200],
        np.full(3000, 7, np.uint8),
        frame_of(KEYS[2], make_representation(layers=1)),
    ]
    newer = reheaded(frame_of(KEYS[2], SMALL), codec_id=99)  # which is not called wrong
    for wrong, named in [*((one, KEYS[2]) for one in wrongs), (newer, None)]:
        frames = [arrived(i, wrong if i == 2 else None) for i in range(6)]
        found, broken = reader.read(Wanted(session, KEYS), iter(frames))
        assert_right(found, 2)
        assert broken == named
    found, broken = reader.read(Wanted(session, KEYS), map(arrived, (0, 1, 3, 4)))
    assert_right(found, 2)
    assert broken is None


def test_prefix_ends_before_a_copy_that_is_less_accurate_than_was_asked_for(
    reader: Reader, session: Session
) -> None:
    stated = sorted(Accuracy, reverse=True)
    frames = [
        arrived(at, reheaded(frame_of(KEYS[at], SMALL), accuracy=one))
        for at, one in enumerate(stated)
    ]
    for count, least in enumerate(stated, 1):
        found, broken = reader.read(Wanted(session, KEYS, accuracy=least), iter(frames))
        assert_right(found, count)
        assert [one.header.stated.accuracy for one in found] == stated[:count]
        assert broken is None


def test_frames_that_nobody_asked_for_are_not_read(reader: Reader, session: Session) -> None:
    found, broken = reader.read(Wanted(session, KEYS[:2]), map(arrived, range(6)))
    assert_right(found, 2)
    assert broken is None
    with pytest.raises(InvalidFrameError, match="0 chunks were requested"):
        reader.read(Wanted(session, []), map(arrived, range(2)))


def test_memory_that_was_reused_says_nothing_of_the_chunk(reader: Reader, session: Session) -> None:
    for held in (None, np.zeros(2368, np.uint8), flipped(1)):
        frames = [arrived(0), arrived(1, held, was_reused)]
        with pytest.raises(LeaseExpiredError, match="replaced while it was read"):
            reader.read(Wanted(session, KEYS), iter(frames))


@pytest.mark.timeout(60)
def test_a_room_that_fails_in_an_unknown_way_ends_the_read_and_leaves_no_thread_waiting(
    session: Session,
) -> None:
    caller = threading.current_thread()

    def room(index: int, layout: KVLayout) -> object:
        if threading.current_thread() is caller:
            raise AttributeError("a mistake of the caller's")
        time.sleep(0.05)  # the caller takes what waits meanwhile
        return empty_tensors(layout)

    reader = Reader(3)
    with pytest.raises(AttributeError, match="mistake"):
        reader.read(Wanted(session, KEYS, room), iter([arrived(index) for index in range(6)]))
    reader.close()  # waits for its threads
    with pytest.raises(KVStoreError, match="the client is closed"):
        reader.read(Wanted(session, KEYS), map(arrived, range(6)))


@pytest.mark.parametrize("is_layered", [False, True], ids=["whole", "layers"])
def test_reads_that_wait_for_what_is_on_its_way_hold_no_thread_that_others_need(
    reader: Reader, session: Session, is_layered: bool
) -> None:
    frame, start = frame_of(KEYS[0], SMALL), parse_header(frame_of(KEYS[0], SMALL)).header_bytes
    is_here, waiting = threading.Event(), threading.Semaphore(0)

    def pieces() -> Iterator[Arrival]:
        yield reply(0, 0, frame[:start].tobytes(), len(frame))
        yield reply(0, start, frame[start : start + 1].tobytes(), len(frame))
        waiting.release()
        assert is_here.wait(60.0)  # the rest does not come

    def frames() -> Iterator[Arrival]:
        yield arrived(0)
        waiting.release()
        assert is_here.wait(60.0)
        yield arrived(1)

    def read() -> int:
        if not is_layered:
            return len(reader.read(Wanted(session, KEYS[:2]), frames())[0])
        stream = LayerStream(pieces(), len(frame), 1)
        return len(list(LayerReader(reader, Wanted(session, KEYS[:1])).layers(stream.arriving())))

    with ThreadPoolExecutor(reader.threads) as callers:
        calls = [callers.submit(read) for _ in range(reader.threads)]
        try:
            for _ in calls:
                assert waiting.acquire(timeout=60.0)
            others = [reader.submit(threading.current_thread) for _ in range(reader.threads)]
            assert all(one.result(10.0) for one in others)
        finally:
            is_here.set()
        assert [call.result() for call in calls] == [0 if is_layered else 2] * reader.threads


def test_threads_start_while_the_first_frame_is_on_its_way(
    reader: Reader, session: Session
) -> None:
    """Started behind it, a read of three chunks took twice as long."""
    before = set(threading.enumerate())

    def frames() -> Iterator[Arrival]:
        assert len(set(threading.enumerate()) - before) == min(reader.threads, 3) - 1
        yield from map(arrived, range(3))

    assert len(reader.read(Wanted(session, KEYS[:3]), frames())[0]) == 3
