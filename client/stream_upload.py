"""A StreamUpload: one put over a FrameStream, from where the tensors lie to the socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.client.frame_stream import FrameStream
from kvstore.client.transport import Outgoing, Put, read_outcomes
from kvstore.proto import bulk
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.framing import MAX_PIECES

SMALL_FRAME_BYTES = 1 << 17
"""Goes in one part; of a larger one the header goes ahead, and the server takes the rest to where
it stays.
"""


class StreamUpload:
    """Used once, by one thread. After an error the stream is of no use."""

    def __init__(self, stream: FrameStream, deadline: float) -> None:
        self.stream = stream
        self._deadline = deadline
        self._request = stream.next_request()
        self._room = np.empty(0, np.uint8)

    def begin(self, request: pb.PutRequest) -> None:
        """Send *request*, and wait until frames may come. Raises the server's errors."""
        self.stream.send(pb.StreamMessage(request=self._request, put=request), self._deadline)
        answer = self._answer()
        if not answer.ready:
            raise InvalidFrameError("kind", answer.WhichOneof("body"), "not an answer to a put")

    def run(self, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return what became of each. Raises the server's errors."""
        for index, chunk in enumerate(chunks):
            self._send(index, chunk.frame_bytes, chunk.pieces(self._room_of))
        finish = pb.StreamMessage(request=self._request, finish=len(chunks))
        self.stream.send(finish, self._deadline)
        answer = self._answer()
        outcomes, reasons = answer.stored.outcomes, answer.stored.reasons
        is_answer = len(outcomes) == len(reasons) == len(chunks) and answer.HasField("stored")
        if not is_answer:
            raise InvalidFrameError("answer", answer, f"{len(chunks)} were put")
        return read_outcomes(outcomes, reasons)

    def _room_of(self, size_bytes: int) -> Bytes:
        """The socket has taken what was in it before."""
        if len(self._room) < size_bytes:
            self._room = np.empty(size_bytes, np.uint8)
        return self._room[:size_bytes]

    def _send(self, index: int, frame_bytes: int, pieces: Sequence[Bytes]) -> None:
        head = pb.StreamPart(index=index, frame_bytes=frame_bytes)
        message = pb.StreamMessage(request=self._request, part=head)
        for part in _parts(frame_bytes, pieces):
            if self.stream.has_more():
                kind = self._answer().WhichOneof("body")
                raise InvalidFrameError("kind", kind, "not an answer to a part")
            self.stream.send(message, self._deadline, part)
            message.part.offset += sum(map(len, part))

    def _answer(self) -> pb.StreamMessage:
        message, payload = self.stream.receive(self._deadline)
        if message.request != self._request or payload is not None:
            raise InvalidFrameError("request", message.request, f"{self._request} was asked")
        if message.HasField("failed"):
            raise bulk.error_of(message.failed)
        return message


def _parts(frame_bytes: int, pieces: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Cut a frame into what one message may have; its header is one by itself."""
    part: list[Bytes] = []
    room = bulk.MAX_PAYLOAD_BYTES
    if frame_bytes > SMALL_FRAME_BYTES:
        yield [pieces[0]]
        pieces = pieces[1:]
    for piece in pieces:
        left = piece
        while len(left):
            if not room or len(part) == MAX_PIECES:
                yield part
                part, room = [], bulk.MAX_PAYLOAD_BYTES
            part.append(left[:room])
            room -= len(part[-1])
            left = left[len(part[-1]) :]
    if part:
        yield part
