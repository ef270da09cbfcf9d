"""A client reads what another server has from there: right or by way of its own server, and only
what it was let in for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_peer import FakePeer, other
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, assert_reads, keys_of, store
from helpers.stream_messages import attach, get
from simulation.clock import FakeClock

from kvstore.client import Client, ClientOptions
from kvstore.client.frames import FrameAssembler
from kvstore.client.options import TransportName
from kvstore.client.transports import peers
from kvstore.client.transports.peers import AGAIN_S, MAX_LENDERS, SILENCE_S, PeerReads
from kvstore.client.transports.shared_memory import ShmTransport
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import GUEST_S, guest_token
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    PermissionDeniedError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkKey, Namespace
from kvstore.server.bulk import tcp_server
from kvstore.server.cluster.peers import MAX_FAULTS

BOTH_WAYS = pytest.mark.parametrize("pair", ["plain", "tls"], indirect=True)
ServerMaker = Callable[..., LocalServer]
CHUNK_TOKENS = 64
CHUNKS = 4
SOON_S = 20.0


def client_of(server: LocalServer, transport: TransportName = "shm") -> Client:
    options = ClientOptions(transport, chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
    return server.connect(transport, MEDIUM, options)


def reads_of(client: Client) -> PeerReads:
    transport = client._link.connected()
    assert isinstance(transport, ShmTransport)
    return transport._peers


@dataclass(frozen=True)
class Pair:
    """Two nodes, of which the second reads from the first, and a client of each."""

    first: LocalServer
    second: LocalServer
    writer: Client
    reader: Client

    def find(self, keys: list[ChunkKey]) -> None:
        """Have the second know that the first has *keys*."""
        match = self.reader.lookup(keys=keys)
        assert (match.ready, set(match.tiers)) == (len(keys), {"peer"})

    def acquaint(self) -> None:
        """Have the reader connected to the first."""
        assert eventually(lambda: reads_of(self.reader).numbers() == [1])

    def lent(self) -> int:
        return self.second.counter("peer_lent_chunks")

    def loaded(self) -> int:
        """How many chunks the second read itself."""
        return self.second.counter("peer_read_chunks")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers wait for a machine that is busy."""
    monkeypatch.setattr(peers, "SILENCE_S", SOON_S)


@pytest.fixture
def pair(make_server: ServerMaker, request: pytest.FixtureRequest) -> Pair:
    """In plain text; where a test says so, over TLS."""
    is_encrypted = getattr(request, "param", "plain") == "tls"
    own = ("--tiers", "cpu", "--cpu", "32MiB", "--limits", "peer_timeout_ms=20000")
    channel = ("--bulk", "127.0.0.1:0") if not is_encrypted else ("--bulk", "0.0.0.0:0")
    first = make_server(*own, "--socket", "off", *channel, "--insecure")
    second = make_server(*own, "--peers", first.address)
    assert eventually(lambda: any(peer.is_up for peer in second.peer_tier.peers.known()))
    pair = Pair(first, second, client_of(first, "grpc"), client_of(second))
    pair.acquaint()
    return pair


@pytest.fixture
def keys(pair: Pair) -> list[ChunkKey]:
    """Chunks of the first node that the second knows of."""
    keys = store(pair.writer, 1, CHUNKS)
    pair.find(keys)
    return keys


# --- a client that reads


@BOTH_WAYS
def test_what_a_peer_has_comes_straight_from_it_and_the_own_server_reads_nothing(
    pair: Pair,
    keys: list[ChunkKey],
) -> None:
    assert_reads(pair.reader, keys)
    assert (pair.lent(), pair.loaded()) == (CHUNKS, 0)
    assert pair.first.counter("peer_served_chunks") == CHUNKS
    for server in (pair.first, pair.second):
        assert server.settled().held == 0


def test_under_a_lease_nothing_is_loaded_ahead_of_who_reads_it_there(pair: Pair) -> None:
    pair.reader.get_chunks(keys_of(pair.reader, 98, 1))  # says from whom it reads
    keys = store(pair.writer, 1, CHUNKS)
    with pair.reader.lease(keys=keys) as lease:
        assert len(lease.get()) == CHUNKS
    assert (pair.lent(), pair.loaded()) == (CHUNKS, 0)
    assert pair.second.counter("prefetched_chunks") == 0


