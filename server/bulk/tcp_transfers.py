"""Bytes of one request over a stream: parts sent from where they lie, or received where they stay.

Each is used once, by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

import numpy as np

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.framing import STEP_BYTES, FramedSocket, message_of
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import SessionTable
from kvstore.server.store.reads import LayerPart

FIRST_PART_BYTES = 1 << 16
"""Of a frame for a client: it learns from that where the rest goes, which is not copied then."""


TAKES_S = 0.05
"""A thread waits so long for a reader to take more; then the reader's connection waits without."""

Sending: TypeAlias = Generator[float, None, None]
"""Sends as it is iterated. Yields when the reader takes nothing, and until when that may last;
to go on, or to be closed, in any thread."""


class PartSender:
    """Sends the parts that answer get number *request* over *wire*; *clock* is the wire's."""

    def __init__(self, wire: FramedSocket, request: int, clock: Callable[[], float]) -> None:
        self.frames_sent = 0
        self.is_broken = False
        """The other end is gone or late, in the midst of a frame: nothing more can be sent."""
        self._request = request
        self._wire = wire
        self._clock = clock
        self._deadline = 0.0
        self._is_cancelled = False

    def send_all(
        self,
        parts: Generator[LayerPart, None, None],
        deadline: float,
        pause: Callable[[], None] = lambda: None,
        *,
        first_bytes: int = bulk.MAX_PAYLOAD_BYTES,
    ) -> Sending:
        """Send *parts* until one does not come to its end, or the reader wants no more.

        *deadline* is on the clock of the wire; *pause* is called before each message. The first of
        a frame has *first_bytes* at most. Each part's memory is in use no more when the next is
        taken.
        """
        self._deadline = deadline
        self._wire.set_timeout(TAKES_S, deadline)
        with closing(parts):
            for part in parts:
                yield from self._send(part, first_bytes, pause)
                if self.is_broken or self._is_cancelled:
                    return
                self.frames_sent += not part.offset

    def _send(self, part: LayerPart, first_bytes: int, pause: Callable[[], None]) -> Sending:
        head = pb.StreamPart(index=part.chunk, frame_bytes=part.frame_bytes, tier=part.tier)
        message = pb.StreamMessage(request=self._request, part=head)
        stop = 0
        while stop < len(part.data):
            pause()
            start, at = stop, part.offset + stop
            stop += bulk.MAX_PAYLOAD_BYTES if at else first_bytes
            message.part.offset = at
            self.is_broken = True
            try:
                if self._wire.has_more():
                    self._receive_cancel()
                left = [] if self._is_cancelled else message_of(message, [part.data[start:stop]])
                while left:
                    try:
                        self._wire.send_some(left)
                    except DeadlineError:
                        now = self._clock()
                        if now >= self._deadline:
                            return
                        yield min(now + bulk.SILENCE_S, self._deadline)
            except KVStoreError:
                return
            self.is_broken = False
            if self._is_cancelled:
                return

    def _receive_cancel(self) -> None:
        """Take in that the reader wants no more. Raises as ``FramedSocket.receive``."""
        self._wire.set_timeout(bulk.SILENCE_S, self._deadline)
        message, _ = self._wire.receive()
        if not message.cancel or message.request != self._request:
            kind = message.WhichOneof("body")
            raise InvalidRequestError("kind", kind, "cancel a get, or wait for it")
        self._is_cancelled = True


def receive_put(
    wire: FramedSocket, message: pb.StreamMessage, stream: PutStream, sessions: SessionTable
) -> None:
    """Receive the frames of put *message* where *stream* stores them.

    Raises InvalidFrameError, InvalidRequestError, and as PutStream and FramedSocket do.
    """
    request, session_id = message.request, message.put.session_id
    skipped = np.empty(STEP_BYTES, np.uint8)
    frames = 0
    while True:
        message, size_bytes = wire.receive()
        kind = message.WhichOneof("body")
        if message.request != request:
            raise InvalidFrameError("request", message.request, f"{request} is a put")
        if kind == "finish":
            break
        if kind != "part":
            raise InvalidRequestError("kind", kind, "a put has parts")
        part = message.part
        if (part.index, part.offset) != stream.position:
            wrong = (part.index, part.offset)
            raise InvalidFrameError("offset", wrong, "parts must follow each other")
        frames = part.index + 1
        session = sessions.get(session_id)
        if not part.offset:  # the first of a frame, whose header decides where it stays
            head = np.empty(size_bytes, np.uint8)
            wire.fill(head)
            stream.take(session, part.frame_bytes, head)
            continue
        for start in range(0, max(1, size_bytes), STEP_BYTES):
            step_bytes = min(size_bytes - start, STEP_BYTES)
            room = stream.room(step_bytes)
            wire.fill(skipped[:step_bytes] if room is None else room)
            stream.landed(step_bytes)
    if frames != message.finish:
        raise InvalidFrameError("frames", message.finish, f"{frames} came")
