"""The grpc transport: the contract, and how frames are put together from parts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from contracts.transport import TransportContract
from hypothesis import given
from hypothesis import strategies as st
from prompts import MEDIUM, assert_reads, store

from kvstore.client import Client
from kvstore.client.stream import StreamTransport
from kvstore.client.transport import Assembly
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidFrameError


class TestStreamTransport(TransportContract):
    transport = StreamTransport

    def test_frames_of_several_messages_come_back(self, connect: Callable[..., Client]) -> None:
        client = connect(MEDIUM, self.options(chunk_tokens=300))
        assert_reads(client, store(client, 1, 3))


def part(frame_bytes: int, offset: int, data: bytes) -> pb.FramePart:
    return pb.FramePart(frame_bytes=frame_bytes, offset=offset, data=data)


@given(
    frames=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4),
    cut=st.integers(min_value=1, max_value=20),
)
def test_frames_are_what_their_parts_add_up_to(frames: list[bytes], cut: int) -> None:
    assembly = Assembly(50)
    whole = []
    for frame in frames:
        for start in range(0, len(frame), cut):
            done = assembly.add(part(len(frame), start, frame[start : start + cut]))
            assert (done is not None) == (start + cut >= len(frame))
            if done is not None:
                whole.append(done)
    assert [frame.tobytes() for frame in whole] == frames
    assert not any(np.shares_memory(one, other) for one, other in pairwise(whole))


LIES: dict[str, tuple[list[pb.FramePart], str]] = {
    "no size": ([part(0, 0, b"x")], "frame_bytes=0: over the session's limit"),
    "a size over the limit": ([part(101, 0, b"x")], "frame_bytes=101: over the session's limit"),
    "a size of 2^63": ([part(1 << 63, 0, b"x")], "over the session's limit"),
    "a start in the middle": ([part(10, 5, b"x")], "offset=5: parts must follow each other"),
    "a gap": ([part(10, 0, b"ab"), part(10, 3, b"x")], "offset=3: parts must follow"),
    "an overlap": ([part(10, 0, b"ab"), part(10, 1, b"x")], "offset=1: parts must follow"),
    "too much": ([part(3, 0, b"ab"), part(3, 2, b"xy")], "offset=2: parts must follow"),
    "nothing": ([part(3, 0, b"ab"), part(3, 2, b"")], "offset=2: parts must follow"),
    "a part after the last": ([part(2, 0, b"ab"), part(2, 2, b"x")], "offset=2: parts must"),
}


@pytest.mark.parametrize("what", LIES)
def test_parts_that_lie_are_refused(what: str) -> None:
    parts, message = LIES[what]
    assembly = Assembly(100)
    for early in parts[:-1]:
        assembly.add(early)
    with pytest.raises(InvalidFrameError, match=message.replace("^", r"\^")):
        assembly.add(parts[-1])
