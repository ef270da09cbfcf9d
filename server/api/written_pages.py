"""Which pages of a client's memory were written: to read another would allocate it here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from threading import Lock

import numpy as np

WALKED_PER_PAGE = 16
"""Pages that the kernel may look at again for each one that is new; it takes less for them than
one call takes."""
MAX_HOLES = 64
"""After so many parts that were never written a session's new pages are refused without a look."""


class WrittenPages:
    """The pages of a memfd of *size_bytes*, with seals that keep what was written. Thread-safe.

    A page that was written once is not looked up again, so that all looks together take time by
    the memory's size, whatever order it is written in. *descriptor* is ours to close. *lseek* is
    ``os.lseek``.
    """

    def __init__(
        self,
        descriptor: int,
        size_bytes: int,
        lseek: Callable[[int, int, int], int] = os.lseek,
    ) -> None:
        self._descriptor = descriptor
        self._lseek = lseek
        self._known = np.zeros(-(-size_bytes // mmap.PAGESIZE), np.bool_)
        self._holes = 0
        self._lock = Lock()  # guards the above, and keeps the descriptor open during a look

    def has(self, offset: int, size_bytes: int) -> bool:
        """Whether all of a part, within the memory's size, was written."""
        page, stop = offset // mmap.PAGESIZE, -(-(offset + size_bytes) // mmap.PAGESIZE)
        with self._lock:
            new = stop - page - np.count_nonzero(self._known[page:stop])
            if not size_bytes or not new:
                return True
            # A look for the next hole walks over all that is written behind it.
            again = np.count_nonzero(self._known[page:])
            learn = self._learn_page if again > WALKED_PER_PAGE * new else self._learn_run
            while not self._known[page:stop].all():
                page += int(self._known[page:stop].argmin())
                if self._holes >= MAX_HOLES or not learn(page):
                    self._holes += 1
                    return False
        return True

    def _learn_run(self, page: int) -> bool:
        """Look at a page and those behind it, up to the next hole. False when it is one."""
        stop = -(-self._seek(page, os.SEEK_HOLE) // mmap.PAGESIZE)
        self._known[page:stop] = True
        return stop > page

    def _learn_page(self, page: int) -> bool:
        """Look at one page. False when it is a hole."""
        self._known[page] = self._seek(page, os.SEEK_DATA) == page * mmap.PAGESIZE
        return bool(self._known[page])

    def _seek(self, page: int, whence: int) -> int:
        try:
            return self._lseek(self._descriptor, page * mmap.PAGESIZE, whence)
        except OSError:  # holes to the end, or closed
            return -1

    def close(self) -> None:
        """Close the descriptor; nothing more is learned. Call once."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1
