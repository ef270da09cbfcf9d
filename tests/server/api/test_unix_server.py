"""The Unix socket: memory without seals, lies about sizes, strangers, garbage and silence."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.bare_wire import wire_to
from helpers.local_server import LocalServer, eventually, open_session
from helpers.prompts import SMALL, chunks_of, keys_of
from helpers.socket_peer import STAGING_BYTES, Claim, Peer, staging, ticking
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client.transports.shared_memory import StagingMemory
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import KVLayout
from kvstore.proto.unix_socket import Op, Reply, Request
from kvstore.server.api import unix_server
from kvstore.server.api.unix_server import SlabFile, UnixServer
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.settings import Settings

ServerMaker = Callable[..., LocalServer]

ONLY_OPEN_FDS = "/proc/self/fd"
_PUNCH_HOLE = 0x1 | 0x2  # and keep the size


@pytest.fixture
def connect(server: LocalServer) -> Iterator[Callable[[], Peer]]:
    """Connect peers to the server's socket."""
    peers: list[Peer] = []

    def connect() -> Peer:
        peers.append(Peer(str(server.config.socket_path_for(server.node.port))))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest.fixture
def terms(server: LocalServer) -> pb.OpenSessionResponse:
    return open_session(server.dial())


def test_sealed_staging_memory_is_taken(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    with staging() as descriptor:
        assert connect().attach(terms, descriptor) is Reply.ok
    plane = server.node.unix_server
    assert plane is not None
    assert len(plane.staging(terms.session_id).memory) == STAGING_BYTES


@pytest.mark.parametrize(
    "seals",
    [
        0,
        unix_socket.SIZE_SEALS,
        *(
            unix_socket.STAGING_SEALS & ~one
            for one in (unix_socket.SEAL_SHRINK, unix_socket.SEAL_GROW, unix_socket.SEAL_SEAL)
        ),
    ],
)
def test_staging_memory_whose_size_or_holes_could_change_is_refused(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    seals: int,
) -> None:
    with staging(seals) as descriptor:
        assert connect().attach(terms, descriptor) is Reply.invalid
    assert_nothing_attached(server, terms)


def assert_nothing_attached(server: LocalServer, terms: pb.OpenSessionResponse) -> None:
    """Fail if the session got staging memory, or lost its life."""
    plane = server.node.unix_server
    assert plane is not None
    with pytest.raises(InvalidRequestError, match="attach staging memory first"):
        plane.staging(terms.session_id)
    assert not server.node.sessions.get(terms.session_id).is_attached


@pytest.mark.parametrize("stated_bytes", [0, 1, STAGING_BYTES - 1, STAGING_BYTES + 1, 1 << 63])
def test_lie_about_the_size_of_the_staging_memory_is_refused(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    stated_bytes: int,
) -> None:
    with staging() as descriptor:
        said = connect().attach(terms, descriptor, size_bytes=stated_bytes)
    assert said is Reply.invalid
    assert_nothing_attached(server, terms)


def test_staging_memory_of_no_bytes_or_too_many_is_refused(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    for size_bytes in (0, (1 << 30) + mmap.PAGESIZE):
        with staging(size_bytes=size_bytes) as descriptor:
            said = connect().attach(terms, descriptor, size_bytes=size_bytes)
        assert said is Reply.invalid
    assert_nothing_attached(server, terms)


def test_staging_memory_that_was_never_written_is_refused_and_costs_nothing(
    server: LocalServer, connect: Callable[[], Peer]
) -> None:
    wire, size_bytes, chunks = wire_to(server), 64 << 20, 60
    frame_bytes = raw_frame_bytes(KVLayout.of(SMALL, 16))
    with staging(size_bytes=size_bytes) as descriptor, server.unchanged():
        assert connect().attach(wire.terms, descriptor, size_bytes=size_bytes) is Reply.ok
        for number in range(chunks):
            (reservation,) = wire.call("Reserve", wire.reserve(frame_bytes)).reservation_ids
            commit = pb.CommitRequest(reservation_ids=[reservation], offsets=[number << 20])
            with pytest.raises(InvalidRequestError, match="bytes there first"):
                wire.call("Commit", commit)
        assert os.fstat(descriptor).st_blocks == 0


def test_staging_memory_is_looked_at_once_however_many_frames_are_in_it(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size_bytes, looks, lseek = 16 << 20, [0], os.lseek

    def counting(descriptor: int, offset: int, whence: int) -> int:
        looks[0] += 1
        return lseek(descriptor, offset, whence)

    monkeypatch.setattr(os, "lseek", counting)
    plane = server.node.unix_server
    assert plane is not None
    with staging(size_bytes=size_bytes, written=True) as descriptor:
        assert connect().attach(terms, descriptor, size_bytes=size_bytes) is Reply.ok
        for offset in [*range(0, size_bytes, mmap.PAGESIZE)] * 2:
            plane.staging(terms.session_id).part(offset, mmap.PAGESIZE)
    assert looks == [2]  # for the data, and for its end


def test_nobody_waits_for_a_look_at_another_s_staging_memory(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, goes_on, lseek = threading.Event(), threading.Event(), os.lseek

    def slow(descriptor: int, offset: int, whence: int) -> int:
        looks.set()
        assert goes_on.wait(20)
        return lseek(descriptor, offset, whence)

    plane = server.node.unix_server
    assert plane is not None
    monkeypatch.setattr(os, "lseek", slow)
    with staging(written=True) as descriptor:
        peer = connect()
        assert peer.attach(terms, descriptor) is Reply.ok
        look = plane.staging(terms.session_id).part
        thread = threading.Thread(target=look, args=(0, STAGING_BYTES))
        thread.start()
        try:
            assert looks.wait(20)
            other = open_session(server.dial())
            assert connect().attach(other, descriptor) is Reply.ok
            peer.close()  # its descriptor is looked at: closed behind that
        finally:
            goes_on.set()
            thread.join()


def test_what_was_written_to_staging_memory_cannot_be_taken_back() -> None:
    memory = StagingMemory(STAGING_BYTES)
    try:
        memory._memory[:] = 1
        written = os.fstat(memory.descriptor).st_blocks
        assert os.lseek(memory.descriptor, 0, os.SEEK_HOLE) == memory.size_bytes
        libc = ctypes.CDLL(None, use_errno=True)
        length = ctypes.c_long(memory.size_bytes)
        assert libc.fallocate(memory.descriptor, _PUNCH_HOLE, ctypes.c_long(0), length) == -1
        assert ctypes.get_errno() == errno.EPERM
        assert os.fstat(memory.descriptor).st_blocks == written
    finally:
        memory.close_descriptor()
        memory.close()


def test_descriptor_that_is_no_memfd_is_refused(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(STAGING_BYTES))
    descriptor = os.open(file, os.O_RDWR)
    try:
        assert connect().attach(terms, descriptor) is Reply.invalid
    finally:
        os.close(descriptor)
    assert_nothing_attached(server, terms)


@pytest.mark.parametrize("count", [0, 2, 4, 9])
def test_attach_with_other_than_one_descriptor_is_refused_and_leaks_none(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    count: int,
) -> None:
    with staging() as descriptor:
        assert connect().attach(terms, *[descriptor] * count) is Reply.invalid
    assert_nothing_attached(server, terms)


@pytest.mark.parametrize("token", [b"", bytes(16), b"\xff" * 16])
def test_wrong_token_is_denied(
    server: LocalServer,
    connect: Callable[[], Peer],
    terms: pb.OpenSessionResponse,
    token: bytes,
) -> None:
    other = open_session(server.dial())
    for claimed in (token, other.attach_token):
        with staging() as descriptor:
            claim = Claim(terms.session_id, claimed)
            assert connect().attach(claim, descriptor) is Reply.denied
    assert_nothing_attached(server, terms)


def test_session_that_ended_takes_nobody_in(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    server.node.sessions.close(terms.session_id)
    with staging() as descriptor:
        assert connect().attach(terms, descriptor) is Reply.denied


def test_what_somebody_overheard_of_one_attach_is_worth_nothing(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    hello = Request(Op.hello, terms.session_id, b"n" * 16).pack()
    peer, thief = connect(), connect()
    said = []
    for one in (peer, thief):
        one.link.send(hello)
        said.append(one.link.recv(unix_socket.GREETING_BYTES))
    nonce, proven = unix_socket.unpack_greeting(said[0])
    assert proven == unix_socket.proof(
        terms.attach_token, Op.hello, terms.session_id, (b"n" * 16, nonce)
    )  # the server had to say it first
    own = unix_socket.proof(terms.attach_token, Op.attach, terms.session_id, (b"n" * 16, nonce))
    attach = Request(Op.attach, STAGING_BYTES, own).pack()
    assert terms.attach_token not in hello + said[0] + attach
    with staging() as descriptor:
        assert thief.ask(attach, [descriptor]) is Reply.denied  # its hello had another nonce
        assert connect().ask(attach, [descriptor]) is Reply.denied
        as_join = Request(Op.join, 0, own).pack()
        assert peer.ask(as_join) is Reply.denied  # a proof is of one operation, and of one try
        assert peer.ask(attach, [descriptor]) is Reply.denied
    assert_nothing_attached(server, terms)


def test_peer_attaches_once(connect: Callable[[], Peer], terms: pb.OpenSessionResponse) -> None:
    peer = connect()
    with staging() as descriptor:
        assert peer.attach(terms, descriptor) is Reply.ok
        assert peer.attach(terms, descriptor) is Reply.invalid


def test_slab_is_denied_to_a_stranger_and_unknown_slabs_to_everyone(
    connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    peer = connect()
    assert peer.ask(Request(Op.slab, 1).pack()) is Reply.denied
    with staging() as descriptor:
        assert peer.attach(terms, descriptor) is Reply.ok
    for slab_id in (0, 10**6, (1 << 64) - 1):
        assert peer.ask(Request(Op.slab, slab_id).pack()) is Reply.invalid


@given(garbage=st.binary(min_size=1, max_size=64))
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_garbage_is_answered_invalid_and_never_kills_the_thread(
    server: LocalServer, connect: Callable[[], Peer], garbage: bytes
) -> None:
    peer = connect()
    assert peer.ask(garbage) in (Reply.invalid, Reply.denied)
    peer.close()
    assert server.node.is_alive()


def test_message_of_another_version_is_refused(connect: Callable[[], Peer]) -> None:
    message = bytearray(Request(Op.slab, 1).pack())
    struct.pack_into("<H", message, 4, 1)
    assert connect().ask(bytes(message)) is Reply.invalid


def test_server_works_on_after_garbage_and_serves_its_clients(
    server: LocalServer, connect: Callable[[], Peer]
) -> None:
    client = server.connect("shm")
    keys = keys_of(client, 1, 3)
    client.put_chunks(chunks_of(client, keys))
    for _ in range(50):
        peer = connect()
        peer.ask(b"x" * 33)
        peer.close()
    assert len(client.get_chunks(keys)) == 3


def test_attached_peer_s_end_closes_its_session(
    server: LocalServer, connect: Callable[[], Peer], terms: pb.OpenSessionResponse
) -> None:
    peer = connect()
    with staging() as descriptor:
        peer.attach(terms, descriptor)
    assert len(server.node.sessions) == 1
    peer.close()
    assert eventually(lambda: len(server.node.sessions) == 0)


def test_attached_session_does_not_expire_and_a_silent_one_does(
    make_server: ServerMaker, no_leaks: None
) -> None:
    server = make_server()
    connection = server.dial()
    silent, attached = open_session(connection), open_session(connection)
    peer = Peer(str(server.config.socket_path_for(server.node.port)))
    with staging() as descriptor:
        assert peer.attach(attached, descriptor) is Reply.ok
    server.skip(server.config.limits.session_ttl_ms / 1000 + 1)
    assert eventually(lambda: server.counter("expired_sessions") == 1)
    ids = set(server.node.sessions.by_id)
    assert silent.session_id not in ids
    assert attached.session_id in ids
    peer.close()


# --- planes by themselves, with a clock of the test's own


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sessions(clock: Clock) -> SessionTable:
    return SessionTable(2, 1000, lambda tenant: b"", clock, os.urandom)


def no_slabs(slab_id: int, tenant: str) -> tuple[int, int]:
    raise InvalidRequestError("slab_id", slab_id, "there is none")


def open_plane(path: Path, clock: Clock, slab_file: SlabFile = no_slabs) -> UnixServer:
    return open_plane_of(path, sessions(clock), slab_file, clock)


def open_plane_of(
    path: Path,
    table: SessionTable,
    slab_file: SlabFile,
    clock: Clock,
    descriptors: int = 64,
) -> UnixServer:
    authorizer = Authorizer(Settings(), table, clock)
    return UnixServer(path, table, {Op.slab: slab_file}, authorizer, 4, descriptors)


def test_peer_that_connects_and_stays_silent_is_hung_up_on(tmp_path: Path, no_leaks: None) -> None:
    clock = Clock()
    plane = open_plane(tmp_path / "s.sock", clock)
    peer = Peer(str(plane.path))
    assert peer.ask(b"hello") is Reply.invalid
    clock.now = unix_server._ATTACH_WITHIN_S + 1
    with ticking(plane):
        assert peer.is_hung_up()
    peer.close()
    plane.close()


def test_peers_beyond_the_limit_are_hung_up_on(tmp_path: Path, no_leaks: None) -> None:
    plane = open_plane(tmp_path / "s.sock", Clock())
    peers = [Peer(str(plane.path)) for _ in range(2)]
    for peer in peers:
        assert peer.ask(b"hello") is Reply.invalid
    third = Peer(str(plane.path))
    assert third.is_hung_up()
    for peer in (*peers, third):
        peer.close()
    plane.close()


def test_slab_s_descriptor_is_closed_once_it_is_sent(tmp_path: Path, no_leaks: None) -> None:
    clock = Clock()
    table = sessions(clock)
    slab = unix_socket.create_memfd("test-slab", 4096)
    plane = open_plane_of(tmp_path / "s.sock", table, lambda *_: (os.dup(slab), 4096), clock)
    session = table.open(SMALL, "test")
    peer = Peer(str(plane.path))
    with staging() as descriptor:
        assert peer.attach(session, descriptor) is Reply.ok
    before = len(os.listdir(ONLY_OPEN_FDS))
    for _ in range(20):
        assert peer.ask(Request(Op.slab, 1).pack()) is Reply.ok
    # Fewer when the memory of attach was not closed yet when they were counted.
    assert eventually(lambda: len(os.listdir(ONLY_OPEN_FDS)) <= before)
    peer.close()
    plane.close()
    os.close(slab)


def test_a_ring_that_was_taken_is_written_down_and_one_that_was_not_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    clock = Clock()
    table, notes = sessions(clock), list[tuple[object, ...]]()
    monkeypatch.setattr(Authorizer, "note_on", lambda _, *event: notes.append(event))
    plane = open_plane_of(tmp_path / "s.sock", table, no_slabs, clock)
    plane.take_ring = lambda session, request, exported: None
    session = table.open(SMALL, "test")
    ring = Request(Op.ring, STAGING_BYTES).pack()
    with closing(plane), Peer(str(plane.path)) as peer, staging() as descriptor:
        assert peer.ask(ring, [descriptor]) is Reply.denied
        assert peer.attach(session, descriptor) is Reply.ok
        assert peer.ask(ring, [descriptor]) is Reply.ok
        # It is written down behind the answer: what follows on this connection comes later.
        assert peer.ask(b"noise") is Reply.invalid
    assert notes == [
        (None, "Ring", "UnauthenticatedError", 0, "unix"),
        (session, "Ring", "OK", 0, "unix"),
    ]


def test_a_connection_that_finds_no_room_is_in_the_log_with_what_to_raise(
    tmp_path: Path, no_leaks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    plane = open_plane_of(tmp_path / "s.sock", sessions(clock), no_slabs, clock, 1)
    with closing(plane), Peer(str(plane.path)) as first, Peer(str(plane.path)) as second:
        assert first.ask(b"hello") is Reply.invalid
        assert second.is_hung_up()
        assert eventually(lambda: "raise ulimit -n" in capsys.readouterr().out)


def test_calls_of_one_client_are_answered_side_by_side(server: LocalServer) -> None:
    client = server.connect("shm")
    keys = keys_of(client, 1, 2)
    client.put_chunks(chunks_of(client, keys))
    plane = server.node.unix_server
    assert plane is not None
    answer, together = plane.answer, threading.Barrier(3)
    assert answer is not None

    def wait_for_others(*call: Any) -> Generator[Any, None, None]:
        together.wait(20)
        yield from answer(*call)

    plane.answer = wait_for_others
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: client.lookup(keys=keys).ready, range(3)))
    plane.answer = answer
    assert found == [2, 2, 2]
    assert 3 < len(plane._threads) + 1 <= server.config.workers + 1