def test_what_is_read_a_second_time_is_kept_by_the_own_server(
    pair: Pair, keys: list[ChunkKey]
) -> None:
    for _ in range(2):
        assert_reads(pair.reader, keys)
    assert eventually(lambda: set(pair.reader.lookup(keys=keys).tiers) == {"cpu"})
    assert_reads(pair.reader, keys)
    assert (pair.lent(), pair.loaded()) == (2 * CHUNKS, CHUNKS)


def test_what_the_peer_has_lost_meanwhile_ends_the_prefix(pair: Pair, keys: list[ChunkKey]) -> None:
    pair.writer.delete(keys=keys[2:])
    assert len(pair.reader.get_chunks(keys)) == 2
    assert reads_of(pair.reader).numbers() == [1], "it did as it was asked"


def test_what_the_peer_has_lost_and_the_own_server_has_comes_from_there(
    pair: Pair, keys: list[ChunkKey]
) -> None:
    store(pair.reader, 1, CHUNKS)
    pair.writer.delete(keys=keys[2:])
    assert_reads(pair.reader, keys)


def test_wrong_bytes_of_a_peer_are_a_miss_and_count_against_it(
    pair: Pair, keys: list[ChunkKey]
) -> None:
    frame = pair.first.node.store.tiers.cpu_tier.peek(keys[1])
    assert frame is not None
    frame.setflags(write=True)
    frame[-100] ^= 1
    assert len(pair.reader.get_chunks(keys)) == 1
    (peer,) = pair.second.peer_tier.peers.known()
    assert eventually(lambda: peer._faults == 1)
    del frame
    assert_reads(pair.reader, keys[:1])  # a second time: it is there when the peer is barred
    assert eventually(lambda: set(pair.reader.lookup(keys=keys[:1]).tiers) == {"cpu"})
    for _ in range(2 * MAX_FAULTS):
        pair.reader.lookup(keys=keys)
        assert len(pair.reader.get_chunks(keys)) == 1
    assert eventually(lambda: peer.is_barred)


