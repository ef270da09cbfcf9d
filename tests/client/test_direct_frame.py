"""Frames whose parts go straight into their reader's tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from bare_wire import reheaded
from contracts.chunks import make_frame
from hypothesis import given
from hypothesis import strategies as st
from local_server import LocalServer
from prompts import SMALL, equal, frame_of, tensors_of

from kvstore.client import ClientOptions
from kvstore.client.direct_frame import DirectFrame
from kvstore.client.reader import Room, decode, direct, fresh
from kvstore.client.session import Session
from kvstore.client.transport import Arrival
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError
from kvstore.proto.frame import parse_header
from kvstore.proto.types import ChunkKey, KVLayout

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


# --- which frames can be taken so


@pytest.fixture
def session(server: LocalServer) -> Iterator[Session]:
    session = Session(server.dial(), SMALL, ClientOptions())
    yield session
    session.close()


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
    ours = direct(session, [KEY], fresh, 0, len(frame), frame)
    assert ours is not None
    assert len(ours) == len(frame)
    feed(ours, frame, [700, 1100])
    found = decode(session, KEY, Arrival(0, "cpu", len(ours), ours), fresh)
    assert equal(found, tensors_of(KEY, SMALL, 16))


@pytest.mark.parametrize("room", [strided, other_shape])
def test_other_room_has_the_frame_come_whole(session: Session, room: Room) -> None:
    frame = frame_of(KEY, SMALL)
    assert direct(session, [KEY], room, 0, len(frame), frame) is None


@pytest.mark.parametrize("what", ["another key", "another codec", "another size", "half a header"])
def test_what_is_not_plainly_right_has_to_come_whole_and_is_judged_then(
    session: Session, what: str
) -> None:
    frame, size = frame_of(KEY, SMALL), len(frame_of(KEY, SMALL))
    if what == "another key":
        frame = frame_of(ChunkKey(bytes(31) + b"x"), SMALL)
    elif what == "another codec":
        frame = reheaded(frame, codec_id=1)
    elif what == "another size":
        size += 1
    else:
        frame = frame[:200]
    assert direct(session, [KEY], fresh, 0, size, frame) is None


def test_more_frames_than_were_asked_for_go_nowhere_of_the_readers(session: Session) -> None:
    frame = frame_of(KEY, SMALL)
    assert direct(session, [KEY], fresh, 1, len(frame), frame) is None
