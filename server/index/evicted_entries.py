"""Ghosts: rows of chunks that are remembered though no tier has a copy of them any more."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import NO_ROW


class EvictedEntries:
    """Rows in the order in which they came, any of them taken out in O(1). Nine bytes a row.

    Ghost lists are how a cache learns from what it gave up too early (ARC, Megiddo and Modha,
    FAST 2003). Row 0 is nobody's and begins the list.
    """

    def __init__(self) -> None:
        self._newer = array("I", [NO_ROW])
        self._older = array("I", [NO_ROW])
        self._here = array("B", [0])
        self._count = 0

    def extend(self, count: int) -> None:
        """Let there be *count* rows more."""
        for column in (self._newer, self._older, self._here):
            column.frombytes(bytes(count * column.itemsize))

    def __contains__(self, row: int) -> bool:
        return self._here[row] != 0

    @property
    def flags(self) -> NDArray[np.uint8]:
        """1 for each row that is here, by row; to be dropped before the list changes."""
        return np.frombuffer(self._here, np.uint8)

    def append(self, row: int) -> None:
        """Put a row that is not here behind all others."""
        newest = self._older[NO_ROW]
        self._newer[newest] = self._older[NO_ROW] = row
        self._older[row], self._newer[row] = newest, NO_ROW
        self._here[row] = 1
        self._count += 1

    def remove(self, row: int) -> None:
        """Take out a row that is here."""
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older
        self._here[row] = 0
        self._count -= 1

    @property
    def oldest(self) -> int:
        """The row that came first; NO_ROW when there is none."""
        return self._newer[NO_ROW]

    def __iter__(self) -> Iterator[int]:
        row = self._newer[NO_ROW]
        while row:
            yield row
            row = self._newer[row]

    def __len__(self) -> int:
        return self._count
