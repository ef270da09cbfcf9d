"""A StreamWork: one get over a stream whose parts are sent at once, by who offers them."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.proto import bulk
from kvstore.proto.errors import DeadlineError, TierUnavailableError
from kvstore.proto.stream_wire import StreamWire
from kvstore.server.bulk.bulk_work import Piece

SILENCE_S = bulk.SILENCE_MS / 1000
"""For a part to be taken."""


FIRST_PART_BYTES = 1 << 16
"""Of a frame for a client: it learns from that where the rest goes, which is not copied then."""


def _at_once() -> None:
    """Wait for nobody."""


class StreamWork:
    """What ``PeerDesk.get`` and ``BulkService.get`` ask of a get, over *wire*. Used by one thread.

    *deadline* is on the clock of *wire*; *pause* is called before each part. A frame begins with a
    short part when it *is_for_client*.
    """

    def __init__(
        self,
        wire: StreamWire,
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
        self._is_for_client = is_for_client
        wire.patience(SILENCE_S, deadline)

    def offer(self, piece: Piece) -> bool:
        """Send *piece*; False when it did not come to its end. Its memory is in use no more."""
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
                self._wire.send(part, data)
            except (DeadlineError, TierUnavailableError):
                return False
            self.is_broken = False
        self.frames_sent += not piece.offset
        return True

    def _part_bytes(self, at: int) -> int:
        is_first = not at and self._is_for_client
        return FIRST_PART_BYTES if is_first else bulk.MAX_PAYLOAD_BYTES

    def settle(self) -> bool:
        """Whether all that was offered is sent."""
        return not self.is_broken
