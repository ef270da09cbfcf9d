"""A StreamPut: one put over a stream, its frames received where they stay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from google.protobuf.message import DecodeError

from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.framing import STEP_BYTES, FramedSocket
from kvstore.proto.messages import hints_from_message
from kvstore.proto.plans import Hints
from kvstore.server.api.put_stream import PutStream
from kvstore.server.security.sessions import Session


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
