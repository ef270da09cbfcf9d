"""What a thread has said that it reads next."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.proto.types import ChunkKey


class Expected:
    """The row of chunks that each thread reads, one after the other. Thread-safe."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def note(self, keys: Sequence[ChunkKey]) -> None:
        """Take note that the calling thread reads *keys*, from now on and in this order."""
        self._of_thread.row = tuple(keys)

    def after(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """Return what the calling thread reads after *key*; nothing when it was to read another."""
        row: tuple[ChunkKey, ...] = getattr(self._of_thread, "row", ())
        return row[1:] if row[:1] == (key,) else ()
