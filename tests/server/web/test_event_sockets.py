"""ZeroMQ's sockets take so many connections and no more, whatever knocks at them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from conftest import ServerMaker
from helpers.local_server import LocalServer, eventually

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.web import event_sockets
from kvstore.server.web.event_sockets import (
    SECRET_NAME,
    ConnectionCap,
    EventSockets,
    bind_to,
    load_key,
)

MOST = 6


def connected(address: str, stack: ExitStack) -> socket.socket:
    """Return a connection that has nothing to say."""
    url = urlsplit(address)
    family = socket.AF_UNIX if url.scheme == "ipc" else socket.AF_INET
    link = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    link.settimeout(20)
    link.connect(url.path if url.scheme == "ipc" else (url.hostname, url.port))
    link.setblocking(False)
    return link


def is_hung_up_on(link: socket.socket) -> bool:
    """Whether the server has ended it, behind its greeting or without one."""
    try:
        while link.recv(64):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


class Router:
    """A bound socket with a limit of ``MOST``, and what was refused."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.handshake_ivl = 0
        self.refused = 0
        self.cap = ConnectionCap(self.socket, MOST, self._count)
        self.address = bind_to(self.socket, endpoint)

    def _count(self) -> None:
        self.refused += 1

    def has(self, connections: int, refused: int) -> bool:
        self.cap.hold()
        return (len(self.cap._open), self.refused) == (connections, refused)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Router]:
    one = Router("127.0.0.1:0" if request.param == "tcp" else f"ipc:{tmp_path / 'r'}")
    yield one
    one.close()


def test_who_comes_beyond_the_limit_is_hung_up_on_and_room_comes_back(router: Router) -> None:
    with ExitStack() as stack:
        links = [connected(router.address, stack) for _ in range(MOST)]
        assert eventually(lambda: router.has(MOST, 0))
        more = [connected(router.address, stack) for _ in range(3)]
        assert eventually(lambda: router.has(MOST, 3))
        assert all(map(is_hung_up_on, more))
        assert not any(map(is_hung_up_on, links))
        links[0].close()
        assert eventually(lambda: router.has(MOST - 1, 3))
        connected(router.address, stack)
        assert eventually(lambda: router.has(MOST, 3))
    assert eventually(lambda: router.has(0, 3))


def test_a_number_that_is_another_file_by_now_is_left_alone(router: Router, tmp_path: Path) -> None:
    left, right = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    with left, right, listener, far, near, (tmp_path / "file").open("wb") as file:
        files = len(os.listdir("/proc/self/fd"))
        for one in (left, near, file):
            router.cap._hang_up(one.fileno())
        spare = os.dup(file.fileno())
        os.close(spare)
        router.cap._hang_up(spare)
        assert len(os.listdir("/proc/self/fd")) == files
        left.sendall(b"a")
        near.sendall(b"b")
        assert (right.recv(1), far.recv(1)) == (b"a", b"b")


@pytest.mark.parametrize("flag", ["--events", "--events-replay"])
def test_readers_of_events_are_so_many(
    flag: str, make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_sockets, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(event_sockets, "_HANDSHAKE_MS", 100_000)
    folder = tmp_path / "p"
    folder.mkdir(mode=0o700)
    server: LocalServer = make_server(flag, f"ipc:{folder / 'e'}")
    assert server.node.publisher is not None
    (address,) = server.node.publisher.addresses
    with ExitStack() as stack:
        links = [connected(address, stack) for _ in range(4 * MOST)]
        assert eventually(lambda: server.counter("zmq_refused_connections") == 3 * MOST)
        assert sum(not is_hung_up_on(link) for link in links) == MOST


def test_keys_are_made_at_the_first_start_and_found_at_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    secret = load_key(folder)
    assert len(secret) == 40
    assert load_key(folder) == secret
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [SECRET_NAME]


def test_servers_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(load_key, [tmp_path / "keys"] * 8))
    assert len(set(keys)) == 1


def test_a_key_that_others_could_read_is_refused(tmp_path: Path) -> None:
    for name in ["", SECRET_NAME]:
        for mode in [0o740, 0o704, 0o777]:
            folder = tmp_path / f"keys {name} {mode}"
            load_key(folder)
            (folder / name).chmod(mode)
            with pytest.raises(InvalidRequestError, match="others could read the key"):
                load_key(folder)


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"x" * 39, b"\xff" * 40, b"x" * 41, b"\0" * 40]):
        folder = tmp_path / str(number)
        load_key(folder)
        (folder / SECRET_NAME).write_bytes(content)
        with pytest.raises(InvalidRequestError, match="delete it to have another made"):
            load_key(folder)


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match=r"events_keys=.*name a folder"):
        load_key(tmp_path / "file" / "keys")


def test_who_asks_to_be_let_in_over_and_over_leaves_events_their_turn() -> None:
    sockets: Any = EventSockets("off", "off")
    ask = (b"1.0", b"1", b"events", b"", b"", b"CURVE", bytes(32))
    answers: list[tuple[bytes, ...]] = []
    sockets.readers = SimpleNamespace(refresh=lambda: None, value=frozenset())
    sockets._admission = SimpleNamespace(
        recv_multipart=lambda _: ask, send_multipart=answers.append
    )
    sockets.admit()
    assert 0 < len(answers) <= event_sockets.MAX_CONNECTIONS
    assert {answer[2] for answer in answers} == {b"400"}
    sockets.close()
