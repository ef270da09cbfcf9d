"""Put streams whose lengths lie or that end early."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.bare_wire import Wire, wire_to
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, SMALL, frame_of

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
)
from kvstore.proto.types import PutOutcome

STORED, EXISTS = bytes([PutOutcome.stored]), bytes([PutOutcome.exists])


@pytest.fixture
def wire(server: LocalServer) -> Wire:
    return wire_to(server)


def first(frame: bytes, frame_bytes: int | None = None) -> pb.PutRequest:
    """Return the message that opens a frame."""
    size = len(frame) if frame_bytes is None else frame_bytes
    return pb.PutRequest(frame_bytes=size, data=frame)


Stream = Callable[[bytes], list[pb.PutRequest]]

BAD_STREAMS: dict[str, tuple[Stream, type[KVStoreError], str]] = {
    "frame of 2^63 bytes": (
        lambda f: [first(f, 1 << 63)], InvalidRequestError, f"frame_bytes={1 << 63}: its header",
    ),
    "frame of no bytes": (
        lambda f: [first(f, 0)], InvalidRequestError, "frame_bytes=0: give it with a frame's first",
    ),
    "one byte less than its header says": (
        lambda f: [first(f[:-1])], InvalidRequestError, "frame_bytes=2367: its header: 2368",
    ),
    "data beyond the frame's end": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest(data=f[1000:] + b"x")],
        InvalidFrameError, "data=2369: the frame has 2368 bytes",
    ),
    "data beyond the end at once": (
        lambda f: [first(f + b"x", len(f))], InvalidFrameError, "data=2369: the frame has 2368",
    ),
    "a message without data": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest()],
        InvalidFrameError, "data=1000: the frame has 2368 bytes",
    ),
    "the end inside the frame": (
        lambda f: [first(f[:1000], len(f))], InvalidFrameError,
        "frame=1000: the stream ended inside it",
    ),
    "the end inside the header": (
        lambda f: [first(f[:200], len(f))], InvalidFrameError, "header_bytes=.*: does not fit",
    ),
    "session that changes to an unknown one": (
        lambda f: [first(f[:1000], len(f)), pb.PutRequest(session_id=7, data=f[1000:])],
        LeaseExpiredError, "session_id=7: closed, expired",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_STREAMS)
def test_bad_stream_is_refused_and_leaves_nothing(
    server: LocalServer, wire: Wire, what: str
) -> None:
    stream, kind, message = BAD_STREAMS[what]
    frame = frame_of(wire.key(), SMALL).tobytes()
    assert len(frame) == 2368
    with server.unchanged(), pytest.raises(kind, match=message):
        wire.put(*stream(frame))


@pytest.mark.parametrize("what", BAD_STREAMS)
def test_lies_about_a_chunk_that_exists_are_refused_too(
    server: LocalServer, wire: Wire, what: str
) -> None:
    stream, kind, message = BAD_STREAMS[what]
    frame = frame_of(wire.key(), SMALL)
    assert wire.put_frame(frame).outcomes == STORED
    with server.unchanged(), pytest.raises(kind, match=message):
        wire.put(*stream(frame.tobytes()))


def test_frames_before_the_bad_one_stay_stored(server: LocalServer, wire: Wire) -> None:
    good, bad = (frame_of(wire.key(seed), SMALL).tobytes() for seed in (1, 2))
    with pytest.raises(InvalidFrameError, match="the stream ended inside it"):
        wire.put(first(good), first(bad[:1000], len(bad)))
    assert server.settled().tiers[0][1].chunks == 1
    assert wire.put(first(good), first(bad)).outcomes == EXISTS + STORED


def test_empty_stream_is_an_empty_answer(server: LocalServer, wire: Wire) -> None:
    with server.unchanged():
        assert wire.put().outcomes == b""


def test_frame_in_many_small_messages_is_stored(wire: Wire) -> None:
    frame = frame_of(wire.key(), SMALL).tobytes()
    rest = [pb.PutRequest(data=frame[at : at + 7]) for at in range(400, len(frame), 7)]
    assert wire.put(first(frame[:400], len(frame)), *rest).outcomes == STORED


def test_stream_that_is_cut_off_by_its_deadline_leaves_nothing(
    server: LocalServer, wire: Wire
) -> None:
    frame = frame_of(wire.key(), SMALL).tobytes()
    opened = first(frame[:1000], len(frame))
    opened.session_id = wire.terms.session_id
    released: list[bool] = []

    def stall() -> Iterator[pb.PutRequest]:
        yield opened
        begun = eventually(lambda: server.usage().pending_puts == 1)
        released.append(begun and eventually(lambda: server.usage().pending_puts == 0))

    with server.unchanged():
        with pytest.raises(DeadlineError):
            wire.connection.upload("Put", stall(), 3000, pb.PutResponse)
        assert eventually(lambda: released == [True])


def test_session_that_ends_during_a_put_takes_the_put_with_it(
    server: LocalServer, wire: Wire
) -> None:
    frame = frame_of(wire.key(), SMALL).tobytes()

    def close_midway() -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(
            session_id=wire.terms.session_id, frame_bytes=len(frame), data=frame[:1000]
        )
        assert eventually(lambda: server.usage().pending_puts == 1)
        wire.call("CloseSession", pb.CloseSessionRequest())
        yield pb.PutRequest(session_id=wire.terms.session_id, data=frame[1000:])

    with server.unchanged(), pytest.raises(LeaseExpiredError):
        wire.connection.upload("Put", close_midway(), DEADLINE_MS, pb.PutResponse)


def test_durable_stream_without_a_disk_is_refused_before_its_session_is_noted(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server("--tiers", "cpu")
    wire = wire_to(server)
    message = first(frame_of(wire.key(), SMALL).tobytes())
    message.durable = True
    session = server.node.sessions.by_id[wire.terms.session_id]
    heard_at = session.heard_at
    with (
        server.unchanged(),
        pytest.raises(InvalidRequestError, match="durable=True: start the server with a disk tier"),
    ):
        wire.put(message)
    assert session.heard_at == heard_at


def test_frame_larger_than_a_message_is_put_together_right(server: LocalServer) -> None:
    client = server.connect("grpc", MEDIUM)
    wire = Wire(server.dial(), pb.OpenSessionResponse(key_namespace=client.namespace))
    session = next(iter(server.node.sessions.by_id.values()))
    wire.terms.session_id = session.session_id
    frame = frame_of(wire.key(), MEDIUM, 512)
    assert len(frame) > 2 << 20
    assert wire.put_frame(frame).outcomes == STORED
    assert len(client.get_chunks([wire.key()])) == 1
