"""The Unix socket: who listens there, who is let in; false memory, lies, garbage and silence."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from contracts.shelf import open_files
from helpers.bare_wire import Wire
from helpers.local_server import LocalServer, eventually, open_session
from helpers.prompts import SMALL
from helpers.socket_peer import STAGING_BYTES, Claim, Peer, staging, ticking
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock

from kvstore.client.transports.shared_memory import StagingMemory
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import KVLayout
from kvstore.proto.unix_socket import Op, Reply, Request
from kvstore.server.api import unix_server
from kvstore.server.api.unix_server import Staging, UnixServer, is_trusted, listen
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.settings import Settings

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path, no_leaks: None) -> Path:
    return tmp_path / "s.sock"


def connected(path: Path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, kind)
    link.setblocking(False)
    try:
        link.connect(str(path))
    except OSError:
        link.close()
        raise
    return link


def assert_refused(path: Path, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        listen(path)


def test_second_server_on_one_socket_is_refused_also_of_one_that_is_overrun(path: Path) -> None:
    with closing(listen(path)), ExitStack() as waiting:
        assert_refused(path, r"s\.sock': another server listens there; stop it or")
        with suppress(BlockingIOError):  # it accepts nobody, and lets no more wait
            while True:
                waiting.enter_context(connected(path))
        assert_refused(path, "another server listens there; stop it or")


def test_what_another_program_has_in_the_socket_s_place_is_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        assert_refused(path, "choose another with --socket")
        connected(path, socket.SOCK_STREAM).close()
    notes = path.parent / "notes.txt"
    notes.write_text("mine")
    assert_refused(notes, r"notes\.txt': not a socket")
    assert notes.read_text() == "mine"


def test_socket_that_a_killed_server_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    assert path.exists()
    with closing(listen(path)):
        connected(path).close()


def test_socket_is_for_this_user_alone(path: Path) -> None:
    path = path.parent / "new" / "s.sock"
    with closing(listen(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_folder_in_which_others_could_swap_the_socket_or_as_a_whole_is_refused(path: Path) -> None:
    folder = path.parent / "open"
    own = folder / "own"
    own.mkdir(parents=True, mode=0o700)
    (path.parent / "link").symlink_to(own)
    for mode in (0o777, 0o775):
        folder.chmod(mode)
        for one in (folder, own, path.parent / "link"):
            assert_refused(
                one / "s.sock", r"others could replace the socket in .*/open: chmod go-w"
            )
    folder.chmod(0o1777)
    listen(folder / "s.sock").close()


def test_path_that_cannot_be_is_refused_in_one_sentence(path: Path) -> None:
    path.write_text("")
    assert_refused(path / "s.sock", "File exists; choose another with --socket")
    assert_refused(path.parent / ("s" * 108), "path too long; choose another with --socket")


def test_peers_of_this_user_and_root_are_trusted_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_trusted(ours)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    trusted = []
    for uid in (0, 1, 999, 1000, 1001, 65534, -2):
        caller = Mock(getsockopt=Mock(return_value=struct.pack("3i", 1, uid, 1)))
        trusted += [uid] if is_trusted(caller) else []
        caller.getsockopt.assert_called_once_with(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    assert trusted == [0, 1000]


def test_a_user_namespace_in_which_root_has_no_number_takes_root_s_folders(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid_map, stat_of = path.parent / "uid_map", Path.stat

    def seen(folder: Path, **options: bool) -> os.stat_result:
        """As it is seen where root's number is not mapped."""
        found = stat_of(folder, **options)
        return os.stat_result((*found[:4], found.st_uid or NOBODY, *found[5:]))

    monkeypatch.setattr(Path, "stat", seen)
    monkeypatch.setattr(unix_server, "_UID_MAP", uid_map)
    uid_map.write_text("0 0 4294967295")
    assert_refused(path, "others could replace the socket")
    uid_map.write_text("1000 1000 1")
    listen(path).close()


# --- what peers send


Connect = Callable[[], Peer]
Terms = pb.OpenSessionResponse
_PUNCH_HOLE = 0x1 | 0x2  # and keep the size


@pytest.fixture
def unattached(server: LocalServer, plane: UnixServer, terms: Terms) -> Iterator[Terms]:
    """The terms of a session, which gets no staging memory and lives on."""
    yield terms
    with pytest.raises(InvalidRequestError, match="attach staging memory first"):
        plane.staging(terms.session_id)
    assert not server.node.sessions.get(terms.session_id).is_attached


