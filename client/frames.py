"""Frames on their way to a reader: in memory, in a file, in parts, layer by layer, or directly into
tensors.

Frames from a transport are sliced like an array of their bytes, wherever these are. Only
``FileFrame.decode_into`` and ``DirectFrame`` verify anything here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvstore.codecs.base import AnyTensors, ChunkTensors, check_tensors, each_wanted
from kvstore.codecs.raw import RAW, flat_parts, pieces_in
from kvstore.proto.buffers import Bytes, copy_bytes, copy_summed
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameHeader, check_segment

HEAD_BYTES = 1 << 12
"""Read once and kept: it holds the header of most frames, which is parsed in pieces."""
_SKIP_BYTES = 1 << 16


def stays() -> None:
    """Confirm bytes that this process owns: their memory is not reused."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes of the frame of chunk ``index`` of a read, from ``offset`` on: all of it, or a part.

    Valid until the read is left; not verified yet. ``data``: Bytes, a FileFrame, DirectFrame or
    LayeredFrame; a Payload for a part yet to be received. Call ``confirm`` after reading it: it
    raises LeaseExpiredError if the memory was reused meanwhile.
    """

    index: int
    tier: str
    frame_bytes: int
    data: Any
    confirm: Callable[[], None] = stays
    offset: int = 0


# --- in a file


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor, closed with the last frame that reads from it."""

    descriptor: int
    size_bytes: int

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class FileFrame:
    """``size_bytes`` from *offset* of an open file of the disk tier.

    Every slice past the head is read anew, never mapped: a disk error under a mapping kills the
    process (SIGBUS). Raises TierUnavailableError when the file cannot be read, InvalidRequestError
    when it is shorter.
    """

    file: OpenFile
    offset: int
    size_bytes: int
    _head: Bytes | None = None

    def __post_init__(self) -> None:
        place = self.offset, self.offset + self.size_bytes
        if place[1] > self.file.size_bytes:
            fix = f"the file has {self.file.size_bytes} bytes"
            raise InvalidRequestError("place", place, fix)

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        start, stop, _ = piece.indices(self.size_bytes)
        if stop > HEAD_BYTES:
            return self._bytes(start, stop)
        if self._head is None:
            self._head = self._bytes(0, min(HEAD_BYTES, self.size_bytes))
        return self._head[start:stop]

    def decode_into(self, header: FrameHeader, out: AnyTensors) -> None:
        """Read a raw frame's layers into *out*, each checked while it is in cache.

        Parts that are not contiguous are copied from a buffer of one layer. Raises as
        ``RawCodec.decode_into``.
        """
        RAW.check_header(header)
        pieces = pieces_in(header.layout, out, is_target=True)
        sums = pieces and pieces[0].read(self.file.descriptor, self.offset, pieces[1])
        if pieces is None or sums is None:
            RAW.decode_by_layer(header, self, out)
        else:
            pieces[0].check(header, sums)

    def _bytes(self, start: int, stop: int) -> Bytes:
        out = np.empty(max(0, stop - start), np.uint8)
        at, done = self.offset + start, 0
        try:
            while done < len(out):
                more = os.preadv(self.file.descriptor, [out[done:].data], at + done)
                if not more:
                    raise TierUnavailableError("disk", f"its file ends at byte {at + done}")
                done += more
        except OSError as error:
            raise TierUnavailableError("disk", f"its file cannot be read: {error}") from None
        return out


# --- in parts


class Payload:
    """The bytes of a part, read once and in order.

    *fill* writes the next bytes to a buffer, and adds them to a digest.
    """

    def __init__(self, size_bytes: int, fill: Callable[[Bytes, xxh3_64 | None], None]) -> None:
        self.left = self._size_bytes = size_bytes
        """Bytes not read yet."""
        self._fill = fill

    def __len__(self) -> int:
        return self._size_bytes

    def into(self, out: Bytes, digest: xxh3_64 | None = None) -> None:
        """Fill *out* with the next bytes, and add the contents of *out* to *digest*."""
        self._fill(out, digest)
        self.left -= len(out)

    def skip(self, size_bytes: int) -> None:
        """Discard the next bytes."""
        nowhere = np.empty(min(size_bytes, _SKIP_BYTES), np.uint8)
        while size_bytes:
            out = nowhere[:size_bytes]
            self.into(out)
            size_bytes -= len(out)


def _payload(data: Bytes | Payload) -> Payload:
    if isinstance(data, Payload):
        return data
    at = 0

    def fill(out: Bytes, digest: xxh3_64 | None) -> None:
        nonlocal at
        piece = data[at : at + len(out)]
        at += len(out)
        if digest is None:
            copy_bytes(out, piece)
        else:
            copy_summed(out, piece, digest)

    return Payload(len(data), fill)


def received(data: Bytes | Payload) -> Bytes:
    """Return a part's bytes: received into new memory, or in place if they are here already."""
    if isinstance(data, Payload):
        out = np.empty(len(data), np.uint8)
        data.into(out)
        return out
    return data


