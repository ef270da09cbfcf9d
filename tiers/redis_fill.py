"""Replies that are known but for their payload, which goes from the socket to its place.

What is on its way is bounded, and goes on with the frame that the same thread reads next: a server
that waits to be asked, or a thread that waits to be woken, costs more than the copies do.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from socket import MSG_DONTWAIT, MSG_WAITALL, SO_RCVLOWAT, SO_RCVTIMEO, SOL_SOCKET, socket
from typing import NamedTuple

from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

from kvstore.tiers.redis_reply import error_of
from kvstore.tiers.redis_wire import Talk

SLICE_BYTES = 1 << 18
"""Payload is asked for in slices of this size."""
FILL_WINDOW = 2
"""Slices asked for and not yet here, on one line. Redis copies all that it is asked for before it
sends, and the kernel what the reader has not taken: two slices stay in the processor's caches
from one end to the other (measured: 4.3 GB/s on one line, 1.9 with four)."""
MAX_FILL_WINDOW = 16
"""Of a server that is far: what is on its way there and back is not in anybody's cache."""

_RECEIVE_BUFFERS = 8
_MAX_ERROR_BYTES = 512
_TIMEVAL = struct.Struct("@ll")
_END = b"\r\n"


class Step(NamedTuple):
    """A packed command, and its reply: *expected*, and then, if any, payload and a CRLF."""

    ask: bytes
    expected: bytes
    payload_bytes: int = 0


def slice_steps(name: bytes, start: int, stop: int) -> list[Step]:
    """Return what brings the bytes from *start* to *stop* of the value called *name*, by slices."""
    head = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(name), name)
    steps = []
    for first in range(start, stop, SLICE_BYTES):
        end = min(first + SLICE_BYTES, stop)
        span, expected = _span(first, end)
        steps.append(Step(head + span, expected, end - first))
    return steps


@lru_cache(maxsize=1024)
def _span(first: int, end: int) -> tuple[bytes, bytes]:
    """Return what asks for bytes of a value, and how long their reply says it is."""
    words = (b"%d" % first, b"%d" % (end - 1))
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words), (
        b"$%d\r\n" % (end - first)
    )


