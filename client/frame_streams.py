"""The FrameStreams of one session: connected when they are needed, kept for the next call."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress

from kvstore.client.frame_stream import Entrance, FrameStream
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
)

MAX_STREAMS = 8
"""Gets and puts at once; more go through gRPC. Below what a server allows one session."""
DIAL_S = 2.0
"""For a connection; a call that waits for one gives it half of its time at most."""
AGAIN_S = 30.0
"""A server that did not let us in is not dialled again for. One that did not do so within a call is
dialled beside calls for as long."""
_JOIN_S = 0.2


class FrameStreams:
    """Thread-safe. *silence_s* as theirs.

    A call takes one that is idle or connects one, or does without where there are as many as there
    may be, or the server does not let us in.
    """

    def __init__(self, entrance: Entrance, silence_s: float = math.inf) -> None:
        self._entrance = entrance
        self._silence_s = silence_s
        self._idle: list[FrameStream] = []
        self._busy: set[FrameStream] = set()
        self._dialling: threading.Thread | None = None
        self._connecting = 0
        self._is_closed = False
        self._refused_until = -math.inf
        self._beside_until = -math.inf
        # Guards the seven above.
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether a call would find one now; else, and if that may help, one is connected."""
        if not self._idle:
            self._dial_if_due()
        return bool(self._idle)

    def take(self, within_s: float = 0.0) -> FrameStream | None:
        """Return a stream of our own for one call of *within_s* seconds; None when there is none.

        Without time to connect one, or where that took too long of late, one is connected beside
        the call, for the next.
        """
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
                if stream is not None:
                    self._busy.add(stream)
            if stream is None:
                break
            if not stream.is_broken():
                return stream
            self.give_back(stream, is_clean=False)
        is_beside = self._dialling is not None or time.monotonic() < self._beside_until
        if within_s <= 0 or is_beside:
            self._dial_if_due()
        elif self._may_connect():
            try:
                return self._connected(within_s / 2)
            except (DeadlineError, TierUnavailableError, QuotaExceededError):
                self._beside_until = time.monotonic() + AGAIN_S
                self._refused_until = -math.inf  # it had the time of one call: that says little
                self._dial_if_due()
        return None

    def connect(self, within_s: float) -> None:
        """Connect a stream for the first call. Raises as ``FrameStream``."""
        if self._may_connect():
            self.give_back(self._connected(within_s), is_clean=True)

    def give_back(self, stream: FrameStream, *, is_clean: bool) -> None:
        """Take back a stream; one whose call did not come to its end is closed."""
        with self._lock:
            self._busy.discard(stream)
            if is_clean and not self._is_closed:
                self._idle.append(stream)
                return
        stream.close()

    def hang_up(self) -> None:
        """Have whoever waits on one of them wait no more."""
        with self._lock:
            for stream in self._busy:
                stream.give_up()

    def leave(self) -> None:
        """In a child: close its descriptors; what is said stays between parent and server."""
        self._lock = threading.Lock()  # another thread may have had it
        self._is_closed = True
        self._dialling = None
        for stream in (*self._idle, *self._busy):
            stream.close()
        self._idle = []

    def close(self) -> None:
        """Hang up on all; calls at work end. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            dialling = self._dialling
        for stream in idle:
            stream.close()
        self.hang_up()
        if dialling is not None:
            dialling.join(_JOIN_S)

    def _may_connect(self) -> bool:
        """Whether one more may be connected now; if so, it is counted."""
        with self._lock:
            count = len(self._idle) + len(self._busy) + self._connecting
            is_refused = time.monotonic() < self._refused_until
            if self._is_closed or is_refused or count >= MAX_STREAMS:
                return False
            self._connecting += 1
            return True

    def _connected(self, within_s: float) -> FrameStream:
        """Return one more, in use. Raises as it does, for a while after which none is tried."""
        stream: FrameStream | None = None
        seconds = min(within_s, DIAL_S)
        try:
            stream = FrameStream(self._entrance, lambda: self._is_closed, seconds, self._silence_s)
        finally:
            with self._lock:
                self._connecting -= 1
                if stream is None:
                    self._refused_until = time.monotonic() + AGAIN_S
                else:
                    self._busy.add(stream)
        return stream

    def _dial_if_due(self) -> None:
        if self._dialling is None and self._may_connect():
            self._dialling = threading.Thread(
                target=self._dial, name="kvstore-stream-dial", daemon=True
            )
            self._dialling.start()

    def _dial(self) -> None:
        with suppress(KVStoreError):
            self.give_back(self._connected(DIAL_S), is_clean=True)
        self._dialling = None