# --- staging memory


def test_staging_memory_whose_size_or_holes_could_change_is_refused(
    connect: Connect, unattached: Terms
) -> None:
    needed = (unix_socket.SEAL_SHRINK, unix_socket.SEAL_GROW, unix_socket.SEAL_SEAL)
    lacking = [unix_socket.STAGING_SEALS & ~one for one in needed]
    for seals in (0, unix_socket.SIZE_SEALS, *lacking):
        with staging(seals) as descriptor:
            assert connect().attach(unattached, descriptor) is Reply.invalid


def test_attach_that_lies_about_its_memory_or_brings_other_than_one_is_refused_and_leaks_none(
    connect: Connect, unattached: Terms, tmp_path: Path
) -> None:
    peer = connect()
    before = open_files()
    for size_bytes in (0, (1 << 30) + mmap.PAGESIZE):
        with staging(size_bytes=size_bytes) as descriptor:
            said = peer.attach(unattached, descriptor, size_bytes=size_bytes)
            assert said is Reply.invalid
    with staging() as descriptor:
        for stated in (0, 1, STAGING_BYTES - 1, STAGING_BYTES + 1, 1 << 63):
            assert peer.attach(unattached, descriptor, size_bytes=stated) is Reply.invalid
        for count in (0, 2, 4, 9):
            assert peer.attach(unattached, *[descriptor] * count) is Reply.invalid
    with (tmp_path / "file").open("w+b") as file:  # which is no memfd
        file.truncate(STAGING_BYTES)
        assert peer.attach(unattached, file.fileno()) is Reply.invalid
    assert eventually(lambda: open_files() <= before)


def test_staging_memory_that_was_never_written_is_refused_and_costs_nothing(
    server: LocalServer, wire: Wire, connect: Connect
) -> None:
    size_bytes, frame_bytes = 64 << 20, raw_frame_bytes(KVLayout.of(SMALL, 16))
    with staging(size_bytes=size_bytes) as descriptor, server.unchanged():
        assert connect().attach(wire.terms, descriptor, size_bytes=size_bytes) is Reply.ok
        for number in range(60):
            (reservation,) = wire.call("Reserve", wire.reserve(frame_bytes)).reservation_ids
            commit = pb.CommitRequest(reservation_ids=[reservation], offsets=[number << 20])
            with pytest.raises(InvalidRequestError, match="bytes there first"):
                wire.call("Commit", commit)
        assert os.fstat(descriptor).st_blocks == 0


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
        os.close(memory.descriptor)
        memory.close()


# --- who is let in


def test_wrong_token_and_ended_session_are_denied(
    server: LocalServer, connect: Connect, unattached: Terms
) -> None:
    connection = server.dial()
    other, ended = open_session(connection), open_session(connection)
    server.node.sessions.close(ended.session_id)
    with staging() as descriptor:
        for token in (b"", bytes(16), b"\xff" * 16, other.attach_token):
            claim = Claim(unattached.session_id, token)
            assert connect().attach(claim, descriptor) is Reply.denied
        assert connect().attach(ended, descriptor) is Reply.denied


def test_what_somebody_overheard_of_one_attach_is_worth_nothing(
    connect: Connect, unattached: Terms
) -> None:
    token, session_id = unattached.attach_token, unattached.session_id
    hello = Request(Op.hello, session_id, b"n" * 16).pack()
    peer, thief = connect(), connect()
    said = []
    for one in (peer, thief):
        one.link.send(hello)
        said.append(one.link.recv(unix_socket.GREETING_BYTES))
    nonce, proven = unix_socket.unpack_greeting(said[0])
    nonces = (b"n" * 16, nonce)
    assert proven == unix_socket.proof(token, Op.hello, session_id, nonces)  # the server's, first
    own = unix_socket.proof(token, Op.attach, session_id, nonces)
    attach = Request(Op.attach, STAGING_BYTES, own).pack()
    assert token not in hello + said[0] + attach
    with staging() as descriptor:
        assert thief.request(attach, [descriptor]) is Reply.denied  # its hello had another nonce
        assert connect().request(attach, [descriptor]) is Reply.denied
        as_join = Request(Op.join, 0, own).pack()
        assert peer.request(as_join) is Reply.denied  # a proof is of one operation, and of one try
        assert peer.request(attach, [descriptor]) is Reply.denied


def test_what_follows_a_request_that_is_no_call_is_refused(connect: Connect, terms: Terms) -> None:
    hello = Request(Op.hello, terms.session_id, b"n" * unix_socket.NONCE_BYTES).pack()
    assert connect().request(hello + b"more") is Reply.invalid
    assert connect().request(hello) is Reply.ok


