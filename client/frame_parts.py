"""The FrameAssembler: whole frames out of the parts of a get, wherever their bytes go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from xxhash import xxh3_64

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, copy_bytes, copy_summed
from kvstore.proto.errors import InvalidFrameError

if TYPE_CHECKING:
    from kvstore.client.transport import Arrival


class PayloadReader(Protocol):
    """A part's payload that is still to come. All of it has to be had, in its order."""

    def __len__(self) -> int:
        """How many bytes it has in all."""

    def into(self, out: Bytes, /) -> None:
        """Fill *out* with the next of them."""

    def summed(self, out: Bytes, digest: xxh3_64, /) -> None:
        """Fill *out* with the next of them, and add what is there then to *digest*."""

    def skip(self, size_bytes: int, /) -> None:
        """Skip the next *size_bytes*."""


class BufferReader:
    """*data* that has come, had as what is still to come."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def into(self, out: Bytes, /) -> None:
        """Copy the next bytes to *out*."""
        copy_bytes(out, self._data[self._at : self._at + len(out)])
        self._at += len(out)

    def summed(self, out: Bytes, digest: xxh3_64, /) -> None:
        """Copy the next bytes to *out*, and add what is there then to *digest*."""
        copy_summed(out, self._data[self._at : self._at + len(out)], digest)
        self._at += len(out)

    def skip(self, size_bytes: int, /) -> None:
        """Skip the next *size_bytes*."""
        self._at += size_bytes


Payload: TypeAlias = "Bytes | PayloadReader"


class Sink(Protocol):
    """What takes a frame's parts one after the other, instead of memory for all of it."""

    def take(self, offset: int, data: Payload, /) -> None:
        """Take the part at *offset*, whose memory is another's afterwards."""


Room = Callable[[int, int, Bytes], Bytes | Sink | None]
"""A frame's number in the request, its size and first part to where it goes; None: nowhere."""


class ReceivedFrame(NamedTuple):
    """A frame that is whole, where it was sent. Nothing of what is in memory is verified."""

    chunk: int
    tier: str
    frame: Bytes | Sink


class FrameAssembler:
    """Whole frames out of what the server sends, none over *limit_bytes*. Used by one thread."""

    def __init__(self, limit_bytes: int, room: Room) -> None:
        self._limit_bytes = limit_bytes
        self._room = room
        self.next_index = 0
        """Of the frame whose parts come next; who reads those before it elsewhere sets it."""
        self._received_bytes = 0
        self._frame_bytes = 0
        self._frame: Bytes | Sink | None = None

    def take(self, part: Arrival | pb.StreamPart, data: Payload) -> ReceivedFrame | None:
        """Take the next part; return the frame that it made whole.

        Raises InvalidFrameError when parts do not follow each other.
        """
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
            data = here(data)
            self._frame = self._room(part.index, part.frame_bytes, data)
        coming = BufferReader(data) if isinstance(data, np.ndarray) else data
        if isinstance(self._frame, np.ndarray):
            coming.into(self._frame[part.offset : stop])
        elif self._frame is not None:
            self._frame.take(part.offset, data)
        else:
            coming.skip(len(data))
        self._received_bytes = stop % part.frame_bytes
        if self._received_bytes:
            return None
        self.next_index += 1
        frame, self._frame = self._frame, None
        return None if frame is None else ReceivedFrame(part.index, part.tier, frame)

    def end(self, frames: int) -> None:
        """Take how many the server counted. Raises InvalidFrameError unless so many came.

        A frame that was begun and did not become whole was late, or dropped.
        """
        if frames != self.next_index:
            raise InvalidFrameError("frames", frames, f"{self.next_index} came")


def here(payload: Payload) -> Bytes:
    """Return a payload in memory of its own, or where it has come already."""
    if isinstance(payload, np.ndarray):
        return payload
    data = np.empty(len(payload), np.uint8)
    payload.into(data)
    return data
