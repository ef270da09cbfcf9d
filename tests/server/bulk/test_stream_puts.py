"""Puts over a stream, by a writer with every message of its own making."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import ServerMaker
from contracts.bad_puts import BAD_PUTS, parts_of
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import MEDIUM, SMALL, assert_reads, frame_of, store
from helpers.stream_caller import StreamCaller
from helpers.stream_messages import finish, get, part, ready, stored

from kvstore.client import Client
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChainDigest, ChunkKey, Namespace, PutOutcome
from kvstore.server.bulk import service
from kvstore.server.security.audit_log import audit_files, read_chain

Terms = pb.OpenSessionResponse
GO_ON = ready(1)


def put_of(terms: Terms, **other: Any) -> pb.StreamMessage:
    asked = {"session_id": terms.session_id, "deadline_ms": DEADLINE_MS, **other}
    return pb.StreamMessage(request=1, put=pb.PutRequest(**asked))


def key_of(terms: Terms, seed: int = 1) -> ChunkKey:
    return chunk_key(Namespace(terms.key_namespace), ChainDigest(bytes([seed]) * 16))


def begin(writer: StreamCaller, terms: Terms, steps: int = 0) -> None:
    """Begin a put, and send the first *steps* parts of its frame."""
    writer.say(put_of(terms))
    assert writer.hear() == (GO_ON, b"")
    for word, data in parts_of(frame_of(key_of(terms), SMALL))[:steps]:
        writer.say(word, data)


def leaves(server: LocalServer, chunks: int) -> bool:
    usage = server.settled()
    cpu = usage.tiers[0][1]
    return (usage.open_puts, usage.pending_puts, cpu.reservations, cpu.chunks) == (0, 0, 0, chunks)


def test_the_audit_log_says_that_a_put_was_one_however_it_ended(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    server = make_server("--bulk", "127.0.0.1:0", "--audit-log", str(log), "--audit-reads")
    terms = open_session(server.dial())
    with closing(StreamCaller(terms)) as writer:
        begin(writer, terms, 3)
        writer.say(finish(1, 1))
        assert writer.hear()[0] == stored(1, bytes([PutOutcome.stored]))
        writer.say(put_of(terms, hints=pb.Hints(reuse=7)))  # type: ignore[arg-type]
        assert writer.is_refused("hints.reuse")
        begin(writer, terms)
        writer.say(*parts_of(frame_of(key_of(terms), SMALL))[1])
        assert writer.is_refused("offset")
    wanted = [("Put", "OK", 1), ("Put", "InvalidRequestError", 0), ("Put", "InvalidFrameError", 0)]
    assert eventually(lambda: told(log) == wanted), told(log)


def told(log: Path) -> list[tuple[object, ...]]:
    """Return what the audit log has of requests over streams."""
    lines = [line for line, _ in read_chain(audit_files(log))]
    ours = [line for line in lines if line.get("peer") == "stream:127.0.0.1"]
    return [(line["rpc"], line["outcome"], line.get("chunks", 0)) for line in ours]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_server_that_stops_in_the_midst_of_a_put_ends_it_and_is_clean(
    server: LocalServer, caller: StreamCaller, terms: Terms, steps: int
) -> None:
    begin(caller, terms, steps)
    if steps:
        assert eventually(lambda: server.usage().pending_puts == 1)
    with closing(StreamCaller(terms)) as idle:
        server.stop()
        assert idle.is_hung_up_on()
    with pytest.raises(KVStoreError):
        list(iter(caller.hear, None))
    assert eventually(lambda: server.usage().open_puts + server.usage().pending_puts == 0)


@pytest.mark.parametrize("cut", [700, 1 << 20])
def test_frames_are_stored_and_answered_for_one_by_one(
    server: LocalServer, caller: StreamCaller, terms: Terms, cut: int
) -> None:
    frames = [frame_of(key_of(terms, seed), SMALL) for seed in (1, 2, 1)]
    begin(caller, terms)
    for chunk, frame in enumerate(frames):
        for word, data in parts_of(frame, chunk=chunk, cut=cut):
            caller.say(word, data)
    caller.say(finish(1, 3))
    answer = caller.hear()[0].stored
    assert list(answer.outcomes) == [PutOutcome.stored, PutOutcome.stored, PutOutcome.exists]
    assert len(answer.reasons) == 3
    cpu = server.node.store.tiers.cpu_tier
    for frame, seed in zip(frames[:2], (1, 2), strict=True):
        out = frame * 0
        assert cpu.read(key_of(terms, seed), out)
        assert out.tobytes() == frame.tobytes()


def test_a_bad_put_is_refused_leaves_nothing_and_ends_its_stream_alone(
    server: LocalServer, client: Client, terms: Terms
) -> None:
    there = 0
    for seed, (what, (change, frames, message)) in enumerate(BAD_PUTS.items(), 1):
        with closing(StreamCaller(terms)) as writer:
            begin(writer, terms)
            for word, data in change(parts_of(frame_of(key_of(terms, seed), SMALL))):
                writer.say(word, data)
            writer.say(finish(1, frames))
            assert writer.is_refused(message)
            writer.wire.hang_up()
        there += what == "fewer frames than it says"
        assert leaves(server, there), what
        assert_reads(client, store(client, 70 + seed, 1))
        there += 1


def test_what_is_no_part_of_a_put_ends_it(server: LocalServer, terms: Terms) -> None:
    for word, message in (
        (finish(2, 0), "request=2"),
        (get(1, 1, bytes(16)), "kind='get'"),
        (part(1, 1000, 0), "InvalidFrameError"),
    ):
        with closing(StreamCaller(terms)) as writer:
            begin(writer, terms)
            writer.say(word)
            assert writer.is_refused(message)
            writer.wire.hang_up()
        assert leaves(server, 0)


def test_a_put_that_may_not_begin_is_refused_and_the_stream_goes_on(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    hints = pb.Hints(reuse=7)  # type: ignore[arg-type]
    caller.say(put_of(terms, session_id=1))
    assert caller.is_refused("UnauthenticatedError")
    caller.say(put_of(terms, hints=hints))
    assert caller.is_refused("hints.reuse")
    begin(caller, terms)
    caller.say(finish(1, 0))
    assert caller.hear() == (stored(1, b""), b"")
    server.node.store.writes.is_draining = True
    begin(caller, terms, 1)
    assert caller.is_refused("ShuttingDownError")
    caller.wire.hang_up()
    assert leaves(server, 0)


def test_a_writer_that_dies_leaves_nothing(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    begin(caller, terms, 2)
    assert eventually(lambda: server.usage().open_puts + server.usage().pending_puts > 0)
    caller.close()
    assert leaves(server, 0)
    streams = server.node.bulk
    assert streams is not None
    assert eventually(lambda: not streams._streams)


def test_a_writer_that_falls_silent_is_hung_up_on(
    server: LocalServer, caller: StreamCaller, terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_S", 0.2)
    monkeypatch.setattr(service, "REFUSED_S", 0.1)
    begin(caller, terms, 1)
    assert caller.is_refused("DeadlineError")
    assert caller.is_hung_up_on()
    assert leaves(server, 0)


def test_a_writer_that_goes_on_after_it_was_refused_is_cut_off(
    server: LocalServer, caller: StreamCaller, terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REFUSED_BYTES", 1 << 20)
    begin(caller, terms)
    wrong, payload = part(1, 1 << 30, 5), bytes(bulk.MAX_PAYLOAD_BYTES)
    with pytest.raises(KVStoreError):
        list(map(caller.say, [wrong] * 10_000, [payload] * 10_000))
    assert leaves(server, 0)


def test_the_end_of_a_session_ends_its_put_and_is_said(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    begin(caller, terms, 1)
    assert eventually(lambda: server.usage().pending_puts == 1)
    server.node.sessions.close(terms.session_id)
    caller.say(*parts_of(frame_of(key_of(terms), SMALL))[1])
    assert caller.is_refused("LeaseExpiredError")
    caller.wire.hang_up()
    assert leaves(server, 0)


def test_a_large_frame_that_is_there_is_skipped(server: LocalServer) -> None:
    terms = open_session(server.dial(), MEDIUM)
    frame = frame_of(key_of(terms), MEDIUM, 64)
    with closing(StreamCaller(terms)) as writer:
        for outcome in (PutOutcome.stored, PutOutcome.exists):
            begin(writer, terms)
            for word, data in parts_of(frame, cut=200_000):
                writer.say(word, data)
            writer.say(finish(1, 1))
            assert writer.hear() == (stored(1, bytes([outcome])), b"")
