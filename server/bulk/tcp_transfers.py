"""A StreamWork: one get over a stream whose parts are sent at once, by who offers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.framing import FramedSocket

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
    """What ``PeerDesk.get`` and ``BulkService.get`` ask of a get, over *wire*. Used by one thread.

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
