"""A LocalLink: calls to a server on this host over its Unix socket, a tenth of gRPC's cost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from kvstore.client.connection import SLACK_S, Connection
from kvstore.client.session import SessionTerms
from kvstore.proto import shm
from kvstore.proto.calls import MAX_PACKET_BYTES, pack_call, reply_of, unpack_answer
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)

MAX_CONNECTIONS = 12
"""Calls at once; more go through gRPC. Below what a server allows one session."""

_JOIN_WITHIN_S = 2.0

T = TypeVar("T")


class _Broken(Exception):
    """The socket does not carry calls any more: nobody answered, so gRPC is asked instead."""


class LocalLink:
    """Calls of one session, on connections of their own, one call at a time each. Thread-safe.

    The same verbs and errors as ``Connection``. What does not fit a packet, is not among its
    methods or finds the socket gone is called through gRPC.
    """

    def __init__(self, terms: SessionTerms, connection: Connection) -> None:
        self._terms = terms
        self._connection = connection
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._is_closed = False
        self._is_refused = False
        """The server lets no more connections join: those there are have to do."""
        self._lock = threading.Lock()  # guards the three above

    def call(self, method: str, request: Any, deadline_ms: int, reply: type[T]) -> T:
        """Call *method* and return its reply."""
        packet = self._packet(method, request)
        if packet is None:
            return self._connection.call(method, request, deadline_ms, reply)
        try:
            link = self._started(packet, deadline_ms)
            answer: T = self._reply(link, reply)
        except _Broken:
            return self._connection.call(method, request, deadline_ms, reply)
        return answer

    def send(self, method: str, request: Any, deadline_ms: int) -> Callable[[], Any]:
        """Start *method*; the returned function waits for its reply, once."""
        packet = self._packet(method, request)
        try:
            if packet is None:
                raise _Broken
            link = self._started(packet, deadline_ms)
        except _Broken:
            return self._connection.send(method, request, deadline_ms)
        kind: Any = reply_of(method)

        def wait() -> Any:
            try:
                return self._reply(link, kind)
            except _Broken:
                return self._connection.call(method, request, deadline_ms, kind)

        return wait

    def stream(self, method: str, request: Any, deadline_ms: int) -> Generator[Any, None, None]:
        """Yield the replies of *method*. Closing the iterator early ends the call."""
        packet = self._packet(method, request)
        try:
            if packet is None:
                raise _Broken
            link = self._started(packet, deadline_ms)
        except _Broken:
            yield from self._connection.stream(method, request, deadline_ms)
            return
        kind: Any = reply_of(method)
        is_over = False
        try:
            while True:
                try:
                    body, more = self._receive(link)
                except _Broken:
                    raise TierUnavailableError("server", "hung up") from None
                except KVStoreError:
                    is_over = link.fileno() >= 0
                    raise
                if not more:
                    is_over = True
                    return
                yield kind.FromString(body)
        finally:
            if is_over:
                self._give_back(link)
            else:
                self._drop(link)

    def close(self) -> None:
        """Hang up; calls that run fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for link in idle:
            self._drop(link)
        for link in busy:  # whose users close them, woken by this
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    # --- one connection

    def _packet(self, method: str, request: Any) -> bytes | None:
        if reply_of(method) is None:
            return None
        packet = pack_call(method, request)
        return packet if len(packet) <= MAX_PACKET_BYTES else None

    def _started(self, packet: bytes, deadline_ms: int) -> socket.socket:
        """Send a call and return the connection that will bring its answer."""
        self._connection.gate.check()
        link = self._take()
        try:
            link.settimeout(deadline_ms / 1000 + SLACK_S)
            link.send(packet)
        except OSError:
            self._drop(link)
            raise _Broken from None
        return link

    def _reply(self, link: socket.socket, kind: Any) -> Any:
        try:
            body, _ = self._receive(link)
        except KVStoreError:
            self._give_back(link)
            raise
        self._give_back(link)
        return kind.FromString(body)

    def _receive(self, link: socket.socket) -> tuple[bytes, bool]:
        """Receive one packet. On silence the connection is dropped: a late answer must not be
        taken for the next call's.
        """
        try:
            packet = link.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            self._drop(link)
            error = DeadlineError("the server did not answer in time")
            self._connection.gate.note(error)
            raise error from None
        except OSError:
            packet = b""
        if not packet:
            self._drop(link)
            raise _Broken
        self._connection.gate.note(None)
        return unpack_answer(packet)

    def _take(self) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise KVStoreError("the client is closed")
            if self._idle:
                return self._idle.pop()
            if self._is_refused or len(self._all) >= MAX_CONNECTIONS:
                raise _Broken
        link = self._joined()
        with self._lock:
            if not self._is_closed:
                self._all.add(link)
                return link
        link.close()
        raise KVStoreError("the client is closed")

    def _joined(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_JOIN_WITHIN_S)
        try:
            link.connect(self._terms.socket_path)
            link.send(shm.Request(shm.Op.join, 0, self._terms.attach_token).pack())
            reply, _ = shm.unpack_reply(link.recv(shm.MESSAGE_BYTES))
        except (OSError, InvalidRequestError):
            reply = shm.Reply.unknown
        if reply is not shm.Reply.ok:
            link.close()
            self._is_refused = True
            raise _Broken
        return link

    def _give_back(self, link: socket.socket) -> None:
        with self._lock:
            if link not in self._all:
                return
            if not self._is_closed:
                self._idle.append(link)
                return
        self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        with self._lock:
            self._all.discard(link)
        link.close()
