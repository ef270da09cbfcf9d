"""The bulk channel as strangers see it: no token, garbage, floods, silence, parts out of order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from contracts.bad_puts import BAD_PUTS, parts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_server import DEADLINE_MS, LocalServer, eventually, open_session
from prompts import MEDIUM, SMALL, assert_reads, frame_of, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.credit import cost
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChainDigest, ChunkKey, Namespace, PutOutcome
from kvstore.server.bulk.bulk_work import GetWork
from kvstore.server.bulk.zmq_plane import PEERS_PER_SESSION

ServerMaker = Callable[..., LocalServer]
CREDIT_BYTES = 8 << 20


class Peer:
    """A process at the other end of the channel, with every message of its own making."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.link = context.socket(zmq.DEALER)
        self.link.linger = 0
        self.link.rcvtimeo = DEADLINE_MS
        self.link.connect(address)

    def say(self, word: bulk.Word, payload: bytes | None = None) -> None:
        self.shout(bulk.pack(word), *([] if payload is None else [payload]))

    def shout(self, *frames: bytes) -> None:
        self.link.send_multipart(frames)

    def hear(self) -> tuple[bulk.Word, bytes]:
        """Return the next message; zmq.Again says that none came."""
        header, *payload = self.link.recv_multipart()
        return bulk.unpack(header, len(payload[0]) if payload else None), b"".join(payload)

    def attach(self, terms: pb.OpenSessionResponse) -> None:
        self.say(bulk.Attach(0, terms.session_id, terms.attach_token))
        assert self.hear() == (bulk.Attached(0), b"")

    def is_refused(self, request: int, message: str) -> bool:
        """Whether the next message is the error of *request* that has *message* in it."""
        word, payload = self.hear()
        assert message in payload.decode(), payload
        return word == bulk.Failed(request)


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--zmq", "127.0.0.1:0")


@pytest.fixture
def connect(server: LocalServer) -> Iterator[Callable[[], Peer]]:
    """Connect peers to the server's channel."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[Peer] = []

    def connect() -> Peer:
        assert server.node.bulk is not None
        peers.append(Peer(context, server.node.bulk.address))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.link.close(0)
    context.term()


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


@pytest.fixture
def peer(connect: Callable[[], Peer], terms: pb.OpenSessionResponse) -> Peer:
    """A peer that said who it is."""
    one = connect()
    one.attach(terms)
    return one


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Another client of the server, which is to be served whatever the peer does."""
    return server.connect("zmq")


def get_word(terms: pb.OpenSessionResponse, request: int = 1, **other: int) -> bulk.Get:
    word = bulk.Get(request, terms.session_id, 0, CREDIT_BYTES, DEADLINE_MS, 0)
    return word._replace(**other)


def put_word(terms: pb.OpenSessionResponse, request: int = 1, **other: int) -> bulk.Put:
    return bulk.Put(request, terms.session_id, DEADLINE_MS, 0)._replace(**other)


def key_of(terms: pb.OpenSessionResponse, seed: int = 1) -> ChunkKey:
    return chunk_key(Namespace(terms.key_namespace), ChainDigest(bytes([seed]) * 16))


def digests_of(client: Client, seed: int, count: int) -> bytes:
    return b"".join(key[16:] for key in keys_of(client, seed, count))


# --- who is let in


