"""A FileFrame: a frame in a file of the server's disk tier, read straight into its reader's memory.

A file is read, never mapped: a disk that fails under a map kills the process that looks at it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64

from kvstore.codecs.base import AnyPart, AnyTensors, check_room, each_wanted
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes, read_summed
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.frame import FrameHeader, check_segment

_RAW = RawCodec()
HEAD_BYTES = 1 << 12
"""Read once and kept: the header of most frames lies within, and is looked at in pieces."""
STEP_BYTES = 1 << 19
"""What is read before it is summed: larger steps have left the cache by then."""


class OpenFile:
    """A descriptor that closes with the last frame that reads from it."""

    __slots__ = ("descriptor", "size_bytes")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Own *descriptor*."""
        self.descriptor = descriptor
        self.size_bytes = size_bytes

    def __del__(self) -> None:
        os.close(self.descriptor)


class FileFrame:
    """``size_bytes`` from *offset* of an open file.

    Sliced like the array of a frame's bytes; every slice past the head is read anew. Raises
    TierUnavailableError when the file cannot be read. Nothing is verified here but by
    ``decode_into``.
    """

    __slots__ = ("_file", "_head", "_offset", "_size_bytes")

    def __init__(self, file: OpenFile, offset: int, size_bytes: int) -> None:
        """Raise InvalidRequestError when the file is shorter."""
        if offset + size_bytes > file.size_bytes:
            raise InvalidRequestError(
                "place", (offset, offset + size_bytes), f"the file has {file.size_bytes} bytes"
            )
        self._file = file
        self._offset = offset
        self._size_bytes = size_bytes
        self._head: Bytes | None = None

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, piece: slice) -> Bytes:
        start, stop, _ = piece.indices(self._size_bytes)
        if stop <= HEAD_BYTES:
            if self._head is None:
                self._head = self._bytes(0, min(HEAD_BYTES, self._size_bytes))
            return self._head[start:stop]
        return self._bytes(start, stop)

    def _bytes(self, start: int, stop: int) -> Bytes:
        out = np.empty(max(0, stop - start), np.uint8)
        self._read(start, out)
        return out

    def decode_into(self, header: FrameHeader, out: AnyTensors) -> None:
        """Read a raw frame's layers into *out*, each checked while it is in cache.

        Raises as ``RawCodec.decode_into``. Parts that are not contiguous go through a layer of
        our own.
        """
        _RAW.check_header(header)
        check_room(header.layout, out)
        starts = header.segments["offset"].tolist()
        sizes = header.segments["stored_bytes"].tolist()
        layers = [(index, parts) for index, _, parts in each_wanted(header.layout, out)]
        flats = [_flat(parts) for _, parts in layers]
        sums = self._sums_at_once([starts[index] for index, _ in layers], flats)
        for (index, parts), flat, found in zip(layers, flats, sums, strict=True):
            start, size = starts[index], sizes[index]
            if flat is None:
                _RAW.decode_checked(header, index, self[start : start + size], parts)
            else:
                summed = self._read_summed(start, flat) if found is None else found
                check_segment(header, index, summed)

    def _sums_at_once(
        self, starts: Sequence[int], flats: Sequence[list[Bytes] | None]
    ) -> Sequence[int | None]:
        """Fill all of *flats*, each from its start, and return their checksums; None for those
        that are still to be read.
        """
        groups = [
            (self._offset + start, flat)
            for start, flat in zip(starts, flats, strict=True)
            if flat is not None
        ]
        sums = read_summed(self._file.descriptor, groups) if len(groups) == len(flats) else None
        return [None] * len(flats) if sums is None else sums

    def _read_summed(self, start: int, out: Sequence[Bytes]) -> int:
        """Fill *out* from *start*, each step summed while it is in cache; return the checksum."""
        digest = xxh3_64()
        for part in out:
            for at in range(0, len(part), STEP_BYTES):
                step = part[at : at + STEP_BYTES]
                self._read(start + at, step)
                digest.update(step)  # type: ignore[arg-type]
            start += len(part)
        return digest.intdigest()

    def _read(self, start: int, out: Bytes) -> None:
        """Fill *out* with the bytes from *start*."""
        at, done = self._offset + start, 0
        try:
            while done < len(out):
                more = os.preadv(self._file.descriptor, [out[done:].data], at + done)
                if not more:
                    raise TierUnavailableError("disk", f"its file ends at byte {at + done}")
                done += more
        except OSError as error:
            raise TierUnavailableError("disk", f"its file cannot be read: {error}") from None


def _flat(parts: Sequence[AnyPart]) -> list[Bytes] | None:
    """Return the parts' own bytes; None unless all are contiguous arrays."""
    arrays = [part for part in parts if isinstance(part, np.ndarray) and part.flags.c_contiguous]
    if len(arrays) < len(parts):
        return None
    return [array.reshape(-1).view(np.uint8) for array in arrays]
