"""Checking a frame while its bytes come in, each soon after it came and still in cache."""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import FrameHeader, check_identity, check_segment, parse_header
from kvstore.proto.types import ChunkKey


class FrameCheck:
    """Does what ``check_frame`` does to *frame*, in steps. Used once, by one thread.

    *header_bytes* is what the header of *key*'s frame has; another's is a mismatch.
    """

    def __init__(self, frame: Bytes, key: ChunkKey, header_bytes: int) -> None:
        self._frame = frame
        self._key = key
        self._header_bytes = min(header_bytes, len(frame))
        self._header: FrameHeader | None = None
        self._bounds: list[tuple[int, int]] = []
        self._segment = 0
        self._digest = xxh3_64()
        self._done = 0
        self._failure: InvalidFrameError | ChunkCorruptError | None = None

    def follow(self, steps: Iterable[int]) -> bool:
        """Check up to each of *steps*, which say how many bytes have come; False if none did.

        What is wrong is told by ``finish``.
        """
        is_found = False
        for arrived in steps:
            is_found = True
            if self._failure is None:
                try:
                    self._advance(arrived)
                except (InvalidFrameError, ChunkCorruptError) as error:
                    self._failure = error
        return is_found

    def finish(self) -> FrameHeader:
        """Return the header of the whole frame, checked. Raises as ``check_frame`` does."""
        if self._failure is not None:
            raise self._failure
        if self._header is None or self._segment < len(self._bounds):
            raise ChunkCorruptError(self._key, f"{self._done} bytes of {len(self._frame)}")
        return self._header

    def _advance(self, arrived: int) -> None:
        if self._header is None:
            if arrived < self._header_bytes:
                return
            self._open()
        while self._header is not None and self._segment < len(self._bounds):
            start, stop = self._bounds[self._segment]
            begin, end = max(start, self._done), min(stop, arrived)
            if begin < end:
                self._digest.update(self._frame[begin:end])  # type: ignore[arg-type]
            if arrived < stop:
                break
            check_segment(self._header, self._segment, self._digest.intdigest())
            self._segment += 1
            self._digest = xxh3_64()
        self._done = arrived

    def _open(self) -> None:
        header = parse_header(self._frame[: self._header_bytes])
        check_identity(header, len(self._frame), self._key)
        starts = header.segments["offset"].tolist()
        sizes = header.segments["stored_bytes"].tolist()
        self._bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._done = header.header_bytes
        self._header = header
