"""Layered put streams that lie, end early or come in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from bare_wire import Wire, reheaded, wire_to
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import SMALL, frame_of

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
)
from kvstore.proto.frame import FLAG_UNSUMMED, parse_header
from kvstore.proto.types import PutOutcome

STORED = bytes([PutOutcome.stored])


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


def piece(data: bytes, offset: int = 0, frame: int = 0, frame_bytes: int = 0) -> pb.PutRequest:
    return pb.PutRequest(
        layer_major=True, frame=frame, offset=offset, data=data, frame_bytes=frame_bytes
    )


def opening(frame: Bytes, number: int = 0) -> pb.PutRequest:
    """The message that begins a frame: its header, checksums still open."""
    size = parse_header(frame).header_bytes
    open_frame = reheaded(frame, flags=FLAG_UNSUMMED)
    return piece(open_frame[:size].tobytes(), 0, number, len(frame))


def segments(frame: Bytes, number: int = 0) -> list[pb.PutRequest]:
    header = parse_header(frame)
    return [
        piece(header.segment(frame, at).tobytes(), int(row["offset"]), number)
        for at, row in enumerate(header.segments)
    ]


def closing(frame: Bytes, number: int = 0) -> pb.PutRequest:
    return piece(frame[: parse_header(frame).header_bytes].tobytes(), 0, number)


def test_segments_of_several_frames_may_come_in_any_order(wire: Wire, server: LocalServer) -> None:
    frames = [frame_of(wire.key(seed), SMALL) for seed in (1, 2)]
    first, second = (segments(frame, number) for number, frame in enumerate(frames))
    reply = wire.put(
        opening(frames[0]), first[1], opening(frames[1], 1), second[1], second[0],
        closing(frames[1], 1), first[0], closing(frames[0]),
    )  # fmt: skip
    assert reply.outcomes == STORED * 2
    for seed, frame in zip((1, 2), frames, strict=True):
        held = server.node.store.tiers.cpu_tier.peek(wire.key(seed))
        assert held is not None
        assert held.tobytes() == frame.tobytes()


Stream = Callable[[Bytes], list[pb.PutRequest]]

BAD_STREAMS: dict[str, tuple[Stream, type[KVStoreError], str]] = {
    "the end before the last header": (
        lambda f: [opening(f), *segments(f)], InvalidFrameError, "frame=0: the stream ended before",
    ),
    "a segment missing": (
        lambda f: [opening(f), segments(f)[0], closing(f)], ChunkCorruptError, "fails its checksum",
    ),
    "a header whose checksums stay open": (
        lambda f: [opening(f), *segments(f), opening(f)], InvalidFrameError, "set by a newer",
    ),
    "another chunk's header at the end": (
        lambda f: [opening(f), *segments(f), closing(reheaded(f, key=bytes(32)))],
        ChunkCorruptError, "its place holds chunk",
    ),
    "other costs at the end": (
        lambda f: [opening(f), *segments(f), closing(reheaded(f, parent=bytes([7]) * 16))],
        InvalidRequestError, "its layout or parent is not what was reserved",
    ),
    "a header that needs no checksums": (
        lambda f: [closing(f)], InvalidFrameError, "data=320: begin with",
    ),
    "a frame of 2^63 bytes": (
        lambda f: [piece(opening(f).data, 0, 0, 1 << 63)], InvalidRequestError, "its header: 2368",
    ),
    "data beyond the frame's end": (
        lambda f: [opening(f), piece(b"xy", 2367)], InvalidFrameError, "data=2369: the frame has",
    ),
    "data at 2^63": (
        lambda f: [opening(f), piece(b"x", 1 << 63)], InvalidFrameError, "the frame has 2368",
    ),
    "data into the header": (
        lambda f: [opening(f), piece(b"x", 100)], InvalidFrameError, "offset=100: send segments",
    ),
    "a message without data": (
        lambda f: [opening(f), piece(b"", 320)], InvalidFrameError, "offset=320: send segments",
    ),
    "more after the last header": (
        lambda f: [opening(f), *segments(f), closing(f), segments(f)[0]],
        InvalidFrameError, "send segments, and the header last, once",
    ),
    "a frame that was not begun": (
        lambda f: [opening(f), piece(b"x", 320, 2)], InvalidRequestError, "frame=2: begin frames",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_STREAMS)
def test_a_stream_that_lies_is_refused_and_leaves_nothing(
    wire: Wire, server: LocalServer, what: str
) -> None:
    make, error, message = BAD_STREAMS[what]
    frame = frame_of(wire.key(), SMALL)
    with server.unchanged(), pytest.raises(error, match=message.replace("^", r"\^")):
        wire.put(*make(frame))
    good = [opening(frame), *segments(frame), closing(frame)]
    assert wire.put(*good).outcomes == STORED


def test_no_frame_of_a_stream_is_seen_when_one_is_not_whole(
    wire: Wire, server: LocalServer
) -> None:
    frames = [frame_of(wire.key(seed), SMALL) for seed in (1, 2)]
    whole = [opening(frames[0]), *segments(frames[0]), closing(frames[0])]
    with server.unchanged(), pytest.raises(InvalidFrameError, match="frame=1: the stream ended"):
        wire.put(*whole, opening(frames[1], 1))


def test_what_no_checksum_covers_is_not_what_lay_there_before(
    wire: Wire, server: LocalServer
) -> None:
    model = SMALL
    frame = frame_of(wire.key(), model)
    assert wire.put(opening(frame), *segments(frame), closing(frame)).outcomes == STORED
    held = server.node.store.tiers.cpu_tier.peek(wire.key())
    assert held is not None
    assert held.tobytes() == frame.tobytes()


def test_a_stream_that_stalls_holds_its_room_until_its_deadline_only(
    wire: Wire, server: LocalServer
) -> None:
    frame = frame_of(wire.key(), SMALL)
    halt = server.node.sessions

    def stalled() -> Iterator[pb.PutRequest]:
        message = opening(frame)
        message.session_id = wire.terms.session_id
        yield message
        assert eventually(lambda: server.usage().pending_puts == 1)
        assert len(halt) == 1

    with pytest.raises((DeadlineError, InvalidFrameError)):
        wire.connection.upload("Put", stalled(), DEADLINE_MS, pb.PutResponse)
    assert server.settled().pending_puts == 0
