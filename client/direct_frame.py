"""A DirectFrame: a raw frame whose bytes go into its reader's tensors as they come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64

from kvstore.client.frame_parts import BufferReader, Payload
from kvstore.codecs.base import AnyTensors, ChunkTensors, check_room, each_wanted
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, LayoutMismatchError
from kvstore.proto.frame import FrameHeader, check_segment


class _Run(NamedTuple):
    """Bytes *start* to *stop* of the frame go to *out*; *ends* says which segment is whole then."""

    start: int
    stop: int
    out: Bytes
    segment: int
    ends: bool


class DirectFrame:
    """Each part is copied once, and summed while it is in cache: what comes last is ready with
    its last byte. Used by one thread.

    Sliced like the array of a frame's bytes, but only within its header.
    """

    __slots__ = ("_digest", "_failure", "_head", "_header", "_next", "_runs", "tensors")

    def __init__(self, header: FrameHeader, head: Bytes, tensors: ChunkTensors) -> None:
        """Take parts of the frame of *header*, whose bytes are *head*, into *tensors*.

        Raises LayoutMismatchError unless these are whole contiguous arrays of its layout,
        UnknownCodecError for a frame that is not raw.
        """
        RawCodec().check_header(header)
        check_room(header.layout, tensors)
        self.tensors = tensors
        self._header = header
        self._head = head
        self._runs = _runs(header, tensors)
        self._next = 0
        self._digest = xxh3_64()
        self._failure: ChunkCorruptError | None = None

    def __len__(self) -> int:
        return self._header.frame_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        return self._head[piece]

    def take(self, offset: int, data: Payload) -> None:
        """Take the part at *offset*; each follows the one before. What is wrong ``check`` says.

        What is summed is what lies in the tensors.
        """
        coming = BufferReader(data) if isinstance(data, np.ndarray) else data
        at, end = offset, offset + len(data)
        while self._next < len(self._runs) and self._failure is None:
            run = self._runs[self._next]
            first, last = max(run.start, at), min(run.stop, end)
            if first < last:
                coming.skip(first - at)
                # What is summed is what lies in the tensors, while it is in cache.
                coming.summed(run.out[first - run.start : last - run.start], self._digest)
                at = last
            if end < run.stop:
                break
            self._next += 1
            if run.ends:
                self._end_segment(run.segment)
        coming.skip(end - at)

    def _end_segment(self, segment: int) -> None:
        try:
            check_segment(self._header, segment, self._digest.intdigest())
        except ChunkCorruptError as error:
            self._failure = error
        self._digest = xxh3_64()

    def check(self) -> None:
        """Raise ChunkCorruptError unless all that was wanted came, and is right."""
        if self._failure is not None:
            raise self._failure
        if self._next < len(self._runs):
            raise ChunkCorruptError(self._header.key, "its last parts did not come")


def _runs(header: FrameHeader, tensors: AnyTensors) -> list[_Run]:
    starts = header.segments["offset"].tolist()
    sizes = header.segments["stored_bytes"].tolist()
    runs = []
    for index, component, parts in each_wanted(header.layout, tensors):
        if sizes[index] != component.layer_bytes:
            raise LayoutMismatchError("stored_bytes", sizes[index], "not a raw layer's")
        at = starts[index]
        for number, part in enumerate(parts, 1):
            if not isinstance(part, np.ndarray) or not part.flags.c_contiguous:
                raise LayoutMismatchError("strides", type(part).__name__, "not one piece of memory")
            out = part.reshape(-1).view(np.uint8)
            runs.append(_Run(at, at + len(out), out, index, number == len(parts)))
            at += len(out)
    return runs
