"""The reader's side of a get: frames are what their parts add up to, lies are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.frame_parts import FrameAssembler, ReceivedFrame
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError

LIMIT_BYTES = 100


def room(chunk: int, size_bytes: int, start: Bytes) -> Bytes:
    return np.empty(size_bytes, np.uint8)


def reading() -> FrameAssembler:
    return FrameAssembler(LIMIT_BYTES, room)


def bytes_of(landed: ReceivedFrame) -> bytes:
    assert isinstance(landed.frame, np.ndarray)
    return landed.frame.tobytes()


def part(chunk: int, frame_bytes: int, offset: int) -> pb.StreamPart:
    return pb.StreamPart(index=chunk, frame_bytes=frame_bytes, offset=offset, tier="disk")


@given(
    frames=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5),
    cut=st.integers(1, 20),
    passed_by=st.sets(st.integers(0, 4)),
)
def test_frames_are_what_their_parts_add_up_to(
    frames: list[bytes], cut: int, passed_by: set[int]
) -> None:
    one = FrameAssembler(
        LIMIT_BYTES,
        lambda chunk, size, start: None if chunk in passed_by else room(chunk, size, start),
    )
    landed: list[ReceivedFrame] = []
    for number, frame in enumerate(frames):
        for start in range(0, len(frame), cut):
            data = as_bytes(frame[start : start + cut])
            whole = one.take(part(number, len(frame), start), data)
            if whole is not None:
                assert start + cut >= len(frame)
                landed.append(whole)
    one.end(len(frames))
    assert [(one.chunk, one.tier, bytes_of(one)) for one in landed] == [
        (number, "disk", frame) for number, frame in enumerate(frames) if number not in passed_by
    ]


LIES: dict[str, tuple[list[tuple[pb.StreamPart, bytes]], str]] = {
    "no size": ([(part(0, 0, 0), b"x")], "frame_bytes=0: over"),
    "over the limit": ([(part(0, 101, 0), b"x")], "frame_bytes=101: over"),
    "2^63 bytes": ([(part(0, 1 << 63, 0), b"x")], "frame_bytes=9223372036854775808: over"),
    "a start in the middle": ([(part(0, 10, 5), b"x")], "frame_bytes=10: must not change"),
    "an offset of 2^63": (
        [(part(0, 10, 0), b"ab"), (part(0, 10, 1 << 63), b"x")], "offset=9223372036854775808",
    ),
    "a gap": ([(part(0, 10, 0), b"ab"), (part(0, 10, 3), b"x")], "offset=3: parts must follow"),
    "an overlap": ([(part(0, 10, 0), b"ab"), (part(0, 10, 1), b"x")], "offset=1: parts"),
    "another size": ([(part(0, 10, 0), b"ab"), (part(0, 11, 2), b"x")], "frame_bytes=11: must"),
    "too much": ([(part(0, 3, 0), b"ab"), (part(0, 3, 2), b"xy")], "offset=2: parts must"),
    "nothing": ([(part(0, 3, 0), b"ab"), (part(0, 3, 2), b"")], "offset=2: parts must"),
    "the second frame first": ([(part(1, 3, 0), b"ab")], "offset=0: parts must"),
    "a frame twice": ([(part(0, 1, 0), b"a"), (part(0, 1, 0), b"a")], "offset=0: parts must"),
    "another frame inside one": ([(part(0, 2, 0), b"a"), (part(1, 2, 0), b"a")], "offset=0"),
}  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_parts_that_lie_are_refused(what: str) -> None:
    messages, match = LIES[what]
    one = reading()
    for sent, data in messages[:-1]:
        one.take(sent, as_bytes(data))
    with pytest.raises(InvalidFrameError, match=match.replace("^", r"\^")):
        one.take(messages[-1][0], as_bytes(messages[-1][1]))


def test_a_frame_that_was_begun_when_the_time_was_up_is_no_frame_and_no_error() -> None:
    one = reading()
    assert one.take(part(0, 1, 0), as_bytes(b"a")) is not None
    assert one.take(part(1, 2, 0), as_bytes(b"a")) is None
    one.end(1)
    with pytest.raises(InvalidFrameError, match="frames=2: 1 came"):
        one.end(2)
