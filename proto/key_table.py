"""A table of keys: each key has a row number, which indexes the columns with its values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import KEY_BYTES, ChunkKey

NO_ROW = 0
"""Returned for a key without a row."""

_KEY_WORDS = KEY_BYTES // 8
_FIRST_SLOTS = 64
_FIRST_ROWS = 64
_FEW = 16
"""Up to this many keys Python is faster than numpy."""
_TAG_BITS = 32
_TAG_MASK = _ROW_MASK = (1 << _TAG_BITS) - 1


class KeyTable:
    """Maps keys to rows. A row belongs to its key until the key is removed, then it is reused.

    A dictionary takes 140 bytes a key, this 50: keys lie in one array, and the hash table is an
    array of (tag, row) with linear probing; the tag is 32 bits of Python's salted hash of the key,
    which clients cannot predict. The keys of a prompt are found together: first in consecutive
    rows, as prompts are put, then by their hashes. Memory never shrinks. Not thread-safe.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST_SLOTS))
        self._keys = bytearray(KEY_BYTES)
        self._free = array("I")
        self._count = 0

    def find(self, key: ChunkKey) -> int:
        """Return the row of *key*, or NO_ROW."""
        tag = hash(key) >> _TAG_BITS & _TAG_MASK
        slots = self._slots
        mask = len(slots) - 1
        at = tag & mask
        wanted: bytes = key
        while entry := slots[at]:
            if entry >> _TAG_BITS == tag:
                row = entry & _ROW_MASK
                if self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] == wanted:
                    return row
            at = (at + 1) & mask
        return NO_ROW

    def add(self, key: ChunkKey) -> int:
        """Return the row of *key*; assigns one if it has none."""
        row = self.find(key)
        if row:
            return row
        if self._free:
            row = self._free.pop()
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        else:
            row = len(self._keys) // KEY_BYTES
            self._keys += key
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            self._grow()
        self._place((hash(key) >> _TAG_BITS & _TAG_MASK) << _TAG_BITS | row)
        return row

    def _place(self, entry: int) -> None:
        mask = len(self._slots) - 1
        at = entry >> _TAG_BITS & mask
        while self._slots[at]:
            at = (at + 1) & mask
        self._slots[at] = entry

    def _grow(self) -> None:
        """Double the slots: each entry goes to the first free slot from its home on."""
        old = np.frombuffer(self._slots, np.uint64)
        size = 2 * len(old)
        entries = old[old > 0]
        homes = (entries >> np.uint64(_TAG_BITS)).astype(np.intp) & (size - 1)
        order = homes.argsort(kind="stable")
        entries, homes = entries[order], homes[order]
        numbers = np.arange(len(homes))
        places = np.maximum.accumulate(homes - numbers) + numbers
        self._slots = array("Q", [0]) * size
        fit = places < size
        np.frombuffer(self._slots, np.uint64)[places[fit]] = entries[fit]
        for entry in entries[~fit].tolist():  # past the end: wrap around
            self._place(entry)

    def remove(self, row: int) -> None:
        """Remove the key of *row*, which must have one."""
        slots = self._slots
        tag = hash(self.key(row)) >> _TAG_BITS & _TAG_MASK
        entry = tag << _TAG_BITS | row
        mask = len(slots) - 1
        hole = tag & mask
        while slots[hole] != entry:
            hole = (hole + 1) & mask
        # Move entries after the hole back to where their probing finds them.
        at = (hole + 1) & mask
        while other := slots[at]:
            home = other >> _TAG_BITS & mask
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = other
                hole = at
            at = (at + 1) & mask
        slots[hole] = 0
        self._count -= 1
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = bytes(KEY_BYTES)
        self._free.append(row)

    def key(self, row: int) -> ChunkKey:
        """Return the key of *row*; zeros for a free row."""
        return ChunkKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def keys(self, rows: NDArray[np.intp]) -> NDArray[np.void]:
        """Return the keys of *rows*, each a void of 32 bytes; zeros for free rows."""
        return np.frombuffer(self._keys, f"V{KEY_BYTES}")[rows]

    def prefix(self, keys: Sequence[ChunkKey]) -> NDArray[np.intp]:
        """Return the rows of *keys* up to the first key without one."""
        rows = self.find_all(keys)
        return rows if rows.all() else rows[: int((rows != NO_ROW).argmin())]

    def find_all(self, keys: Sequence[ChunkKey]) -> NDArray[np.intp]:
        """Return the row of each of *keys*, or NO_ROW."""
        if len(keys) <= _FEW:
            return np.array([self.find(key) for key in keys], np.intp)
        wanted = b"".join(keys)
        first = self.find(keys[0])
        start = first * KEY_BYTES
        if first and self._keys[start : start + len(wanted)] == wanted:
            return np.arange(first, first + len(keys))
        rows = self._probe(keys)
        mine = np.frombuffer(self._keys, np.uint64).reshape(-1, _KEY_WORDS)[rows]
        is_other = (mine != np.frombuffer(wanted, np.uint64).reshape(-1, _KEY_WORDS)).any(axis=1)
        for at in np.flatnonzero(is_other & (rows > 0)).tolist():  # two keys share a tag
            rows[at] = self.find(keys[at])
        return rows

    def _probe(self, keys: Sequence[ChunkKey]) -> NDArray[np.intp]:
        """Return the first row with each key's tag, or NO_ROW."""
        codes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
        tags = codes >> np.uint64(_TAG_BITS)
        slots, mask = np.frombuffer(self._slots, np.uint64), len(self._slots) - 1
        rows = np.zeros(len(keys), np.intp)
        left, at = np.arange(len(keys)), tags.astype(np.intp) & mask
        while len(left):
            entries = slots[at]
            is_tag = entries >> np.uint64(_TAG_BITS) == tags[left]
            is_full = entries > 0
            is_found = is_tag & is_full
            rows[left[is_found]] = entries[is_found] & np.uint64(_ROW_MASK)
            goes_on = is_full & ~is_tag
            left, at = left[goes_on], (at[goes_on] + 1) & mask
        return rows

    def rows_of(self, start: bytes) -> NDArray[np.intp]:
        """Return the rows whose keys begin with *start*, in order; a free row's key is zeros."""
        keys = np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)
        return np.flatnonzero((keys[:, : len(start)] == np.frombuffer(start, np.uint8)).all(axis=1))

    def __len__(self) -> int:
        return self._count


def spare_rows(rows: int) -> int:
    """Return by how many rows to grow columns of *rows*: by a sixteenth, at least 64."""
    return max(_FIRST_ROWS, rows >> 4)
