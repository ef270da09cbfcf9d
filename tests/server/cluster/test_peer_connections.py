"""One server reads another's memory over TCP: right frames, nothing, or a clean error, in time."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock
from urllib.parse import urlsplit

import numpy as np
import pytest
from helpers.fake_peer import other
from helpers.local_server import DEADLINE_MS, LocalServer, eventually, open_session
from helpers.prompts import MEDIUM, store
from helpers.stream_messages import attach, get, part, put
from structlog.testing import capture_logs

from kvstore.client import ClientOptions
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierUnavailableError,
)
from kvstore.proto.frame import check_frame
from kvstore.proto.framing import FramedSocket, make_tls
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.bulk import tcp_server
from kvstore.server.bulk.peer_server import PeerServer
from kvstore.server.bulk.tcp_server import (
    ATTACH_BYTES,
    MAX_STRANGERS,
    STREAMS_PER_SESSION,
    BulkServer,
)
from kvstore.server.cluster.peer_connections import StreamLink, dial_peer
from kvstore.server.cluster.peers import PeerChunk, Peers
from kvstore.server.security.audit_log import audit_files, read_chain
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import GET_BYTES, Limits
from kvstore.server.telemetry.metrics import Counters

ServerMaker = Callable[..., LocalServer]
SILENCE_S = 20.0
NOWHERE = "tcp://127.0.0.1:9"


BOTH_WAYS = pytest.mark.parametrize("server", ["plain", "tls"], indirect=True)


@pytest.fixture
def server(make_server: ServerMaker, request: pytest.FixtureRequest) -> LocalServer:
    """In plain text; where a test says so, over TLS."""
    own = ("--cpu", "64MiB", "--limits", "peer_requests=1")
    if getattr(request, "param", "plain") == "plain":
        return make_server("--bulk", "127.0.0.1:0", *own)
    return make_server("--bulk", "0.0.0.0:0", "--insecure", *own)


def stored(server: LocalServer, count: int) -> list[ChunkKey]:
    """Have chunks of a prompt in the server's memory."""
    options = ClientOptions("grpc", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    return store(server.connect("grpc", MEDIUM, options), 1, count)


@pytest.fixture
def infos(server: LocalServer) -> list[ChunkInfo]:
    """Three chunks in the server's memory."""
    found = server.node.store.tiers.cpu.tier.find(stored(server, 3))
    return [info for info in found if info is not None]


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenPeerResponse:
    return dial_peer(Settings(), server.address, "other", SILENCE_S)


@pytest.fixture
def link(terms: pb.OpenPeerResponse) -> Iterator[StreamLink]:
    with closing(reached(terms)) as one:
        yield one


def reached(terms: pb.OpenPeerResponse) -> StreamLink:
    link = StreamLink(terms, time.monotonic)
    link.connect(SILENCE_S)
    return link


def read(link: StreamLink, info: ChunkInfo) -> Bytes:
    frame = np.zeros(info.size_bytes, np.uint8)
    assert list(link.read(info, frame, 0, SILENCE_S))[-1] == info.size_bytes
    return frame


def find(
    link: StreamLink, keys: list[ChunkKey], within_s: float = SILENCE_S
) -> list[ChunkInfo | None]:
    deadline = time.monotonic() + within_s
    link.begin_find(keys, deadline)
    return link.end_find(keys, deadline)


def wire_of(link: StreamLink) -> FramedSocket:
    assert link._wire is not None
    return link._wire


@BOTH_WAYS
def test_what_is_in_memory_is_read_whole_and_in_parts(
    infos: list[ChunkInfo], link: StreamLink, server: LocalServer
) -> None:
    for info in infos:
        frame = read(link, info)
        assert check_frame(frame, info.key).info() == info
        part = np.zeros(1000, np.uint8)
        assert list(link.read(info, part, 70_000, SILENCE_S)) == [1000]
        assert bytes(part) == bytes(frame[70_000:71_000])
    assert server.settled().held == 0
    assert server.counter("peer_served_chunks") == 3


@BOTH_WAYS
def test_what_is_in_memory_is_found_and_what_is_not_is_not(
    infos: list[ChunkInfo], link: StreamLink, server: LocalServer
) -> None:
    absent = ChunkKey(infos[0].key[:16] + bytes(16))
    keys = [one.key for one in infos]
    assert find(link, [*keys, absent, keys[0]]) == [*infos, None, infos[0]]
    assert find(link, [ChunkKey(bytes(16) + keys[0][16:])]) == [None]
    many = [ChunkKey(keys[0][:16] + number.to_bytes(16, "big")) for number in range(4096)]
    assert find(link, many) == [None] * 4096
    assert link.is_open
    assert server.settled().held == 0


@BOTH_WAYS
def test_who_stops_reading_hangs_up_and_the_peer_holds_nothing(
    infos: list[ChunkInfo], link: StreamLink, terms: pb.OpenPeerResponse, server: LocalServer
) -> None:
    out = np.zeros(infos[0].size_bytes, np.uint8)
    with closing(link.read(infos[0], out, 0, SILENCE_S)) as steps:
        assert next(steps) < infos[0].size_bytes
    assert not link.is_open
    assert server.settled().held == 0

    def is_served() -> bool:
        with suppress(QuotaExceededError):
            return len(read(more, infos[0])) == infos[0].size_bytes
        return False

    with closing(reached(terms)) as more:
        assert eventually(is_served), "it is not counted for ever"


@BOTH_WAYS
def test_frames_that_follow_are_asked_for_at_once(
    infos: list[ChunkInfo], link: StreamLink, server: LocalServer
) -> None:
    first, *following = infos
    for left, info in enumerate(infos, 1 - len(infos)):
        frame = np.zeros(info.size_bytes, np.uint8)
        assert list(link.read(info, frame, 0, SILENCE_S, following))[-1] == len(frame)
        assert check_frame(frame, info.key).info() == info
        assert link.coming == (infos[left].key if left else None)
    assert link.is_open
    assert link._requests == 1
    assert len(read(link, first)) == first.size_bytes
    assert server.settled().held == 0
    assert server.counter("peer_served_chunks") == 4


def test_the_first_that_is_not_in_memory_ends_what_follows(
    infos: list[ChunkInfo], link: StreamLink
) -> None:
    absent = replace(infos[1], key=ChunkKey(infos[0].key[:16] + bytes(16)))
    frame = np.zeros(infos[0].size_bytes, np.uint8)
    assert list(link.read(infos[0], frame, 0, SILENCE_S, [absent, infos[2]]))[-1] == len(frame)
    assert link.coming == absent.key
    assert list(link.read(absent, frame, 0, SILENCE_S)) == []
    assert link.coming is None
    assert check_frame(read(link, infos[2]), infos[2].key).info() == infos[2]
    assert link._requests == 2


def test_more_than_the_most_requests_of_peers_are_refused_at_once(
    infos: list[ChunkInfo], link: StreamLink, server: LocalServer
) -> None:
    with server.streams.service.peer_server.admitted():
        with pytest.raises(QuotaExceededError, match="peer_requests=1"):
            read(link, infos[0])
        with pytest.raises(QuotaExceededError, match="peer_requests=1"):
            find(link, [infos[0].key])
    assert link.is_open
    assert len(read(link, infos[0])) == infos[0].size_bytes
    assert find(link, [infos[0].key]) == infos[:1]
    assert server.counter("peer_refused_requests") == 2


def test_more_than_the_most_bytes_under_way_to_peers_are_refused_and_questions_are_not(
    make_server: ServerMaker,
) -> None:
    """One get may have 16 MiB under way, and is counted with as many."""
    server = make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB", "--limits", "peer_bytes=16MiB")
    keys = stored(server, 1)
    with closing(reached(dial_peer(Settings(), server.address, "other", SILENCE_S))) as link:
        peer_server = server.streams.service.peer_server
        with peer_server.admitted(GET_BYTES):
            (info,) = find(link, keys)
            assert info is not None
            with pytest.raises(QuotaExceededError, match="peer_bytes=16777216"):
                read(link, info)
        assert len(read(link, info)) == info.size_bytes


def test_a_client_that_asks_as_a_server_does_is_hung_up_on(
    infos: list[ChunkInfo], server: LocalServer, terms: pb.OpenPeerResponse
) -> None:
    reply = open_session(server.dial(), MEDIUM)
    theirs = other(terms, session_id=reply.session_id, attach_token=reply.attach_token)
    with closing(reached(theirs)) as link, pytest.raises(LeaseExpiredError):
        list(link.read(infos[0], np.zeros(10, np.uint8), 0, SILENCE_S))
    with closing(reached(theirs)) as link, pytest.raises(LeaseExpiredError):
        find(link, [infos[0].key])
    assert server.counter("peer_served_bytes") == 0
    assert server.settled().held == 0


def test_what_breaks_in_the_server_ends_one_stream_and_is_in_its_log(
    server: LocalServer, infos: list[ChunkInfo], terms: pb.OpenPeerResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    with closing(reached(terms)) as before:
        for owner, name, ask in (
            (PeerServer, "parts", lambda: read(before, infos[0])),
            (SessionTable, "get", lambda: reached(terms)),
        ):
            with monkeypatch.context() as patch, capture_logs() as logs:
                patch.setattr(owner, name, broken)
                with pytest.raises((LeaseExpiredError, TierUnavailableError)):
                    ask()
                assert eventually(
                    lambda: any(
                        line["event"] == "internal error" and line["log_level"] == "error"
                        for line in logs
                    )
                )
    streams = server.streams
    assert eventually(lambda: not streams._streams and not streams._unattached)
    with closing(reached(terms)) as link:
        read(link, infos[0])


def test_a_session_has_so_many_streams_and_no_more(terms: pb.OpenPeerResponse) -> None:
    with ExitStack() as stack:
        for _ in range(STREAMS_PER_SESSION):
            stack.enter_context(closing(reached(terms)))
        with pytest.raises(QuotaExceededError, match="streams_per_session=16"):
            reached(terms)

    def is_let_in() -> bool:
        with suppress(QuotaExceededError):
            reached(terms).close()
            return True
        return False

    assert eventually(is_let_in)


def test_clients_have_so_many_streams_and_servers_find_room_beside_them(
    server: LocalServer, terms: pb.OpenPeerResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CLIENT_STREAMS", 1)
    reply = open_session(server.dial(), MEDIUM)
    theirs = other(terms, session_id=reply.session_id, attach_token=reply.attach_token)
    with closing(reached(terms)), closing(reached(theirs)):
        with pytest.raises(QuotaExceededError, match="client_streams=1"):
            reached(theirs)
        reached(terms).close()


@BOTH_WAYS
def test_a_session_that_ends_ends_its_streams(
    infos: list[ChunkInfo], link: StreamLink, terms: pb.OpenPeerResponse, server: LocalServer
) -> None:
    server.node.sessions.close(terms.session_id)
    with pytest.raises(LeaseExpiredError):
        read(link, infos[0])
    assert eventually(lambda: not server.streams._streams)


def test_what_is_no_get_of_a_peer_is_hung_up_on_and_in_the_audit_log(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    server = make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB", "--audit-log", str(log))
    terms = dial_peer(Settings(), server.address, "other", SILENCE_S)
    session_id, (key,) = terms.session_id, stored(server, 1)
    for message in (get(1, session_id, key[16:]), put(1, session_id)):
        with closing(reached(terms)) as link:
            wire_of(link).send(message)
            with pytest.raises(TierUnavailableError):
                wire_of(link).receive()
    assert server.settled().held == 0
    refused = {"rpc": "Put", "outcome": "PermissionDeniedError", "peer": "stream:127.0.0.1"}

    def is_written() -> bool:
        return any(refused.items() <= line.items() for line, _ in read_chain(audit_files(log)))

    assert eventually(is_written)


@BOTH_WAYS
def test_strangers_who_say_anything_else_are_hung_up_on(
    infos: list[ChunkInfo], terms: pb.OpenPeerResponse, server: LocalServer
) -> None:
    for said in [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 400,
        bulk.LENGTHS.pack(bulk.MAGIC, ATTACH_BYTES + 1, 0),
        bulk.LENGTHS.pack(bulk.MAGIC, 0, 0),
        bulk.LENGTHS.pack(bulk.MAGIC, 3, 0) + b"\xff" * 3,
        bulk.pack(part(1, 1000, 0), 1000),
        bulk.pack(attach(terms.session_id, terms.attach_token), 8) + bytes(8),
    ]:
        with connected(terms) as stranger:
            stranger.sendall(said)
            assert ends(stranger)
        with closing(reached(terms)) as link:
            assert len(read(link, infos[0])) == infos[0].size_bytes


@BOTH_WAYS
def test_strangers_who_say_nothing_keep_nobody_out(
    infos: list[ChunkInfo], link: StreamLink, terms: pb.OpenPeerResponse, server: LocalServer
) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(terms)) for _ in range(MAX_STRANGERS + 8)]
        assert len(read(link, infos[0])) == infos[0].size_bytes
        assert all(ends(one) for one in silent), "each is hung up on after a while"
        with closing(reached(terms)) as more:
            assert len(read(more, infos[0])) == infos[0].size_bytes


@BOTH_WAYS
def test_strangers_who_only_begin_keep_nobody_out(
    infos: list[ChunkInfo], terms: pb.OpenPeerResponse, server: LocalServer
) -> None:
    begun = b"\x16\x03\x01" if terms.bulk_certificate else bulk.MAGIC
    for _ in range(3):
        with ExitStack() as stack:
            for _ in range(MAX_STRANGERS):
                stack.enter_context(connected(terms)).sendall(begun)
            started, found = time.monotonic(), list[bytes]()
            while not found and time.monotonic() - started < tcp_server.HELLO_S:
                with suppress(TierUnavailableError), closing(reached(terms)) as link:
                    found.append(bytes(read(link, infos[0])))
            assert len(found[0]) == infos[0].size_bytes
            assert time.monotonic() - started < tcp_server.HELLO_S, "before they are hung up on"


def connected(terms: pb.OpenPeerResponse) -> socket.socket:
    where = urlsplit(terms.bulk_address)
    return socket.create_connection((where.hostname or "", where.port or 0), SILENCE_S)


def ends(link: socket.socket) -> bool:
    """Whether the other end hangs up; it may say why before."""
    try:
        while link.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def test_a_server_with_another_certificate_is_not_believed(make_server: ServerMaker) -> None:
    server = make_server("--bulk", "0.0.0.0:0", "--insecure", "--cpu", "64MiB")
    terms = dial_peer(Settings(), server.address, "other", SILENCE_S)
    for certificate in (make_tls()[1], b"no certificate"):
        with pytest.raises(TierUnavailableError):
            reached(other(terms, bulk_certificate=certificate))
    with pytest.raises(KVStoreError):
        reached(other(terms, bulk_certificate=b""))  # in plain text
    with closing(reached(terms)) as link:
        cipher = wire_of(link)._link.version()  # type: ignore[attr-defined]
        assert cipher == "TLSv1.3"


def test_a_peer_whose_streams_are_not_reached_is_not_up_until_they_are(
    make_server: ServerMaker,
) -> None:
    server = make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")
    keys = stored(server, 2)
    is_reached = False

    def dial(address: str, node_id: str, within_s: float) -> pb.OpenPeerResponse:
        told = dial_peer(Settings(), address, node_id, SILENCE_S)
        where = told.bulk_address if is_reached else NOWHERE
        return other(told, bulk_address=where)

    waits = {"peer_timeout_ms": int(1000 * SILENCE_S), "breaker_failures": 1, "breaker_retry_ms": 1}
    terms = (server.address,), Limits(**waits)
    with closing(Peers(*terms, dial, Counters(), time.monotonic)) as peers:
        peers.start("other", 1)
        (peer,) = peers.known()
        assert eventually(lambda: bool(peer.breaker.reason))
        assert not peer.is_up
        assert peers.find(keys) == {}
        is_reached = True
        assert eventually(lambda: peer.is_up and peer.is_connected)
        for offer in peers.find(keys).values():
            frame = np.zeros(offer.info.size_bytes, np.uint8)
            *_, (sender, arrived) = peers.read(offer, frame, 0)
            assert (sender, arrived) == (peer, len(frame))
            assert check_frame(frame, offer.info.key).info() == offer.info
        assert len(peer._idle) == 1
    assert server.counter("peer_served_chunks") == 2


def test_who_reads_something_else_than_what_comes_gets_that_and_hangs_up_on_the_rest(
    make_server: ServerMaker,
) -> None:
    server = make_server("--bulk", "127.0.0.1:0", "--cpu", "64MiB")
    keys = stored(server, 4)
    terms = (server.address,), Limits(peer_timeout_ms=int(1000 * SILENCE_S))
    with closing(
        Peers(*terms, partial(dial_peer, Settings()), Counters(), time.monotonic)
    ) as peers:
        peers.start("other", 1)
        (peer,) = peers.known()
        assert eventually(lambda: peer.is_connected)
        found = peers.find(keys)
        offers = [found[key] for key in keys]

        def read_one(offer: PeerChunk, following: list[PeerChunk]) -> None:
            frame = np.zeros(offer.info.size_bytes, np.uint8)
            *_, (_, arrived) = peers.read(offer, frame, 0, following)
            assert arrived == len(frame)
            assert check_frame(frame, offer.info.key).info() == offer.info

        read_one(offers[0], offers[1:])
        assert peers._reads.run is not None
        read_one(offers[1], offers[2:])
        assert (len(peer._in_use), peer._idle) == (1, [])
        read_one(offers[3], [])
        assert not peer._in_use
        read_one(offers[2], offers[3:])
        peers.expect(())
        assert not peer._in_use
        assert peer.is_up
    assert server.settled().held == 0


def test_without_a_descriptor_it_listens_again_a_little_later(
    server: LocalServer, terms: pb.OpenPeerResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, address = tcp_server.listen("127.0.0.1", 0)
    listener = Mock(wraps=bound)
    listener.accept.side_effect = [OSError(errno.EMFILE, "too many open files"), DEFAULT]
    monkeypatch.setattr(tcp_server, "listen", lambda host, port: (listener, address))
    service = server.streams.service
    with closing(BulkServer(Settings(bulk="127.0.0.1:0"), service, 64)) as streams:
        reached(other(terms, bulk_address=address)).close()
        assert listener.accept.call_count == 2
        assert streams.is_alive()
