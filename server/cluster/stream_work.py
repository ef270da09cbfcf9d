"""A StreamWork: one get of a peer whose parts are sent at once, by who offers them."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.proto import bulk
from kvstore.proto.errors import DeadlineError, TierUnavailableError
from kvstore.proto.stream_wire import StreamWire
from kvstore.server.bulk.bulk_work import Piece

SILENCE_S = bulk.SILENCE_MS / 1000
"""For a part to be taken."""


class StreamWork:
    """What ``PeerDesk.get`` asks of a get, over *wire*. Used by one thread.

    *clock* returns monotonic seconds; *pause* is called before each part.
    """

    def __init__(
        self,
        wire: StreamWire,
        word: bulk.Get,
        clock: Callable[[], float],
        pause: Callable[[], None],
    ) -> None:
        self.word = word
        self.frames_sent = 0
        self.is_broken = False
        """The other end is gone or late, in the midst of a frame: nothing more can be said."""
        self._wire = wire
        self._pause = pause
        wire.patience(SILENCE_S, clock() + word.deadline_ms / 1000)

    def offer(self, piece: Piece) -> bool:
        """Send *piece*; False when it did not come to its end. Its memory is in use no more."""
        tier = bulk.tier_bytes(piece.tier)
        for start in range(0, len(piece.data), bulk.MAX_PAYLOAD_BYTES):
            self._pause()
            data = piece.data[start : start + bulk.MAX_PAYLOAD_BYTES]
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

    def settle(self) -> bool:
        """Whether all that was offered is sent."""
        return not self.is_broken
