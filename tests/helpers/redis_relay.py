"""A relay in front of a Redis that can corrupt its replies."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.redis_connection import ConnectionOptions, DeadlineSocket, RedisConnection

Spoil = Callable[[socket.socket, bytes], None]


def drip(client: socket.socket, reply: bytes) -> None:
    """Send single bytes without a pause until the client hangs up."""
    while not select.select([client], [], [], 0.01)[0]:
        client.sendall(b"$")


def drip_inside(client: socket.socket, reply: bytes) -> None:
    """Send the last third of the correct reply in single bytes."""
    cut = 2 * len(reply) // 3
    client.sendall(reply[:cut])
    for at in range(cut, len(reply)):
        if select.select([client], [], [], 0.02)[0]:
            return
        client.sendall(reply[at : at + 1])


def hang_up_inside(client: socket.socket, reply: bytes) -> None:
    client.sendall(reply[: 2 * len(reply) // 3])


def stay_silent_inside(client: socket.socket, reply: bytes) -> None:
    client.sendall(reply[: 2 * len(reply) // 3])
    select.select([client], [], [])


def sending(answer: bytes) -> Spoil:
    def spoil(client: socket.socket, reply: bytes) -> None:
        client.sendall(answer)
        select.select([client], [], [])

    return spoil


SPOILS: dict[str, Spoil] = {
    "drips": drip,
    "drips inside": drip_inside,
    "hangs up": lambda client, reply: None,
    "hangs up inside": hang_up_inside,
    "goes silent inside": stay_silent_inside,
    "other size": sending(b"$5\r\nhello\r\n" * 40),
    "size of nothing": sending(b"$0\r\n\r\n" * 40),
    "nil": sending(b"$-1\r\n" * 40),
    "giant value": sending(b"$9223372036854775807\r\n"),
    "giant list": sending(b"*2147483647\r\n" * 40),
    "deep list": sending(b"*1\r\n" * 4000),
    "negative size": sending(b"$-7\r\n" * 40),
    "no number": sending(b"$1_0\r\n0123456789\r\n" * 40),
    "endless line": sending(b"$" + b"1" * 100_000),
    "another protocol": sending(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "an error": sending(b"-ERR out of sorts\r\n" * 40),
    "wrong end": sending(b"$4\r\nrubbish\r\n" * 40),
}


class _Relay(socketserver.BaseRequestHandler):
    """Forward between a client and the Redis at ``port``; ``spoil`` corrupts the replies.

    A request that contains ``unanswered`` gets no reply: the connection is closed.
    """

    port: int
    spoil: Spoil | None = None
    unanswered: bytes | None = None

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as upstream:
            while True:
                for ready in select.select([self.request, upstream], [], [])[0]:
                    data = ready.recv(1 << 20)
                    spoil = type(self).spoil
                    if not data:
                        return
                    if ready is upstream and spoil is not None:
                        spoil(self.request, data)
                        return
                    (upstream if ready is self.request else self.request).sendall(data)
                    if self.unanswered and ready is self.request and self.unanswered in data:
                        upstream.recv(1 << 16)
                        return


@contextmanager
def relay(port: int) -> Iterator[tuple[str, type[_Relay]]]:
    """Run a relay to *port*; yield its URL and the handler whose ``spoil`` can be set."""
    handler = type("Handler", (_Relay,), {"port": port})
    with serving(handler) as url:
        yield url, handler


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    """Serve connections by *handler*; yield the URL."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def outcome(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except TierUnavailableError:
        return "unavailable"


class _Pieces:
    def __init__(self, *pieces: bytes) -> None:
        self._left = deque(pieces)

    def recv(self, size: int) -> bytes:
        piece = self._left.popleft() if self._left else b""
        if piece[size:]:
            self._left.appendleft(piece[size:])
        return piece[:size]

    def recvmsg_into(self, outs: Sequence[memoryview]) -> tuple[int]:
        piece = self.recv(sum(map(len, outs)))
        for at, out in zip(accumulate(map(len, outs), initial=0), outs, strict=False):
            part = piece[at : at + len(out)]
            out[: len(part)] = part
        return (len(piece),)

    def settimeout(self, timeout_s: float) -> None:
        pass


def replying(*pieces: bytes) -> RedisConnection:
    """Return a connection to a server that sends *pieces*, then hangs up."""
    connection = RedisConnection(("nowhere", 1), ConnectionOptions(1.0, 1), time.monotonic)
    connection.link = DeadlineSocket(cast(Any, _Pieces(*pieces)), 1.0, time.monotonic)
    connection.link.deadline = time.monotonic() + 60
    connection._sock = connection.link  # type: ignore[assignment]
    connection._parser.on_connect(connection)
    return connection
