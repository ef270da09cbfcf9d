"""A client or a server of the Unix socket with handmade messages."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message

from kvstore.proto import unix_socket
from kvstore.proto.unix_socket import (
    MAX_PACKET_BYTES,
    Answer,
    Op,
    Reply,
    Request,
    pack_call,
    unpack_answer,
)
from kvstore.server.api.unix_server import UnixServer
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.settings import Settings

STAGING_BYTES = 1 << 16
OPEN = Authorizer(
    Settings(), SessionTable(1, 1000, lambda _: b"", lambda: 0.0, os.urandom), lambda: 0.0
)
"""Admits every session and logs nothing."""


class Terms(Protocol):
    """The id and token of a session."""

    @property
    def session_id(self) -> int: ...
    @property
    def attach_token(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """A session and a claimed token."""

    session_id: int
    attach_token: bytes


class Peer:
    """One connection to the socket at *path*."""

    def __init__(self, path: str) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(20.0)
        self.link.connect(path)

    def request(self, message: bytes, descriptors: list[int] | None = None) -> Reply:
        """Send *message* and return the reply."""
        socket.send_fds(self.link, [message], descriptors or [])
        head = self.link.recv(unix_socket.HEADER_BYTES)
        return unix_socket.unpack_head(head, unix_socket.REPLY_KINDS)[0]

    def attach(self, terms: Terms, *descriptors: int, size_bytes: int = STAGING_BYTES) -> Reply:
        return self.enter(terms, Op.attach, size_bytes, descriptors)

    def join(self, terms: Terms) -> Reply:
        return self.enter(terms, Op.join)

    def enter(
        self, terms: Terms, op: Op, size_bytes: int = 0, descriptors: Sequence[int] = ()
    ) -> Reply:
        """Send hello, then the proof with the token of *terms*; return the reply to *op*.

        *op* is sent even if hello is refused.
        """
        nonce = b"n" * unix_socket.NONCE_BYTES
        self.link.send(Request(Op.hello, terms.session_id, nonce).pack())
        greeting = self.link.recv(unix_socket.GREETING_BYTES)
        theirs = greeting[unix_socket.HEADER_BYTES :][: unix_socket.NONCE_BYTES] or nonce
        proven = unix_socket.proof(terms.attach_token, op, terms.session_id, (nonce, theirs))
        return self.request(Request(op, size_bytes, proven).pack(), list(descriptors))

    def send_call(self, method: str, request: Message) -> None:
        self.link.send(pack_call(method, request))

    def receive(self) -> Answer:
        return unpack_answer(self.link.recv(MAX_PACKET_BYTES + 1))

    def call(self, method: str, request: Message) -> Answer:
        self.send_call(method, request)
        return self.receive()

    def is_hung_up(self) -> bool:
        """Wait for the server to hang up; False if it sends something instead."""
        return self.link.recv(1) == b""

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Listener:
    """Listens at *path* in place of the server; *serve* runs in a thread for each connection."""

    def __init__(self, path: Path, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._threads: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(64)
        self.links = [self._socket]
        """Sockets that ``close`` shuts down."""
        self.start(self._accept)

    def start(self, work: Callable[..., None], *args: socket.socket) -> None:
        """Run *work* in a thread; ``close`` joins it."""
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._socket.accept()
                self.links.append(link)
                self.start(self._serve, link)

    def close(self) -> None:
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for link in self.links:
            link.close()


@contextlib.contextmanager
def staging(
    seals: int = unix_socket.STAGING_SEALS, size_bytes: int = STAGING_BYTES
) -> Iterator[int]:
    """Make a memfd of holes alone that could be staging memory."""
    descriptor = unix_socket.create_memfd("test-staging", size_bytes)
    try:
        unix_socket.add_seals(descriptor, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def attached(path: str, terms: Terms) -> Peer:
    """Return a peer that brought its session's staging memory."""
    peer = Peer(path)
    with staging() as descriptor:
        assert peer.attach(terms, descriptor) is Reply.ok
    return peer


def joined(path: str, terms: Terms) -> Peer:
    """Return a peer that joined its session."""
    peer = Peer(path)
    assert peer.join(terms) is Reply.ok
    return peer


@contextlib.contextmanager
def ticking(plane: UnixServer) -> Iterator[None]:
    """Call ``tick`` of *plane* again and again, as a node does, inside ``with``."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.01):
            plane.tick()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
