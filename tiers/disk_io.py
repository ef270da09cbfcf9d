"""Reading and writing extent files, through the page cache or past it."""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import ClassVar

import numpy as np
from typing_extensions import override

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.file_sums import FileGroups, can_sum, read_summed
from kvstore.tiers.disk_folder import GRANULE_BYTES, TIER

BOUNCE_BYTES = 1 << 20
"""What one read or write past the page cache takes at a time."""
BOUNCE_BUFFERS = 8
"""Whoever needs one more waits."""
PROBE_BYTES = 1 << 20
"""How far apart the bytes are of which the page cache is asked whether it has them."""
_MAX_PARTS = 1024
"""IOV_MAX of Linux."""


class FileIO(ABC):
    """How the bytes of extents are read and written. Thread-safe."""

    open_flags: ClassVar[int]
    reads_ahead: ClassVar[bool]
    """Whether the kernel keeps what it is told to read ahead."""

    @abstractmethod
    def read(self, fd: int, offset: int, outs: Sequence[Bytes]) -> bool:
        """Fill *outs*, one after the other, from *offset*. False when the file ends early."""

    def can_sum(self) -> bool:
        """Whether ``read_summed`` is worth asking."""
        return False

    def read_summed(self, fd: int, groups: FileGroups) -> list[int] | None:
        """Fill *groups* and return their sums, as ``file_sums`` does; None: ``read`` them."""
        return None

    @abstractmethod
    def write(self, fd: int, offset: int, data: Bytes) -> None:
        """Put *data* at *offset*. Raises OSError, as ``read`` does."""

    def is_near(self, fd: int, offset: int, size_bytes: int) -> bool:
        """Whether these bytes seem to be in memory, so that to read them ahead is of no use."""
        return False

    def check(self, fd: int) -> None:  # noqa: B027 - nothing to check
        """Raise OSError when the file cannot be used like this."""

    def close(self) -> None:  # noqa: B027 - nothing to free
        """Free what the reads and writes needed. Idempotent."""


