"""A process of the server's user takes the socket's place: it learns no secret, gets no bytes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from helpers.local_server import DEADLINE_MS
from helpers.prompts import SMALL, assert_reads, store
from helpers.server_process import ServerProcess
from helpers.socket_peer import Listener

from kvstore.client import Access, Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.unix_socket import MAX_PACKET_BYTES


class Relay:
    """Listens where the server did, and passes each packet and descriptor on to it and back."""

    def __init__(self, path: Path) -> None:
        self.heard = bytearray()
        self.files = 0
        self._real = path.with_name("moved.sock")
        path.rename(self._real)
        self._listener = Listener(path, self._serve)

    def _serve(self, near: socket.socket) -> None:
        far = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far.connect(str(self._real))
        self._listener.links.append(far)
        self._listener.start(self._pass_on, far, near)
        self._pass_on(near, far)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while True:
                message, files, _, _ = socket.recv_fds(source, MAX_PACKET_BYTES, 8)
                if not message:
                    break
                self.heard += message
                self.files += len(files)
                with ExitStack() as stack:
                    for descriptor in files:
                        stack.callback(os.close, descriptor)
                    socket.send_fds(target, [message], files)
        for link in (source, target):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up on both sides."""
        self._listener.close()


@pytest.fixture
def relay(server_process: Callable[..., ServerProcess]) -> Iterator[tuple[ServerProcess, Relay]]:
    process = server_process("--cpu", "16MiB", "--tiers", "cpu")
    process.start()
    with closing(Relay(process.socket_path)) as relay:
        yield process, relay


def test_a_relay_in_the_socket_s_place_gets_neither_token_nor_memory_nor_chunks(
    relay: tuple[ServerProcess, Relay],
) -> None:
    process, false = relay
    with Client(process.address, SMALL, ClientOptions("auto", 16, DEADLINE_MS)) as client:
        assert_reads(client, store(client, 1, 4))
        assert client.transport_name != "shm"
        token = client._link.connected().session.terms.attach_token
    assert token not in false.heard
    assert (len(false.heard), false.files) == (0, 0)


LISTENS = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
listener.settimeout(60)
while True:
    link, _ = listener.accept()
    print(link.recv(1 << 16), flush=True)
"""


@contextmanager
def listener(uid: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process of *uid* on a port that a server might have left."""
    process = subprocess.Popen([sys.executable, "-c", LISTENS, str(uid)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a process of another user")
def test_a_token_in_plain_text_is_not_shown_to_another_user_who_took_the_port(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("kvs_0123456789ab_secret")
    with listener(65534) as (address, process):
        for access in (Access(token="secret"), Access(token_file=token)):
            with pytest.raises(InvalidRequestError, match="user 65534 listens there"):
                Connection(address, 20, access=access)
        run = "import sys; from kvstore.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
        command = (sys.executable, "-c", run, "--token-file", str(token), "status", address)
        done = subprocess.run(command, capture_output=True, text=True)
        assert "user 65534 listens there and would get the token" in done.stderr
        assert done.returncode != 0
        Connection(address, 20).close()  # without a token there is nothing to lose
        Connection(address, 20, access=Access(token="secret", insecure=True)).close()
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a process of another user")
def test_a_token_goes_to_a_user_of_the_system_and_to_who_is_not_there_yet() -> None:
    with listener(997) as (address, _):
        Connection(address, 20, access=Access(token="secret")).close()
    Connection(address, 20, access=Access(token="secret")).close()
