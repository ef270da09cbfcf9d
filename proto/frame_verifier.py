"""Checks a frame while its bytes arrive, when they are still in cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from xxhash import xxh3_64

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import (
    FrameHeader,
    check_identity,
    check_segment,
    parse_header,
    stated_header_bytes,
)
from kvstore.proto.types import ChunkKey


class FrameVerifier:
    """Does what ``check_frame`` does to *frame*, in steps. Used once, by one thread.

    *header_bytes* is the least size of the header of *key*'s frame: levels add to it. *arriving*
    is called at each step with the bytes received so far; an exception from it ends the read.
    """

    def __init__(
        self,
        frame: Bytes,
        key: ChunkKey,
        header_bytes: int,
        arriving: Callable[[int], object] = bool,
    ) -> None:
        self._frame = frame
        self._arriving = arriving
        self._key = key
        self.header_bytes = min(header_bytes, len(frame))
        self._header: FrameHeader | None = None
        self._bounds: list[tuple[int, int, int]] = []
        """Start, stop and checksum of each segment."""
        self._segment = 0
        self._digest = xxh3_64()
        self._sums: deque[int] = deque()
        """Checksums of the next segments, if the reader computed them."""
        self._done = 0
        self._failure: InvalidFrameError | ChunkCorruptError | None = None
        self.has_begun = False
        """Whether any bytes have arrived."""

    def update(self, arrived: int) -> None:
        """Check the frame's first *arrived* bytes; ``finish`` raises the first failure."""
        self.has_begun = True
        self._arriving(arrived)
        if self._failure is None:
            try:
                self._advance(arrived)
            except (InvalidFrameError, ChunkCorruptError) as error:
                self._failure = error

    def next_segments(self, start: int, limit_bytes: int) -> list[tuple[int, int]]:
        """Return start and stop of the next segments, at least one, up to *limit_bytes* together.

        Empty unless everything before *start* was checked and they follow it without a gap.
        """
        segments: list[tuple[int, int]] = []
        if self._failure is None and start == self._done:
            for begin, stop, _ in self._bounds[self._segment :]:
                if begin != start or (segments and stop - segments[0][0] > limit_bytes):
                    break
                segments.append((begin, stop))
                start = stop
        return segments

    def add_checksums(self, sums: Iterable[int]) -> None:
        """Use *sums* as the checksums of the next segments, before ``update`` covers them."""
        self._sums.extend(sums)

    def finish(self) -> FrameHeader:
        """Return the header of the whole frame, checked. Raises as ``check_frame`` does."""
        if self._failure is not None:
            raise self._failure
        if self._header is None or self._segment < len(self._bounds):
            raise ChunkCorruptError(self._key, f"{self._done} bytes of {len(self._frame)}")
        return self._header

    def _advance(self, arrived: int) -> None:
        if self._header is None:
            if arrived < self.header_bytes:
                return
            stated = stated_header_bytes(self._frame)
            self.header_bytes = max(self.header_bytes, min(stated, len(self._frame)))
            if arrived < self.header_bytes:
                return
            header = parse_header(self._frame[: self.header_bytes])
            check_identity(header, len(self._frame), self._key)
            rows = header.segments.tolist()
            self._bounds = [(start, start + size, wanted) for *_, start, size, wanted in rows]
            self._done = header.header_bytes
            self._header = header
        while self._header is not None and self._segment < len(self._bounds):
            start, stop, wanted = self._bounds[self._segment]
            begin, end = max(start, self._done), min(stop, arrived)
            if begin < end and not self._sums:
                self._digest.update(self._frame[begin:end])  # type: ignore[arg-type]
            if arrived < stop:
                break
            found = self._sums.popleft() if self._sums else self._digest.intdigest()
            if found != wanted:
                check_segment(self._header, self._segment, found)
            self._segment += 1
            self._digest = xxh3_64()
        self._done = arrived
