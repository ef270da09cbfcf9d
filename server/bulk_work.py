"""Gets and puts of the bulk channel, between the thread that owns the socket and a worker."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk import (
    MAX_CREDIT_BYTES,
    MAX_PAYLOAD_BYTES,
    Budget,
    Get,
    Part,
    Put,
    Window,
    tier_bytes,
)
from kvstore.proto.errors import DeadlineError, InvalidFrameError, LeaseExpiredError
from kvstore.server.delivery import Arrival
from kvstore.server.sessions import Session

FRAMES_AHEAD = 8
"""Frames that a worker has ready before the first of them is sent."""


class GetWork:
    """One get: a worker offers frames, the socket's thread takes parts of them as credit allows.

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
        self.budget = Budget()
        self.budget.grant(word.credit_bytes)
        self._clock = clock
        self._wake = wake
        self._offset = 0
        self._frames: deque[Arrival] = deque()
        self._outstanding_bytes = 0
        self._is_cancelled = False
        # Guards the three above; its waiters are the worker only.
        self._changed = threading.Condition()

    # --- the worker's side

    def offer(self, arrival: Arrival) -> bool:
        """Queue a frame to be sent; False when nobody wants more of them, or it is too late."""
        # A copy of its own is accounted for only until its frame is taken back from us.
        ahead = FRAMES_AHEAD if arrival.place is not None else 1
        with self._changed:
            self._frames.append(arrival)
        self._wake()
        return self._wait(lambda: len(self._frames) < ahead)

    def settle(self) -> bool:
        """Wait until all that was offered is sent and let go; False when it is cut short."""
        return self._wait(lambda: not self._frames and not self._outstanding_bytes)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            while not self._is_cancelled and not condition():
                left_s = self.deadline - self._clock()
                if left_s <= 0:
                    self._is_cancelled = True
                    self._frames.clear()
                    return False
                self._changed.wait(left_s)
            return not self._is_cancelled

    # --- the socket's side

    def next_part(self) -> tuple[Part, Bytes] | None:
        """Return the next part to send, None when there is none or no credit for it."""
        with self._changed:
            if not self._frames or self._outstanding_bytes >= MAX_CREDIT_BYTES:
                return None
            arrival = self._frames[0]
        frame, start = arrival.frame, self._offset
        stop = min(start + MAX_PAYLOAD_BYTES, len(frame))
        if not self.budget.spend(stop - start):
            return None
        word = Part(self.word.request, len(frame), start, arrival.index, tier_bytes(arrival.tier))
        data = frame[start:stop]
        weakref.finalize(data, self._let_go, stop - start).atexit = False
        self._offset = stop % len(frame)
        with self._changed:
            self._outstanding_bytes += len(data)
            if not self._offset and self._frames:
                self._frames.popleft()
                self.frames_sent += 1
                self._changed.notify()
        return word, data

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
            self._frames.clear()
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
