"""Which frame is sealed where, for a tier that cuts its medium into areas."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.info_table import InfoTable
from kvstore.proto.types import ChunkInfo, ChunkKey

NO_AREA = 0


class Spots(NamedTuple):
    """Where frames lie, one entry a key: NO_AREA for keys that are not here."""

    areas: NDArray[np.uint32]
    starts: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class SpotTable(InfoTable):
    """Sealed frames by key: area (a slab, an extent; from 1 on), start, and order of sealing.

    About 115 bytes a frame. The tier's lock guards it.
    """

    def __init__(self) -> None:
        self._areas = array("I")
        self._starts = array("Q")
        self._sealed = array("Q")
        self._sequence = count()
        super().__init__()

    @override
    def _extend(self, count: int) -> None:
        super()._extend(count)
        for column in (self._areas, self._starts, self._sealed):
            column.frombytes(bytes(count * column.itemsize))

    def seal(self, info: ChunkInfo, area: int, start: int) -> None:
        """Take note of a frame whose key is not here."""
        row = self.note(info)
        self._areas[row] = area
        self._starts[row] = start
        self._sealed[row] = next(self._sequence)

    @override
    def remove(self, row: int) -> None:
        super().remove(row)
        self._areas[row] = NO_AREA

    def spot(self, row: int) -> tuple[int, int, int]:
        """Return area, start and size of the frame in a row; NO_AREA for row 0."""
        return self._areas[row], self._starts[row], self._sizes[row]

    def spots(self, keys: Sequence[ChunkKey]) -> Spots:
        """Return where all of *keys* lie."""
        rows = self.find_all(keys)
        return Spots(
            np.frombuffer(self._areas, np.uint32)[rows],
            np.frombuffer(self._starts, np.uint64)[rows],
            np.frombuffer(self._sizes, np.uint64)[rows],
        )

    def keys_in(self, area: int) -> list[ChunkKey]:
        """Return the keys of an area's frames, in order of sealing."""
        rows = np.flatnonzero(np.frombuffer(self._areas, np.uint32) == area)
        return [self.key(row) for row in self._in_order(rows)]

    def infos(self) -> list[ChunkInfo]:
        """Return every frame's, in order of sealing."""
        rows = np.flatnonzero(np.frombuffer(self._areas, np.uint32))
        return [self.info(row) for row in self._in_order(rows)]

    def _in_order(self, rows: NDArray[np.intp]) -> list[int]:
        order = np.frombuffer(self._sealed, np.uint64)[rows].argsort()
        ordered: list[int] = rows[order].tolist()
        return ordered
