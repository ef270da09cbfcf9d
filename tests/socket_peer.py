"""A process at the other end of the server's Unix socket, with every message of its own making."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from kvstore.proto import shm
from kvstore.proto.calls import MAX_PACKET_BYTES, Answer, pack_call, unpack_answer
from kvstore.proto.shm import Op, Reply, Request
from kvstore.server.trust.doorkeeper import Door

STAGING_BYTES = 1 << 16
OPEN = Door(lambda session, method: None, lambda *event: None)
"""Lets everybody in, and writes nothing down."""


class Peer:
    """One connection to the socket at *path*."""

    def __init__(self, path: str) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(20.0)
        self.link.connect(path)

    def ask(self, message: bytes, descriptors: list[int] | None = None) -> Reply:
        """Send *message* and return the answer."""
        socket.send_fds(self.link, [message], descriptors or [])
        return shm.unpack_reply(self.link.recv(shm.MESSAGE_BYTES))[0]

    def attach(self, token: bytes, descriptor: int, size_bytes: int = STAGING_BYTES) -> Reply:
        """Bring staging memory."""
        return self.ask(Request(Op.attach, size_bytes, token).pack(), [descriptor])

    def join(self, token: bytes) -> Reply:
        """Become a further connection of the session."""
        return self.ask(Request(Op.join, 0, token).pack())

    def send_call(self, method: str, request: Message) -> None:
        """Send a call and wait for nothing."""
        self.link.send(pack_call(method, request))

    def receive(self) -> Answer:
        """Return the next packet of an answer."""
        return unpack_answer(self.link.recv(MAX_PACKET_BYTES + 1))

    def call(self, method: str, request: Message) -> Answer:
        """Send a call and return the first packet of its answer."""
        self.send_call(method, request)
        return self.receive()

    def is_hung_up(self) -> bool:
        """Wait for the server's hanging up; False when it sends something instead."""
        return self.link.recv(1) == b""

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.link.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextlib.contextmanager
def staging(seals: int = shm.SIZE_SEALS, size_bytes: int = STAGING_BYTES) -> Iterator[int]:
    """Make a memfd that could be staging memory."""
    descriptor = shm.create_memfd("test-staging", size_bytes)
    try:
        shm.add_seals(descriptor, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def attached(path: str, token: bytes) -> Peer:
    """Return a peer that brought its session's staging memory."""
    peer = Peer(path)
    with staging() as descriptor:
        assert peer.attach(token, descriptor) is Reply.ok
    return peer


def joined(path: str, token: bytes) -> Peer:
    """Return a peer that joined its session."""
    peer = Peer(path)
    assert peer.join(token) is Reply.ok
    return peer
