"""The bytes between this process and Redis: commands out, replies in, several lines at once.

RESP2 (redis.io/docs/reference/protocol-spec). A payload whose size is known goes from the
socket straight to its place; any other reply is parsed strictly and within limits.
"""

from __future__ import annotations

import select
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from socket import SO_RCVLOWAT, SOL_SOCKET, socket
from typing import TypeAlias

from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

from kvstore.tiers.redis_reply import Reply, error_of, parse_reply

Argument: TypeAlias = bytes | int | memoryview
Command: TypeAlias = Sequence[Argument]

FILL_WINDOW = 2
"""Payloads asked for and not yet here, on one line. Redis answers all it was asked before it
sends: more of them would only pile up in its memory and leave its caches (measured: all 4
parts of 2 MiB at once come at 0.9 GB/s, 2 at a time at 1.5)."""

LOW_WATER_BYTES = 1 << 20
"""Payload that is worth a wake-up: at the slowest rate allowed it comes in 64 ms."""

_SEND_BUFFERS = 64
_RECEIVE_BUFFERS = 8
_RECEIVE_BYTES = 64 << 10
_MAX_ERROR_BYTES = 512


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
        return self.sock.sendmsg(
            [self._outbox[at] for at in range(min(_SEND_BUFFERS, len(self._outbox)))]
        )

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


@dataclass(frozen=True, slots=True)
class Step:
    """A command with a known reply: ``expected`` before ``room`` is filled, CRLF after it."""

    command: Command
    expected: bytes
    room: memoryview | None = None

    @classmethod
    def fill(cls, command: Command, room: memoryview) -> Step:
        """Return a step whose reply is as many bytes as *room* has."""
        return cls(command, b"$%d\r\n" % len(room), room)


class FillTalk(Talk):
    """Commands whose replies are known but for payload, which is read into its place.

    ``is_other`` says that a reply was of another size or content; the line is of no use then.
    """

    def __init__(self, sock: socket, steps: Sequence[Step], window: int = FILL_WINDOW) -> None:
        super().__init__(sock)
        self.is_other = False
        self._steps = deque(steps)
        self._window = window
        self._places: list[memoryview] = []
        self._expected: list[bytes] = []
        self._at = 0
        self._low = 1
        self._lay_out(steps)
        self._ask_on()

    def _lay_out(self, steps: Sequence[Step]) -> None:
        """Put what is expected and where payload goes in the order of their coming."""
        text = b""
        for step in steps:
            text += step.expected
            if step.room is not None:
                self._place(memoryview(bytearray(len(text))), text)
                self._place(step.room, b"")
                text = b"\r\n"
        self._place(memoryview(bytearray(len(text))), text)

    def _place(self, place: memoryview, expected: bytes) -> None:
        if len(place):
            self._places.append(place)
            self._expected.append(expected)

    def _ask_on(self) -> None:
        """Ask for what comes next, up to as many payloads as the window allows."""
        commands = b""
        while self._steps and (self._window or self._steps[0].room is None):
            step = self._steps.popleft()
            self._window -= step.room is not None
            commands += b"".join(pack(step.command))
        if commands:
            self._outbox.append(commands)

    @property
    def is_done(self) -> bool:
        """Whether every reply is here."""
        return self._at == len(self._places)

    def _receive(self) -> None:
        places = self._places[self._at : self._at + _RECEIVE_BUFFERS]
        if self._is_tls:
            count = self.sock.recv_into(places[0])
        else:
            count = self.sock.recvmsg_into(places)[0]
        if not count:
            raise ConnectionError("the server hung up")
        while count:
            count -= self._advance(count)
        if self._outbox:
            self.send()
        if not self._is_tls:
            self._wake_at()

    def _wake_at(self) -> None:
        """Let the kernel wake us once there is much to copy, if much is certain to come."""
        low = 1
        if not self.is_done and not self._expected[self._at]:
            low = min(LOW_WATER_BYTES, len(self._places[self._at]))
        if low != self._low:
            self._low = low
            self.sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, low)

    def _advance(self, count: int) -> int:
        """Take note of *count* more bytes, as far as one place goes; return how many."""
        place, expected = self._places[self._at], self._expected[self._at]
        taken = min(count, len(place))
        if expected and place[:taken] != expected[:taken]:
            self._fail(count)
        if taken < len(place):
            self._places[self._at] = place[taken:]
            self._expected[self._at] = expected[taken:]
            return taken
        self._at += 1
        if not expected:
            self._window += 1
            self._ask_on()
        return taken

    def _fail(self, count: int) -> None:
        """Raise what the server sent in place of what was expected."""
        self.is_other = True
        got = b"".join(bytes(p[:_MAX_ERROR_BYTES]) for p in self._places[self._at : self._at + 3])
        got, expected = got[:count], self._expected[self._at]
        same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), 0)
        text, _, _ = got[same:_MAX_ERROR_BYTES].partition(b"\r\n")
        raise error_of(text) if text.startswith(b"-") else InvalidResponse("another reply")


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
        if _try(talk.send, talk) and not talk.is_done:
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