@dataclass(frozen=True, slots=True)
class Fill:
    """Steps, and the *rooms* of those that bring payload.

    Where all comes over one connection, *arrived* is told, after each slice, how much payload has
    come, and *ahead* is asked at the end: the calling thread's next fill begins with that.
    """

    steps: Sequence[Step]
    rooms: Sequence[memoryview]
    ahead: Sequence[Step] = ()
    arrived: Callable[[int], object] | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload."""
        return sum(map(len, self.rooms))

    def share(self, number: int, shares: int) -> Fill:
        """Return what one of several connections has to do: its slices; the rest the first does."""
        rooms = iter(self.rooms)
        mine: list[Step] = []
        room_of: list[memoryview] = []
        for at, step in enumerate(self.steps):
            room = next(rooms) if step.payload_bytes else None
            if (at % shares if room is not None else 0) == number:
                mine.append(step)
                room_of += [] if room is None else [room]
        return Fill(mine, room_of)


class FillTalk(Talk):
    """A Fill on one line.

    The first *asked* of its steps were asked by the talk before this one. *window* slices are on
    their way at most. A reply of another size or content is an ``error``; the line is of no use
    then.
    """

    def __init__(self, sock: socket, fill: Fill, asked: int = 0, window: int = FILL_WINDOW) -> None:
        super().__init__(sock)
        self.filled_bytes = 0
        self.first_s: float | None = None
        """How long the first bytes took to come, where ``run`` asked for them."""
        self._is_begun = asked > 0
        self._arrived = fill.arrived or bool
        self._unasked = deque(fill.steps[asked:])
        self._unasked.extend(fill.ahead)
        self._ahead = len(fill.ahead)
        self._window = window - sum(step.payload_bytes > 0 for step in fill.steps[:asked])
        self._places: list[memoryview] = []
        self._expected: list[bytes] = []
        self._at = 0
        self._low = 1
        self._lay_out(fill.steps, fill.rooms)
        self._ask_on()

    def _lay_out(self, steps: Sequence[Step], rooms: Sequence[memoryview]) -> None:
        """Put what is expected and where payload goes in the order of their coming."""
        text = b""
        left = iter(rooms)
        for step in steps:
            text += step.expected
            if step.payload_bytes:
                # The CRLF is apart from the text of what comes next, which may not be asked yet.
                self._places += (memoryview(bytearray(text)), next(left), _room_of(_END))
                self._expected += (text, b"", _END)
                text = b""
        if text:
            self._places.append(_room_of(text))
            self._expected.append(text)

    def _ask_on(self) -> None:
        """Ask for what comes next, up to as many payloads as the window allows."""
        asks = b""
        while self._unasked:
            is_slice = self._unasked[0].payload_bytes > 0
            if is_slice and self._window <= 0:
                break
            self._window -= is_slice
            asks += self._unasked.popleft().ask
        if asks:
            self._outbox.append(asks)

    @property
    def is_done(self) -> bool:
        """Whether every reply is here."""
        return self._at == len(self._places)

    @property
    def asked_ahead(self) -> int:
        """How many of the next talk's steps have been asked."""
        return max(0, self._ahead - len(self._unasked))

    # --- beside other lines, or over TLS: see ``converse``

    def _receive(self) -> None:
        places = self._places[self._at : self._at + _RECEIVE_BUFFERS]
        if self._is_tls:
            count = self.sock.recv_into(places[0])
        else:
            count = self.sock.recvmsg_into(places)[0]
        self._take_in(count)
        if not self._is_tls:
            self._wake_at()

    def _wake_at(self) -> None:
        """Let the kernel wake us once a slice is there that is certain to come."""
        low = 1
        if not self.is_done and not self._expected[self._at]:
            low = len(self._places[self._at])
        if low != self._low:
            self._low = low
            self.sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, low)

    # --- alone

    @property
    def runs_alone(self) -> bool:
        """Whether ``run`` can be used: nothing stands between the socket and its bytes."""
        return not self._is_tls

    def run(self, deadline: float, silence_s: float, clock: Callable[[], float]) -> None:
        """Carry on until all is here or there is an ``error``, on a line in plain text.

        As ``converse`` does, but that the kernel waits for all of a slice: one call for it. What is
        not taken at once is left to that: who sends and receives in turns could wait for ever.
        Silence is noticed up to a quarter of *silence_s* later than it lasts that.
        """
        waits_s, began = 0.0, clock()
        heard = began
        self.sock.setblocking(True)
        try:
            while self._at < len(self._places):
                self.send()
                if self._outbox:
                    return
                left_s = min(silence_s / 4, deadline - clock())
                is_silent = clock() - heard >= silence_s
                if left_s <= 0:
                    raise TimeoutError("no answer in time")
                if left_s != waits_s:
                    waits_s = left_s
                    self._wait_at_most(left_s)
                try:
                    self._receive_more(MSG_DONTWAIT if is_silent else 0)
                except BlockingIOError:
                    if is_silent:
                        raise TimeoutError("no answer in time") from None
                    continue
                heard = clock()
                if not self._is_begun:
                    self._is_begun, self.first_s = True, heard - began
        except (OSError, RedisError) as error:
            self.error = error
        finally:
            self.sock.setblocking(False)

    def _wait_at_most(self, seconds: float) -> None:
        """Have every receiving call to the kernel end by then."""
        whole = int(seconds)
        interval = _TIMEVAL.pack(whole, max(1000, int(1e6 * (seconds - whole))))
        self.sock.setsockopt(SOL_SOCKET, SO_RCVTIMEO, interval)

    def _receive_more(self, flags: int) -> None:
        """Receive what is there, up to the end of a slice, or wait for that.

        Until a slice is known to come, what comes may be an error, which is shorter.
        """
        at = self._at
        is_certain = not self._expected[at]
        places = self._places[at : at + (2 if is_certain else 3)]
        waits = MSG_WAITALL if is_certain else 0
        self._take_in(self.sock.recvmsg_into(places, 0, flags or waits)[0])

    # --- both

    def _take_in(self, count: int) -> None:
        """Take note of *count* more bytes, and go on asking."""
        if not count:
            raise ConnectionError("the server hung up")
        slices = 0
        while count:
            place, expected = self._places[self._at], self._expected[self._at]
            taken = min(count, len(place))
            if expected:
                if place[:taken] != expected[:taken]:
                    self._fail(count)
            else:
                self.filled_bytes += taken
                slices += taken == len(place)
            if taken == len(place):
                self._at += 1
            else:
                self._places[self._at] = place[taken:]
                self._expected[self._at] = expected[taken:]
            count -= taken
        if slices:
            self._window += slices
            self._ask_on()
            if self._outbox:
                self.send()  # before whoever is told takes time
            self._arrived(self.filled_bytes)

    def _fail(self, count: int) -> None:
        """Raise what the server sent in place of what was expected."""
        got = b"".join(bytes(p[:_MAX_ERROR_BYTES]) for p in self._places[self._at : self._at + 3])
        got, expected = got[:count], self._expected[self._at]
        same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), 0)
        text, _, _ = got[same:_MAX_ERROR_BYTES].partition(_END)
        raise error_of(text) if text.startswith(b"-") else InvalidResponse("another reply")


def _room_of(text: bytes) -> memoryview:
    return memoryview(bytearray(text))
