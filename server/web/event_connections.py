"""A limit on the connections of a ZeroMQ socket, which has none of its own.

ZeroMQ takes every connection that comes, and each costs a descriptor and buffers before anybody
has proven anything. It does tell, over a second socket, of those that came and went: beyond the
limit the one that came last is hung up on.
"""

from __future__ import annotations

import os
import socket as sockets
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import zmq

    Socket = zmq.Socket[bytes]

_EVENT = struct.Struct("=Hi")


class ConnectionCap:
    """Lets *socket*, not bound yet, have *most* connections; *refused* is called for each beyond.

    For the thread that owns the socket: ``hold`` does the work when ``news`` can be read.
    """

    def __init__(self, socket: Socket, most: int, refused: Callable[[], object]) -> None:
        import zmq

        self._socket = socket
        self._most = most
        self._refused = refused
        self._open: set[int] = set()
        where = f"inproc://connections-{id(self):x}"
        # ZeroMQ's own thread writes here and would wait for room, so there is no end of it. What
        # comes between two turns of the loop is few.
        self.news = socket.context.socket(zmq.PAIR)
        self.news.linger = self.news.rcvhwm = 0
        socket.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.news.connect(where)

    def __len__(self) -> int:
        return len(self._open)

    def hold(self) -> None:
        """Take in who came and went, and hang up on who is too many."""
        import zmq

        while True:
            try:
                event, _ = self.news.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, descriptor = _EVENT.unpack(event)
            if kind == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
            elif len(self._open) < self._most:
                self._open.add(descriptor)
            else:
                self._hang_up(descriptor)
                self._refused()

    def _hang_up(self, descriptor: int) -> None:
        """End a connection as its other end would; ZeroMQ sees that and closes it."""
        try:
            copy = os.dup(descriptor)
        except OSError:
            return  # gone by itself
        try:
            link = sockets.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        with link:
            # The number may be another file's by now: only what came to this address is ended.
            if _own_end(link) == _bound_end(self._socket):
                try:
                    link.shutdown(sockets.SHUT_RDWR)
                except OSError:
                    return  # gone by itself

    def close(self) -> None:
        """Watch no more. Idempotent. To be called before the socket is closed."""
        if not self.news.closed:
            self._socket.disable_monitor()
            self.news.close(0)


def _own_end(link: sockets.socket) -> object:
    try:
        name = link.getsockname()
    except OSError:
        return None
    return name[1] if link.family in (sockets.AF_INET, sockets.AF_INET6) else name


def _bound_end(socket: Socket) -> object:
    """Return the port or path that *socket* is bound to."""
    import zmq

    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    url = endpoint.rstrip(b"\0").decode()
    return url.removeprefix("ipc://") if url.startswith("ipc:") else urlsplit(url).port
