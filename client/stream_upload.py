"""A StreamUpload: one put over a FrameStream, from where the tensors lie to the socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.client.frame_stream import FrameStream
from kvstore.client.transport import Outgoing, Put, read_outcomes
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.framing import MAX_PIECES
from kvstore.proto.messages import hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints

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

    def begin(self, word: bulk.Put) -> None:
        """Ask as *word* does, and hear that frames may come. Raises the server's errors."""
        self.stream.send(word._replace(request=self._request), self._deadline)
        answer, _ = self._answer()
        if not isinstance(answer, bulk.Ready):
            raise InvalidFrameError("kind", type(answer).__name__, "not an answer to a put")

    def run(self, chunks: Sequence[Outgoing], hints: Hints = NO_HINTS) -> list[Put]:
        """Put *chunks*; return what became of each. Raises the server's errors."""
        said = hints_to_message(hints)
        if said is not None:
            self.stream.send(bulk.Hint(self._request), self._deadline, said.SerializeToString())
        for index, chunk in enumerate(chunks):
            self._send(index, chunk.frame_bytes, chunk.pieces(self._room_of))
        self.stream.send(bulk.Finish(self._request, len(chunks)), self._deadline)
        answer, payload = self._answer()
        if not isinstance(answer, bulk.Done) or answer.frames != len(chunks):
            raise InvalidFrameError("answer", answer, f"{len(chunks)} were put")
        return read_outcomes(*bulk.unpack_outcomes(answer.frames, payload))

    def _room_of(self, size_bytes: int) -> Bytes:
        """The socket has taken what was in it before."""
        if len(self._room) < size_bytes:
            self._room = np.empty(size_bytes, np.uint8)
        return self._room[:size_bytes]

    def _send(self, index: int, frame_bytes: int, pieces: Sequence[Bytes]) -> None:
        at = 0
        for part in _parts(frame_bytes, pieces):
            if self.stream.has_more():
                answer, _ = self._answer()
                raise InvalidFrameError("kind", type(answer).__name__, "not an answer to a part")
            word = bulk.Part(self._request, frame_bytes, at, index, bytes(bulk.TIER_BYTES))
            self.stream.send_part(word, part, self._deadline)
            at += sum(map(len, part))

    def _answer(self) -> tuple[bulk.Word, bytes]:
        word, payload = self.stream.receive(self._deadline)
        if word.request != self._request or isinstance(word, bulk.Part):
            raise InvalidFrameError("request", word.request, f"{self._request} was asked")
        data = payload.tobytes() if isinstance(payload, np.ndarray) else b""
        if isinstance(word, bulk.Failed):
            raise bulk.unpack_failure(data)
        return word, data


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
