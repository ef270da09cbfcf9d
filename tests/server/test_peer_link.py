"""One server pulls chunks from another: right frames, a shorter prefix, or a clean error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import zmq
from local_server import DEADLINE_MS, LocalServer, open_session
from prompts import MEDIUM, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierUnavailableError, UnauthenticatedError
from kvstore.proto.frame import check_frame
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkKey
from kvstore.server.peer_link import PeerLink, PeerTerms

ServerMaker = Callable[..., LocalServer]


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--zmq", "127.0.0.1:0", "--cpu", "32MiB")


@pytest.fixture
def client(server: LocalServer) -> Client:
    """Who put the chunks that the other server wants."""
    options = ClientOptions("zmq", chunk_tokens=512, deadline_ms=DEADLINE_MS)
    return server.connect("zmq", MEDIUM, options)


@pytest.fixture
def terms(server: LocalServer) -> PeerTerms:
    reply = open_session(server.dial(), MEDIUM)
    return PeerTerms(
        reply.zmq_address,
        reply.zmq_public_key,
        reply.session_id,
        reply.attach_token,
        reply.max_frame_bytes,
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def link(terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[PeerLink]:
    one = PeerLink(terms, context, time.monotonic)
    yield one
    one.close()


def digests(keys: list[ChunkKey]) -> list[ChainDigest]:
    return [ChainDigest(key[DIGEST_BYTES:]) for key in keys]


def room(chunk: int, size_bytes: int) -> Bytes:
    return np.empty(size_bytes, np.uint8)


def test_frames_of_several_parts_come_whole_and_right(
    client: Client, link: PeerLink, server: LocalServer
) -> None:
    keys = store(client, 1, 5)
    for _ in range(2):
        landed = link.fetch(digests(keys), room, DEADLINE_MS)
        assert [one.chunk for one in landed] == list(range(5))
        for one, key in zip(landed, keys, strict=True):
            assert len(one.frame) > 1 << 20
            assert check_frame(one.frame, key).key == key
    assert server.settled().leases == 0


def test_the_prefix_ends_at_the_first_chunk_that_the_peer_lacks(
    client: Client, link: PeerLink
) -> None:
    keys = store(client, 1, 2)
    wanted = [*keys, *keys_of(client, 2, 1), *keys]
    assert [one.chunk for one in link.fetch(digests(wanted), room, DEADLINE_MS)] == [0, 1]
    assert link.fetch(digests(keys_of(client, 3, 2)), room, DEADLINE_MS) == []


def test_what_there_is_no_room_for_is_passed_by(client: Client, link: PeerLink) -> None:
    keys = store(client, 1, 3)
    landed = link.fetch(
        digests(keys), lambda chunk, size: None if chunk == 1 else room(chunk, size), DEADLINE_MS
    )
    assert [one.chunk for one in landed] == [0, 2]


def test_a_peer_that_is_gone_is_an_error_and_found_again_when_it_is_back(
    terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]], client: Client
) -> None:
    keys = store(client, 1, 1)
    gone = PeerLink(replace(terms, address="tcp://127.0.0.1:9"), context, time.monotonic)
    with pytest.raises(TierUnavailableError, match=r"tier 'peer': .*does not answer"):
        gone.fetch(digests(keys), room, 200)
    gone._terms = terms
    assert len(gone.fetch(digests(keys), room, DEADLINE_MS)) == 1
    gone.close()


def test_a_peer_that_does_not_know_our_session_says_so(
    terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    stranger = PeerLink(replace(terms, token=bytes(16)), context, time.monotonic)
    with pytest.raises(UnauthenticatedError, match="not this session's"):
        stranger.fetch([ChainDigest(bytes(16))], room, DEADLINE_MS)
    stranger.close()


def test_a_peer_that_falls_silent_costs_the_deadline_and_no_more(
    client: Client, link: PeerLink, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, 3)
    assert len(link.fetch(digests(keys[:1]), room, DEADLINE_MS)) == 1
    plane = server.node.bulk
    assert plane is not None
    monkeypatch.setattr(plane, "_pump", lambda: False)
    monkeypatch.setattr(plane, "_finish", lambda *_: None)
    assert link.fetch(digests(keys), room, 300) == []
    monkeypatch.undo()
    assert len(link.fetch(digests(keys), room, DEADLINE_MS)) == 3
