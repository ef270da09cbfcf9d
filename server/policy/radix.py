"""The RadixIndex: which chunks exist, what they continue, and which tiers hold copies.

Chain digests already name a whole prefix, so the tree needs no edges to be walked: the
longest cached prefix of a key chain is its longest run of known keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, KeyTable, spare_rows
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Fidelity,
    KVLayout,
    Namespace,
)

Rows = NDArray[np.intp]

MAX_TIERS = 8
"""A chunk's tiers are the bits of one byte."""

_LAYOUTS_KEPT = 1024


class _Copies:
    """Columns of what differs between the copies of one chunk; one of these a tier."""

    def __init__(self) -> None:
        self.sizes = array("Q")
        self.codecs = array("H")
        self.fidelities = array("B")
        """One more than the copy's; 0 where this tier has none."""

    def extend(self, count: int) -> None:
        for column in (self.sizes, self.codecs, self.fidelities):
            column.frombytes(bytes(count * column.itemsize))


class RadixIndex:
    """Chunks by key, each in a row of columns. Not thread-safe: the catalog's lock guards it.

    A row belongs to a chunk while any tier has a copy of it or a known chunk continues it; the
    parent of a known chunk therefore always has a row. Columns and not objects, because a
    million chunks are a few million objects that the collector of garbage would go through.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        if len(tiers) > MAX_TIERS:
            raise InvalidRequestError("tiers", len(tiers), f"at most {MAX_TIERS}")
        self.tiers = tuple(tiers)
        self._keys = KeyTable()
        self._holders = array("B")
        """A bit for each tier that has a copy."""
        self._parents = array("I")
        self._uses = array("I")
        """Known chunks that continue the row's, and one for its copies."""
        self._flops = array("d")
        self._hits = array("I")
        self._layouts: list[KVLayout | None] = []
        self._known_layouts: dict[KVLayout, KVLayout] = {}
        self._copies = [_Copies() for _ in tiers]
        self._count = 0
        self._extend()

    # --- changes

    def add(self, tier: str, info: ChunkInfo) -> int:
        """Take note of a sealed copy on *tier* and return the chunk's row."""
        row = self._row_for(info.key)
        if not self._holders[row]:
            self._describe(row, info)
        number = self.tiers.index(tier)
        copies = self._copies[number]
        copies.sizes[row] = info.size_bytes
        copies.codecs[row] = info.codec_id
        copies.fidelities[row] = info.fidelity + 1
        self._holders[row] |= 1 << number
        return row

    def _row_for(self, key: ChunkKey) -> int:
        row = self._keys.add(key)
        if row == len(self._holders):
            self._extend()
        return row

    def _extend(self) -> None:
        """Make every column longer; row 0 is nobody's."""
        count = spare_rows(len(self._holders))
        for column in (self._holders, self._parents, self._uses, self._flops, self._hits):
            column.frombytes(bytes(count * column.itemsize))
        self._layouts += [None] * count
        for copies in self._copies:
            copies.extend(count)

    def _describe(self, row: int, info: ChunkInfo) -> None:
        """Keep what is the same in all copies."""
        self._count += 1
        self._uses[row] += 1
        parent = info.parent_key
        if parent is not None:
            above = self._row_for(parent)
            self._uses[above] += 1
            self._parents[row] = above
        self._flops[row] = info.prefill_flops
        if len(self._known_layouts) >= _LAYOUTS_KEPT:
            self._known_layouts.clear()
        self._layouts[row] = self._known_layouts.setdefault(info.layout, info.layout)

    def discard(self, tier: str, row: int) -> bool:
        """Forget the copy on *tier*. Return whether there was one; a row may go with its last."""
        number = self.tiers.index(tier)
        bit = 1 << number
        if not self._holders[row] & bit:
            return False
        self._copies[number].fidelities[row] = 0
        self._holders[row] ^= bit
        if not self._holders[row]:
            self._count -= 1
            self._hits[row] = 0
            self._layouts[row] = None
            above, self._parents[row] = self._parents[row], NO_ROW
            self._let_go(row)
            if above:
                self._let_go(above)
        return True

    def _let_go(self, row: int) -> None:
        self._uses[row] -= 1
        if not self._uses[row]:
            self._keys.remove(row)

    # --- questions

    def row(self, key: ChunkKey) -> int:
        """Return the row of a chunk with a copy; NO_ROW when no tier holds it."""
        row = self._keys.find(key)
        return row if self._holders[row] else NO_ROW

    def key(self, row: int) -> ChunkKey:
        """Return the key of a row."""
        return self._keys.key(row)

    def parent(self, row: int) -> int:
        """Return the row of the chunk before this one; NO_ROW at the start of a chain."""
        return self._parents[row]

    def hits(self, row: int) -> int:
        """Return how often the chunk was found."""
        return self._hits[row]

    def size_bytes(self, tier: str, row: int) -> int:
        """Return the size of the frame on *tier*, which there must be."""
        return self._copies[self.tiers.index(tier)].sizes[row]

    def holders(self, row: int, least: Fidelity = Fidelity.none) -> list[str]:
        """Return the tiers that hold the chunk, at *least* so true, in the index's order."""
        copies = enumerate(self._copies)
        return [self.tiers[number] for number, one in copies if one.fidelities[row] > least]

    def info(self, tier: str, row: int) -> ChunkInfo:
        """Return the description of the copy on *tier*, which there must be."""
        copies = self._copies[self.tiers.index(tier)]
        above = self._parents[row]
        parent = ChainDigest(self._keys.key(above)[DIGEST_BYTES:]) if above else ROOT
        layout = self._layouts[row]
        assert layout is not None, "a chunk with a copy has a layout"
        return ChunkInfo(
            self._keys.key(row), parent, layout, copies.codecs[row], copies.sizes[row],
            Fidelity(copies.fidelities[row] - 1), self._flops[row],
        )  # fmt: skip

    def copies(self, row: int) -> dict[str, ChunkInfo]:
        """Return the chunk's copies by tier name."""
        return {tier: self.info(tier, row) for tier in self.holders(row)}

    def longest_prefix(
        self, keys: Sequence[ChunkKey], min_fidelity: Fidelity = Fidelity.exact
    ) -> Rows:
        """Return the rows of the longest run of *keys* with a copy of at least *min_fidelity*."""
        rows = self._keys.prefix(keys)
        fit = np.zeros(len(rows), np.bool_)
        for copies in self._copies:
            fit |= np.frombuffer(copies.fidelities, np.uint8)[rows] > min_fidelity
        return rows if fit.all() else rows[: int(fit.argmin())]

    def sizes(
        self, tier: str, rows: Rows, min_fidelity: Fidelity
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which chunks *tier* has a copy of *min_fidelity* of, and how large each is."""
        copies = self._copies[self.tiers.index(tier)]
        held = np.frombuffer(copies.fidelities, np.uint8)[rows] > min_fidelity
        return held, np.frombuffer(copies.sizes, np.int64)[rows]

    def count_hits(self, rows: Rows) -> None:
        """Take note that the chunks were found; one that is named twice was found once."""
        np.frombuffer(self._hits, np.uint32)[rows] += 1

    def keys_of(self, space: Namespace) -> list[ChunkKey]:
        """Return the chunks of a namespace that have a copy."""
        rows = self._keys.rows_of(space)
        return [self.key(row) for row in rows.tolist() if self._holders[row]]

    def only_on(self, tiers: Iterable[str]) -> list[ChunkKey]:
        """Return the chunks that are on no tier but these."""
        bits = sum(1 << self.tiers.index(tier) for tier in tiers)
        holders = np.frombuffer(self._holders, np.uint8)
        rows = np.flatnonzero((holders > 0) & (holders & ~np.uint8(bits) == 0))
        return [self.key(row) for row in rows.tolist()]

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: ChunkKey) -> bool:
        return self.row(key) != NO_ROW
