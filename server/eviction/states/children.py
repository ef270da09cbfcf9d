"""Who is below whom in a tree of token sequences, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.proto.key_table import spare_rows

_FIRST_BUCKETS = 64
_PARENT_FACTOR, _TOKEN_FACTOR = 0x9E3779B1, 0x85EBCA6B
_TOKEN_MASK = 0xFFFFFFFF
_SHIFT = 15
NOBODY = 0
"""The root, who is nobody's child."""


class Children:
    """Children by the first token of their edge, and each one's parent.

    A child is found by parent and token in a table of chains, in the mean in one or two steps;
    those of one parent are linked both ways. Numbers are the caller's. 28 bytes a number, and 4
    to 8 of the table.
    """

    def __init__(self) -> None:
        self.parents = array("I", [NOBODY])
        self.counts = array("I", [0])
        """Children of each."""
        self._tokens = array("i", [0])
        self._first = array("I", [NOBODY])
        self._next = array("I", [NOBODY])
        self._before = array("I", [NOBODY])
        """Links among children of one parent."""
        self._buckets = array("I", bytes(4 * _FIRST_BUCKETS))
        self._chained = array("I", [NOBODY])
        """Links among those of one bucket."""
        self._linked = 0

    def reach(self, count: int) -> None:
        """Let there be a place for *count* numbers."""
        if count <= len(self.parents):
            return
        more = count - len(self.parents) + spare_rows(count)
        for column in (
            *(self.parents, self.counts, self._tokens, self._first),
            *(self._next, self._before, self._chained),
        ):
            column.frombytes(bytes(more * column.itemsize))

    def find(self, parent: int, token: int) -> int:
        """Return the child of *parent* whose edge begins with *token*; NOBODY without one."""
        at = self._buckets[self._bucket(parent, token)]
        parents, tokens = self.parents, self._tokens
        while at and not (tokens[at] == token and parents[at] == parent):
            at = self._chained[at]
        return at

    def _bucket(self, parent: int, token: int) -> int:
        mixed = parent * _PARENT_FACTOR ^ (token & _TOKEN_MASK) * _TOKEN_FACTOR
        return mixed >> _SHIFT & (len(self._buckets) - 1)

    def link(self, number: int, parent: int, token: int) -> None:
        """Let *number*, who is nobody's child, be a child of *parent*'s."""
        self._linked += 1
        if self._linked > len(self._buckets):
            self._widen()
        self.parents[number], self._tokens[number] = parent, token
        bucket = self._bucket(parent, token)
        self._chained[number] = self._buckets[bucket]
        self._buckets[bucket] = number
        first = self._first[parent]
        self._next[number], self._before[number] = first, NOBODY
        if first:
            self._before[first] = number
        self._first[parent] = number
        self.counts[parent] += 1

    def unlink(self, number: int) -> None:
        """Let *number* be nobody's child."""
        parent = self.parents[number]
        bucket = self._bucket(parent, self._tokens[number])
        after = self._chained[number]
        at = self._buckets[bucket]
        if at == number:
            self._buckets[bucket] = after
        else:
            while self._chained[at] != number:
                at = self._chained[at]
            self._chained[at] = after
        following, before = self._next[number], self._before[number]
        if before:
            self._next[before] = following
        else:
            self._first[parent] = following
        if following:
            self._before[following] = before
        self.parents[number] = NOBODY
        self.counts[parent] -= 1
        self._linked -= 1

    def _widen(self) -> None:
        """Double the table."""
        before, chained = self._buckets, self._chained
        self._buckets = array("I", bytes(8 * len(before)))
        for number in before:
            while number:
                after = chained[number]
                bucket = self._bucket(self.parents[number], self._tokens[number])
                chained[number] = self._buckets[bucket]
                self._buckets[bucket] = number
                number = after

    def of(self, parent: int) -> Iterator[int]:
        """Yield the children of *parent*; nothing may change before this is dropped."""
        at = self._first[parent]
        while at:
            yield at
            at = self._next[at]