def test_what_a_stranger_says_is_ignored_and_counted(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    stranger = connect()
    stranger.say(get_word(terms), bytes(16))
    stranger.say(put_word(terms))
    stranger.say(bulk.Credit(1, 5))
    assert eventually(lambda: server.counter("bulk_ignored_messages") == 3)
    stranger.attach(terms)  # the first that it hears


@pytest.mark.parametrize("what", ["token", "session"])
def test_a_wrong_token_or_session_is_refused(
    connect: Callable[[], Peer], terms: pb.OpenSessionResponse, what: str
) -> None:
    stranger = connect()
    if what == "token":
        stranger.say(bulk.Attach(0, terms.session_id, bytes(16)))
        assert stranger.is_refused(0, "UnauthenticatedError\0token: not this session's")
    else:
        stranger.say(bulk.Attach(0, terms.session_id ^ 1, terms.attach_token))
        assert stranger.is_refused(0, "LeaseExpiredError")


def test_a_peer_cannot_ask_for_another_session(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    other = open_session(server.dial())
    peer.say(get_word(other), bytes(16))
    assert peer.is_refused(1, "UnauthenticatedError")
    peer.say(put_word(other))
    assert peer.is_refused(1, "UnauthenticatedError")


def test_a_session_has_so_many_peers_and_no_more(
    connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    for _ in range(PEERS_PER_SESSION):
        connect().attach(terms)
    last = connect()
    last.say(bulk.Attach(0, terms.session_id, terms.attach_token))
    assert last.is_refused(0, "QuotaExceededError")


def test_the_end_of_a_session_ends_its_peers(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    server.node.sessions.close(terms.session_id)
    assert peer.is_refused(0, "LeaseExpiredError")
    peer.say(get_word(terms), bytes(16))
    assert eventually(lambda: server.counter("bulk_ignored_messages") == 1)


# --- what is no message


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=4))
def test_rubbish_is_counted_and_the_peer_goes_on(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse, frames: list[bytes]
) -> None:
    before = server.counter("bulk_invalid_messages")
    peer.shout(*frames)
    assert eventually(lambda: server.counter("bulk_invalid_messages") == before + 1)
    peer.say(get_word(terms), bytes(16))
    assert peer.hear() == (bulk.Done(1, 0), b"")


@pytest.mark.parametrize("word", [bulk.Attached(1), bulk.Done(1, 1), bulk.Failed(1)])
def test_the_server_s_own_words_are_refused(
    server: LocalServer, peer: Peer, word: bulk.Word
) -> None:
    peer.say(word, None if isinstance(word, bulk.Attached) else b"")
    assert eventually(lambda: server.counter("bulk_invalid_messages") == 1)


def test_a_message_over_the_limit_ends_the_connection_and_nobody_else_s(
    server: LocalServer, peer: Peer, client: Client
) -> None:
    peer.shout(bytes(4), bytes(bulk.MAX_WIRE_BYTES + 1))
    assert_reads(client, store(client, 1, 2))
    assert server.node.is_alive()


# --- gets


def test_frames_come_in_parts_and_end_with_their_number(
    client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    keys = store(client, 1, 2)
    peer.say(get_word(terms), b"".join(key[16:] for key in keys) + bytes(16))
    for number, key in enumerate(keys):
        frame = frame_of(key, SMALL).tobytes()
        word, payload = peer.hear()
        assert word == bulk.Part(1, len(frame), 0, number, bulk.tier_bytes("cpu"))
        # All but the chain of the chunk, which frame_of does not know, is the same.
        assert len(payload) == len(frame)
        assert payload[-1000:] == frame[-1000:]
    assert peer.hear() == (bulk.Done(1, 2), b"")


@pytest.mark.parametrize(
    ("changes", "digests", "message"),
    [
        ({"credit_bytes": 1 << 63}, bytes(16), "InvalidRequestError\0credit_bytes"),
        ({"deadline_ms": 1 << 31}, bytes(16), "InvalidRequestError\0deadline_ms"),
        ({"lease_id": 5}, bytes(16), "LeaseExpiredError"),
        ({"flags": 64}, bytes(16), "InvalidRequestError\0flags=64: this server knows 15"),
        ({}, bytes(15), "InvalidRequestError\0digests=15"),
        ({}, bytes(16 * 4097), "InvalidRequestError\0digests=4097: at most 4096"),
    ],
)
def test_a_get_that_makes_no_sense_is_refused_and_leaves_nothing(
    server: LocalServer,
    peer: Peer,
    terms: pb.OpenSessionResponse,
    changes: dict[str, int],
    digests: bytes,
    message: str,
) -> None:
    with server.unchanged():
        peer.say(get_word(terms, **changes), digests)
        assert peer.is_refused(1, message)


def test_a_reader_without_credit_gets_nothing_and_its_lease_ends_by_the_deadline(
    server: LocalServer, client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    store(client, 1, 3)
    peer.say(get_word(terms, credit_bytes=0, deadline_ms=200), digests_of(client, 1, 3))
    assert peer.hear() == (bulk.Done(1, 0), b"")
    assert server.settled().leases == 0


def test_credit_lets_the_frames_go_on(
    client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    keys = store(client, 1, 2)
    price = cost(len(frame_of(keys[0], SMALL)))
    peer.say(get_word(terms, credit_bytes=price), digests_of(client, 1, 2))
    assert isinstance(peer.hear()[0], bulk.Part)
    peer.link.rcvtimeo = 200
    with pytest.raises(zmq.Again):
        peer.hear()
    peer.link.rcvtimeo = DEADLINE_MS
    peer.say(bulk.Credit(1, price))
    assert isinstance(peer.hear()[0], bulk.Part)
    assert peer.hear() == (bulk.Done(1, 2), b"")


def test_credit_past_all_sense_ends_the_get(
    server: LocalServer, client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    store(client, 1, 2)
    peer.say(get_word(terms, credit_bytes=0), digests_of(client, 1, 2))
    peer.say(bulk.Credit(1, 1 << 63))
    assert peer.is_refused(1, "InvalidRequestError\0credit_bytes")
    assert server.settled().leases == 0


def test_a_get_that_is_cancelled_ends_at_once(
    server: LocalServer, client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    store(client, 1, 2)
    peer.say(get_word(terms, credit_bytes=0), digests_of(client, 1, 2))
    peer.say(bulk.Cancel(1))
    assert peer.hear() == (bulk.Done(1, 0), b"")
    assert server.settled().leases == 0


def test_a_flood_of_requests_is_refused_beyond_a_few(
    server: LocalServer, client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    store(client, 1, 1)
    for request in range(1, 101):
        peer.say(get_word(terms, request, credit_bytes=0), digests_of(client, 1, 1))
    for request in range(bulk.MAX_REQUESTS + 1, 101):
        assert peer.is_refused(request, "QuotaExceededError")
    assert_reads(client, keys_of(client, 1, 1))
    for request in range(1, bulk.MAX_REQUESTS + 1):
        peer.say(bulk.Cancel(request))
    ended = {peer.hear()[0].request for _ in range(bulk.MAX_REQUESTS)}
    assert ended == set(range(1, bulk.MAX_REQUESTS + 1))
    assert server.settled().leases == 0


def test_a_client_that_never_reads_costs_what_is_under_way_and_hinders_nobody(
    make_server: ServerMaker,
) -> None:
    server = make_server("--zmq", "127.0.0.1:0", "--cpu", "64MiB")
    wide = ClientOptions("zmq", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = server.connect("zmq", MEDIUM, wide)
    keys = store(client, 1, 8)
    session = client._connected().session.terms
    plane = server.node.bulk
    assert plane is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mute = context.socket(zmq.DEALER)
    mute.linger, mute.rcvhwm, mute.rcvbuf = 0, 1, 1 << 12
    mute.connect(plane.address)
    mute.send(bulk.pack(bulk.Attach(0, session.session_id, session.attach_token)))
    for request in range(1, 4):
        word = bulk.Get(request, session.session_id, 0, bulk.MAX_CREDIT_BYTES, 1500, 0)
        mute.send_multipart([bulk.pack(word), b"".join(key[16:] for key in keys)])

    def gets() -> list[GetWork]:
        return [get for one in list(plane._peers.values()) for get in list(one.gets.values())]

    assert eventually(lambda: len(gets()) == 3)
    outstanding = [get._outstanding_bytes for get in gets()]
    assert max(outstanding) <= bulk.MAX_CREDIT_BYTES + bulk.MAX_PAYLOAD_BYTES
    assert_reads(client, keys[:2])
    assert eventually(lambda: not gets())
    mute.close(0)
    context.term()
    assert server.settled().leases == 0


# --- puts


def test_frames_that_come_in_parts_are_stored(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    frame = frame_of(key_of(terms), SMALL)
    peer.say(put_word(terms))
    assert peer.hear() == (bulk.Credit(1, bulk.WINDOW_BYTES), b"")
    for word, data in [*parts_of(frame), *parts_of(frame, chunk=1)]:
        peer.say(word, data)
    peer.say(bulk.Finish(1, 2))
    outcomes = bytes([PutOutcome.stored, PutOutcome.exists])
    assert peer.hear() == (bulk.Done(1, 2), bulk.pack_outcomes(outcomes, ["", ""]))
    assert server.settled().tiers[0][1].chunks == 1


@pytest.mark.parametrize("what", BAD_PUTS)
def test_a_bad_put_is_refused_and_leaves_no_room_taken(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse, what: str
) -> None:
    change, frames, message = BAD_PUTS[what]
    frame = frame_of(key_of(terms), SMALL)
    peer.say(put_word(terms))
    peer.hear()
    for word, data in change(parts_of(frame)):
        peer.say(word, data)
    peer.say(bulk.Finish(1, frames))
    assert peer.is_refused(1, message)
    assert server.settled().open_puts == 0
    stored = 1 if what == "fewer frames than it says" else 0
    assert server.usage().tiers[0][1].chunks == stored


def test_parts_without_credit_end_the_put(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    peer.say(put_word(terms, deadline_ms=60_000))
    peer.hear()
    work = next(iter(server.node.bulk._peers.values())).puts[1]  # type: ignore[union-attr]
    work._window._under_way_bytes = 0
    peer.say(*parts_of(frame_of(key_of(terms), SMALL))[0])
    assert peer.is_refused(1, "InvalidRequestError\0credit=1000: wait for credit")
    assert server.settled().open_puts == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_writer_that_dies_leaves_nothing_after_its_deadline(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse, steps: int
) -> None:
    peer.say(put_word(terms, deadline_ms=300))
    peer.hear()
    for word, data in parts_of(frame_of(key_of(terms), SMALL))[:steps]:
        peer.say(word, data)
    peer.link.close(0)
    assert eventually(lambda: not any(p.puts for p in server.node.bulk._peers.values()))  # type: ignore[union-attr]
    usage = server.settled()
    assert (usage.open_puts, usage.pending_puts, usage.tiers[0][1].reservations) == (0, 0, 0)


def test_the_end_of_a_session_ends_its_put(
    server: LocalServer, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    peer.say(put_word(terms))
    peer.hear()
    peer.say(*parts_of(frame_of(key_of(terms), SMALL))[0])
    server.node.sessions.close(terms.session_id)
    assert server.settled().tiers[0][1].reservations == 0


# --- keys


@pytest.fixture
def open_server(make_server: ServerMaker, tmp_path: Path) -> LocalServer:
    """A server that other hosts could reach."""
    return make_server("--zmq", "0.0.0.0:0", "--zmq-keys", str(tmp_path / "keys"))


def test_beyond_the_loopback_bytes_are_encrypted(open_server: LocalServer) -> None:
    assert open_server.node.bulk is not None
    assert open_server.node.bulk.address.startswith("tcp://*:")
    options = ClientOptions("zmq", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    client = open_server.connect("zmq", MEDIUM, options)
    assert len(client._connected().session.terms.zmq_public_key) == 40
    keys = store(client, 1, 3)
    assert len(frame_of(keys[0], MEDIUM, 512)) > bulk.MAX_PAYLOAD_BYTES  # parts of full size too
    assert_reads(client, keys)


def test_a_peer_in_plain_text_is_not_let_in(open_server: LocalServer) -> None:
    terms = open_session(open_server.dial())
    assert open_server.node.bulk is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = Peer(context, open_server.node.bulk.address.replace("*", "127.0.0.1"))
    peer.link.rcvtimeo = 500
    peer.say(bulk.Attach(0, terms.session_id, terms.attach_token))
    with pytest.raises(zmq.Again):
        peer.hear()
    peer.link.close(0)
    context.term()
    assert not open_server.node.bulk._peers


# --- its own life


def test_an_address_that_is_taken_stops_the_start(
    server: LocalServer, make_server: ServerMaker
) -> None:
    assert server.node.bulk is not None
    taken = server.node.bulk.address.removeprefix("tcp://")
    flags = ("--zmq", taken, "--tiers", "cpu", "--socket", "off")
    with pytest.raises(InvalidRequestError, match=r"zmq='127\.0\.0\.1:[0-9]+': .*is it taken"):
        make_server(*flags)


def test_the_channel_goes_over_a_unix_socket_too(make_server: ServerMaker, tmp_path: Path) -> None:
    server = make_server("--zmq", f"ipc:{tmp_path / 'bulk.sock'}")
    client = server.connect("zmq")
    assert_reads(client, store(client, 1, 3))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_its_thread_fails_health(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = server.node.bulk
    assert plane is not None
    assert server.node.is_alive()

    def die() -> bool:
        raise MemoryError

    monkeypatch.setattr(plane, "_pump", die)
    assert eventually(lambda: not plane.is_alive())
    assert not server.node.is_alive()


def test_a_server_stops_soon_while_a_get_waits_for_credit(
    server: LocalServer, client: Client, peer: Peer, terms: pb.OpenSessionResponse
) -> None:
    store(client, 1, 1)
    peer.say(get_word(terms, credit_bytes=0, deadline_ms=600_000), digests_of(client, 1, 1))
    assert eventually(lambda: server.usage().leases == 1)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 60
