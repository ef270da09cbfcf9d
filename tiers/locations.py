"""Infos and places of a tier's sealed frames, in packed rows for a million chunks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.key_table import KeyTable, spare_rows
from kvstore.proto.types import Accuracy, ChainDigest, ChunkInfo, ChunkKey, KVLayout
from kvstore.proto.unix_socket import Place

_LAYOUTS_KEPT = 1024
_ROW = struct.Struct("<IBB2xQQQQd16sHBx")
"""A place as in ``unix_socket``, the order of sealing from 1 on, and the rest of the info."""
_COLUMNS = np.dtype(
    {
        "names": ["place", "number", "order"],
        "formats": ["V32", "<u4", "<u8"],
        "offsets": [0, 0, 32],
        "itemsize": _ROW.size,
    }
)


class LocationTable(KeyTable):
    """Sealed frames by key: their infos and places, in order of sealing.

    About 125 bytes a frame, and no objects for the garbage collector to visit. Layouts are shared:
    a model has one for whole chunks and a few for the ends of prompts. The tier's lock guards it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows = bytearray(_ROW.size)  # row 0 is unused
        self._layouts: list[KVLayout | None] = [None]
        self._known_layouts: dict[KVLayout, KVLayout] = {}
        self._order = count(1)

    def seal(self, info: ChunkInfo, place: Place) -> int:
        """Add a frame whose key is absent; return its row."""
        row = self.add(info.key)
        if row == len(self._layouts):
            self._layouts += [None] * spare_rows(row)
            self._rows += bytes(len(self._layouts) * _ROW.size - len(self._rows))
        if len(self._known_layouts) >= _LAYOUTS_KEPT:
            self._known_layouts.clear()
        self._layouts[row] = self._known_layouts.setdefault(info.layout, info.layout)
        _ROW.pack_into(
            self._rows, row * _ROW.size, *place, next(self._order), info.prefill_flops, info.parent,
            info.codec_id, info.accuracy,
        )  # fmt: skip
        return row

    def pop(self, key: ChunkKey) -> Place | None:
        """Remove a frame and return its place; None when absent."""
        row = self.find(key)
        if not row:
            return None
        place = self._location(row)
        self.remove(row)
        self._layouts[row] = None
        self._rows[row * _ROW.size : (row + 1) * _ROW.size] = bytes(_ROW.size)
        return place

    def info(self, row: int) -> ChunkInfo:
        """Return the info of a row, which must have a key."""
        layout = self._layouts[row]
        assert layout is not None, "a row with a key has a layout"
        *_, size, _, _, flops, parent, codec, accuracy = _ROW.unpack_from(
            self._rows, row * _ROW.size
        )
        return ChunkInfo(
            self.key(row), ChainDigest(parent), layout, codec, size, Accuracy(accuracy), flops
        )

    def info_of(self, key: ChunkKey) -> ChunkInfo | None:
        """Return the info of *key*; None when absent."""
        row = self.find(key)
        return self.info(row) if row else None

    def location(self, key: ChunkKey) -> Place | None:
        """Return the place of a frame; None when absent."""
        row = self.find(key)
        return self._location(row) if row else None

    def _location(self, row: int) -> Place:
        return Place._make(_ROW.unpack_from(self._rows, row * _ROW.size)[:6])

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return the places of *keys* as ``pack_places`` does; zeros for absent ones."""
        return np.frombuffer(self._rows, _COLUMNS)["place"][self.find_all(keys)].tobytes()

    def keys_in(self, number: int) -> list[ChunkKey]:
        """Return the keys of the frames in a slab or file, in order of sealing."""
        numbers = np.frombuffer(self._rows, _COLUMNS)["number"]
        return [self.key(row) for row in self._in_order(np.flatnonzero(numbers == number))]

    def infos(self) -> list[ChunkInfo]:
        """Return the info of every frame, in order of sealing."""
        return [self.info(row) for row in self._in_order(np.arange(len(self._layouts)))]

    def _in_order(self, rows: NDArray[np.intp]) -> list[int]:
        """Return the *rows* that have a frame, in order of sealing."""
        order = np.frombuffer(self._rows, _COLUMNS)["order"][rows]
        ordered: list[int] = rows[order.argsort()][np.count_nonzero(order == 0) :].tolist()
        return ordered
