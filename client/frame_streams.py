"""The FrameStreams of one session: connected beside its calls, kept for the next."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

from kvstore.client.frame_stream import Entrance, FrameStream
from kvstore.proto.errors import KVStoreError

MAX_STREAMS = 8
"""Gets and puts at once; more go through ZeroMQ. Below what a server allows one session."""
DIAL_S = 2.0
"""For a connection, which no call waits for."""
_JOIN_S = 0.2


class FrameStreams:
    """Thread-safe. There are none where *entrance* leads nowhere; *silence_s* as theirs.

    A call takes one that is there, or does without, and the next finds one: a port that a firewall
    keeps shut delays nobody. After a server that does not let us in no more are tried.
    """

    def __init__(self, entrance: Entrance, silence_s: float = math.inf) -> None:
        self._entrance = entrance
        self._silence_s = silence_s
        self._idle: list[FrameStream] = []
        self._busy: set[FrameStream] = set()
        self._dialling: threading.Thread | None = None
        self._is_closed = False
        self._is_refused = not entrance.where
        # Guards the five above.
        self._lock = threading.Lock()
        self._dial_if_due()

    @property
    def is_ready(self) -> bool:
        """Whether a call would find one now; else, and if that may help, one is connected."""
        if not self._idle:
            self._dial_if_due()
        return bool(self._idle)

    def take(self) -> FrameStream | None:
        """Return a stream of our own for one call; None when there is none yet."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
                if stream is not None:
                    self._busy.add(stream)
            if stream is None:
                self._dial_if_due()
                return None
            if not stream.is_broken():
                return stream
            self.give_back(stream, is_clean=False)

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

    def _dial_if_due(self) -> None:
        with self._lock:
            is_enough = len(self._idle) + len(self._busy) >= MAX_STREAMS
            if self._is_closed or self._is_refused or self._dialling or is_enough:
                return
            self._dialling = threading.Thread(
                target=self._dial, name="kvstore-stream-dial", daemon=True
            )
            self._dialling.start()

    def _dial(self) -> None:
        stream: FrameStream | None = None
        with suppress(KVStoreError):  # what comes over ZeroMQ comes as well
            stream = FrameStream(self._entrance, lambda: self._is_closed, DIAL_S, self._silence_s)
        with self._lock:
            self._dialling = None
            self._is_refused = stream is None
            is_wanted = stream is not None and not self._is_closed
            if is_wanted and stream is not None:
                self._idle.append(stream)
        if stream is not None and not is_wanted:
            stream.close()