def test_a_peer_that_hangs_is_left_alone_and_its_chunks_come_by_way_of_the_own_server(
    pair: Pair, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = reads_of(pair.reader).lenders[1].streams
    assert streams is not None
    for stream in streams.idle:
        stream._silence_s = SILENCE_S
    resumed = threading.Event()
    peer_server = pair.first.streams.service.peer_server
    parts = peer_server.parts

    def hang_once(*_: object) -> None:
        monkeypatch.setattr(peer_server, "parts", parts)
        resumed.wait(SOON_S)
        raise TierUnavailableError("peer", "gone")

    monkeypatch.setattr(peer_server, "parts", hang_once)
    started = time.monotonic()
    assert_reads(pair.reader, keys)
    assert time.monotonic() - started >= SILENCE_S
    resumed.set()
    assert reads_of(pair.reader).numbers() == []
    assert pair.loaded() == CHUNKS
    others = store(pair.writer, 2, 1)
    pair.find(others)
    assert_reads(pair.reader, others)
    assert reads_of(pair.reader).numbers() == [], f"for {AGAIN_S} s"


@BOTH_WAYS
def test_a_peer_that_hangs_up_in_the_midst_costs_nothing(
    pair: Pair, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_server = pair.first.streams.service.peer_server
    parts = peer_server.parts

    def two(*terms: object) -> Iterator[object]:
        monkeypatch.setattr(peer_server, "parts", parts)
        whole = parts(*terms)  # type: ignore[arg-type]
        yield next(whole)
        yield next(whole)
        raise OSError("the cable")

    monkeypatch.setattr(peer_server, "parts", two)
    assert_reads(pair.reader, keys)
    assert pair.lent() == CHUNKS


def test_leave_is_asked_for_anew_at_half_its_time(pair: Pair) -> None:
    reads = reads_of(pair.reader)
    before = reads.lenders[1]
    assert before.due_s - time.monotonic() > 0.4 * GUEST_S
    reads._clock = lambda: time.monotonic() + GUEST_S / 2
    reads.numbers()
    assert eventually(lambda: reads.lenders[1] is not before)
    assert eventually(lambda: reads.numbers() == [1])


def test_servers_past_the_limit_take_the_place_of_those_that_are_not_read_from() -> None:
    clock, lent = FakeClock(), list[int]()

    def call(method: str, request: pb.LendPeerRequest, *_: object) -> pb.LendPeerResponse:
        lent.append(request.number)
        return pb.LendPeerResponse(bulk_address=fake.dial("", "", 1.0).bulk_address, valid_ms=10**6)

    session: Any = SimpleNamespace(
        options=ClientOptions(),
        peers=range(MAX_LENDERS),
        namespace=bytes(16),
        terms=SimpleNamespace(session_id=1, max_frame_bytes=1),
        connection=SimpleNamespace(call=call),
    )
    with closing(FakePeer({})) as fake, closing(PeerReads(session, clock)) as reads:
        assert eventually(lambda: len(reads.numbers()) == MAX_LENDERS)
        for _ in range(3):
            reads.connect_to(range(40))
            assert len(reads.numbers()) == MAX_LENDERS
        assert sorted(lent) == list(range(MAX_LENDERS))
        clock.advance(AGAIN_S + 1)
        list(reads.read(0, 0, bytes(16), lambda *_: None, time.monotonic() + SOON_S))
        reads.connect_to([40])
        assert eventually(lambda: 40 in lent)
        assert {0, 40} <= set(reads.lenders)


def test_who_asks_for_a_server_that_is_not_known_or_is_down_hears_why(pair: Pair) -> None:
    session = pair.reader._link.connected().session
    ask = pb.LendPeerRequest(session_id=session.terms.session_id, number=7)
    with pytest.raises(InvalidRequestError, match="number"):
        session.connection.call("LendPeer", ask, DEADLINE_MS, pb.LendPeerResponse)
    (peer,) = pair.second.peer_tier.peers.known()
    peer.breaker.fail("a test")
    peer.breaker.fail("a test")
    peer.breaker.fail("a test")
    ask.number = 1
    with pytest.raises(TierUnavailableError, match="is down"):
        session.connection.call("LendPeer", ask, DEADLINE_MS, pb.LendPeerResponse)


def test_who_is_not_to_read_from_peers_does_not(pair: Pair, keys: list[ChunkKey]) -> None:
    options = ClientOptions(
        "shm", chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS, read_peers=False
    )
    reader = pair.second.connect("shm", MEDIUM, options)
    assert_reads(reader, keys)
    assert (pair.lent(), pair.loaded()) == (0, CHUNKS)
    assert reads_of(reader).lenders == {}


# --- a guest that asks for more


def lent_to(pair: Pair, space: Namespace) -> Entrance:
    (peer,) = pair.second.peer_tier.peers.known()
    lent = peer.grant_direct_reads(space)
    assert lent is not None
    guest = pb.StreamAttach(
        session_id=lent.session_id, token=lent.token, key_namespace=space, until_s=lent.until_s
    )
    return Entrance(lent.bulk_address, lent.bulk_certificate, guest)


def enter(lent: Entrance, guest: pb.StreamAttach | None = None) -> FrameStream:
    entrance = Entrance(lent.where, lent.certificate, guest or lent.attach)
    return FrameStream(entrance, SOON_S)


def frames_of(
    stream: FrameStream, lent: Entrance, keys: list[ChunkKey], **other: Any
) -> list[bytes]:
    """Return what is sent of *keys*. Raises the server's errors."""
    deadline = time.monotonic() + SOON_S
    reading = FrameAssembler(1 << 30)
    ask = get(0, lent.attach.session_id, b"".join(key[16:] for key in keys))
    ask.get.key_namespace = keys[0][:16]
    ask.get.deadline_ms = 20_000
    ask.get.MergeFrom(pb.GetRequest(**other))
    stream.begin(ask, deadline)
    return [frame.data.tobytes() for frame in reading.frames(stream.parts())]


@BOTH_WAYS
def test_a_guest_reads_its_namespace_and_no_other(pair: Pair) -> None:
    keys = store(pair.writer, 1, 2)
    space = Namespace(keys[0][:16])
    lent = lent_to(pair, space)
    with closing(enter(lent)) as stream:
        frames = frames_of(stream, lent, keys)
        for key, frame in zip(keys, frames, strict=True):
            assert check_frame(np.frombuffer(frame, np.uint8), key).key == key
        for form in ({"ranges": [pb.FrameRange(stop=100)]}, {"layer_major": True}):
            with pytest.raises(PermissionDeniedError):
                frames_of(stream, lent, keys, **form)
        others = [ChunkKey(bytes(16) + key[16:]) for key in keys]
        with pytest.raises(PermissionDeniedError, match="own namespace"):
            frames_of(stream, lent, others)
        assert frames_of(stream, lent, keys) == frames, "a refusal ends no connection"


def test_who_forges_leave_or_stretches_it_is_not_let_in(pair: Pair) -> None:
    space = pair.reader.namespace
    lent = lent_to(pair, space)
    guest = lent.attach
    own = pair.writer._link.connected().session.terms  # has a token only where it may attach
    of_client = pb.StreamAttach(
        session_id=own.session_id,
        key_namespace=space,
        until_s=100,
        token=guest_token(own.attach_token, own.session_id, space, 100),
    )
    forged = (
        other(guest, token=bytes(16)),
        other(guest, until_s=guest.until_s + 1),
        other(guest, key_namespace=bytes(16)),
        other(guest, key_namespace=space + b"x"),
        attach(guest.session_id, guest.token).attach,
        of_client,
    )
    for one in forged:
        with pytest.raises(UnauthenticatedError):
            enter(lent, one)
    with pytest.raises(KVStoreError):
        enter(lent, other(guest, session_id=guest.session_id ^ 1))
    enter(lent).close()


def test_a_guest_is_hung_up_on_when_its_time_is_over(pair: Pair) -> None:
    keys = store(pair.writer, 1, 1)
    lent = lent_to(pair, Namespace(keys[0][:16]))
    with closing(enter(lent)) as stream:
        assert len(frames_of(stream, lent, keys)) == 1
        pair.first.skip(lent.attach.until_s + 1)
        assert eventually(stream.is_broken)
    with pytest.raises(KVStoreError):
        enter(lent)


def test_guests_of_one_server_are_bounded_and_leave_it_its_own_streams(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "GUEST_STREAMS_PER_SESSION", 2)
    lent = lent_to(pair, Namespace(bytes(range(16))))
    with closing(enter(lent)):  # beside the reader's own
        with pytest.raises(QuotaExceededError, match="streams_per_session"):
            enter(lent)
        keys = store(pair.writer, 1, CHUNKS)
        another = client_of(pair.second)
        pair.find(keys)
        assert_reads(another, keys)
        assert pair.loaded() == CHUNKS


def test_a_guest_who_asks_as_an_engine_of_the_server_is_hung_up_on(pair: Pair) -> None:
    keys = store(pair.writer, 1, 1)
    lent = lent_to(pair, Namespace(keys[0][:16]))
    with closing(enter(lent)) as stream:
        deadline = time.monotonic() + SOON_S
        with pytest.raises(KVStoreError):
            stream.begin(get(0, lent.attach.session_id, keys[0][16:]), deadline)
        with pytest.raises(KVStoreError):
            list(stream.parts())
        assert eventually(stream.is_broken)


def test_the_token_covers_all_that_a_guest_says() -> None:
    secret = bytes(range(16))
    assert guest_token(secret, 5, bytes(16), 300).hex() == "d95a743a562c0880b2ae25034b0959e9"
    tokens = {
        guest_token(secret, 5, bytes(16), 300),
        guest_token(secret, 6, bytes(16), 300),
        guest_token(secret, 5, bytes(15) + b"x", 300),
        guest_token(secret, 5, bytes(16), 301),
        guest_token(bytes(16), 5, bytes(16), 300),
    }
    assert len(tokens) == 5


def test_a_peer_that_is_gone_costs_no_more_than_its_chunks(pair: Pair) -> None:
    keys = store(pair.writer, 1, CHUNKS)
    own = store(pair.reader, 2, 1)
    pair.find(keys)
    pair.writer.close()
    pair.first.close()
    assert pair.reader.get_chunks(keys) == []
    assert_reads(pair.reader, own)
