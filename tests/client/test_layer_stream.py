"""A LayerStream and servers that lie to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client.frames import Arrival, LayerStream, Range
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import DeadlineError, InvalidFrameError, KVStoreError

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


def test_many_threads_get_each_range_once() -> None:
    stream = stream_of([*HEADERS, *segments(*PLAN, cut=1)])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: taken(stream, number), range(4)))
    assert found == [b"aa", b"cc", b"bbb", b"ddd"]


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


@pytest.mark.parametrize("what", LIES)
def test_parts_that_lie_are_refused(what: str) -> None:
    stream = stream_of([*HEADERS, *LIES[what]])
    with pytest.raises(InvalidFrameError, match="offset="):
        taken(stream, 3)


@pytest.mark.parametrize(
    "header",
    [reply(0, 0, HEAD, 101), reply(0, 0, HEAD, 1 << 63), reply(0, 0, HEAD, 5), reply(0, 0, b"")],
)
def test_headers_of_frames_that_cannot_be_are_refused(header: Arrival) -> None:
    with pytest.raises(InvalidFrameError, match="frame_bytes="):
        list(LayerStream(iter([header]), limit_bytes=100).arriving())