class DirectFrame:
    """A raw frame whose parts go into its reader's tensors as they arrive.

    Each part is copied once, and summed while it is in cache, so the frame is ready with its last
    byte. Used by one thread. Can be sliced within its header only.
    """

    __slots__ = ("_digest", "_failure", "_head", "_next", "_runs", "header", "tensors")

    def __init__(self, header: FrameHeader, head: Bytes, tensors: ChunkTensors) -> None:
        """Take parts of the frame of *header*, whose bytes are *head*, into *tensors*.

        Raises LayoutMismatchError unless these are whole contiguous arrays of its layout,
        UnknownCodecError for a frame that is not raw.
        """
        self.tensors = tensors
        self.header = header
        self._head = head
        self._runs = _runs(header, tensors)
        self._next = 0
        self._digest = xxh3_64()
        self._failure: ChunkCorruptError | None = None

    def __getitem__(self, piece: slice) -> Bytes:
        return self._head[piece]

    def take(self, offset: int, data: Bytes | Payload) -> None:
        """Take the part at *offset*; each follows the last. ``check`` raises the errors."""
        payload = _payload(data)
        at, end = offset, offset + len(data)
        while self._next < len(self._runs) and self._failure is None:
            run = self._runs[self._next]
            first, last = max(run.start, at), min(run.stop, end)
            if first < last:
                payload.skip(first - at)
                # The sum is of the tensors' own bytes, while they are in cache.
                payload.into(run.out[first - run.start : last - run.start], self._digest)
                at = last
            if end < run.stop:
                break
            self._next += 1
            if run.ends:
                try:
                    check_segment(self.header, run.segment, self._digest.intdigest())
                except ChunkCorruptError as error:
                    self._failure = error
                self._digest.reset()
        payload.skip(end - at)

    def check(self) -> None:
        """Raise ChunkCorruptError unless all wanted bytes arrived and are right."""
        if self._failure is not None:
            raise self._failure
        if self._next < len(self._runs):
            raise ChunkCorruptError(self.header.key, "its last parts did not arrive")


class _Run(NamedTuple):
    """Bytes *start* to *stop* of the frame go to *out*; *ends*: they complete its *segment*."""

    start: int
    stop: int
    out: Bytes
    segment: int
    ends: bool


def _runs(header: FrameHeader, tensors: AnyTensors) -> list[_Run]:
    RAW.check_header(header)
    check_tensors(header.layout, tensors, is_target=True)
    starts, runs = header.segments["offset"].tolist(), []
    for segment, _, parts in each_wanted(header.layout, tensors):
        flat = flat_parts(parts)
        if flat is None:
            raise LayoutMismatchError("strides", "parts", "each has to be contiguous")
        at = starts[segment]
        for number, out in enumerate(flat, 1):
            runs.append(_Run(at, at + len(out), out, segment, number == len(flat)))
            at += len(out)
    return runs


Direct: TypeAlias = Callable[[int, int, Bytes], DirectFrame | None]
"""From a frame's index, size and first bytes to the receiver of its parts; None: assemble it."""
_NO_FRAME: Bytes = np.empty(0, np.uint8)


def _empty(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, np.uint8)


