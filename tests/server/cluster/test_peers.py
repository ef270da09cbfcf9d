"""What another server has in memory is a hit here, right and soon or not at all."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from contracts.bad_puts import changed
from helpers.credentials import Authority, KeyRing
from helpers.fake_peer import (
    PATIENT,
    FakePeer,
    Lie,
    Message,
    connected,
    is_found,
    is_part,
    other,
    refusal,
)
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, assert_reads, chunks_of, frame_of, keys_of, outcomes, store
from helpers.redis_process import RedisProcess
from helpers.stream_messages import part, ready
from simulation.clock import FakeClock

from kvstore.client import Client, ClientOptions
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import found_rows
from kvstore.proto.errors import (
    InvalidRequestError,
    TierUnavailableError,
)
from kvstore.proto.frame import parse_header
from kvstore.proto.types import ChainDigest, ChunkInfo, ChunkKey, KVLayout, PutOutcome
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.cluster.peer_connections import dial_peer, key_metadata
from kvstore.server.cluster.peer_tier import CHECK_AGAIN_S, CHECKED_AGAIN, KNOWN_S, PeerTier
from kvstore.server.cluster.peers import BARRED_S, FORGET_S, MAX_FAULTS, PeerChunk, PeerNode, Peers
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import Limits
from kvstore.server.store.lookup import MAX_PEER_QUERIES
from kvstore.server.telemetry.metrics import Counters

ServerMaker = Callable[..., LocalServer]
CHUNK_TOKENS = 64
CHUNKS = 4
SILENT_MS = 400
"""What a peer has to answer where it does not."""


def node(make_server: ServerMaker, *flags: str) -> LocalServer:
    sizes = ("--tiers", "cpu", "--cpu", "32MiB", "--socket", "off", "--bulk", "127.0.0.1:0")
    return make_server(*sizes, "--limits", "peer_timeout_ms=20000", *flags)


def client_of(server: LocalServer) -> Client:
    options = ClientOptions("tcp", chunk_tokens=CHUNK_TOKENS, deadline_ms=DEADLINE_MS)
    return server.connect("tcp", MEDIUM, options)


def is_up(server: LocalServer, count: int = 1) -> bool:
    return sum(peer.is_up for peer in server.peer_tier.peers.known()) == count


def linked(make_server: ServerMaker, *flags: str) -> tuple[LocalServer, LocalServer]:
    """Two nodes, of which the second reads from the first."""
    first = node(make_server)
    second = node(make_server, *flags, "--peers", first.address)
    assert eventually(lambda: is_up(second))
    return first, second


def assert_hits(client: Client, keys: list[ChunkKey]) -> None:
    """Fail unless a lookup finds all of *keys*, and a get reads them right."""
    assert client.lookup(keys=keys).ready == len(keys)
    assert_reads(client, keys)


def asked(client: Client, key: ChunkKey) -> list[ChunkTensors]:
    """Look one chunk up and read it."""
    client.lookup(keys=[key])
    return client.get_chunks([key])


# --- two and three nodes


def test_what_is_put_on_one_node_is_hit_from_another_and_kept_there(
    make_server: ServerMaker,
) -> None:
    first, second = linked(make_server)
    keys = store(client_of(first), 1, CHUNKS)
    reader = client_of(second)
    match = reader.lookup(keys=keys)
    assert (match.ready, set(match.tiers)) == (CHUNKS, {"peer"})
    assert_reads(reader, keys)
    assert second.counter("peer_read_chunks") == CHUNKS
    assert first.counter("peer_served_chunks") == CHUNKS
    assert_reads(reader, keys)
    assert second.counter("peer_read_chunks") == CHUNKS
    finds = second.counter("peer_finds")
    assert set(reader.lookup(keys=keys).tiers) == {"cpu"}
    assert second.counter("peer_finds") == finds, "what is answered here is asked of nobody"
    assert reader.lookup(keys=keys_of(reader, 2, CHUNKS)).ready == 0
    assert second.counter("peer_finds") == finds + 1
    for server in (first, second):
        assert server.settled().held == 0


def test_what_was_read_once_goes_when_memory_is_full_and_what_is_read_again_stays(
    make_server: ServerMaker,
) -> None:
    first, second = linked(make_server, "--cpu", "8MiB")
    writer, reader = client_of(first), client_of(second)
    own = store(reader, 1, 28)  # of 31 that there is room for
    once = store(writer, 2, 1)
    assert_hits(reader, once)
    assert eventually(lambda: second.counter("peer_passed_chunks") == 1)
    assert second.settled().tiers[0][1].chunks == len(own)
    assert_hits(reader, once)
    second.node.store.tick()
    assert set(reader.lookup(keys=once).tiers) == {"cpu"}
    assert second.counter("peer_passed_chunks") == 1


def test_a_chain_that_two_nodes_have_parts_of_is_read_from_both(make_server: ServerMaker) -> None:
    first, second = node(make_server), node(make_server)
    third = node(make_server, "--peers", f"{first.address},{second.address}")
    assert eventually(lambda: is_up(third, 2))
    ones, others = client_of(first), client_of(second)
    keys = keys_of(ones, 1, 6)
    for writer, half in ((ones, slice(0, 3)), (others, slice(3, 6))):
        chunks = chunks_of(writer, keys)[half]
        assert outcomes(writer, chunks) == [PutOutcome.stored] * 3
    assert_hits(client_of(third), keys)
    assert (first.counter("peer_served_chunks"), second.counter("peer_served_chunks")) == (3, 3)


def test_who_is_in_its_own_list_does_not_ask_itself(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = linked(make_server)
    peers = second.peer_tier.peers
    (peer,) = peers.known()
    session = dial_peer(Settings(), first.address, "me", 20.0)
    monkeypatch.setattr(peers, "_boot_id", session.server.boot_id)
    peer.forget()
    assert eventually(lambda: peer.is_self)
    asker = client_of(second)
    assert asker.lookup(keys=keys_of(asker, 1, 1)).ready == 0
    assert second.counter("peer_finds") == 0


def test_whom_the_directory_names_is_reached_and_asked_once_a_lookup(
    make_server: ServerMaker,
) -> None:
    first, second = node(make_server), node(make_server, "--peers", "127.0.0.1:9")
    keys = store(client_of(first), 1, 40)
    holder = NodeAddress("first", 5, "", first.address)
    peers, asked = second.peer_tier.peers, list[int]()

    def holders(
        wanted: Sequence[ChunkKey], deadline_s: float
    ) -> dict[ChunkKey, tuple[NodeAddress, ...]]:
        asked.append(len(wanted))
        return {key: (holder,) for key in wanted if key in keys[:30]}

    peers.holders = holders
    reader = client_of(second)
    reader.lookup(keys=keys)  # who is unknown is not waited for
    assert eventually(lambda: is_up(second))
    asked.clear()
    assert eventually(lambda: reader.lookup(keys=keys).ready == 30)
    assert set(asked) == {40}
    assert_reads(reader, keys[:30])
    holder = replace(holder, incarnation=6)
    reader.lookup(keys=keys_of(reader, 9, 1) + keys)
    peer = next(one for one in peers.known() if one.address == first.address)
    (stranger,) = keys_of(reader, 8, 1)
    peers._peer_of(holder)
    assert peer.incarnation == 6
    assert reader.lookup(keys=[stranger]).ready == 0


def test_nodes_that_share_a_redis_find_each_other_by_its_directory(
    make_server: ServerMaker, own_redis: RedisProcess
) -> None:
    own_redis.start()
    flags = (
        *("--redis", own_redis.url, "--redis-timeout-ms", "20000"),
        *("--directory", "--peers", "directory"),
    )
    first, second = node(make_server, *flags), node(make_server, *flags)
    writer, reader = client_of(first), client_of(second)
    keys = store(writer, 1, CHUNKS)
    assert eventually(lambda: reader.lookup(keys=keys).ready == CHUNKS)
    assert_reads(reader, keys)
    assert first.counter("peer_served_chunks") == CHUNKS
    # The one that has them now too is found for the other, once it has lost its own.
    assert writer.delete(keys=keys) == CHUNKS
    assert eventually(lambda: writer.lookup(keys=keys).ready == CHUNKS)
    assert set(writer.lookup(keys=keys).tiers) == {"peer"}


# --- credentials


def test_who_has_no_key_of_a_peer_is_not_let_in(make_server: ServerMaker, tmp_path: Path) -> None:
    rows = KeyRing(tmp_path / "keys")
    engine, peer = rows.make("acme", "read", "write"), rows.make("fleet", "peer")
    first = node(make_server, "--auth-keys", str(tmp_path / "keys"))
    for secret, is_let_in in ((engine, False), (peer, True)):
        (tmp_path / "shown").write_text(secret)
        second = node(make_server, "--peers", first.address, "--peer-key", str(tmp_path / "shown"))
        (known,) = second.peer_tier.peers.known()
        assert eventually(partial(_is_decided, known))
        assert known.is_up is is_let_in
        assert ("lacks the role" in known.breaker.reason) is not is_let_in


def _is_decided(peer: PeerNode) -> bool:
    return peer.is_up or bool(peer.breaker.reason)


def test_over_tls_only_a_peer_of_its_name_that_the_authority_signed_is_shown_the_key(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    rows, right = KeyRing(tmp_path / "keys"), Authority(tmp_path)
    wrong = Authority(tmp_path, "other")
    cert, key = right.issue("first", hosts=("kv.kv.svc",))  # not of the pod's address
    (tmp_path / "shown").write_text(rows.make("fleet", "peer"))
    proofs = ("--tls-cert", str(cert), "--tls-key", str(key), "--auth-keys", str(tmp_path / "keys"))
    first = node(make_server, *proofs)
    for ca, name in ((wrong, "kv.kv.svc"), (right, "other.svc"), (right, "kv.kv.svc")):
        shown = ("--peer-key", str(tmp_path / "shown"), "--peer-ca", str(ca.path))
        second = node(make_server, "--peers", first.address, *shown, "--peer-name", name)
        (known,) = second.peer_tier.peers.known()
        assert eventually(partial(_is_decided, known))
        assert known.is_up is ((ca, name) == (right, "kv.kv.svc"))
    access = Settings(peer_key=tmp_path / "shown", peer_ca=right.path)
    with pytest.raises(TierUnavailableError):
        dial_peer(access, first.address, "second", 20.0)
    cert, key = right.issue("third", hosts=("127.0.0.1",))
    proofs = ("--tls-cert", str(cert), "--tls-key", str(key), "--auth-keys", str(tmp_path / "keys"))
    assert dial_peer(access, node(make_server, *proofs).address, "second", 20.0).session_id


def test_a_key_does_not_travel_in_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("kvs_secret")
    with pytest.raises(InvalidRequestError, match="plain text"):
        key_metadata(Settings(peer_key=path), "example.org:7420")
    key_metadata(Settings(peer_key=path, insecure=True), "example.org:7420")
    key_metadata(Settings(peer_key=path), "127.0.0.1:7420")


# --- peers that lie


@pytest.fixture
def fake(make_server: ServerMaker) -> Iterator[tuple[LocalServer, FakePeer, list[ChunkKey]]]:
    """A node whose only peer is a fake that has three chunks."""
    flags = ("--peers", "127.0.0.1:9", "--limits", f"peer_timeout_ms={SILENT_MS}")
    server = node(make_server, *flags)
    reader = client_of(server)
    keys = [keys_of(reader, seed, 1)[0] for seed in range(3)]
    with closing(FakePeer({key: frame_of(key, MEDIUM, CHUNK_TOKENS) for key in keys})) as peer:
        server.peer_tier.peers._dial = peer.dial
        assert eventually(lambda: is_up(server))
        yield server, peer, keys
        server.close()


def wait_for_answers(server: LocalServer, timeout_ms: int = 20_000) -> None:
    """Let peers of a busy machine have the time that they need: what is missed was refused."""
    server.peer_tier.peers._timeout_s = timeout_ms / 1000


def as_it_is(message: Message) -> list[Message]:
    return [message]


Change = Callable[[pb.StreamMessage, bytes], Sequence[Message]]


def of_parts(change: Change) -> Lie:
    return lambda message: change(*message) if is_part(message) else [message]


def of_finds(*rows: bytes) -> Lie:
    """Answer what finds something by other *rows*."""

    def lie(message: Message) -> list[Message]:
        word = pb.StreamMessage(request=message[0].request, found=pb.FindResponse(rows=rows))
        return [(word, b"")] if is_found(message) else [message]

    return lie


def row_of(size: int, key: bytes) -> bytes:
    layout = KVLayout.of(MEDIUM, CHUNK_TOKENS)
    found = found_rows([ChunkInfo(ChunkKey(key), ChainDigest(bytes(16)), layout, 0, size)])
    return bytes(found.rows[0])


def half_and_gone(message: Message) -> Iterator[Message]:
    word, data = message
    yield word, data[: len(data) // 2] if is_part(message) else data
    if is_part(message):
        raise TierUnavailableError("peer", "gone")


def half_and_silence(message: Message) -> list[Message]:
    word, data = message
    if is_part(message):
        return [(word, data[: len(data) // 2])]
    return [message] if word.ready or word.HasField("found") else []


OTHER = frame_of(ChunkKey(bytes(31) + b"x"), MEDIUM, CHUNK_TOKENS).tobytes()
LIES: tuple[Lie, ...] = (
    of_parts(lambda word, data: [(word, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])]),
    of_parts(lambda word, data: [(word, OTHER[: len(data)])]),
    of_parts(lambda word, data: [changed((word, data), frame_bytes=1 << 63)]),
    of_parts(lambda word, data: [changed((word, data), offset=1 << 63)]),
    of_parts(lambda word, data: [(word, data)] * 12),
    of_parts(lambda word, data: [(word, data[: len(data) // 2])]),
    of_parts(lambda word, data: [changed((word, data), offset=10)]),
    of_parts(lambda word, data: [changed((word, data), index=1)]),
    of_parts(lambda word, data: [(word, data + b"x")]),
    of_parts(lambda word, data: [(word, b"")]),
    of_parts(lambda word, data: [(part(word.request + 1, len(data), 0), data)]),
    of_parts(lambda word, data: [(ready(word.request), b"")]),
    half_and_gone,
    half_and_silence,
    of_finds(row_of(1, bytes(31) + b"y")),
    of_finds(row_of(1 << 62, bytes(32))),
    of_finds(b"\xff" * 300),
)


def test_what_a_liar_sends_is_a_miss_and_counts_against_it(
    fake: tuple[LocalServer, FakePeer, list[ChunkKey]],
) -> None:
    server, peer, keys = fake
    reader, peers = client_of(server), server.peer_tier.peers
    for lie in LIES:
        wait_for_answers(server, SILENT_MS if lie is half_and_silence else 20_000)
        (before,) = peers.known()
        peers._static[:] = [known := peers._new("127.0.0.1:9")]
        before.forget()
        assert eventually(lambda: is_up(server)), lie
        peer.lie = lie
        with server.unchanged():
            assert eventually(partial(_is_found_out, known, reader, keys)), lie
        finds = peer.finds
        assert asked(reader, keys[0]) == []
        assert peer.finds == finds, lie
        peer.lie = as_it_is
    assert outcomes(reader, chunks_of(reader, keys)) == [PutOutcome.stored] * 3
    for key in keys:
        assert_reads(reader, [key])
    assert server.counter("peer_corrupt_chunks") >= 2 * 3
    assert server.counter("peer_failures") >= 2 * 3, "of who hangs up or falls silent in a frame"
    assert server.counter("peer_invalid_answers") >= 3 * (len(LIES) - 4)


def _is_found_out(peer: PeerNode, reader: Client, keys: list[ChunkKey]) -> bool:
    """Ask for *keys*, which must be misses; return whether *peer* is left alone by now."""
    for key in keys:
        assert asked(reader, key) == []
    return not peer.is_up


def test_lookups_with_a_silent_peer_cost_its_timeout_a_few_times_and_then_nothing(
    fake: tuple[LocalServer, FakePeer, list[ChunkKey]],
) -> None:
    server, peer, keys = fake
    reader = client_of(server)
    peer.lie = lambda message: []
    started = time.monotonic()
    for seed in range(30):
        assert reader.lookup(keys=keys_of(reader, 100 + seed, 1)).ready == 0
    assert time.monotonic() - started < 10 * 0.4 + 5
    assert not is_up(server)
    finds = server.counter("peer_finds")
    assert finds <= 4
    peer.lie = as_it_is
    assert eventually(lambda: is_up(server))
    assert eventually(lambda: len(asked(reader, keys[0])) == 1)


# --- one peer


def test_a_peer_that_lies_is_left_alone_for_a_while() -> None:
    now = [100.0]
    peer = PeerNode("127.0.0.1:1", Limits(), lambda: now[0])
    peer.session = object()  # type: ignore[assignment]
    for _ in range(MAX_FAULTS):
        assert peer.is_up
        peer.note_fault()
    assert not peer.is_up
    now[0] += BARRED_S
    assert peer.is_up


KEY = ChunkKey(bytes(31) + b"k")
FRAME = frame_of(KEY, MEDIUM, CHUNK_TOKENS)


def test_the_faster_of_two_peers_is_read_from_and_the_other_when_it_fails() -> None:
    counters, near = Counters(), FakePeer({KEY: FRAME})
    with connected(near, FakePeer({KEY: FRAME}), counters=counters) as peers:
        peers.step()
        one, other = peers.known()
        other.first_byte_s = 5.0
        offer = peers.find([KEY])[KEY]
        assert set(offer.peers) == {one, other}
        for sender in (one, other):
            out = np.zeros(len(FRAME), np.uint8)
            assert {who for who, _ in peers.read(offer, out, 0)} == {sender}
            assert bytes(out) == bytes(FRAME)
            near.lie = lambda message: [refusal(message[0].request)]
        assert counters["peer_refusals"] == 1


def test_a_listed_peer_that_the_directory_names_too_is_asked_for_each_chunk_once() -> None:
    keys = [ChunkKey(bytes(31) + bytes([number])) for number in range(3)]
    address = NodeAddress("n", 1, "", "127.0.0.1:1")
    with connected(FakePeer({})) as peers:
        peers.step()
        peers.holders = lambda keys, _: dict.fromkeys(keys, (address,))
        assert list(peers._choose(keys, math.inf).values()) == [keys]


def test_what_a_peer_deleted_is_offered_no_more_a_moment_later() -> None:
    now, fake = [100.0], FakePeer({})
    keys = [ChunkKey(bytes(14) + bytes([0, n]) + bytes(16)) for n in (1, 2)]  # two namespaces
    keys += [ChunkKey(bytes(16) + n.to_bytes(16, "big")) for n in range(CHECKED_AGAIN + 1)]
    info = parse_header(FRAME).info()
    fake._infos.update({key: replace(info, key=key) for key in keys})
    with (
        connected(fake, clock=lambda: now[0]) as peers,
        closing(PeerTier(peers, Counters(), lambda: now[0])) as tier,
    ):
        peers.step()
        for some in (keys[:1], keys[1:2], keys[2:]):
            assert None not in tier.find(some)
        gone = [keys[0], keys[-1]]
        for key in gone:
            del fake._infos[key]
        tier.check_again()
        assert tier.stale() == []
        now[0] += CHECK_AGAIN_S
        peers.step()
        assert tier.stale() == gone
        for key in gone:
            assert tier.load_s(key, 10) is None
            tier.delete(key)
        fake.lie = lambda message: [refusal(message[0].request)]
        now[0] += CHECK_AGAIN_S
        tier.check_again()
        assert tier.stale() == [], "who does not answer has deleted nothing"
        now[0] += KNOWN_S
        assert set(tier.stale()) == set(keys) - set(gone)


def test_who_has_no_time_to_wait_holds_nothing_against_a_peer() -> None:
    counters, fake = Counters(), FakePeer({KEY: FRAME})
    hasty = Limits(peer_timeout_ms=20_000, breaker_failures=1)
    with connected(fake, counters=counters, limits=hasty) as peers:
        peers.step()
        fake.lie = lambda message: []
        assert peers.find([KEY], time.monotonic() + 0.01) == {}
        assert peers.find([KEY], time.monotonic() - 1.0) == {}
        assert counters["peer_failures"] == 0
        fake.lie = as_it_is
        assert list(peers.find([KEY])) == [KEY]


def test_lookups_beyond_those_that_ask_themselves_have_it_done(make_server: ServerMaker) -> None:
    first, second = linked(make_server)
    keys = store(client_of(first), 1, CHUNKS)
    lookup = second.node.store._lookup
    for _ in range(MAX_PEER_QUERIES):
        lookup._peer_queries.acquire()
    reader = client_of(second)
    assert_hits(reader, keys)
    for _ in range(MAX_PEER_QUERIES):
        lookup._peer_queries.release()
    assert_hits(reader, store(client_of(first), 2, CHUNKS))


# --- peers that end under whoever waits for them

PATIENCE_S = 60.0


@pytest.fixture
def liar() -> FakePeer:
    return FakePeer({KEY: frame_of(KEY, MEDIUM, 64)})


@pytest.fixture
def peers(liar: FakePeer) -> Iterator[Peers]:
    with connected(liar, limits=Limits(peer_timeout_ms=600_000, breaker_failures=1)) as peers:
        yield peers


def silent(message: Message) -> list[Message]:
    return []


def test_a_question_that_is_not_answered_ends_with_the_peers(liar: FakePeer, peers: Peers) -> None:
    peers.step()
    liar.lie = silent
    asked, found = liar.finds, list[dict[ChunkKey, PeerChunk]]()
    asker = threading.Thread(target=lambda: found.append(peers.find([KEY])), daemon=True)
    asker.start()
    assert eventually(lambda: liar.finds > asked)
    peers.close()
    asker.join(PATIENCE_S)
    assert found == [{}]
    assert peers.find([KEY]) == {}
    peers.close()


def test_a_read_that_stands_still_ends_with_the_peers(liar: FakePeer, peers: Peers) -> None:
    peers.step()
    (offer,) = peers.find([KEY]).values()
    begun, ended = threading.Event(), list[object]()

    def keep_silent(message: Message) -> list[Message]:
        begun.set()
        return []

    liar.lie = keep_silent

    def read() -> None:
        ended.append(list(peers.read(offer, frame_of(KEY, MEDIUM, 64), 0)))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(PATIENCE_S)
    peers.close()
    reader.join(PATIENCE_S)
    assert ended == [[]], "without an error"


def test_upkeep_that_waits_for_an_answer_ends_with_the_peers(liar: FakePeer, peers: Peers) -> None:
    liar.lie = silent
    peers.start("me", 5)
    assert eventually(lambda: liar.dials == 1)
    peers.close()
    peers._thread.join(PATIENCE_S)
    assert not peers._thread.is_alive()
    assert not any(peer.session for peer in peers.known())


def test_a_silent_peer_takes_no_time_from_others_that_have_to_be_connected_too() -> None:
    counters, frames = Counters(), {KEY: frame_of(KEY, MEDIUM, 64)}
    fakes = [FakePeer(frames) for _ in range(3)]
    limits = Limits(peer_timeout_ms=450, breaker_failures=1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connected(*fakes, counters=counters, limits=limits) as peers,
    ):
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for peer, fake in zip(peers.known(), fakes, strict=True):
            told = fake.dial("", "", 1.0)
            peer.open_session(other(told, bulk_address=where) if fake is fakes[0] else told)
        first, *others = peers.known()
        assert set(peers.find([KEY])[KEY].peers) == set(others)
        assert [peer.is_up for peer in (first, *others)] == [False, True, True]
        assert counters["peer_failures"] == 1


def test_hosts_that_vanished_hold_up_no_new_peer_and_are_dropped_once_nobody_names_them() -> None:
    clock, fake, dials = FakeClock(), FakePeer({KEY: FRAME}), list[str]()
    named = [NodeAddress(f"gone{at}", at, "", f"10.0.0.{at}:1") for at in range(1, 31)]

    def dial(address: str, node_id: str, within_s: float) -> pb.OpenPeerResponse:
        dials.append(address)
        if address.startswith("10."):
            clock.advance(within_s)
            raise TierUnavailableError("peer", "no answer")
        return fake.dial(address, node_id, within_s)

    peers = Peers((), PATIENT, dial, Counters(), clock)
    peers.holders = lambda keys, _: dict.fromkeys(keys, tuple(named))
    with closing(fake), closing(peers):
        assert peers.find([KEY]) == {}
        peers.step()
        assert len(dials) == 1
        clock.advance(1)
        named[:] = [NodeAddress("new", 99, "", "127.0.0.1:1")]
        assert peers.find([KEY]) == {}
        peers.step()
        assert list(peers.find([KEY])) == [KEY]
        clock.advance(FORGET_S)
        peers.find([KEY])
        peers.step()
        assert [peer.address for peer in peers.known()] == ["127.0.0.1:1"]


def test_a_peer_for_which_no_time_is_left_is_not_blamed() -> None:
    now, counters = [100.0], Counters()

    def ticks() -> float:
        now[0] += 0.15  # of a timeout of 0.2: the first has its turn
        return now[0]

    limits = Limits(peer_timeout_ms=200, breaker_failures=1)
    fakes = [FakePeer({}) for _ in range(3)]
    with connected(*fakes, counters=counters, clock=ticks, limits=limits) as peers:
        for peer, fake in zip(peers.known(), fakes, strict=True):
            peer.open_session(fake.dial("", "", 1.0))
        assert peers.find([ChunkKey(bytes(32))]) == {}
        assert counters["peer_failures"] == 0
