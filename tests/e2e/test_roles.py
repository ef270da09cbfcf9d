"""Every role and operation over every transport: who may not is told nothing, and written down."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest
from helpers.local_server import DEADLINE_MS, eventually, open_session
from helpers.prompts import chunks_of, keys_of
from helpers.socket_peer import Peer, staging
from helpers.stream_messages import attach
from helpers.trust_world import SERVICE, Audited, World, chunks_for, request_of

from kvstore.client import Access, Chunk, Client
from kvstore.client.options import TransportName
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import (
    KVStoreError,
    PermissionDeniedError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.types import DIGEST_BYTES, ChunkKey
from kvstore.proto.unix_socket import (
    METHODS,
    Op,
    Reply,
    Request,
    pack_call,
    unpack_answer,
    unpack_places,
)
from kvstore.server.api import unix_server
from kvstore.server.security.rate_limits import Limits

CHUNKS = 4
ROLES = ("read", "write", "admin", "peer")
NEEDS = {
    "read": (
        *("Lookup", "Get", "Release", "LendPeer", "Resolve", "Stat", "List"),
        *("Explain", "Events", "Spaces"),
    ),
    "write": (
        *("Put", "Reserve", "Commit", "Abort", "PutDevice", "AnnouncePuts", "Weigh", "ReportReuse"),
        *("Pin", "Unpin", "Delete", "Clear"),
    ),
    "admin": ("SetQuota", "Drain", "Scrub", "Trace"),
    "peer": ("OpenPeer",),
}
FOR_ALL = {"OpenSession", "Heartbeat", "CloseSession", "Status", "Quota"}
ROLE_OF = {method: role for role, methods in NEEDS.items() for method in methods}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """A server with chunks of one tenant in memory and on disk, and a key for each role."""
    world = Audited(tmp_path_factory.mktemp("pairs"))
    writer = world.client(world.acme)
    writer.put_chunks(chunks_for(writer, 1, CHUNKS)[1])
    world.server.settled()
    yield world
    world.close()


@pytest.fixture(scope="module")
def key_of(world: World) -> dict[str, str]:
    return {role: world.new_key("acme", role) for role in ROLES} | {"both": world.acme}


def test_the_table_of_this_test_names_every_rpc() -> None:
    assert ROLE_OF.keys() | FOR_ALL == {method.name for method in SERVICE.methods}


# --- gRPC


def outcome_of(world: World, key: str, method: str, session_id: int, digests: bytes) -> str:
    try:
        world.call(key, method, request_of(method, session_id, digests))
    except KVStoreError as error:
        return type(error).__name__
    return "OK"


@pytest.mark.parametrize("role", ROLES)
def test_grpc_refuses_each_role_what_is_another_s(
    role: str, world: World, key_of: dict[str, str]
) -> None:
    key = key_of[role]
    session = open_session(world.dial(Access(ca=world.ca.path, token=key)))
    digests = b"".join(key[DIGEST_BYTES:] for key in keys_of(world.client(world.acme), 1, CHUNKS))
    others = sorted(method for method, needed in ROLE_OF.items() if needed != role)
    seen = {one: outcome_of(world, key, one, session.session_id, digests) for one in others}
    assert set(seen.values()) == {"PermissionDeniedError"}, seen
    own = [one for one in NEEDS[role] if one not in ("Events", "Drain")]
    seen = {one: outcome_of(world, key, one, session.session_id, digests) for one in own}
    assert "PermissionDeniedError" not in seen.values(), seen


# --- clients, whatever carries the bytes

Operation = Callable[[Client, list[ChunkKey], list[Chunk]], Any]
OPERATIONS: dict[str, tuple[str, Operation]] = {
    "lookup": ("read", lambda client, keys, chunks: client.lookup(keys=keys).ready),
    "get": ("read", lambda client, keys, chunks: client.get_chunks(keys)),
    "lease": ("read", lambda client, keys, chunks: client.lease(keys=keys)),
    "put": ("write", lambda client, keys, chunks: client.put_chunks(chunks)),
    "pin": ("write", lambda client, keys, chunks: client.pin(keys=keys, ttl=1.0)),
    "delete": ("write", lambda client, keys, chunks: client.delete(keys=keys)),
}


@pytest.mark.parametrize("way", ["shm", "tcp"])
@pytest.mark.parametrize("role", ROLES)
def test_a_client_does_what_its_role_may_and_nothing_else(
    role: str, way: TransportName, world: World, key_of: dict[str, str]
) -> None:
    client = world.client(key_of[role], way)
    writer = world.client(world.acme)
    leaks, refused = [], []
    for name, (needed, operation) in OPERATIONS.items():
        keys, chunks = chunks_for(writer, 1, CHUNKS)
        if name == "put":
            keys = keys_of(writer, hash((role, way)) % 10_000 + 10, 2)
            chunks = chunks_of(writer, keys)
        writer.put_chunks(chunks_for(writer, 1, CHUNKS)[1])  # which a delete may have deleted
        try:
            operation(client, keys, chunks)
        except (PermissionDeniedError, TierUnavailableError):  # not even let in at the socket
            refused.append(name)
            continue
        if needed != role:
            leaks.append(name)
    assert leaks == []
    assert refused == [name for name, (needed, _) in OPERATIONS.items() if needed != role]


# --- the Unix socket, message by message


def on_the_socket(world: World, key: str) -> tuple[pb.OpenSessionResponse, Peer, Reply]:
    """Return a session, a connection that tried to attach to it, and what that was told."""
    terms = open_session(world.dial(Access(ca=world.ca.path, token=key)))
    peer = Peer(terms.socket_path)
    with staging() as descriptor:
        return terms, peer, peer.attach(terms, descriptor)


def slabs_with(world: World, seed: int) -> set[int]:
    """Have chunks stored, in memory and on disk; return the numbers of the slabs they are in."""
    writer = world.client(world.acme)
    keys, chunks = chunks_for(writer, seed, CHUNKS)
    writer.put_chunks(chunks, durable=True)
    connection = world.dial(Access(ca=world.ca.path, token=world.acme))
    digests = b"".join(key[-DIGEST_BYTES:] for key in keys)
    request = request_of("Lookup", open_session(connection).session_id, digests)
    request.lease = request.places = True
    reply = connection.call("Lookup", request, 20_000, pb.LookupResponse)
    return {place.number for place in unpack_places(reply.places)}


def files_given(peer: Peer, op: Op, numbers: Iterable[int] = range(64)) -> int:
    """Return how many descriptors the server gives, of slabs or extents of these *numbers*."""
    given = 0
    for number in numbers:
        peer.link.send(Request(op, number).pack())
        _, files, _, _ = socket.recv_fds(peer.link, unix_socket.HEADER_BYTES, 4)
        given += len(files)
        for descriptor in files:
            os.close(descriptor)
    return given


def test_memory_is_for_readers_and_files_for_those_who_also_write(
    world: World, key_of: dict[str, str]
) -> None:
    numbers = slabs_with(world, 20)
    for role in (*ROLES, "both"):
        _, peer, reply = on_the_socket(world, key_of[role])
        with closing(peer):
            assert reply is (Reply.denied if role in ("admin", "peer") else Reply.ok)
            slabs = len(numbers) if role in ("read", "both") else 0
            assert files_given(peer, Op.slab, numbers) == slabs
            assert (files_given(peer, Op.extent) > 0) is (role == "both")
            with staging() as descriptor:
                ring = peer.request(Request(Op.ring, 4096).pack(), [descriptor])
            # there is no gpu tier
            assert ring is (Reply.invalid if role in ("write", "both") else Reply.denied)


@pytest.mark.parametrize("role", ROLES)
def test_calls_over_the_socket_are_refused_as_over_grpc(
    role: str, world: World, key_of: dict[str, str]
) -> None:
    terms, peer, _ = on_the_socket(world, key_of[role])
    with closing(peer):
        for method in (one.name for one in METHODS.values()):
            peer.link.send(pack_call(method, request_of(method, terms.session_id)))
            answer = unpack_answer(peer.link.recv(1 << 18))
            is_refused = isinstance(answer.error, PermissionDeniedError)
            assert (is_refused or answer.reply is Reply.denied) is (ROLE_OF[method] != role), method
            while answer.reply is Reply.more:
                answer = unpack_answer(peer.link.recv(1 << 18))


def test_what_was_given_and_refused_at_the_socket_is_written_down(
    world: Audited, key_of: dict[str, str]
) -> None:
    numbers = {0, *slabs_with(world, 20)}  # the first is nobody's
    for role, method, outcome in (
        ("read", "Slab", "OK"),
        ("both", "Extent", "OK"),
        ("write", "Slab", "PermissionDeniedError"),
        ("read", "Extent", "PermissionDeniedError"),
        ("read", "Ring", "PermissionDeniedError"),
        ("both", "Slab", "InvalidRequestError"),
    ):
        _, peer, _ = on_the_socket(world, key_of[role])
        with closing(peer), suppress(OSError), staging() as descriptor:
            files_given(peer, Op.slab, numbers)
            files_given(peer, Op.extent)
            peer.request(Request(Op.ring, 4096).pack(), [descriptor])
        who = f"key:{key_of[role][4:16]}"
        came = partial(world.has_line, peer="unix", rpc=method, outcome=outcome, who=who)
        assert eventually(came), came.keywords
    for role in ("admin", "peer"):
        on_the_socket(world, key_of[role])[1].close()
    assert eventually(lambda: world.has_line(rpc="Attach", outcome="PermissionDeniedError"))


def test_memory_at_the_socket_does_not_count_as_requests_of_its_tenant(
    world: World, key_of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = slabs_with(world, 20)
    limits = world.server.node.authorizer.limits
    now_s = limits._clock()
    monkeypatch.setattr(limits, "_clock", lambda: now_s)
    limits.set("acme", Limits(requests_per_s=3))
    try:
        terms, peer, reply = on_the_socket(world, key_of["both"])
        with closing(peer):
            assert reply is Reply.ok
            given = [files_given(peer, Op.slab, numbers) for _ in range(8)]
            assert given == [len(numbers)] * 8
            with staging() as descriptor:
                for _ in range(8):
                    peer.request(Request(Op.ring, 4096).pack(), [descriptor])
            lookup = request_of("Lookup", terms.session_id)
            assert peer.call("Lookup", lookup).error is None
    finally:
        limits.set("acme", Limits())


def test_a_reader_without_writing_gets_copies_of_what_is_on_disk(world: World) -> None:
    writer = world.client(world.acme)
    keys, chunks = chunks_for(writer, 2, CHUNKS)
    writer.put_chunks(chunks, durable=True)
    world.server.leave_memory(keys)
    reader = world.client(world.reader, "shm")
    got = reader.get_chunks(keys)
    assert len(got) == CHUNKS
    assert reader._link.connected().slabs._files == {}  # type: ignore[attr-defined]


# --- what is written down


@pytest.mark.parametrize(
    ("transport", "origin"), [("shm", "unix"), ("tcp", "stream:127.0.0.1"), ("grpc", "ipv")]
)
def test_puts_and_gets_are_written_down_with_who_and_of_what_and_so_is_a_refused_put(
    transport: TransportName, origin: str, world: Audited
) -> None:
    client = world.client(key := world.new_key("acme", "read", "write"), transport)
    keys, chunks = chunks_for(client, 30 + len(origin), CHUNKS)
    client.put_chunks(chunks)
    assert len(client.get_chunks(keys)) == CHUNKS
    who = f"key:{key[4:16]}"
    same = {"who": who, "tenant": "acme", "outcome": "OK", "key_prefix": keys[0][:8].hex()}
    wrote = "Reserve" if transport == "shm" else "Put"
    assert eventually(lambda: world.has_line(rpc=wrote, chunks=CHUNKS, **same))
    assert eventually(lambda: world.has_line(rpc="Get", chunks=CHUNKS, **same))
    lines = [line for line in world.lines() if line.get("who") == who]
    origins = {line["peer"] for line in lines if line["rpc"] in (wrote, "Get")}
    assert all(one.startswith(origin) for one in origins), origins
    reader = world.client(key := world.new_key("acme", "read"), transport)
    with pytest.raises(PermissionDeniedError):
        reader.put_chunks(chunks)
    who = f"key:{key[4:16]}"
    assert eventually(lambda: world.has_line(rpc=wrote, who=who, outcome="PermissionDeniedError"))


def test_strangers_at_the_streams_and_at_the_socket_are_written_down(
    world: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = open_session(world.dial(Access(ca=world.ca.path, token=world.acme)))
    entrance = Entrance(terms.bulk_address, b"", attach(terms.session_id, bytes(16)).attach)
    with pytest.raises(UnauthenticatedError):
        FrameStream(entrance, DEADLINE_MS / 1000)
    wanted = {"rpc": "Attach", "outcome": "UnauthenticatedError"}
    assert eventually(lambda: world.has_line(peer="stream:127.0.0.1", **wanted))
    assert not any("who" in line for line in world.lines() if wanted.items() <= line.items())
    with Peer(terms.socket_path) as stranger:
        assert stranger.request(Request(Op.join, 0).pack()) is Reply.denied
    assert eventually(lambda: world.has_line(peer="unix", **wanted))
    monkeypatch.setattr(unix_server, "is_trusted", lambda connection: False)
    with Peer(terms.socket_path):
        wanted |= {"outcome": "PermissionDeniedError", "peer": "unix"}
        assert eventually(
            lambda: any(wanted.items() <= row.items() and "who" not in row for row in world.lines())
        )
