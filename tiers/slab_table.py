"""Which frame is sealed where in the slabs of CPU memory."""

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


class Spots(NamedTuple):
    """Where frames lie, one entry a key: slab 0 for keys that are not here."""

    slabs: NDArray[np.uint32]
    starts: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class SlabTable(InfoTable):
    """Sealed frames by key: slab, start, and the how-manieth each was to be sealed.

    The CPU tier's lock guards it.
    """

    def __init__(self) -> None:
        self._slabs = array("I")
        self._starts = array("Q")
        self._sealed = array("Q")
        self._sequence = count()
        super().__init__()

    @override
    def _extend(self) -> None:
        super()._extend()
        for column in (self._slabs, self._starts, self._sealed):
            column.append(0)

    def seal(self, info: ChunkInfo, slab_id: int, start: int) -> None:
        """Take note of a frame whose key is not here."""
        row = self.note(info)
        self._slabs[row] = slab_id
        self._starts[row] = start
        self._sealed[row] = next(self._sequence)

    @override
    def remove(self, row: int) -> None:
        super().remove(row)
        self._slabs[row] = 0

    def spot(self, row: int) -> tuple[int, int, int]:
        """Return slab, start and size of the frame in a row; slab 0 for row 0."""
        return self._slabs[row], self._starts[row], self._sizes[row]

    def spots(self, keys: Sequence[ChunkKey]) -> Spots:
        """Return where all of *keys* lie."""
        rows = self.find_all(keys)
        return Spots(
            np.frombuffer(self._slabs, np.uint32)[rows],
            np.frombuffer(self._starts, np.uint64)[rows],
            np.frombuffer(self._sizes, np.uint64)[rows],
        )

    def keys_in(self, slab_id: int) -> list[ChunkKey]:
        """Return the keys of a slab's frames, in order of sealing."""
        rows = np.flatnonzero(np.frombuffer(self._slabs, np.uint32) == slab_id)
        return [self.key(row) for row in self._in_order(rows)]

    def infos(self) -> list[ChunkInfo]:
        """Return every frame's, in order of sealing."""
        rows = np.flatnonzero(np.frombuffer(self._slabs, np.uint32))
        return [self.info(row) for row in self._in_order(rows)]

    def _in_order(self, rows: NDArray[np.intp]) -> list[int]:
        order = np.frombuffer(self._sealed, np.uint64)[rows].argsort()
        ordered: list[int] = rows[order].tolist()
        return ordered
