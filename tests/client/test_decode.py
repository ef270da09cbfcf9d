"""Frames that come late, out of order or wrong, and what is made of those before them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from contracts.chunks import make_representation
from helpers.bare_wire import reheaded
from helpers.prompts import SMALL, frame_of, tensors_of
from helpers.prompts import equal as equal_tensors

from kvstore.client.decode import Decoded, Reader, Wanted, given
from kvstore.client.frames import Arrival
from kvstore.client.session import Session
from kvstore.codecs.base import empty_tensors
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    LayoutMismatchError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout

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
        assert equal_tensors(one.tensors, tensors_of(key, SMALL, 16))


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


def test_prefix_ends_at_a_gap(reader: Reader, session: Session) -> None:
    found, broken = reader.read(Wanted(session, KEYS), map(arrived, (0, 1, 3, 4)))
    assert_right(found, 2)
    assert broken is None


def test_prefix_ends_before_what_is_wrong_and_names_it(reader: Reader, session: Session) -> None:
    for wrong in (
        flipped(2),
        frame_of(KEYS[3], SMALL),
        frame_of(KEYS[2], SMALL)[:1200],
        np.full(3000, 7, np.uint8),
        frame_of(KEYS[2], make_representation(layers=1)),
    ):
        frames = [arrived(i, wrong if i == 2 else None) for i in range(6)]
        found, broken = reader.read(Wanted(session, KEYS), iter(frames))
        assert_right(found, 2)
        assert broken == KEYS[2]


def test_prefix_ends_before_a_codec_of_the_future_which_is_not_called_wrong(
    reader: Reader, session: Session
) -> None:
    newer = reheaded(frame_of(KEYS[2], SMALL), codec_id=99)
    frames = (arrived(i, newer if i == 2 else None) for i in range(6))
    found, broken = reader.read(Wanted(session, KEYS), frames)
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
        assert [one.stated.accuracy for one in found] == stated[:count]
        assert broken is None


def test_frames_that_nobody_asked_for_are_not_read(reader: Reader, session: Session) -> None:
    found, broken = reader.read(Wanted(session, KEYS[:2]), map(arrived, range(6)))
    assert_right(found, 2)
    assert broken is None
    with pytest.raises(InvalidFrameError, match="0 chunks were asked for"):
        reader.read(Wanted(session, []), map(arrived, range(2)))


def test_memory_that_was_reused_says_nothing_of_the_chunk(reader: Reader, session: Session) -> None:
    for held in (None, np.zeros(2368, np.uint8), flipped(1)):
        frames = [arrived(0), arrived(1, held, was_reused)]
        with pytest.raises(LeaseExpiredError, match="replaced while it was read"):
            reader.read(Wanted(session, KEYS), iter(frames))


def test_room_of_another_layout_is_the_caller_s_error(reader: Reader, session: Session) -> None:
    room = [empty_tensors(KVLayout.of(SMALL, 16 + (i == 3))) for i in range(6)]
    with pytest.raises(LayoutMismatchError):
        reader.read(Wanted(session, KEYS, given(room)), map(arrived, range(6)))


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


def test_a_read_of_a_closed_reader_ends_and_leaves_no_thread_waiting(session: Session) -> None:
    reader = Reader(3)
    reader.close()
    with pytest.raises(KVStoreError, match="the client is closed"):
        reader.read(Wanted(session, KEYS), map(arrived, range(6)))


def test_any_number_of_threads_reads_the_same(session: Session) -> None:
    for threads in (1, 2, 5):
        with closing(Reader(threads)) as reader:
            found, broken = reader.read(Wanted(session, KEYS), map(arrived, range(6)))
            assert_right(found, 6)
            assert broken is None
            one = reader.read(Wanted(session, KEYS[:1]), iter([arrived(0, flipped(0))]))
            assert one == ([], KEYS[0])
