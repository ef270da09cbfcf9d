"""Memory for the frames of a get, kept for those of the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvstore.proto.buffers import Bytes

_LARGE_BLOCK_BYTES = (32 << 20) - (1 << 16)
"""The largest that glibc draws its conclusion from, with room for its own header."""


class FrameMemory:
    """Memory of frames that were read, for those of the next get. Thread-safe.

    At most *limit_bytes* of it lie idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()  # guards the two above

    def take(self, size_bytes: int, owner: list[Bytes]) -> Bytes:
        """Return memory of *size_bytes*, noted with its *owner*."""
        with self._lock:
            of_size = self._idle.get(size_bytes)
            frame = of_size.pop() if of_size else None
            if frame is not None:
                self._idle_bytes -= size_bytes
        if frame is None:
            frame = np.empty(size_bytes, np.uint8)
        owner.append(frame)
        return frame

    def give(self, frames: Sequence[Bytes]) -> None:
        """Take back what its owner reads no more."""
        with self._lock:
            for frame in frames:
                if self._idle_bytes + len(frame) > self._limit_bytes:
                    self._idle.clear()
                    self._idle_bytes = 0
                self._idle.setdefault(len(frame), []).append(frame)
                self._idle_bytes += len(frame)


def keep_freed_memory() -> None:
    """Have the allocator keep what messages of a megabyte free, rather than give it back each time.

    glibc does so once the process has freed one block as large as this; its pages are never
    touched. Each piece of a layered get has memory of its own.
    """
    np.empty(_LARGE_BLOCK_BYTES, np.uint8)
