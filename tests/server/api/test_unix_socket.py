"""The socket's path: who may listen there, and who is let in."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.api.unix_server import is_trusted, listen

NOBODY, NO_NAMESPACE = 65534, 3


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
    assert_refused(notes, r"notes\.txt': something else is there")
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
            assert_refused(one / "s.sock", r"others could swap the socket in .*/open: chmod go-w")
    folder.chmod(0o1777)
    listen(folder / "s.sock").close()


def test_path_that_cannot_be_is_refused_in_one_sentence(path: Path) -> None:
    path.write_text("")
    assert_refused(path / "s.sock", "File exists; choose another with --socket")
    assert_refused(path.parent / ("s" * 108), "path too long; choose another with --socket")


class Caller:
    """A connection whose other end runs as *uid*, as the kernel would say."""

    def __init__(self, uid: int) -> None:
        self._credentials = struct.pack("3i", 1, uid, 1)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return self._credentials[:size]


def test_peers_of_this_user_and_root_are_trusted_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_trusted(ours)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    callers = {
        uid: cast("socket.socket", Caller(uid)) for uid in (0, 1, 999, 1000, 1001, 65534, -2)
    }
    assert [uid for uid, caller in callers.items() if is_trusted(caller)] == [0, 1000]


def test_a_user_namespace_in_which_root_has_no_number_takes_root_s_folders() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        user = os.geteuid() or NOBODY
        os.chown(folder, user, -1)
        child = os.fork()
        if not child:
            status = 2
            try:
                status = listens_in_a_namespace_of(user, Path(folder) / "own" / "s.sock")
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == NO_NAMESPACE:
        pytest.skip("needs user namespaces")
    assert status == 0


def listens_in_a_namespace_of(user: int, path: Path) -> int:
    libc = ctypes.CDLL(None)
    os.setresuid(user, user, user)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or else what is in /proc/self is root's
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        return NO_NAMESPACE
    Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
    listen(path).close()
    return 0