class FrameAssembler:
    """Assembles frames of up to *limit_bytes* from the parts that the server sends. For one thread.

    They go to the receiver that *direct* returns, else to memory from *allocate*.
    """

    def __init__(
        self,
        limit_bytes: int,
        direct: Direct | None = None,
        allocate: Callable[[int], Bytes] = _empty,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._direct = direct
        self._allocate = allocate
        self.next_index = 0
        """Index of the next frame; set by a caller that gets earlier frames elsewhere."""
        self._received_bytes = 0
        self._frame_bytes = 0
        self._frame: Bytes | DirectFrame = _NO_FRAME

    def frames(self, parts: Iterable[Arrival]) -> Iterator[Arrival]:
        """Yield the frames assembled from *parts*. Raises as ``take``."""
        for part in parts:
            frame = self.take(part)
            if frame is not None:
                yield frame

    def take(self, part: Arrival) -> Arrival | None:
        """Take the next part; return the frame that it completes, not verified.

        Raises InvalidFrameError when parts are not consecutive.
        """
        data: Bytes | Payload = part.data
        if not part.offset:
            if not 0 < part.frame_bytes <= self._limit_bytes:
                raise InvalidFrameError("frame_bytes", part.frame_bytes, "over the limit")
        elif part.frame_bytes != self._frame_bytes:
            raise InvalidFrameError("frame_bytes", part.frame_bytes, "must not change")
        stop = part.offset + len(data)
        follows = (part.index, part.offset) == (self.next_index, self._received_bytes)
        if not follows or not len(data) or stop > part.frame_bytes:
            raise InvalidFrameError("offset", part.offset, "parts must follow each other")
        if not part.offset:
            self._frame_bytes = part.frame_bytes
            data = received(data)
            direct = self._direct and self._direct(part.index, part.frame_bytes, data)
            self._frame = self._allocate(part.frame_bytes) if direct is None else direct
        if isinstance(self._frame, DirectFrame):
            self._frame.take(part.offset, data)
        else:
            _payload(data).into(self._frame[part.offset : stop])
        self._received_bytes = stop % part.frame_bytes
        if self._received_bytes:
            return None
        self.next_index += 1
        frame, self._frame = self._frame, _NO_FRAME  # keeps no memory
        return Arrival(part.index, part.tier, part.frame_bytes, frame)

    def end(self, frames: int) -> None:
        """Raise InvalidFrameError unless *frames*, the server's count, is the number completed.

        A frame left incomplete was late, or dropped.
        """
        if frames != self.next_index:
            raise InvalidFrameError("frames", frames, f"{self.next_index} arrived")


# --- layer by layer


@dataclass(frozen=True, slots=True, eq=False)
class LayeredFrame:
    """A frame with its header, not verified yet; its segments arrive through *stream*."""

    stream: LayerStream
    number: int
    header: Bytes
    frame_bytes: int

    def __len__(self) -> int:
        return self.frame_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        return self.header[piece]


class Range(NamedTuple):
    """Bytes *start* to *stop* of the frame of chunk *chunk*: one segment."""

    chunk: int
    start: int
    stop: int


class LayerStream:
    """The replies to a ``layer_major`` get: headers of all frames, then segments layer by layer.

    Thread-safe but for ``arriving`` and ``expect``, called first. Headers of *most* frames are
    accepted. A range that the replies skip will not arrive. One of the waiting threads at a time
    reads *replies*, for all of them; a range that has arrived is kept until it is taken. No header
    over *limit_bytes* is accepted. *end* ends the replies: a thread that waits for one gets an
    error. With *is_cut*, raw segments lack the rows that the request left out. Raises
    InvalidFrameError for invalid parts.
    """

    def __init__(
        self,
        replies: Iterator[Arrival],
        limit_bytes: int,
        most: int,
        *,
        is_cut: bool = False,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_cut = is_cut
        self.end = end
        """End the replies."""
        self._replies = replies
        self._limit_bytes = limit_bytes
        self._most = most
        self._held: Arrival | None = None
        self._plan: Sequence[Range] = ()
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 0
        """The first range of the plan that is neither complete nor skipped."""
        self._partial: Bytes | None = None
        self._received_bytes = 0
        self._whole: dict[int, Bytes] = {}
        self._error: KVStoreError | None = None
        self._wanted_frames = 0
        """Frames from this one on are skipped; it only sinks, and is read without the lock."""
        self._is_drawing = False
        """Whether a thread waits for a reply."""
        # Guards all fields above; notified when they change.
        self._changed = threading.Condition()

    def arriving(self) -> Iterator[Arrival]:
        """Wait for the headers of all frames of the prefix, then yield the frames."""
        found: list[Arrival] = []
        for reply in self._replies:
            data, size_bytes = reply.data, reply.frame_bytes
            if reply.offset or reply.index != len(found):
                self._held = reply
                break
            if reply.index == self._most:
                raise InvalidFrameError("index", reply.index, f"{self._most} were requested")
            if not 0 < len(data) <= size_bytes <= self._limit_bytes:
                raise InvalidFrameError("frame_bytes", size_bytes, "over the session's limit")
            frame = LayeredFrame(self, reply.index, data, size_bytes)
            found.append(replace(reply, data=frame))
        yield from found

    def expect(self, plan: Sequence[Range]) -> None:
        """Set the ranges to take, in order of arrival: layer by layer."""
        self._plan = plan
        self._wanted_frames = max((one.chunk + 1 for one in plan), default=0)
        self._numbers = {(one.chunk, one.start): number for number, one in enumerate(plan)}

    def take(self, chunk: int, start: int) -> Bytes | None:
        """Wait for a range of the plan; None when it will not arrive. Each is taken once.

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
        """Skip all further data of frames from *chunk* on."""
        self._wanted_frames = min(self._wanted_frames, chunk)

    def _draw(self) -> None:
        """Add the next reply, and wait for it without the lock."""
        reply, self._held = self._held, None
        try:
            if reply is None:
                self._is_drawing = True
                self._changed.release()
                try:
                    reply = next(self._replies, None)
                finally:
                    self._changed.acquire()
                    self._is_drawing = False
                    self._changed.notify_all()
            if reply is None:
                self._next = len(self._plan)
            else:
                self._add(reply)
        except KVStoreError as error:
            self._error = error  # for the next waiting thread
            raise

    def _add(self, reply: Arrival) -> None:
        data, offset = reply.data, reply.offset
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
        if not at and len(data) == size:  # kept without a copy
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
