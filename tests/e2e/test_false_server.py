"""A process of the server's user takes the socket's place: it learns no secret, gets no bytes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from local_server import DEADLINE_MS
from prompts import SMALL, assert_reads, store
from server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.calls import MAX_PACKET_BYTES


class Relay:
    """Listens where the server did, and passes each packet and descriptor on to it and back."""

    def __init__(self, path: Path) -> None:
        self.heard = bytearray()
        self.files = 0
        self._real = path.with_name("moved.sock")
        path.rename(self._real)
        self._links: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                far.connect(str(self._real))
                self._links += near, far
                self._start(self._pass_on, near, far)
                self._start(self._pass_on, far, near)

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
        for link in (self._listener, *self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for link in (self._listener, *self._links):
            link.close()


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
        token = client._connected().session.terms.attach_token
    assert token not in false.heard
    assert (len(false.heard), false.files) == (0, 0)
