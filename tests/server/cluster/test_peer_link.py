"""One server asks and reads another's memory: right frames, nothing, or a clean error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from local_server import DEADLINE_MS, LocalServer, eventually, open_session
from prompts import MEDIUM, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    PermissionDeniedError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.peer_dial import PeerAccess
from kvstore.server.cluster.peer_link import PeerLink, PeerTerms

ServerMaker = Callable[..., LocalServer]
SILENCE_S = 20.0


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--zmq", "127.0.0.1:0", "--cpu", "64MiB", "--peer-requests", "1")


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Who put the chunks that the other server wants."""
    options = ClientOptions("zmq", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    return server.connect("zmq", MEDIUM, options)


@pytest.fixture
def terms(server: LocalServer) -> PeerTerms:
    return PeerAccess().dial(server.address, "other", SILENCE_S).terms


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def link(terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[PeerLink]:
    with closing(PeerLink(terms, context, time.monotonic)) as one:
        yield one


def find(
    link: PeerLink, keys: list[ChunkKey], patience_s: float = SILENCE_S
) -> list[ChunkInfo | None]:
    deadline = time.monotonic() + patience_s
    link.begin_find(keys, deadline)
    return link.end_find(keys, deadline)


def read(link: PeerLink, info: ChunkInfo) -> Bytes:
    frame = np.zeros(info.size_bytes, np.uint8)
    assert list(link.read(info, frame, 0, SILENCE_S))[-1] == info.size_bytes
    return frame


def test_what_is_in_memory_is_found_and_read_whole_and_in_parts(
    client: Client, link: PeerLink, server: LocalServer
) -> None:
    keys = store(client, 1, 3)
    wanted = [*keys, *keys_of(client, 2, 1), keys[0]]
    found = find(link, wanted)
    assert [info and info.key for info in found] == [*keys, None, keys[0]]
    for info in found[:3]:
        assert info is not None
        frame = read(link, info)
        assert check_frame(frame, info.key).info() == info
        part = np.zeros(1000, np.uint8)
        assert list(link.read(info, part, 70_000, SILENCE_S)) == [1000]
        assert bytes(part) == bytes(frame[70_000:71_000])
    assert server.settled().held == 0
    assert server.counter("peer_served_chunks") == 3


def test_between_hosts_the_same_goes_encrypted(
    make_server: ServerMaker, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    keys = ("--zmq-keys", str(tmp_path / "keys"))
    server = make_server("--zmq", "0.0.0.0:0", "--insecure", *keys, "--cpu", "64MiB")
    options = ClientOptions("grpc", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    stored = store(server.connect("grpc", MEDIUM, options), 1, 2)
    terms = PeerAccess().dial(server.address, "other", SILENCE_S).terms
    assert terms.public_key
    with closing(PeerLink(terms, context, time.monotonic)) as link:
        for info in find(link, stored):
            assert info is not None
            assert check_frame(read(link, info), info.key).info() == info
        assert link.is_open
    plain = replace(terms, public_key=b"")
    with closing(PeerLink(plain, context, time.monotonic)) as link, pytest.raises(DeadlineError):
        find(link, stored, 1.0)


def test_what_is_not_in_memory_is_nothing(client: Client, link: PeerLink) -> None:
    keys = store(client, 1, 1)
    (info,) = find(link, keys)
    assert info is not None
    absent = replace(info, key=keys_of(client, 3, 1)[0])
    assert list(link.read(absent, np.zeros(10, np.uint8), 0, SILENCE_S)) == []
    assert link.is_open


def test_who_stops_reading_hangs_up_and_the_peer_holds_nothing(
    client: Client, link: PeerLink, server: LocalServer
) -> None:
    keys = store(client, 1, 1)
    (info,) = find(link, keys)
    assert info is not None
    with closing(link.read(info, np.zeros(info.size_bytes, np.uint8), 0, SILENCE_S)) as steps:
        assert next(steps) < info.size_bytes
    assert not link.is_open
    assert server.settled().held == 0
    assert len(read(link, info)) == info.size_bytes


def test_more_than_the_most_requests_of_peers_are_refused_at_once(
    client: Client,
    link: PeerLink,
    terms: PeerTerms,
    context: zmq.Context[zmq.Socket[bytes]],
    server: LocalServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = store(client, 1, 1)
    (info,) = find(link, keys)
    assert info is not None
    plane = server.node.bulk
    assert plane is not None
    with monkeypatch.context() as patch, closing(PeerLink(terms, context, time.monotonic)) as more:
        patch.setattr(plane, "_pump", lambda: False)
        out = np.zeros(info.size_bytes, np.uint8)
        with closing(link.read(info, out, 0, 0.2)) as steps, pytest.raises(DeadlineError):
            list(steps)
        with pytest.raises(QuotaExceededError, match="peer_requests=1"):
            find(more, keys)
        assert more.is_open
    assert server.counter("peer_refused_requests") == 1
    assert eventually(lambda: _answers(link, keys))


def test_more_than_the_most_bytes_under_way_to_peers_are_refused_and_questions_are_not(
    make_server: ServerMaker,
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One get may have 16 MiB under way, and is counted with as many."""
    server = make_server(
        *("--zmq", "127.0.0.1:0", "--cpu", "64MiB", "--peer-requests", "8"),
        *("--peer-bytes", "16MiB"),
    )
    options = ClientOptions("zmq", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    keys = store(server.connect("zmq", MEDIUM, options), 1, 1)
    terms = PeerAccess().dial(server.address, "other", SILENCE_S).terms
    plane = server.node.bulk
    assert plane is not None
    with (
        closing(PeerLink(terms, context, time.monotonic)) as link,
        closing(PeerLink(terms, context, time.monotonic)) as more,
    ):
        (info,) = find(link, keys)
        assert info is not None
        out = np.zeros(info.size_bytes, np.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(plane, "_pump", lambda: False)  # what was asked for stays under way
            with closing(link.read(info, out, 0, 0.2)) as steps, pytest.raises(DeadlineError):
                list(steps)
            with (
                closing(more.read(info, out, 0, SILENCE_S)) as steps,
                pytest.raises(QuotaExceededError, match="peer_bytes=16777216"),
            ):
                list(steps)
            assert find(more, keys) == [info]
        assert server.counter("peer_refused_requests") == 1
        assert eventually(lambda: _reads(more, info)), "who went away is not counted for ever"
    assert server.settled().held == 0


def _reads(link: PeerLink, info: ChunkInfo) -> bool:
    try:
        return len(read(link, info)) == info.size_bytes
    except QuotaExceededError:
        return False


def _answers(link: PeerLink, keys: list[ChunkKey]) -> bool:
    try:
        return find(link, keys) != [None]
    except QuotaExceededError:
        return False


def test_a_peer_may_read_what_it_names_and_do_nothing_else(
    terms: PeerTerms,
    context: zmq.Context[zmq.Socket[bytes]],
    client: Client,
    link: PeerLink,
    server: LocalServer,
) -> None:
    keys = store(client, 1, 1)
    stranger = ChunkKey(bytes(16) + keys[0][16:])
    assert find(link, [stranger]) == [None]
    for word, payload in (
        (bulk.Get(99, terms.session_id, 0, 1 << 20, 1000, 0), keys[0][16:]),
        (bulk.Put(99, terms.session_id, 1000, 0), None),
    ):
        link._send(word, payload)
        answer, reason = link._receive(time.monotonic() + SILENCE_S)
        assert isinstance(answer, bulk.Failed)
        assert reason is not None
        assert isinstance(bulk.unpack_failure(reason.tobytes()), PermissionDeniedError)
    assert server.settled().leases == 0


def test_who_is_no_peer_may_not_ask_as_one(
    server: LocalServer, context: zmq.Context[zmq.Socket[bytes]], terms: PeerTerms
) -> None:
    reply = open_session(server.dial(), MEDIUM)
    session = server.node.sessions.get(reply.session_id)
    session.roles = frozenset({"read", "write", "admin"})
    theirs = replace(terms, session_id=reply.session_id, token=reply.attach_token)
    unknown = replace(terms, token=bytes(16))
    for shown, error in ((theirs, PermissionDeniedError), (unknown, UnauthenticatedError)):
        with closing(PeerLink(shown, context, time.monotonic)) as link, pytest.raises(error):
            find(link, [ChunkKey(bytes(32))])


def test_a_peer_that_is_gone_costs_the_time_given_and_no_more(
    terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    gone = replace(terms, address="tcp://127.0.0.1:9")
    with closing(PeerLink(gone, context, time.monotonic)) as link:
        deadline = time.monotonic() + 0.1
        link.begin_find([ChunkKey(bytes(32))], deadline)
        with pytest.raises(DeadlineError):
            link.end_find([ChunkKey(bytes(32))], deadline)
        assert not link.is_open
