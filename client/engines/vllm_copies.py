"""Copies of what is to be stored, made beside the engine, before its blocks are another request's.

vLLM gives a block that nobody needs any more to another request, but says so at the beginning of
the step that writes to it. Until then what was computed lies where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from kvstore.client.engines.vllm_layout import NULL_BLOCK, EnginePages, PageCopy


class CopyPool:
    """Memory for copies of chunks of *chunk_blocks* blocks, used again and again. Thread-safe."""

    def __init__(self, pages: EnginePages, chunk_blocks: int) -> None:
        self._pages = pages
        self._chunk_blocks = chunk_blocks
        self.chunk_bytes = pages.chunk_bytes(chunk_blocks)
        self._idle: list[PageCopy] = []
        self._lock = threading.Lock()  # guards _idle

    def take(self) -> PageCopy:
        """Return memory for one chunk."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return PageCopy(self._pages, self._chunk_blocks)

    def give(self, copied: PageCopy) -> None:
        """Take memory back."""
        with self._lock:
            self._idle.append(copied)


class ChunkCopy:
    """One chunk that lies in the blocks *tables* name, to be copied by whoever comes first.

    ``whole`` is the copy once it is made; None if the engine had given up what it is of.
    """

    def __init__(self, pool: CopyPool, tables: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        self._tables = tables
        self._blocks = {block for table in tables for block in table} - {NULL_BLOCK}
        self._claim = threading.Lock()  # taken for good by who makes the copy
        self._over = threading.Event()
        self.whole: PageCopy | None = None

    def lies_in(self, blocks: Collection[int] | None) -> bool:
        """Whether any of *blocks* is its; None: those of every chunk."""
        return blocks is None or not self._blocks.isdisjoint(blocks)

    def make(self) -> None:
        """Copy it, unless that was done; return when nobody reads the blocks any more."""
        if not self._claim.acquire(blocking=False):
            self._over.wait()
            return
        try:
            copied = self._pool.take()
            if copied.take(self._tables):
                self.whole = copied
            else:
                self._pool.give(copied)
        finally:
            self._over.set()

    def free(self) -> None:
        """Give the memory of the copy back, which nobody reads any more."""
        if self.whole is not None:
            self._pool.give(self.whole)
            self.whole = None
