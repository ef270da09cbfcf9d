"""Frames that come layer by layer: the reader's side of a ``layer_major`` get."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, KVStoreError

if TYPE_CHECKING:
    from kvstore.client.transports.base import Arrival


class LayeredFrame:
    """A frame whose ``header`` is here, not verified yet; its segments come with its *stream*."""

    def __init__(self, stream: LayerStream, number: int, header: Bytes, frame_bytes: int) -> None:
        self.stream = stream
        self.number = number
        self._header = header
        self._frame_bytes = frame_bytes

    def __len__(self) -> int:
        return self._frame_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        return self._header[piece]

    def take(self, start: int) -> Bytes | None:
        """Wait for the segment at *start*; None when it will not come."""
        return self.stream.take(self.number, start)


class Range(NamedTuple):
    """Bytes *start* to *stop* of the frame of chunk number *chunk*: one segment."""

    chunk: int
    start: int
    stop: int


class LayerStream:
    """The replies to a ``layer_major`` get: headers of all frames, then segments layer by layer.

    Thread-safe but for ``arriving`` and ``expect``, called first. A range that is passed over
    will not come. Whoever waits for a range reads on for all: *replies* are drawn by one thread
    at a time, and what is here waits for nobody; it is kept until it is taken. No header over
    *limit_bytes* is accepted. *end* ends the replies: who waits for one gets an error. With
    *is_cut* raw segments come without the rows that the request left out. Raises
    InvalidFrameError when the parts are not as they should be.
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
        self.end = end
        """Nothing more is wanted."""
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

    def arriving(self) -> Iterator[Arrival]:
        """Wait for the headers of all frames that are there: those of the longest prefix."""
        found: list[Arrival] = []
        for reply in self._replies:
            data, size_bytes = cast("Bytes", reply.data), reply.frame_bytes
            if reply.offset or reply.index != len(found):
                self._held = reply
                break
            if not 0 < len(data) <= size_bytes <= self._limit_bytes:
                raise InvalidFrameError("frame_bytes", size_bytes, "over the session's limit")
            frame = LayeredFrame(self, reply.index, data, size_bytes)
            found.append(replace(reply, data=frame))
        yield from found

    def expect(self, plan: Sequence[Range]) -> None:
        """Set which ranges will be taken, in the order of their arrival: layer by layer."""
        self._plan = plan
        self._wanted_frames = max((one.chunk + 1 for one in plan), default=0)
        self._numbers = {(one.chunk, one.start): number for number, one in enumerate(plan)}

    def take(self, chunk: int, start: int) -> Bytes | None:
        """Wait for a range of the plan; None when it will not come. Each is taken once.

        Raises DeadlineError, TierUnavailableError.
        """
        number = self._numbers[chunk, start]
        with self._changed:
            while self._next <= number:
                if self._error is not None:
                    raise self._error
                if self._is_drawing:
                    self._changed.wait()
                else:
                    self._draw()
            return self._whole.pop(number, None)

    def drop(self, chunk: int) -> None:
        """Pass by what comes of frames from that of *chunk* on."""
        self._wanted_frames = min(self._wanted_frames, chunk)

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
        data, offset = cast("Bytes", reply.data), reply.offset
        if self._partial is None:
            if reply.index >= self._wanted_frames:
                return
            number = self._numbers.get((reply.index, offset), -1)
            if number < self._next:
                raise InvalidFrameError("offset", offset, "layers must come in order")
            self._next, self._received_bytes = number, 0
        wanted = self._plan[self._next]
        at, size = self._received_bytes, wanted.stop - wanted.start
        follows = (reply.index, offset) == (wanted.chunk, wanted.start + at)
        if not follows or not 0 < len(data) <= size - at:
            raise InvalidFrameError("offset", offset, "parts must follow each other")
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
