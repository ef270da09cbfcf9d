"""Puts over a stream, by a writer with every message of its own making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from contracts.bad_puts import BAD_PUTS, parts_of
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import MEDIUM, SMALL, assert_reads, frame_of, store
from helpers.stream_caller import StreamCaller
from helpers.stream_messages import Sent, finish, get, part, ready, stored

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChainDigest, ChunkKey, Namespace, PutOutcome
from kvstore.server.bulk import service
from kvstore.server.security.audit_log import audit_files, read_chain

ServerMaker = Callable[..., LocalServer]
SOON_S = 20.0
GO_ON = ready(1)


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def writer(terms: pb.OpenSessionResponse) -> Iterator[StreamCaller]:
    with closing(StreamCaller(terms)) as one:
        yield one


def put_of(terms: pb.OpenSessionResponse, **other: Any) -> pb.StreamMessage:
    asked = {"session_id": terms.session_id, "deadline_ms": DEADLINE_MS, **other}
    return pb.StreamMessage(request=1, put=pb.PutRequest(**asked))


def key_of(terms: pb.OpenSessionResponse, seed: int = 1) -> ChunkKey:
    return chunk_key(Namespace(terms.key_namespace), ChainDigest(bytes([seed]) * 16))


def leaves_nothing(server: LocalServer) -> bool:
    usage = server.settled()
    cpu = usage.tiers[0][1]
    return (usage.open_puts, usage.pending_puts, cpu.reservations, cpu.chunks) == (0, 0, 0, 0)


def test_the_audit_log_says_that_a_put_was_one_however_it_ended(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    server = make_server("--bulk", "127.0.0.1:0", "--audit-log", str(log), "--audit-reads")
    terms = open_session(server.dial())
    parts = parts_of(frame_of(key_of(terms), SMALL))
    with closing(StreamCaller(terms)) as writer:
        writer.say(put_of(terms))
        writer.hear()
        for word, data in parts:
            writer.say(word, data)
        writer.say(finish(1, 1))
        assert writer.hear()[0] == stored(1, bytes([PutOutcome.stored]))
        writer.say(put_of(terms, hints=pb.Hints(reuse=7)))  # type: ignore[arg-type]
        assert writer.is_refused("hints.reuse")
        writer.say(put_of(terms))
        writer.hear()
        writer.say(*parts[1])
        assert writer.is_refused("offset")
    wanted = [("Put", "OK", 1), ("Put", "InvalidRequestError", 0), ("Put", "InvalidFrameError", 0)]
    assert eventually(lambda: told(log) == wanted), told(log)


def told(log: Path) -> list[tuple[object, ...]]:
    """Return what the audit log has of requests over streams."""
    lines = [line for line, _ in read_chain(audit_files(log))]
    ours = [line for line in lines if line.get("peer") == "stream:127.0.0.1"]
    return [(line["rpc"], line["outcome"], line.get("chunks", 0)) for line in ours]


def begin(writer: StreamCaller, terms: pb.OpenSessionResponse, steps: int) -> None:
    """Begin a put, and send the first *steps* parts of its frame."""
    writer.say(put_of(terms))
    writer.hear()
    for word, data in parts_of(frame_of(key_of(terms), SMALL))[:steps]:
        writer.say(word, data)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_server_that_stops_in_the_midst_of_a_put_ends_it_and_is_clean(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse, steps: int
) -> None:
    begin(writer, terms, steps)
    if steps:
        assert eventually(lambda: server.usage().pending_puts == 1)
    server.stop()
    with pytest.raises(KVStoreError):
        hear_for_ever(writer)
    assert eventually(lambda: server.usage().open_puts + server.usage().pending_puts == 0)


def hear_for_ever(writer: StreamCaller) -> None:
    while True:
        writer.hear()


@pytest.mark.parametrize("cut", [700, 2000, 1 << 20])
def test_frames_are_stored_and_answered_for_one_by_one(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse, cut: int
) -> None:
    frames = [frame_of(key_of(terms, seed), SMALL) for seed in (1, 2, 1)]
    writer.say(put_of(terms))
    assert writer.hear() == (GO_ON, b"")
    for chunk, frame in enumerate(frames):
        for word, data in parts_of(frame, chunk=chunk, cut=cut):
            writer.say(word, data)
    writer.say(finish(1, 3))
    answer = writer.hear()[0].stored
    assert list(answer.outcomes) == [PutOutcome.stored, PutOutcome.stored, PutOutcome.exists]
    assert len(answer.reasons) == 3
    cpu = server.node.store.tiers.cpu_tier
    for frame, seed in zip(frames[:2], (1, 2), strict=True):
        out = frame * 0
        assert cpu.read(key_of(terms, seed), out)
        assert out.tobytes() == frame.tobytes()


@pytest.mark.parametrize("what", BAD_PUTS)
def test_a_bad_put_is_refused_leaves_nothing_and_ends_its_stream_alone(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse, what: str
) -> None:
    other = server.connect("tcp")
    change, frames, message = BAD_PUTS[what]
    writer.say(put_of(terms))
    writer.hear()
    for word, data in change(parts_of(frame_of(key_of(terms), SMALL))):
        writer.say(word, data)
    writer.say(finish(1, frames))
    assert writer.is_refused(message)
    writer.wire.hang_up()
    if what == "fewer frames than it says":
        assert server.settled().tiers[0][1].chunks == 1
    else:
        assert leaves_nothing(server)
    assert_reads(other, store(other, 7, 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([(finish(2, 0), b"")], "request=2"),
        ([(get(1, 1, bytes(16)), b"")], "kind='get'"),
        ([(part(1, 1000, 0), b"")], "InvalidFrameError"),
    ],
)
def test_what_is_no_part_of_a_put_ends_it(
    server: LocalServer,
    writer: StreamCaller,
    terms: pb.OpenSessionResponse,
    words: list[Sent],
    message: str,
) -> None:
    writer.say(put_of(terms))
    writer.hear()
    for word, payload in words:
        writer.say(word, payload)
    assert writer.is_refused(message)
    writer.wire.hang_up()
    assert leaves_nothing(server)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"session_id": 1}, "UnauthenticatedError"),
        ({"hints": pb.Hints(reuse=7)}, "hints.reuse"),  # type: ignore[arg-type]
    ],
)
def test_a_put_that_may_not_begin_is_refused_and_the_stream_goes_on(
    server: LocalServer,
    writer: StreamCaller,
    terms: pb.OpenSessionResponse,
    other: dict[str, Any],
    message: str,
) -> None:
    writer.say(put_of(terms, **other))
    assert writer.is_refused(message)
    writer.say(put_of(terms))
    assert writer.hear() == (GO_ON, b"")
    writer.say(finish(1, 0))
    assert writer.hear() == (stored(1, b""), b"")
    assert leaves_nothing(server)


def test_a_drained_server_refuses_puts(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse
) -> None:
    server.node.store.writes.is_draining = True
    writer.say(put_of(terms))
    writer.hear()
    writer.say(*parts_of(frame_of(key_of(terms), SMALL))[0])
    assert writer.is_refused("ShuttingDownError")
    writer.wire.hang_up()
    assert leaves_nothing(server)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_writer_that_dies_leaves_nothing(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse, steps: int
) -> None:
    begin(writer, terms, steps)
    if steps:
        assert eventually(lambda: server.usage().open_puts + server.usage().pending_puts > 0)
    writer.close()
    assert leaves_nothing(server)
    assert server.node.bulk is not None
    streams = server.node.bulk
    assert eventually(lambda: not streams._streams)


def test_a_writer_that_falls_silent_is_hung_up_on(
    server: LocalServer,
    writer: StreamCaller,
    terms: pb.OpenSessionResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_S", 0.2)
    monkeypatch.setattr(service, "REFUSED_S", 0.1)
    writer.say(put_of(terms))
    writer.hear()
    writer.say(*parts_of(frame_of(key_of(terms), SMALL))[0])
    assert writer.is_refused("DeadlineError")
    assert writer.is_hung_up_on()
    assert leaves_nothing(server)


def test_a_writer_that_goes_on_after_it_was_refused_is_cut_off(
    server: LocalServer,
    writer: StreamCaller,
    terms: pb.OpenSessionResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "REFUSED_BYTES", 1 << 20)
    writer.say(put_of(terms))
    writer.hear()
    with pytest.raises(KVStoreError):
        say_for_ever(writer, part(1, 1 << 30, 5))
    assert leaves_nothing(server)


def say_for_ever(writer: StreamCaller, message: pb.StreamMessage) -> None:
    for _ in range(10_000):
        writer.say(message, bytes(bulk.MAX_PAYLOAD_BYTES))


def test_the_end_of_a_session_ends_its_put_and_is_said(
    server: LocalServer, writer: StreamCaller, terms: pb.OpenSessionResponse
) -> None:
    first, *rest = parts_of(frame_of(key_of(terms), SMALL))
    writer.say(put_of(terms))
    writer.hear()
    writer.say(*first)
    assert eventually(lambda: server.usage().pending_puts == 1)
    server.node.sessions.close(terms.session_id)
    writer.say(*rest[0])
    assert writer.is_refused("LeaseExpiredError")
    writer.wire.hang_up()
    assert leaves_nothing(server)


def test_a_large_frame_that_is_there_is_skipped(server: LocalServer) -> None:
    terms = open_session(server.dial(), MEDIUM)
    frame = frame_of(key_of(terms), MEDIUM, 64)
    with closing(StreamCaller(terms)) as writer:
        for outcome in (PutOutcome.stored, PutOutcome.exists):
            writer.say(put_of(terms))
            writer.hear()
            for word, data in parts_of(frame, cut=200_000):
                writer.say(word, data)
            writer.say(finish(1, 1))
            assert writer.hear() == (stored(1, bytes([outcome])), b"")
