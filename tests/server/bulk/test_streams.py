"""Gets and puts over a stream, by a caller with every message of its own making."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from conftest import ServerMaker
from contracts.bad_puts import BAD_PUTS, parts_of
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import MEDIUM, SMALL, assert_reads, frame_of, store
from helpers.stream_messages import (
    SOON_S,
    StreamCaller,
    cancel,
    done,
    failed,
    finish,
    get,
    kind,
    part,
    ready,
    stored,
)

from kvstore.client import Client, ClientOptions
from kvstore.client.transports.grpc import StreamTransport
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError, QuotaExceededError, TierUnavailableError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChainDigest, ChunkKey, Namespace, PutOutcome
from kvstore.server.bulk import service, tcp_server, tcp_transfers
from kvstore.server.bulk.service import YIELD_WITHIN_S
from kvstore.server.bulk.tcp_transfers import FIRST_PART_BYTES


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def caller(terms: pb.OpenSessionResponse) -> Iterator[StreamCaller]:
    with closing(StreamCaller(terms)) as one:
        yield one


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Another client of the server, which is to be served whatever the caller does."""
    return server.connect("tcp")


# --- gets


Terms = pb.OpenSessionResponse


def get_of(terms: Terms, digests: bytes, request: int = 1, **other: Any) -> pb.StreamMessage:
    asked = {"session_id": terms.session_id, "deadline_ms": DEADLINE_MS, **other}
    return pb.StreamMessage(request=request, get=pb.GetRequest(digests=digests, **asked))


BAD_GETS: list[tuple[dict[str, Any], str]] = [
    ({"deadline_ms": 1 << 31}, "InvalidRequestError: deadline_ms"),
    ({"lease_id": 5}, "LeaseExpiredError"),
    ({"min_accuracy": 4}, "InvalidRequestError: min_accuracy=4: use 0 to 3"),
    ({"skip_rows": bytes(12)}, "InvalidRequestError: skip_rows"),
    ({"digests": bytes(15)}, "InvalidRequestError: digests=15"),
    ({"digests": bytes(16 * 4097)}, "InvalidRequestError: digests=4097: at most 4096"),
    ({"ranges": [pb.FrameRange(index=1, stop=9)]}, "InvalidRequestError: ranges"),
    ({"ranges": [pb.FrameRange(stop=9)] * 4097}, "ranges=4097: at most 4096"),
]


