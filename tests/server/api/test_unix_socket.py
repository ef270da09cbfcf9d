"""The socket's path: who may listen there, and who is let in."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.api.unix_server import is_trusted, listen

NOBODY, NO_NAMESPACE = 65534, 3


@contextmanager
def listening(path: Path) -> Iterator[None]:
    listener = listen(path)
    try:
        yield
    finally:
        listener.close()


def connected(path: Path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, kind)
    link.setblocking(False)
    try:
        link.connect(str(path))
    except OSError:
        link.close()
        raise
    return link


def test_second_server_on_one_socket_is_refused_and_the_first_works_on(
    tmp_path: Path, no_leaks: None
) -> None:
    path = tmp_path / "s.sock"
    with listening(path):
        with pytest.raises(InvalidRequestError, match=r"s\.sock': another server listens there"):
            listen(path)
        connected(path).close()


def overrun(path: Path, waiting: ExitStack) -> None:
    """Connect until the listener, which accepts nobody, lets no more wait."""
    with suppress(BlockingIOError):
        while True:
            waiting.enter_context(connected(path))


def test_second_server_on_the_socket_of_one_that_is_overrun_is_refused_at_once(
    tmp_path: Path, no_leaks: None
) -> None:
    path = tmp_path / "s.sock"
    with listening(path), ExitStack() as waiting:
        overrun(path, waiting)
        with pytest.raises(InvalidRequestError, match="another server listens there; stop it or"):
            listen(path)


def test_socket_of_another_program_is_left_alone(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(InvalidRequestError, match="choose another with --socket"):
            listen(path)
        connected(path, socket.SOCK_STREAM).close()


def test_socket_that_a_killed_server_left_is_replaced(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    assert path.exists()
    with listening(path):
        connected(path).close()


def test_socket_is_for_this_user_alone(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "new" / "s.sock"
    with listening(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_file_in_the_socket_s_place_is_left_alone(tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(InvalidRequestError, match=r"notes\.txt': something else is there"):
        listen(path)
    assert path.read_text() == "mine"


def test_folder_in_which_others_could_swap_the_socket_is_refused(
    tmp_path: Path, no_leaks: None
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    for mode in (0o777, 0o775):
        folder.chmod(mode)
        with pytest.raises(InvalidRequestError, match=r"others could swap the socket in .*/open:"):
            listen(folder / "s.sock")
    folder.chmod(0o1777)
    with listening(folder / "s.sock"):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_folder_that_others_could_swap_as_a_whole_is_refused(
    tmp_path: Path, no_leaks: None, mode: int
) -> None:
    parent = tmp_path / "open"
    own = parent / "own"
    own.mkdir(parents=True, mode=0o700)
    parent.chmod(mode)
    (tmp_path / "link").symlink_to(own)
    for folder in (own, tmp_path / "link"):
        with pytest.raises(InvalidRequestError, match=r"swap the socket in .*/open: chmod go-w"):
            listen(folder / "s.sock")


def test_folder_that_cannot_be_made_is_refused_in_one_sentence(
    tmp_path: Path, no_leaks: None
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="File exists; choose another with --socket"):
        listen(tmp_path / "file" / "s.sock")


def test_path_too_long_for_a_socket_is_refused_with_the_reason(
    tmp_path: Path, no_leaks: None
) -> None:
    with pytest.raises(InvalidRequestError, match="path too long; choose another with --socket"):
        listen(tmp_path / ("s" * 108))


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
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    trusted = [uid for uid in (0, 1, 999, 1000, 1001, 65534, -2) if asks_as(uid)]
    assert trusted == [0, 1000]


def asks_as(uid: int) -> bool:
    return is_trusted(cast("socket.socket", Caller(uid)))


def test_the_kernel_says_who_this_process_is() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_trusted(ours)


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
