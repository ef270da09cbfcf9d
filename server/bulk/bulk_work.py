"""Gets and puts of the bulk channel, between the thread that owns the socket and a worker."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk import (
    MAX_CREDIT_BYTES,
    MAX_PAYLOAD_BYTES,
    Get,
    Part,
    Put,
    tier_bytes,
)
from kvstore.proto.credit import Budget, Window
from kvstore.proto.errors import DeadlineError, InvalidFrameError, LeaseExpiredError
from kvstore.server.sessions import Session

PIECES_AHEAD = 8
"""Frames, or layers of them, that a worker has ready before the first of them is sent."""


class Piece(NamedTuple):
    """A frame or a segment of it, to be sent from where it lies.

    *is_loose*: its memory is accounted for only until its owner takes it back.
    """

    chunk: int
    tier: str
    frame_bytes: int
    offset: int
    data: Bytes
    is_loose: bool = False


class GetWork:
    """One get: a worker offers pieces, the socket's thread takes parts of them as credit allows.

    Payload bytes are never copied: a part counts as outstanding until ZeroMQ has let go of it.
    *clock* returns monotonic seconds. *wake* has the socket's thread look.
    """

    def __init__(
        self,
        session: Session,
        word: Get,
        deadline: float,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.session = session
        self.word = word
        self.deadline = deadline
        self.frames_sent = 0
        """Frames whose last byte was sent, or, of layers, whose header was."""
        self.budget = Budget()
        self.budget.grant(word.credit_bytes)
        self._clock = clock
        self._wake = wake
        self._sent_bytes = 0
        """Of the first piece."""
        self._pieces: deque[Piece] = deque()
        self._outstanding_bytes = 0
        self._is_cancelled = False
        # Guards the three above; its waiters are the worker only.
        self._changed = threading.Condition()

    # --- the worker's side

    def offer(self, piece: Piece) -> bool:
        """Queue a piece to be sent; False when nobody wants more of them, or it is too late."""
        with self._changed:
            self._pieces.append(piece)
        self._wake()
        if piece.is_loose:
            return self.settle()
        return self._wait(lambda: len(self._pieces) < PIECES_AHEAD)

    def settle(self) -> bool:
        """Wait until all that was offered is sent and let go; False when it is cut short."""
        return self._wait(lambda: not self._pieces and not self._outstanding_bytes)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            while not self._is_cancelled and not condition():
                left_s = self.deadline - self._clock()
                if left_s <= 0:
                    self._is_cancelled = True
                    self._pieces.clear()
                    return False
                self._changed.wait(left_s)
            return not self._is_cancelled

    # --- the socket's side

    def next_part(self) -> tuple[Part, Bytes] | None:
        """Return the next part to send, None when there is none or no credit for it."""
        with self._changed:
            if not self._pieces or self._outstanding_bytes >= MAX_CREDIT_BYTES:
                return None
            piece = self._pieces[0]
        start = self._sent_bytes
        data = piece.data[start : start + MAX_PAYLOAD_BYTES]
        if not self.budget.spend(len(data)):
            return None
        weakref.finalize(data, self._let_go, len(data)).atexit = False
        self._sent_bytes = (start + len(data)) % len(piece.data)
        with self._changed:
            self._outstanding_bytes += len(data)
            if not self._sent_bytes and self._pieces:
                self._pieces.popleft()
                self.frames_sent += not piece.offset
                self._changed.notify()
        tier = tier_bytes(piece.tier)
        at = piece.offset + start
        return Part(self.word.request, piece.frame_bytes, at, piece.chunk, tier), data

    def _let_go(self, size_bytes: int) -> None:
        """ZeroMQ needs a part's memory no more."""
        with self._changed:
            was_stalled = self._outstanding_bytes >= MAX_CREDIT_BYTES
            self._outstanding_bytes -= size_bytes
            if not self._outstanding_bytes:
                self._changed.notify()
        if was_stalled:
            self._wake()

    def cancel(self) -> None:
        """Send no more."""
        with self._changed:
            self._is_cancelled = True
            self._pieces.clear()
            self._changed.notify()


class PutWork:
    """One put: the socket's thread hands in parts, a worker takes them out in order."""

    def __init__(
        self, session: Session, word: Put, deadline: float, clock: Callable[[], float]
    ) -> None:
        self.session = session
        self.word = word
        self.deadline = deadline
        self._clock = clock
        self._parts: deque[tuple[Part, Bytes]] = deque()
        self._window = Window()
        self._frames: int | None = None
        self._is_cancelled = False
        # Guards the four above; its waiters are the worker only.
        self._changed = threading.Condition()

    # --- the socket's side

    def open(self) -> int:
        """Return the first grant."""
        with self._changed:
            return self._window.open()

    def receive(self, part: Part, data: Bytes) -> None:
        """Take a part in. Raises InvalidRequestError when it was not covered by credit."""
        with self._changed:
            self._window.receive(len(data))
            self._parts.append((part, data))
            self._changed.notify()

    def finish(self, frames: int) -> None:
        """No parts follow; *frames* were sent."""
        with self._changed:
            self._frames = frames
            self._changed.notify()

    def cancel(self) -> None:
        """Nobody waits for the outcome."""
        with self._changed:
            self._is_cancelled = True
            self._parts.clear()
            self._changed.notify()

    # --- the worker's side

    def parts(self) -> Iterator[tuple[Part, Bytes]]:
        """Yield the parts as they come, up to the last.

        Raises DeadlineError, LeaseExpiredError when the put was cut short.
        """
        frames = 0
        while True:
            with self._changed:
                while not self._parts and self._frames is None and not self._is_cancelled:
                    left_s = self.deadline - self._clock()
                    if left_s <= 0:
                        raise DeadlineError("the frames did not come in time")
                    self._changed.wait(left_s)
                if self._is_cancelled:
                    raise LeaseExpiredError("the put was given up")
                if not self._parts:
                    break
                part, data = self._parts.popleft()
            frames = part.chunk + 1
            yield part, data
        if frames != self._frames:
            raise InvalidFrameError("frames", self._frames, f"{frames} came")

    def consume(self, size_bytes: int) -> int:
        """Take note that a part was dealt with; return what to grant for it."""
        with self._changed:
            return self._window.consume(size_bytes)