def test_a_get_that_makes_no_sense_is_refused_and_leaves_nothing(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    with server.unchanged():
        for changes, message in BAD_GETS:
            caller.send(get_of(terms, **{"digests": bytes(16), **changes}))
            assert caller.is_refused(message)
        caller.send(get_of(open_session(server.dial()), bytes(16)))
        assert caller.is_refused("UnauthenticatedError")
        caller.send(get_of(terms, bytes(16)))
        assert caller.receive() == (done(1, 0), b"")


@pytest.fixture
def wide(server: LocalServer) -> tuple[Terms, bytes]:
    """The terms of a session, and the names of 32 MiB of its chunks: more than sockets hold."""
    return wide_of(server)


def wide_of(server: LocalServer) -> tuple[Terms, bytes]:
    options = ClientOptions("grpc", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = server.connect("grpc", MEDIUM, options)
    keys = store(client, 1, 24)
    assert sum(len(frame_of(key, MEDIUM, 512)) for key in keys[:1]) > FIRST_PART_BYTES
    return open_session(server.dial(), MEDIUM), b"".join(key[16:] for key in keys)


def test_a_get_that_is_cancelled_ends_soon_and_the_stream_goes_on(
    server: LocalServer, wide: tuple[Terms, bytes]
) -> None:
    terms, digests = wide
    with closing(StreamCaller(terms)) as reader:
        reader.send(get_of(terms, digests))
        reader.send(cancel(1))
        while (reply := reader.receive()[0]).HasField("part"):
            continue
        assert kind(reply) == "done"
        assert reply.done < 24
        reader.send(cancel(1))  # of a get that has ended: it was on its way
        reader.send(get_of(terms, digests[:16], request=2))
        while (reply := reader.receive()[0]).HasField("part"):
            assert reply.request == 2
        assert reply == done(2, 1)
    assert server.settled().leases == 0


def test_who_says_anything_else_while_frames_come_is_hung_up_on(
    server: LocalServer, wide: tuple[Terms, bytes]
) -> None:
    terms, digests = wide
    for word in (cancel(2), ready(1), finish(1, 1)):
        with closing(StreamCaller(terms)) as reader:
            reader.send(get_of(terms, digests))
            reader.send(word)
            with suppress(TierUnavailableError):  # what the sockets hold comes before
                while (reply := reader.receive()[0]).HasField("part"):
                    continue
                pytest.fail(f"it was answered: {reply}")
        assert server.settled().leases == 0


def stall(reader: StreamCaller, server: LocalServer, ask: pb.StreamMessage) -> None:
    """Have *reader* begin a get, and wait until that holds a lease more and no thread."""
    streams, leases = server.streams, server.usage().leases
    reader.send(ask)
    assert eventually(lambda: server.usage().leases == leases + 1)
    assert eventually(lambda: streams._clients_served == 0)


def read_all(reader: StreamCaller) -> None:
    """Take the whole answer to a get of all that is ``wide``."""
    size_bytes = 0
    while (reply := reader.receive())[0].HasField("part"):
        size_bytes += len(reply[1])
    assert reply[0] == done(1, 24)
    assert size_bytes == 24 * len(frame_of(ChunkKey(bytes(32)), MEDIUM, 512))


def test_beside_64_readers_that_take_nothing_others_are_served_until_those_lose_their_streams(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transfers, "TAKES_S", 0.005)
    monkeypatch.setattr(bulk, "SILENCE_S", 20.0)
    own = ("--workers", "2", "--cpu", "64MiB", "--limits", "session_ttl_ms=600000")
    server = make_server("--bulk", "127.0.0.1:0", *own)
    terms, digests = wide_of(server)
    monkeypatch.setattr(StreamTransport, "read", None)
    monkeypatch.setattr(StreamTransport, "put", None)
    ours = [terms, *(open_session(server.dial(), MEDIUM) for _ in range(3))]
    other = server.connect("tcp")
    streams = server.streams
    with ExitStack() as stack:
        readers = []
        for reads in ours * 16:
            readers.append(stack.enter_context(closing(StreamCaller(reads))))
            stall(readers[-1], server, get_of(reads, digests, deadline_ms=600_000))
        service = streams.service
        idle_s = service.clock() - service._client_sent_at
        assert idle_s >= YIELD_WITHIN_S, "other servers need not yield to them"
        for seed in range(20):
            began = time.monotonic()
            assert_reads(other, store(other, seed, 2))
            assert time.monotonic() - began < DEADLINE_MS / 1000
        assert eventually(lambda: streams._clients_served == 0)  # the last answer is behind it
        assert server.usage().leases == 64
        server.skip(bulk.SILENCE_S + 1)
        assert eventually(lambda: len(streams._streams) == 1)
        assert server.usage().leases == 0
        for reader in readers:
            with pytest.raises(TierUnavailableError):
                read_all(reader)
    assert server.settled().leases == 0
    assert_reads(other, store(other, 30, 2))


def test_a_get_goes_on_and_another_ends_while_all_threads_of_clients_are_busy(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SILENCE_S", 60.0)
    server = make_server("--bulk", "127.0.0.1:0", "--workers", "1", "--cpu", "64MiB")
    terms, digests = wide_of(server)
    streams = server.streams
    go_on = threading.Event()
    with ExitStack() as stack:
        slow, late, busy = (stack.enter_context(closing(StreamCaller(terms))) for _ in range(3))
        stack.callback(go_on.set)
        stall(slow, server, get_of(terms, digests, deadline_ms=60_000))
        stall(late, server, get_of(terms, digests, deadline_ms=10_000))
        monkeypatch.setattr(streams.service, "get", lambda *_: go_on.wait(SOON_S) and None)
        busy.send(get_of(terms, digests))
        assert eventually(lambda: streams._clients_served == 1)
        with closing(StreamCaller(terms)) as another:
            another.send(get_of(terms, digests))
            assert another.is_hung_up_on(), "no thread is left for what begins"
        read_all(slow)
        assert eventually(lambda: server.usage().leases == 1)
        server.skip(11)
        assert eventually(lambda: len(streams._streams) == 2)
        assert server.usage().leases == 0
        assert streams._clients_served == 1
    assert server.settled().leases == 0


def test_of_too_many_readers_that_take_nothing_the_last_loses_its_stream(
    server: LocalServer, wide: tuple[Terms, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_WAITING_GETS", 2)
    terms, digests = wide
    streams = server.streams
    with ExitStack() as stack:
        for count in (1, 2, 2):
            reader = stack.enter_context(closing(StreamCaller(terms)))
            reader.send(get_of(terms, digests, deadline_ms=60_000))
            assert eventually(lambda: streams._clients_served == 0)
            # Each is seen before the next one comes.
            assert eventually(lambda: len(streams._streams) == count)  # noqa: B023
            assert eventually(lambda: server.usage().leases == count)  # noqa: B023
    assert server.settled().leases == 0


def test_the_server_s_own_words_and_lengths_over_the_limit_are_hung_up_on(terms: Terms) -> None:
    for word in (ready(1), done(1, 1), failed(1, "", "")):
        with closing(StreamCaller(terms)) as reader:
            reader.send(word)
            assert reader.is_hung_up_on()
    for lengths in (
        (bulk.MAGIC, bulk.MAX_HEADER_BYTES + 1, 0),
        (bulk.MAGIC, 0xFFFFFFFF, 0xFFFFFFFF),
        (bulk.MAGIC, 4, bulk.MAX_PAYLOAD_BYTES + 1),
        (b"KVS\x02", 4, 0),
    ):
        with closing(StreamCaller(terms)) as reader:
            reader.wire._link.sendall(bulk.LENGTHS.pack(*lengths))
            assert reader.is_hung_up_on()  # before anything more comes


def test_beyond_the_loopback_bytes_are_encrypted(make_server: ServerMaker) -> None:
    server = make_server("--bulk", "0.0.0.0:0")
    options = ClientOptions("tcp", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = server.connect("tcp", MEDIUM, options)
    terms = client._link.connected().session.terms
    assert terms.bulk_address.startswith("tcp://*:")
    assert terms.bulk_certificate
    assert_reads(client, store(client, 1, 3))


def test_a_server_with_few_descriptors_has_few_streams(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.node.share_of", lambda share, taken, most: min(most, 20))
    server = make_server("--bulk", "127.0.0.1:0")
    terms = open_session(server.dial())
    callers = [StreamCaller(terms) for _ in range(10)]
    with pytest.raises(QuotaExceededError, match="client_streams=10"):
        StreamCaller(terms)
    for one in callers:
        one.close()


# --- puts

GO_ON = ready(1)


def put_of(terms: Terms, **other: Any) -> pb.StreamMessage:
    asked = {"session_id": terms.session_id, "deadline_ms": DEADLINE_MS, **other}
    return pb.StreamMessage(request=1, put=pb.PutRequest(**asked))


def key_of(terms: Terms, seed: int = 1) -> ChunkKey:
    return chunk_key(Namespace(terms.key_namespace), ChainDigest(bytes([seed]) * 16))


def begin(writer: StreamCaller, terms: Terms, steps: int = 0) -> None:
    """Begin a put, and send the first *steps* parts of its frame."""
    writer.send(put_of(terms))
    assert writer.receive() == (GO_ON, b"")
    for word, data in parts_of(frame_of(key_of(terms), SMALL))[:steps]:
        writer.send(word, data)


def leaves(server: LocalServer, chunks: int) -> bool:
    usage = server.settled()
    cpu = usage.tiers[0][1]
    return (usage.open_puts, usage.pending_puts, cpu.reservations, cpu.chunks) == (0, 0, 0, chunks)


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
        list(iter(caller.receive, None))
    assert eventually(lambda: server.usage().open_puts + server.usage().pending_puts == 0)


@pytest.mark.parametrize("cut", [700, 1 << 20])
def test_frames_are_stored_and_answered_for_one_by_one(
    server: LocalServer, caller: StreamCaller, terms: Terms, cut: int
) -> None:
    frames = [frame_of(key_of(terms, seed), SMALL) for seed in (1, 2, 1)]
    begin(caller, terms)
    for chunk, frame in enumerate(frames):
        for word, data in parts_of(frame, chunk=chunk, cut=cut):
            caller.send(word, data)
    caller.send(finish(1, 3))
    answer = caller.receive()[0].stored
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
                writer.send(word, data)
            writer.send(finish(1, frames))
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
            writer.send(word)
            assert writer.is_refused(message)
            writer.wire.hang_up()
        assert leaves(server, 0)


def test_a_put_that_may_not_begin_is_refused_and_the_stream_goes_on(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    hints = pb.Hints(reuse=7)  # type: ignore[arg-type]
    caller.send(put_of(terms, session_id=1))
    assert caller.is_refused("UnauthenticatedError")
    caller.send(put_of(terms, hints=hints))
    assert caller.is_refused("hints.reuse")
    begin(caller, terms)
    caller.send(finish(1, 0))
    assert caller.receive() == (stored(1, b""), b"")
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
    assert eventually(lambda: not server.streams._streams)


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
        list(map(caller.send, [wrong] * 10_000, [payload] * 10_000))
    assert leaves(server, 0)


def test_the_end_of_a_session_ends_its_put_and_is_said(
    server: LocalServer, caller: StreamCaller, terms: Terms
) -> None:
    begin(caller, terms, 1)
    assert eventually(lambda: server.usage().pending_puts == 1)
    server.node.sessions.close(terms.session_id)
    caller.send(*parts_of(frame_of(key_of(terms), SMALL))[1])
    assert caller.is_refused("LeaseExpiredError")
    caller.wire.hang_up()
    assert leaves(server, 0)
