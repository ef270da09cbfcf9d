"""A BulkUpload: one put over a ZmqLink, part by part as far as the server's credit goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.client.transport import Outgoing, Put, read_outcomes
from kvstore.client.zmq_link import ZmqLink
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.credit import Budget
from kvstore.proto.errors import DeadlineError, InvalidFrameError

if TYPE_CHECKING:
    import zmq


class BulkUpload:
    """Used once. One frame is encoded while the one before it is on its way."""

    def __init__(self, link: ZmqLink, deadline: float) -> None:
        self._link = link
        self._deadline = deadline
        self._budget = Budget()
        self._request = 0
        self._done: list[Put] | None = None

    def run(self, word: bulk.Put, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return what became of each. Raises the server's errors."""
        self._request = word.request
        self._link.send(word, self._deadline)
        # Two, so that one is encoded while the other is on its way.
        rooms = [np.empty(max((c.frame_bytes for c in chunks), default=0), np.uint8)] * 2
        if len(chunks) > 1:
            rooms[1] = np.empty(len(rooms[0]), np.uint8)
        trackers: list[list[zmq.MessageTracker]] = [[], []]
        for index, chunk in enumerate(chunks):
            turn = index % 2
            self._wait_for(trackers[turn])
            frame = rooms[turn][: chunk.frame_bytes]
            chunk.encode(frame)
            trackers[turn] = self._send(index, frame)
        self._link.send(bulk.Finish(self._request, len(chunks)), self._deadline)
        while self._done is None:
            self._take_word()
        if len(self._done) != len(chunks):
            raise InvalidFrameError("count", len(self._done), f"{len(chunks)} were put")
        return self._done

    def _wait_for(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        import zmq

        try:
            for tracker in trackers:
                tracker.wait(max(0.0, self._deadline - time.monotonic()))
        except zmq.NotDone:
            raise DeadlineError("the server did not take the frames in time") from None

    def _send(self, index: int, frame: Bytes) -> list[zmq.MessageTracker]:
        trackers = []
        for start in range(0, len(frame), bulk.MAX_PAYLOAD_BYTES):
            data = frame[start : start + bulk.MAX_PAYLOAD_BYTES]
            while self._link.has_more() or not self._budget.spend(len(data)):
                self._take_word()
            part = bulk.Part(self._request, len(frame), start, index, bytes(bulk.TIER_BYTES))
            tracker = self._link.send(part, self._deadline, data)
            assert tracker is not None
            trackers.append(tracker)
        return trackers

    def _take_word(self) -> None:
        word, payload = self._link.receive(self._deadline)
        if word.request != self._request:
            return
        if isinstance(word, bulk.Failed):
            raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
        if isinstance(word, bulk.Credit):
            self._budget.grant(word.credit_bytes)
        elif isinstance(word, bulk.Done):
            data = b"" if payload is None else payload.tobytes()
            self._done = read_outcomes(*bulk.unpack_outcomes(word.frames, data))
        else:
            raise InvalidFrameError("kind", type(word).__name__, "not an answer to a put")
