"""A table of ChunkInfos, in columns: what a tier remembers of a million chunks."""

from __future__ import annotations

from array import array

from typing_extensions import override

from kvstore.proto.key_table import KeyTable, spare_rows
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkInfo, ChunkKey, Fidelity, KVLayout

_LAYOUTS_KEPT = 1024


class InfoTable(KeyTable):
    """ChunkInfos by key. About 95 bytes each, and nothing for the collector of garbage to visit.

    Layouts are shared: a model has one for whole chunks and a few for the ends of prompts. A
    subclass may keep more columns, and lengthens them in ``_extend``.
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
        self._extend(1)

    def _extend(self, count: int) -> None:
        """Make every column *count* rows longer; row 0 is nobody's."""
        self._parents += bytes(count * DIGEST_BYTES)
        self._layouts += [None] * count
        for column in (self._codecs, self._fidelities, self._sizes, self._flops):
            column.frombytes(bytes(count * column.itemsize))

    def note(self, info: ChunkInfo) -> int:
        """Keep *info* under its key, instead of what was there; return the row."""
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
        return row

    @override
    def remove(self, row: int) -> None:
        super().remove(row)
        self._layouts[row] = None

    def info(self, row: int) -> ChunkInfo:
        """Return what was noted in a row, which must have a key."""
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

    def size_bytes(self, row: int) -> int:
        """Return the size of the frame in a row."""
        return self._sizes[row]

    def info_of(self, key: ChunkKey) -> ChunkInfo | None:
        """Return what was noted of *key*; None when nothing was."""
        row = self.find(key)
        return self.info(row) if row else None
