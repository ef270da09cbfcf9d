"""Bytes of one request over a stream: parts sent from where they lie, or received where they stay.

Each is used once, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.framing import STEP_BYTES, FramedSocket
from kvstore.proto.messages import hints_from_message
from kvstore.proto.plans import Hints
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.layered_reads import LayerPart

FIRST_PART_BYTES = 1 << 16
"""Of a frame for a client: it learns from that where the rest goes, which is not copied then."""


class PartSender:
    """Sends the parts that answer *word* over *wire*."""

    def __init__(self, wire: FramedSocket, word: bulk.Get) -> None:
        self.word = word
        self.frames_sent = 0
        self.is_broken = False
        """The other end is gone or late, in the midst of a frame: nothing more can be said."""
        self._wire = wire

    def send_all(
        self,
        parts: Generator[LayerPart, None, None],
        deadline: float,
        pause: Callable[[], None] = lambda: None,
        *,
        has_short_part: bool,
    ) -> None:
        """Send *parts* until one does not come to its end, or the reader wants no more.

        *deadline* is on the clock of the wire; *pause* is called before each message. A whole frame
        begins with a short one if it *has_short_part*. Each part's memory is in use no more when
        the next is asked for.
        """
        self._wire.set_timeout(bulk.SILENCE_S, deadline)
        # Of what is asked for by layers or ranges the reader knows where it goes.
        is_whole = not self.word.flags & (bulk.LAYER_MAJOR | bulk.RANGES)
        first_bytes = FIRST_PART_BYTES if has_short_part and is_whole else bulk.MAX_PAYLOAD_BYTES
        with closing(parts):
            for part in parts:
                if not self._send(part, first_bytes, pause):
                    return
                self.frames_sent += not part.offset

    def _send(self, part: LayerPart, first_bytes: int, pause: Callable[[], None]) -> bool:
        tier = bulk.tier_bytes(part.tier)
        stop = 0
        while stop < len(part.data):
            pause()
            start, at = stop, part.offset + stop
            stop += bulk.MAX_PAYLOAD_BYTES if at else first_bytes
            word = bulk.Part(self.word.request, part.frame_bytes, at, part.chunk, tier)
            self.is_broken = True
            try:
                is_cancelled = self._is_cancelled()
                if not is_cancelled:
                    self._wire.send(word, part.data[start:stop])
            except KVStoreError:
                return False
            self.is_broken = False
            if is_cancelled:
                return False
        return True

    def _is_cancelled(self) -> bool:
        """Whether the reader said that it wants no more. Raises as ``FramedSocket.receive``."""
        if not self._wire.has_more():
            return False
        word, _ = self._wire.receive()
        if not isinstance(word, bulk.Cancel) or word.request != self.word.request:
            raise InvalidRequestError("kind", type(word).__name__, "cancel a get, or wait for it")
        return True


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
            if not word.offset:  # the first of a frame, which says where it stays
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
