"""A StreamWork: one get over a stream whose parts are sent at once, by who offers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, KVStoreError
from kvstore.proto.framing import STEP_BYTES, FramedSocket
from kvstore.proto.messages import hints_from_message
from kvstore.proto.plans import Hints
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import Session

FIRST_PART_BYTES = 1 << 16
"""Of a frame for a client: it learns from that where the rest goes, which is not copied then."""


class Piece(NamedTuple):
    """A frame or a segment of it, to be sent from where it lies."""

    chunk: int
    tier: str
    frame_bytes: int
    offset: int
    data: Bytes


def _at_once() -> None:
    """Wait for nobody."""


class StreamWork:
    """What ``PeerServer.get`` and ``BulkService.get`` need of a get, over *wire*. For one thread.

    *deadline* is on the clock of *wire*; *pause* is called before each part. A whole frame begins
    with a short part when it *is_for_client*.
    """

    def __init__(
        self,
        wire: FramedSocket,
        word: bulk.Get,
        deadline: float,
        pause: Callable[[], None] = _at_once,
        *,
        is_for_client: bool = True,
    ) -> None:
        self.word = word
        self.deadline = deadline
        self.frames_sent = 0
        self.is_broken = False
        """The other end is gone or late, in the midst of a frame: nothing more can be said."""
        self._wire = wire
        self._pause = pause
        # Of what is asked for by layers or ranges the reader knows where it goes.
        is_whole = not word.flags & (bulk.LAYER_MAJOR | bulk.RANGES)
        self._has_short_part = is_for_client and is_whole
        wire.set_timeout(bulk.SILENCE_S, deadline)

    def offer(self, piece: Piece) -> bool:
        """Send *piece*; False when it did not come to its end, or the reader wants no more.

        Its memory is in use no more.
        """
        tier = bulk.tier_bytes(piece.tier)
        stop = 0
        while stop < len(piece.data):
            self._pause()
            start, stop = stop, stop + self._part_bytes(piece.offset + stop)
            data = piece.data[start:stop]
            at = piece.offset + start
            part = bulk.Part(self.word.request, piece.frame_bytes, at, piece.chunk, tier)
            self.is_broken = True
            try:
                is_cancelled = self._is_cancelled()
                if not is_cancelled:
                    self._wire.send(part, data)
            except KVStoreError:
                return False
            self.is_broken = False
            if is_cancelled:
                return False
        self.frames_sent += not piece.offset
        return True

    def _is_cancelled(self) -> bool:
        """Whether the reader said that it wants no more. Raises as ``FramedSocket.receive``."""
        if not self._wire.has_more():
            return False
        word, _ = self._wire.receive()
        if not isinstance(word, bulk.Cancel) or word.request != self.word.request:
            raise InvalidRequestError("kind", type(word).__name__, "cancel a get, or wait for it")
        return True

    def _part_bytes(self, at: int) -> int:
        is_first = not at and self._has_short_part
        return FIRST_PART_BYTES if is_first else bulk.MAX_PAYLOAD_BYTES


class StreamPut:
    """What ``BulkService.put_over`` asks of a put, over *wire*. Used once, by one thread.

    *deadline* is on the clock of *wire*.
    """

    def __init__(self, wire: FramedSocket, word: bulk.Put, deadline: float) -> None:
        self.word = word
        self.has_begun = False
        """Frames are on their way, and only the end of the stream ends them."""
        self._wire = wire
        self._room = np.empty(STEP_BYTES, np.uint8)
        wire.set_timeout(bulk.SILENCE_S, deadline)

    def words(self) -> Iterator[tuple[bulk.Part | bulk.Hint, int]]:
        """Have frames sent, and yield their parts as they come, each with its length: ``land`` it.

        What is said of them comes before: take its ``hints``. Raises InvalidFrameError,
        InvalidRequestError, and as FramedSocket does.
        """
        self._wire.send(bulk.Ready(self.word.request))
        self.has_begun = True
        frames = 0
        while True:
            word, size_bytes = self._wire.receive()
            if word.request != self.word.request:
                raise InvalidFrameError("request", word.request, f"{self.word.request} is a put")
            if isinstance(word, bulk.Finish):
                break
            if not isinstance(word, bulk.Part | bulk.Hint):
                raise InvalidRequestError("kind", type(word).__name__, "a put has parts")
            if isinstance(word, bulk.Part):
                frames = word.chunk + 1
            yield word, size_bytes
        if frames != word.frames:
            raise InvalidFrameError("frames", word.frames, f"{frames} came")

    def hints(self, size_bytes: int) -> Hints:
        """Receive what is said. Raises InvalidRequestError."""
        message = pb.Hints()
        try:
            message.ParseFromString(self._wire.take(size_bytes))
        except DecodeError as error:
            raise InvalidRequestError(
                "hints", str(error), "send a Hints of kvstore.proto"
            ) from None
        return hints_from_message(message)

    def land(self, stream: PutStream, session: Session, part: bulk.Part, size_bytes: int) -> None:
        """Receive a part: the first of a frame, which says where it stays, or more of it there."""
        if not part.offset:
            head = np.empty(size_bytes, np.uint8)
            self._wire.fill(head)
            stream.take(session, part.frame_bytes, head)
            return
        for start in range(0, max(1, size_bytes), STEP_BYTES):
            step = self._step(stream, min(size_bytes - start, STEP_BYTES))
            self._wire.fill(step)
            stream.landed(len(step))

    def _step(self, stream: PutStream, size_bytes: int) -> Bytes:
        room = stream.room(size_bytes)
        return self._room[:size_bytes] if room is None else room
