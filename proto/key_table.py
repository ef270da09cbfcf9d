"""A table of keys: each has a row, a small number under which columns keep what belongs to it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.types import KEY_BYTES, ChunkKey

NO_ROW = 0
"""The row of no key."""

_SEGMENT_BITS = 10
_SEGMENTS = 1 << _SEGMENT_BITS
_KEY_WORDS = KEY_BYTES // 8
_FIRST_SLOTS = 4
_FIRST_STEP = 256
_FIRST_ROWS = 64
_LONG_RUN = 32
"""Rows in a row that are taken at once; of fewer the links may know better."""
_TAG_MASK = _ROW_MASK = (1 << 32) - 1
_EMPTY = array("Q", [0])


class KeyTable:
    """Rows by key. A row is kept while its key is here, and given to another key after that.

    A dictionary, its keys and its numbers take 140 bytes a chunk, this 55: the keys lie in one
    array, and the hash table is an array of (tag, row) with linear probing, where the tag is 32
    bits of Python's own hash of the key, which strangers cannot foresee. It is cut into segments
    that grow by themselves, so that no insertion ever moves more than a 1024th of the table.

    The keys of a prompt are asked for again in the same order, in which they most often lie here:
    ``prefix`` compares them with the rows behind the first all at once. Each row has a link, too,
    to the one that followed last, which is gone along where others lie between. Memory is that of
    the most keys there ever were. Not thread-safe: the owner locks.
    """

    def __init__(self) -> None:
        self._segments = [_EMPTY] * _SEGMENTS
        self._counts = array("I", bytes(4 * _SEGMENTS))
        self._keys = bytearray(KEY_BYTES)
        self._next = array("I", [0])
        """By row, the row that was found for the key asked for behind its own: a guess."""
        self._free = array("I")
        self._count = 0

    def find(self, key: ChunkKey) -> int:
        """Return the row of *key*; NO_ROW when it has none."""
        code = hash(key)
        tag = code >> _SEGMENT_BITS & _TAG_MASK
        slots = self._segments[code & (_SEGMENTS - 1)]
        mask = len(slots) - 1
        at = tag & mask
        asked: bytes = key
        while entry := slots[at]:
            if entry >> 32 == tag:
                row = entry & _ROW_MASK
                if self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] == asked:
                    return row
            at = (at + 1) & mask
        return NO_ROW

    def add(self, key: ChunkKey) -> int:
        """Return the row of *key*, a new one if it had none."""
        row = self.find(key)
        if row:
            return row
        if self._free:
            row = self._free.pop()
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        else:
            row = len(self._keys) // KEY_BYTES
            self._keys += key
            self._next.append(NO_ROW)
        self._count += 1
        code = hash(key)
        segment = code & (_SEGMENTS - 1)
        count = self._counts[segment] = self._counts[segment] + 1
        slots = self._segments[segment]
        if 3 * count > 2 * len(slots):
            slots = self._grow(segment)
        _place(slots, (code >> _SEGMENT_BITS & _TAG_MASK) << 32 | row)
        return row

    def _grow(self, segment: int) -> array[int]:
        old = self._segments[segment]
        new = array("Q", bytes(8 * max(_FIRST_SLOTS, 2 * len(old))))
        for entry in old:
            if entry:
                _place(new, entry)
        self._segments[segment] = new
        return new

    def remove(self, row: int) -> None:
        """Forget the key of *row*, which there must be."""
        code = hash(self.key(row))
        segment = code & (_SEGMENTS - 1)
        slots = self._segments[segment]
        entry = (code >> _SEGMENT_BITS & _TAG_MASK) << 32 | row
        mask = len(slots) - 1
        hole = entry >> 32 & mask
        while slots[hole] != entry:
            hole = (hole + 1) & mask
        # Entries after the hole move up to where their probing would look for them.
        at = (hole + 1) & mask
        while other := slots[at]:
            home = other >> 32 & mask
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = other
                hole = at
            at = (at + 1) & mask
        slots[hole] = 0
        self._counts[segment] -= 1
        self._count -= 1
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = bytes(KEY_BYTES)
        self._next[row] = NO_ROW
        self._free.append(row)

    def key(self, row: int) -> ChunkKey:
        """Return the key of *row*; zeros for a row that has none."""
        return ChunkKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def keys(self, rows: NDArray[np.intp]) -> NDArray[np.void]:
        """Return the keys of *rows*, each a void of 32 bytes; zeros for rows that have none."""
        return np.frombuffer(self._keys, f"V{KEY_BYTES}")[rows]

    def prefix(self, keys: Sequence[ChunkKey]) -> NDArray[np.intp]:
        """Return the rows of *keys* up to the first that has none."""
        return self._rows(keys, all_keys=False)

    def find_all(self, keys: Sequence[ChunkKey]) -> NDArray[np.intp]:
        """Return the row of each of *keys*, NO_ROW for those that have none."""
        return self._rows(keys, all_keys=True)

    def _rows(self, keys: Sequence[ChunkKey], *, all_keys: bool) -> NDArray[np.intp]:
        rows = np.empty(len(keys), np.intp)
        asked = b"".join(keys)
        at, row, step = 0, NO_ROW, _FIRST_STEP
        while at < len(keys):
            run = self._follow(row, asked, at, step) if row else rows[:0]
            if len(run):
                rows[at : at + len(run)] = run
                row = int(run[-1])
                at += len(run)
                step *= 2
                continue
            found = self.find(keys[at])
            if not found and not all_keys:
                break
            self._next[row] = found
            rows[at] = row = found
            at += 1
            step = _FIRST_STEP
        return rows[:at]

    def _follow(self, row: int, asked: bytes, at: int, step: int) -> NDArray[np.intp]:
        """Return the rows behind *row* of the keys from place *at* of *asked*, at most *step*.

        None when the next key is not the one that followed before.
        """
        wanted = asked[at * KEY_BYTES : (at + step) * KEY_BYTES]
        limit = len(wanted) // KEY_BYTES
        start = (row + 1) * KEY_BYTES
        if self._keys[start : start + len(wanted)] == wanted:
            return np.arange(row + 1, row + 1 + limit)
        mine = np.frombuffer(self._keys, np.uint64).reshape(-1, _KEY_WORDS)
        keys = np.frombuffer(wanted, np.uint64).reshape(-1, _KEY_WORDS)
        run = _same_start(mine[row + 1 : row + 1 + limit], keys)
        if run >= _LONG_RUN:
            return np.arange(row + 1, row + 1 + run)
        guess = self._guess(row, limit)
        return guess[: _same_start(mine[guess], keys)]

    def _guess(self, row: int, limit: int) -> NDArray[np.intp]:
        """Return up to *limit* rows whose keys may be asked for behind that of *row*, in order."""
        follow = self._next
        rows: list[int] = []
        row = follow[row]
        while row and len(rows) < limit:
            rows.append(row)
            row = follow[row]
        return np.array(rows, np.intp)

    def rows_of(self, start: bytes) -> NDArray[np.intp]:
        """Return the rows whose keys begin with *start*, in order; free rows have keys of zeros."""
        keys = np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)
        return np.flatnonzero((keys[:, : len(start)] == np.frombuffer(start, np.uint8)).all(axis=1))

    def __len__(self) -> int:
        return self._count


def spare_rows(rows: int) -> int:
    """Return by how many rows to lengthen columns of *rows*: seldom, and never by much."""
    return max(_FIRST_ROWS, rows >> 4)


def _same_start(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """Return how many keys are the same in both from the first on."""
    same = (some == others[: len(some)]).all(axis=1)
    return len(same) if same.all() else int(same.argmin())


def _place(slots: array[int], entry: int) -> None:
    mask = len(slots) - 1
    at = entry >> 32 & mask
    while slots[at]:
        at = (at + 1) & mask
    slots[at] = entry
