"""Which frame is sealed where: what a tier remembers of a million chunks, in columns."""

from __future__ import annotations

from array import array
from itertools import count

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.key_table import KeyTable, spare_rows
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkInfo, ChunkKey, Fidelity, KVLayout

NO_AREA = 0
_LAYOUTS_KEPT = 1024


class LocationTable(KeyTable):
    """Sealed frames by key: info, area (a slab, a data file; from 1 on), start, order of sealing.

    About 115 bytes a frame, and nothing for the collector of garbage to visit. Layouts are shared:
    a model has one for whole chunks and a few for the ends of prompts. A subclass may keep more
    columns, and lengthens them in ``_extend``. The tier's lock guards it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parents = bytearray()
        self._layouts: list[KVLayout | None] = []
        self._known_layouts: dict[KVLayout, KVLayout] = {}
        self._codecs = array("H")
        self._fidelities = array("B")
        self._sizes = array("Q")
        self._flops = array("d")
        self._areas = array("I")
        self._starts = array("Q")
        self._sealed = array("Q")
        self._sequence = count()
        self._extend(1)

    def _extend(self, count: int) -> None:
        """Make every column *count* rows longer; row 0 is nobody's."""
        self._parents += bytes(count * DIGEST_BYTES)
        self._layouts += [None] * count
        for column in (
            self._codecs, self._fidelities, self._sizes, self._flops, self._areas, self._starts,
            self._sealed,
        ):  # fmt: skip
            column.frombytes(bytes(count * column.itemsize))

    def seal(self, info: ChunkInfo, area: int, start: int) -> int:
        """Keep a frame whose key is not here; return its row."""
        row = self.add(info.key)
        if row == len(self._sizes):
            self._extend(spare_rows(row))
        if len(self._known_layouts) >= _LAYOUTS_KEPT:
            self._known_layouts.clear()
        self._layouts[row] = self._known_layouts.setdefault(info.layout, info.layout)
        self._parents[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] = info.parent
        self._codecs[row] = info.codec_id
        self._fidelities[row] = info.fidelity
        self._sizes[row] = info.size_bytes
        self._flops[row] = info.prefill_flops
        self._areas[row] = area
        self._starts[row] = start
        self._sealed[row] = next(self._sequence)
        return row

    @override
    def remove(self, row: int) -> None:
        super().remove(row)
        self._layouts[row] = None
        self._areas[row] = NO_AREA

    def info(self, row: int) -> ChunkInfo:
        """Return what is known of the frame in a row, which must have a key."""
        layout = self._layouts[row]
        assert layout is not None, "a row with a key has a layout"
        return ChunkInfo(
            self.key(row),
            ChainDigest(bytes(self._parents[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])),
            layout,
            self._codecs[row],
            self._sizes[row],
            Fidelity(self._fidelities[row]),
            self._flops[row],
        )

    def info_of(self, key: ChunkKey) -> ChunkInfo | None:
        """Return what is known of *key*; None when it is not here."""
        row = self.find(key)
        return self.info(row) if row else None

    def location(self, row: int) -> tuple[int, int, int]:
        """Return area, start and size of the frame in a row; NO_AREA for row 0."""
        return self._areas[row], self._starts[row], self._sizes[row]

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
