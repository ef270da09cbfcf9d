"""The PartFeed: layers out of a stream of frame parts, kept no longer than until taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from typing_extensions import override

from kvstore.client.layer_feed import LayerFeed, Opened, Range
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, KVStoreError

if TYPE_CHECKING:
    from kvstore.client.transport import Arrival


class PartFeed(LayerFeed):
    """Takes the replies of a ``layer_major`` get: headers of all frames, then ranges in order.

    A range that is passed over will not come. Whoever waits for a range reads on for all:
    *replies* are drawn by one thread at a time, and what is here waits for nobody. No header over
    *limit_bytes* is believed. *end* ends the replies: who waits for one gets an error.
    Raises InvalidFrameError when the parts are not as they should be.
    """

    def __init__(
        self,
        replies: Iterator[Arrival],
        limit_bytes: int,
        *,
        is_cut: bool = False,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_cut = is_cut
        self._end = end
        self._replies = replies
        self._limit_bytes = limit_bytes
        self._held: Arrival | None = None
        self._plan: Sequence[Range] = ()
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 0
        """The first range of the plan that is neither whole nor passed over."""
        self._partial: Bytes | None = None
        self._received_bytes = 0
        self._whole: dict[int, Bytes] = {}
        self._error: KVStoreError | None = None
        self._wanted_frames = 0
        """Frames from this one on are passed by; it only sinks, and is read without the lock."""
        self._is_drawing = False
        """Whether a thread waits for a reply."""
        # Guards all fields above; its condition: they changed.
        self._changed = threading.Condition()

    @override
    def headers(self) -> list[Opened]:
        opened: list[Opened] = []
        for reply in self._replies:
            data = cast("Bytes", reply.data)
            if reply.offset or reply.index != len(opened):
                self._held = reply
                break
            size_bytes = reply.frame_bytes
            if not 0 < len(data) <= size_bytes <= self._limit_bytes:
                raise InvalidFrameError("frame_bytes", size_bytes, "over the session's limit")
            opened.append(Opened(reply.index, reply.tier, data, size_bytes, reply.confirm))
        return opened

    @override
    def expect(self, plan: Sequence[Range]) -> None:
        self._plan = plan
        self._wanted_frames = max((one.chunk + 1 for one in plan), default=0)
        self._numbers = {(one.chunk, one.start): number for number, one in enumerate(plan)}

    @override
    def take(self, number: int) -> Bytes | None:
        with self._changed:
            while self._next <= number:
                if self._error is not None:
                    raise self._error
                if self._is_drawing:
                    self._changed.wait()
                else:
                    self._draw()
            return self._whole.pop(number, None)

    @override
    def drop(self, chunk: int) -> None:
        self._wanted_frames = min(self._wanted_frames, chunk)

    @override
    def end(self) -> None:
        self._end()

    def _draw(self) -> None:
        try:
            reply = self._reply()
            if reply is None:
                self._next = len(self._plan)
            else:
                self._add(reply)
        except KVStoreError as error:
            self._error = error  # for whoever waits next: nothing follows it
            raise

    def _reply(self) -> Arrival | None:
        """Wait for the next reply, without the lock."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        self._is_drawing = True
        self._changed.release()
        try:
            return next(self._replies, None)
        finally:
            self._changed.acquire()
            self._is_drawing = False
            self._changed.notify_all()

    def _add(self, reply: Arrival) -> None:
        data = cast("Bytes", reply.data)
        if self._partial is None:
            if reply.index >= self._wanted_frames:
                return
            number = self._numbers.get((reply.index, reply.offset), -1)
            if number < self._next:
                raise InvalidFrameError("offset", reply.offset, "layers must come in order")
            self._next, self._received_bytes = number, 0
        wanted = self._plan[self._next]
        at, size = self._received_bytes, wanted.stop - wanted.start
        follows = (reply.index, reply.offset) == (wanted.chunk, wanted.start + at)
        if not follows or not 0 < len(data) <= size - at:
            raise InvalidFrameError("offset", reply.offset, "parts must follow each other")
        if not at and len(data) == size:  # the message's own bytes, not copied
            self._finish(data)
            return
        if self._partial is None:
            self._partial = np.empty(size, np.uint8)
        copy_bytes(self._partial[at : at + len(data)], data)
        self._received_bytes += len(data)
        if self._received_bytes == size:
            self._finish(self._partial)

    def _finish(self, data: Bytes) -> None:
        self._whole[self._next] = data
        self._partial = None
        self._next += 1
