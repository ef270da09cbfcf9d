from __future__ import annotations

import numpy as np
import pytest
from contracts.chunks import make_frame, make_representation
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, DeadlineError, InvalidFrameError
from kvstore.proto.frame import check_frame, header_bytes, parse_header
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkKey

INFO, FRAME = make_frame(1, 20, representation=make_representation(5, 2, 8))
OTHER, OTHER_FRAME = make_frame(2, 20, representation=make_representation(3, 2, 8))
HEADER_BYTES = header_bytes(INFO.layout)
_STEPS = st.lists(st.integers(0, len(FRAME)), max_size=9).map(sorted)


def verdict(frame: Bytes, key: ChunkKey, steps: list[int]) -> str:
    check = FrameVerifier(frame, key, HEADER_BYTES)
    for arrived in (*steps, len(frame)):
        check.update(arrived)
    try:
        header = check.finish()
    except (InvalidFrameError, ChunkCorruptError) as error:
        return str(error)
    return f"right {header.key.hex()}"


def whole_verdict(frame: Bytes, key: ChunkKey) -> str:
    try:
        return f"right {check_frame(frame, key).key.hex()}"
    except (InvalidFrameError, ChunkCorruptError) as error:
        return str(error)


@given(_STEPS, st.integers(0, len(FRAME) - 1), st.integers(1, 255))
def test_any_changed_byte_gets_the_verdict_of_the_whole_frame(
    steps: list[int], at: int, flip: int
) -> None:
    frame = FRAME.copy()
    frame[at] ^= flip
    ours, theirs = verdict(frame, INFO.key, steps), whole_verdict(frame, INFO.key)
    assert ours.startswith("right") == theirs.startswith("right")
    if at >= HEADER_BYTES:
        assert ours == theirs


def test_bytes_are_checked_as_they_were_when_they_came() -> None:
    frame = np.zeros_like(FRAME)
    check = FrameVerifier(frame, INFO.key, HEADER_BYTES)
    for stop in range(1_000, len(frame) + 1_000, 1_000):
        frame[stop - 1_000 : stop] = FRAME[stop - 1_000 : stop]
        check.update(min(stop, len(frame)))
    frame[HEADER_BYTES:] = 0
    assert check.finish().key == INFO.key


def test_what_its_caller_raises_as_bytes_arrive_ends_the_read() -> None:
    def arriving(size_bytes: int) -> None:
        if size_bytes > 100:
            raise DeadlineError(f"after {size_bytes} bytes")

    check = FrameVerifier(FRAME, INFO.key, HEADER_BYTES, arriving)
    check.update(100)
    with pytest.raises(DeadlineError, match="after 101 bytes"):
        check.update(101)


def test_a_frame_that_did_not_come_to_its_end_is_not_right() -> None:
    for arrived in [0, 100, HEADER_BYTES, len(FRAME) - 100]:
        check = FrameVerifier(FRAME, INFO.key, HEADER_BYTES)
        check.update(arrived)
        with pytest.raises(ChunkCorruptError, match=f"of {len(FRAME)}"):
            check.finish()


def test_another_frame_and_a_cut_one_are_not_right() -> None:
    for size in [len(OTHER_FRAME), len(FRAME), 50]:
        frame = np.zeros(size, np.uint8)
        frame[: min(size, len(OTHER_FRAME))] = OTHER_FRAME[:size]
        assert not verdict(frame, INFO.key, [size // 2]).startswith("right")
        assert not verdict(FRAME, OTHER.key, []).startswith("right")


def test_a_frame_longer_than_its_header_says_is_not_right() -> None:
    for more in [1, 8, 4096]:
        longer = np.concatenate([FRAME, np.zeros(more, np.uint8)])
        found = verdict(longer, INFO.key, [len(FRAME) // 2])
        assert found == whole_verdict(longer, INFO.key)
        assert f"{len(longer)} bytes of {len(FRAME)}" in found


def test_sums_that_a_reader_brings_along_get_the_verdict_that_ours_would() -> None:
    for limit in [1, 1 << 30]:
        for wrong in [None, 0, 3]:
            frame = FRAME.copy()
            if wrong is not None:
                frame[int(parse_header(FRAME).segments[wrong]["offset"])] ^= 1
            check = FrameVerifier(frame, INFO.key, HEADER_BYTES)
            told: list[tuple[int, int]] = []

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
                assert check.finish().key == INFO.key
                assert told[-1][1] == len(frame)
            else:
                with pytest.raises(ChunkCorruptError) as found:
                    check.finish()
                assert str(found.value) == whole_verdict(frame, INFO.key)


def test_sums_are_taken_of_no_frame_that_is_not_right_so_far() -> None:
    check = FrameVerifier(FRAME, OTHER.key, HEADER_BYTES)
    check.update(HEADER_BYTES)
    assert check.next_segments(HEADER_BYTES, 1 << 30) == []