@given(garbage=st.binary(min_size=1, max_size=64))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_answered_invalid_and_never_kills_the_thread(
    server: LocalServer, plane: UnixServer, garbage: bytes
) -> None:
    with Peer(str(plane.path)) as peer:
        assert peer.request(garbage) in (Reply.invalid, Reply.denied)
    assert server.node.is_alive()


def test_attached_session_does_not_expire_and_ends_with_its_connection(
    server: LocalServer, connect: Connect, terms: Terms
) -> None:
    peer, silent = connect(), open_session(server.dial())
    with staging() as descriptor:
        assert peer.attach(terms, descriptor) is Reply.ok
    server.skip(server.config.limits.session_ttl_ms / 1000 + 1)
    assert eventually(lambda: server.counter("expired_sessions") == 1)
    assert silent.session_id not in server.node.sessions.by_id
    assert terms.session_id in server.node.sessions.by_id
    peer.close()
    assert eventually(lambda: len(server.node.sessions) == 0)


# --- planes by themselves, with a clock of the test's own


def make_table(clock: FakeClock) -> SessionTable:
    return SessionTable(2, 1000, lambda tenant: b"", clock, os.urandom)


def open_plane(folder: Path, table: SessionTable, clock: FakeClock, slab: int = -1) -> UnixServer:
    """A plane whose only slab is the file *slab*."""
    files = {Op.slab: lambda slab_id, tenant: (os.dup(slab), 4096)}
    authorizer = Authorizer(Settings(), table, clock)
    return UnixServer(folder / "s.sock", table, files, authorizer, 4, 64)


def test_peer_that_stays_silent_is_hung_up_on_as_are_those_beyond_the_limit(
    tmp_path: Path, no_leaks: None
) -> None:
    clock = FakeClock()
    plane = open_plane(tmp_path, make_table(clock), clock)
    with closing(plane), Peer(str(plane.path)) as first, Peer(str(plane.path)) as second:
        assert [peer.request(b"hello") for peer in (first, second)] == [Reply.invalid] * 2
        with Peer(str(plane.path)) as third:
            assert third.is_hung_up()
        clock.advance(unix_server._ATTACH_WITHIN_S + 1)
        with ticking(plane):
            assert first.is_hung_up()
            assert second.is_hung_up()


def test_slab_s_descriptor_is_closed_once_it_is_sent(tmp_path: Path, no_leaks: None) -> None:
    clock = FakeClock()
    table, slab = make_table(clock), unix_socket.create_memfd("test-slab", 4096)
    plane = open_plane(tmp_path, table, clock, slab)
    with closing(plane), Peer(str(plane.path)) as peer:
        with staging() as descriptor:
            assert peer.attach(table.open(SMALL, "test"), descriptor) is Reply.ok
        before = open_files()
        for _ in range(20):
            assert peer.request(Request(Op.slab, 1).pack()) is Reply.ok
        # Fewer when the memory of attach was not closed yet when they were counted.
        assert eventually(lambda: open_files() <= before)
    os.close(slab)


# --- which pages were written


PAGE, PAGES = mmap.PAGESIZE, 40


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, PAGES * PAGE - 1), st.integers(0, 12 * PAGE)),
        max_size=60,
    )
)
def test_a_part_is_written_just_when_each_of_its_pages_is(
    steps: list[tuple[bool, int, int]],
) -> None:
    descriptor = unix_socket.create_memfd("test-written", PAGES * PAGE)
    memory, wrote = mmap.mmap(descriptor, PAGES * PAGE), set[int]()
    staging = Staging(mmap.mmap(descriptor, PAGES * PAGE, prot=mmap.PROT_READ), descriptor)

    def has(offset: int, size_bytes: int) -> bool:
        with suppress(InvalidRequestError):
            return len(staging.part(offset, size_bytes)) == size_bytes
        return False

    for is_write, offset, wanted_bytes in steps:
        size_bytes = min(wanted_bytes, PAGES * PAGE - offset)
        stop = -(-(offset + size_bytes) // PAGE) if size_bytes else 0
        pages = set(range(offset // PAGE, stop))
        if is_write:
            for page in pages:
                memory[page * PAGE] = 1
            wrote |= pages
        else:
            assert has(offset, size_bytes) is (pages <= wrote)
    staging.close()
    memory.close()
    os.close(descriptor)
