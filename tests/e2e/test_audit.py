"""What callers did is written down whichever way they came in, and so is what was refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.local_server import DEADLINE_MS, eventually, open_session
from helpers.stream_messages import attach
from helpers.trust_world import Audited, chunks_for

from kvstore.client import Access
from kvstore.client.options import TransportName
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.proto import unix_socket
from kvstore.proto.errors import PermissionDeniedError, UnauthenticatedError
from kvstore.server.api import unix_server

CHUNKS = 3


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Audited]:
    world = Audited(tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize(
    ("transport", "origin"),
    [("shm", "unix"), ("tcp", "stream:127.0.0.1"), ("grpc", "ipv")],
)
def test_puts_and_gets_are_written_down_with_who_and_of_what(
    transport: TransportName, origin: str, world: Audited
) -> None:
    client = world.client(world.acme, transport)
    keys, chunks = chunks_for(client, 1, CHUNKS)
    client.put_chunks(chunks)
    assert len(client.get_chunks(keys)) == CHUNKS
    who = f"key:{world.acme[4:16]}"
    same = {"who": who, "tenant": "acme", "outcome": "OK", "key_prefix": keys[0][:8].hex()}
    wrote = "Reserve" if transport == "shm" else "Put"
    assert eventually(lambda: world.came(rpc=wrote, chunks=CHUNKS, **same))
    assert eventually(lambda: world.came(rpc="Get", chunks=CHUNKS, **same))
    origins = {line["peer"] for line in world.lines() if line["rpc"] in (wrote, "Get")}
    assert all(one.startswith(origin) for one in origins), origins


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_refused_put_is_written_down(transport: TransportName, world: Audited) -> None:
    reader = world.client(world.reader, transport)
    _, chunks = chunks_for(reader, 1, CHUNKS)
    with pytest.raises(PermissionDeniedError):
        reader.put_chunks(chunks)
    wrote = "Reserve" if transport == "shm" else "Put"
    who = f"key:{world.reader[4:16]}"
    assert eventually(lambda: world.came(rpc=wrote, who=who, outcome="PermissionDeniedError"))


def test_a_stranger_at_the_bulk_channel_is_written_down(world: Audited) -> None:
    terms = open_session(world.dial(Access(ca=world.ca.path, token=world.acme)))
    entrance = Entrance(terms.bulk_address, b"", attach(terms.session_id, bytes(16)).attach)
    with pytest.raises(UnauthenticatedError):
        FrameStream(entrance, lambda: False, DEADLINE_MS / 1000)
    wanted = {"rpc": "Attach", "outcome": "UnauthenticatedError", "peer": "stream:127.0.0.1"}
    assert eventually(lambda: world.came(**wanted))
    assert not any("who" in line for line in world.lines() if line["rpc"] == "Attach")


@pytest.mark.parametrize("uid", ["another", "ours"])
def test_who_is_not_let_in_at_the_unix_socket_is_written_down(
    uid: str, world: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = world.server.node.unix_server
    assert plane is not None
    if uid == "another":
        monkeypatch.setattr(unix_server, "is_trusted", lambda connection: False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(DEADLINE_MS / 1000)
        stranger.connect(str(plane.path))
        if uid == "ours":
            stranger.send(unix_socket.Request(unix_socket.Op.join, 0).pack())
            assert stranger.recv(64) == unix_socket.pack_reply(unix_socket.Reply.denied)
        outcome = "PermissionDeniedError" if uid == "another" else "UnauthenticatedError"
        assert eventually(lambda: world.came(rpc="Attach", outcome=outcome, peer="unix"))
