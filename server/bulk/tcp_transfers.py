"""Bytes of one request over a stream: parts sent from where they lie, or received where they stay.

Each is used once, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import DeadlineError, InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.framing import STEP_BYTES, FramedSocket, message_of
from kvstore.proto.messages import hints_from_message
from kvstore.proto.plans import Hints
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.reads import LayerPart

FIRST_PART_BYTES = 1 << 16
"""Of a frame for a client: it learns from that where the rest goes, which is not copied then."""


TAKES_S = 0.05
"""A thread waits so long for a reader to take more; then the reader's connection waits without."""

Sending: TypeAlias = Generator[float, None, None]
"""Sends as it is iterated. Yields when the reader takes nothing, and until when that may last;
to go on, or to be closed, in any thread."""


class PartSender:
    """Sends the parts that answer *word* over *wire*; *clock* is the wire's."""

    def __init__(self, wire: FramedSocket, word: bulk.Get, clock: Callable[[], float]) -> None:
        self.word = word
        self.frames_sent = 0
        self.is_broken = False
        """The other end is gone or late, in the midst of a frame: nothing more can be sent."""
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
        has_short_part: bool,
    ) -> Sending:
        """Send *parts* until one does not come to its end, or the reader wants no more.

        *deadline* is on the clock of the wire; *pause* is called before each message. A whole frame
        begins with a short one if it *has_short_part*. Each part's memory is in use no more when
        the next is taken.
        """
        self._deadline = deadline
        self._wire.set_timeout(TAKES_S, deadline)
        # Of a get by layers or ranges the reader knows where it goes.
        is_whole = not self.word.flags & (bulk.LAYER_MAJOR | bulk.RANGES)
        first_bytes = FIRST_PART_BYTES if has_short_part and is_whole else bulk.MAX_PAYLOAD_BYTES
        with closing(parts):
            for part in parts:
                yield from self._send(part, first_bytes, pause)
                if self.is_broken or self._is_cancelled:
                    return
                self.frames_sent += not part.offset

    def _send(self, part: LayerPart, first_bytes: int, pause: Callable[[], None]) -> Sending:
        tier = bulk.tier_bytes(part.tier)
        stop = 0
        while stop < len(part.data):
            pause()
            start, at = stop, part.offset + stop
            stop += bulk.MAX_PAYLOAD_BYTES if at else first_bytes
            word = bulk.Part(self.word.request, part.frame_bytes, at, part.chunk, tier)
            self.is_broken = True
            try:
                if self._wire.has_more():
                    self._receive_cancel()
                left = [] if self._is_cancelled else message_of(word, [part.data[start:stop]])
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
        word, _ = self._wire.receive()
        if not isinstance(word, bulk.Cancel) or word.request != self.word.request:
            raise InvalidRequestError("kind", type(word).__name__, "cancel a get, or wait for it")
        self._is_cancelled = True


class PutReceiver:
    """Receives the frames of the put *word* over *wire*."""

    def __init__(self, wire: FramedSocket, word: bulk.Put, sessions: SessionTable) -> None:
        self.has_begun = False
        """Frames are on their way, and only the end of the stream ends them."""
        self._word = word
        self._wire = wire
        self._sessions = sessions

    def receive(self, stream: PutStream) -> None:
        """Have the frames sent, and receive them where *stream* stores them.

        Raises InvalidFrameError, InvalidRequestError, and as PutStream and FramedSocket do.
        """
        request = self._word.request
        self._wire.send(bulk.Ready(request))
        self.has_begun = True
        skipped = np.empty(STEP_BYTES, np.uint8)
        frames = 0
        while True:
            word, size_bytes = self._wire.receive()
            if word.request != request:
                raise InvalidFrameError("request", word.request, f"{request} is a put")
            if isinstance(word, bulk.Finish):
                break
            if isinstance(word, bulk.Hint):
                stream.hint(self._hints(size_bytes))
                continue
            if not isinstance(word, bulk.Part):
                raise InvalidRequestError("kind", type(word).__name__, "a put has parts")
            frames = word.chunk + 1
            session = self._session_of(word, stream)
            if not word.offset:  # the first of a frame, whose header decides where it stays
                head = np.empty(size_bytes, np.uint8)
                self._wire.fill(head)
                stream.take(session, word.frame_bytes, head)
                continue
            for start in range(0, max(1, size_bytes), STEP_BYTES):
                step_bytes = min(size_bytes - start, STEP_BYTES)
                room = stream.room(step_bytes)
                self._wire.fill(skipped[:step_bytes] if room is None else room)
                stream.landed(step_bytes)
        if frames != word.frames:
            raise InvalidFrameError("frames", word.frames, f"{frames} came")

    def _session_of(self, part: bulk.Part, stream: PutStream) -> Session:
        """Return whose part it is. Raises InvalidFrameError unless it is the next."""
        if (part.chunk, part.offset) != stream.position:
            raise InvalidFrameError(
                "offset", (part.chunk, part.offset), "parts must follow each other"
            )
        return self._sessions.get(self._word.session_id)

    def _hints(self, size_bytes: int) -> Hints:
        message = pb.Hints()
        try:
            message.ParseFromString(self._wire.take(size_bytes))
        except DecodeError as error:
            raise InvalidRequestError(
                "hints", str(error), "send a Hints of kvstore.proto"
            ) from None
        return hints_from_message(message)