class CachedIO(FileIO):
    """Through the page cache: what was written or read lately costs a copy."""

    open_flags = 0
    reads_ahead = True

    @override
    def read(self, fd: int, offset: int, outs: Sequence[Bytes]) -> bool:
        parts: Sequence[Bytes] = outs
        if len(outs) != 1 or not len(outs[0]):
            parts = [out for out in outs if len(out)]
        while parts:
            count = os.preadv(fd, [part.data for part in parts[:_MAX_PARTS]], offset)
            if count == len(parts[0]) and len(parts) == 1:
                return True
            if count == 0:
                return False
            offset += count
            parts = _rest(parts, count)
        return True

    @override
    def is_near(self, fd: int, offset: int, size_bytes: int) -> bool:
        # The kernel looks at page after page of what it is told to read ahead: 0.1 ms for 8 MiB.
        byte = bytearray(1)
        last = offset + size_bytes - 1
        try:
            for at in (*range(offset, last, PROBE_BYTES), last):
                os.preadv(fd, [byte], at, os.RWF_NOWAIT)
        except OSError:  # not there, or a file system that does not say
            return False
        return True

    @override
    def can_sum(self) -> bool:
        return can_sum()

    @override
    def read_summed(self, fd: int, groups: FileGroups) -> list[int] | None:
        return read_summed(fd, groups)

    @override
    def write(self, fd: int, offset: int, data: Bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwritev(fd, [data[done:].data], offset + done)


class DirectIO(FileIO):
    """Past the page cache: the device alone, at the price of one copy through aligned memory.

    Reads and writes whole granules. A write that begins or ends within one reads it first, so
    two writes into one granule must come one after the other: frames begin on granules, and
    a reservation has one writer. At most ``BOUNCE_BUFFERS`` x ``BOUNCE_BYTES`` of memory.
    """

    open_flags = os.O_DIRECT
    reads_ahead = False

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._made = 0
        self._lock = Lock()  # guards the two above
        self._returned = Condition(self._lock)

    @override
    def read(self, fd: int, offset: int, outs: Sequence[Bytes]) -> bool:
        parts = [out for out in outs if len(out)]
        stop = offset + sum(map(len, parts))
        with self._bounce() as bounce:
            while offset < stop:
                first = offset // GRANULE_BYTES * GRANULE_BYTES
                size = min(len(bounce), _granules(stop - first))
                got = os.preadv(fd, [bounce[:size].data], first) - (offset - first)
                if got <= 0:
                    return False
                take = min(got, stop - offset)
                start = offset - first
                parts = _scatter(bounce[start : start + take], parts)
                offset += take
        return True

    @override
    def write(self, fd: int, offset: int, data: Bytes) -> None:
        done = 0
        with self._bounce() as bounce:
            while done < len(data):
                first = (offset + done) // GRANULE_BYTES * GRANULE_BYTES
                start = offset + done - first
                take = min(len(bounce) - start, len(data) - done)
                size = _granules(start + take)
                if start:
                    _fetch(fd, first, bounce[:GRANULE_BYTES])
                if size > start + take and (size > GRANULE_BYTES or not start):
                    _fetch(fd, first + size - GRANULE_BYTES, bounce[size - GRANULE_BYTES : size])
                copy_bytes(bounce[start : start + take], data[done : done + take])
                written = 0
                while written < size:
                    # A short write ends on a sector; what is repeated is the same bytes.
                    step = os.pwritev(fd, [bounce[written:size].data], first + written)
                    written += step // GRANULE_BYTES * GRANULE_BYTES
                    if step < GRANULE_BYTES:
                        raise OSError(errno.EIO, "the device takes less than a granule")
                done += take

    @contextmanager
    def _bounce(self) -> Iterator[Bytes]:
        with self._returned:
            while not self._free and self._made == BOUNCE_BUFFERS:
                self._returned.wait()
            bounce = self._free.pop() if self._free else None
            self._made += bounce is None
        if bounce is None:
            # Anonymous maps begin on a page; they go with their last view.
            bounce = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        try:
            yield bounce
        finally:
            with self._returned:
                self._free.append(bounce)
                self._returned.notify()

    @override
    def close(self) -> None:
        with self._lock:
            self._made -= len(self._free)
            self._free.clear()

    @override
    def check(self, fd: int) -> None:
        with self._bounce() as bounce:
            _fetch(fd, 0, bounce[:GRANULE_BYTES])


def join_runs(ranges: Sequence[tuple[int, Bytes]]) -> Iterator[tuple[int, list[Bytes]]]:
    """Join ranges that follow one another: the offset of each run and what it fills."""
    start = end = -1
    outs: list[Bytes] = []
    for offset, out in ranges:
        if offset != end:
            if outs:
                yield start, outs
            start, outs = offset, []
        outs.append(out)
        end = offset + len(out)
    if outs:
        yield start, outs


def check_range(frame_bytes: int, offset: int, size_bytes: int) -> None:
    """Raise InvalidRequestError for a range that leaves its frame."""
    if offset < 0 or offset + size_bytes > frame_bytes:
        raise InvalidRequestError(
            "offset", (offset, size_bytes), f"stay within the frame's {frame_bytes} bytes"
        )


def no_direct(path: Path, error: OSError) -> TierUnavailableError:
    """Return the error for a folder that O_DIRECT does not work in."""
    return TierUnavailableError(
        TIER,
        f"{path} is on a file system without direct reads and writes ({error.strerror}): "
        "start without --disk-direct, or give a folder on another file system",
    )


def _granules(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def _fetch(fd: int, offset: int, granule: Bytes) -> None:
    """Read one granule; what lies behind the end of the file is zero."""
    count = os.preadv(fd, [granule.data], offset)
    granule[count:] = 0


def _scatter(data: Bytes, parts: list[Bytes]) -> list[Bytes]:
    """Copy *data* into *parts*, one after the other; return what is still to be filled."""
    left = list(parts)
    done = 0
    while done < len(data):
        step = min(len(data) - done, len(left[0]))
        copy_bytes(left[0][:step], data[done : done + step])
        done += step
        left = _rest(left, step)
    return left


def _rest(parts: Sequence[Bytes], count: int) -> list[Bytes]:
    """Return *parts* without their first *count* bytes."""
    for at, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[at + 1 :]]
        count -= len(part)
    return []
