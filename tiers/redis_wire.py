"""The bytes between this process and Redis: commands out, replies in, several lines at once.

RESP2 (redis.io/docs/reference/protocol-spec). Replies are
parsed strictly and within limits; for those whose size is known see ``redis_fill``.
"""

from __future__ import annotations

import select
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from socket import MSG_DONTWAIT, socket
from typing import TypeAlias

from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

from kvstore.tiers.redis_reply import Reply, parse_reply

Argument: TypeAlias = bytes | int | memoryview
Command: TypeAlias = Sequence[Argument]

_SEND_BUFFERS = 64
_RECEIVE_BYTES = 64 << 10


def pack(command: Command) -> list[bytes | memoryview]:
    """Return *command* as it is sent; views are sent as they are."""
    packed: list[bytes | memoryview] = []
    text = [b"*%d\r\n" % len(command)]
    for argument in command:
        if isinstance(argument, memoryview):
            packed += [b"".join(text) + b"$%d\r\n" % argument.nbytes, argument]
            text = [b"\r\n"]
        else:
            data = argument if isinstance(argument, bytes) else b"%d" % argument
            text.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return [*packed, b"".join(text)]


def pack_words(*words: bytes) -> bytes:
    """Return the command of *words* as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(w), w) for w in words])


class Talk(ABC):
    """One line's part of an exchange. ``error`` is why it ended early, if it did."""

    def __init__(self, sock: socket) -> None:
        self.sock = sock
        self.error: Exception | None = None
        self._outbox: deque[bytes | memoryview] = deque()
        self._is_tls = isinstance(sock, ssl.SSLSocket)

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether every reply is here."""

    @abstractmethod
    def _receive(self) -> None:
        """Take in what one read gives. Raises BlockingIOError when there is nothing."""

    @property
    def is_sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    def send(self) -> None:
        """Send what the socket takes now."""
        while self._outbox:
            try:
                count = self._send_some()
            except (BlockingIOError, ssl.SSLWantWriteError):
                return
            while self._outbox and (count or not len(self._outbox[0])):
                first = self._outbox.popleft()
                size = len(first)
                if count < size:
                    self._outbox.appendleft(memoryview(first)[count:])
                count -= min(count, size)

    def _send_some(self) -> int:
        if self._is_tls:
            return self.sock.send(self._outbox[0])
        parts = [self._outbox[at] for at in range(min(_SEND_BUFFERS, len(self._outbox)))]
        return self.sock.sendmsg(parts, (), MSG_DONTWAIT)

    def receive(self) -> None:
        """Take in what is there. Raises when the server hung up or answers out of turn."""
        try:
            self._receive()
            # poll() does not see what the TLS layer has read ahead
            while isinstance(self.sock, ssl.SSLSocket) and not self.is_done and self.sock.pending():
                self._receive()
        except (BlockingIOError, ssl.SSLWantReadError):
            return


class AskTalk(Talk):
    """Commands whose replies are parsed. ``replies`` holds an error as an exception."""

    def __init__(self, sock: socket, commands: Sequence[Command], limit_bytes: int) -> None:
        super().__init__(sock)
        self.replies: list[Reply] = []
        self._count = len(commands)
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        small: list[bytes | memoryview] = []
        for command in commands:
            packed = pack(command)
            small.append(packed[0])
            if len(packed) > 1:  # a payload is sent from where it lies
                self._outbox.append(b"".join(small))
                self._outbox.extend(packed[1:-1])
                small = packed[-1:]
        if small:
            self._outbox.append(b"".join(small))

    @property
    def is_done(self) -> bool:
        """Whether every reply is here."""
        return len(self.replies) == self._count

    def _receive(self) -> None:
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server hung up")
        self._limit_bytes -= len(data)
        if self._limit_bytes < 0:
            raise InvalidResponse("the reply is larger than any right one")
        self._buffer += data
        at = 0
        while not self.is_done:
            found = parse_reply(self._buffer, at)
            if found is None:
                break
            reply, at = found
            self.replies.append(reply)
        del self._buffer[:at]
        if self.is_done and self._buffer:
            raise InvalidResponse("more replies than commands")


def converse(
    talks: Sequence[Talk],
    deadline: float,
    silence_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Carry on all *talks* until each is done or has its ``error``.

    A talk fails with TimeoutError at *deadline*, on *clock*, or once all have been silent for
    *silence_s*.
    """
    poll = select.poll()
    going: dict[int, Talk] = {}
    for talk in talks:
        alive = _try(talk.send, talk)
        if alive and isinstance(talk.sock, ssl.SSLSocket) and talk.sock.pending():
            alive = _try(talk.receive, talk)  # read ahead by the talk before
        if alive and not talk.is_done:
            going[talk.sock.fileno()] = talk
            poll.register(talk.sock, _wanted(talk))
    while going:
        wait_s = min(silence_s, deadline - clock())
        ready = poll.poll(ceil(1000 * wait_s)) if wait_s > 0 else []
        if not ready:
            for talk in going.values():
                talk.error = TimeoutError("no answer in time")
            return
        for descriptor, event in ready:
            talk = going[descriptor]
            alive = not event & select.POLLOUT or _try(talk.send, talk)
            alive = alive and (not event & ~select.POLLOUT or _try(talk.receive, talk))
            if not alive or talk.is_done:
                poll.unregister(descriptor)
                del going[descriptor]
            else:
                poll.modify(descriptor, _wanted(talk))


def _wanted(talk: Talk) -> int:
    return select.POLLIN | (select.POLLOUT if talk.is_sending else 0)


def _try(work: Callable[[], None], talk: Talk) -> bool:
    try:
        work()
    except (OSError, RedisError) as error:
        talk.error = error
        return False
    return True
