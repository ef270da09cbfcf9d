"""Allocation in a fixed range of bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey


class Span(NamedTuple):
    """A chunk from *start* to *end* of a range, or a hole, which has no key."""

    start: int
    end: int
    key: ChunkKey | None = None


class FreeList:
    """The free ranges of 0..capacity_bytes, in multiples of granule_bytes. Owns no memory.

    The owner tracks its allocations and their sizes, and locks. An allocation takes the smallest
    hole that fits; a free merges with both neighbours, so two holes never touch. Each costs
    O(log n) comparisons and moves parts of two sorted lists.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        self._granule = granule_bytes
        self.used_bytes = capacity_bytes
        """Allocated bytes, rounding included."""
        self._ends: dict[int, int] = {}
        """End of each hole by its start."""
        self._starts: list[int] = []
        """Start of each hole, ascending."""
        self._by_size: list[tuple[int, int]] = []
        """Size and start of each hole, ascending."""
        self._add_hole(0, capacity_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest hole, the largest possible allocation."""
        return self._by_size[-1][0] if self._by_size else 0

    def holes(self) -> list[Span]:
        """Return the current holes."""
        return [Span(start, end) for start, end in self._ends.items()]

    def rounded(self, size_bytes: int) -> int:
        """Return *size_bytes* in whole granules. Raises InvalidRequestError below 1."""
        if size_bytes < 1:
            raise InvalidRequestError("size_bytes", size_bytes, "give a positive size")
        return -(-size_bytes // self._granule) * self._granule

    def allocate(self, size_bytes: int) -> int | None:
        """Take the smallest hole that fits and return its offset; None when none fits."""
        size_bytes = self.rounded(size_bytes)
        at = bisect_left(self._by_size, (size_bytes, 0))
        if at == len(self._by_size):
            return None
        _, offset = self._by_size[at]
        end = self._take_hole(offset)
        self._add_hole(offset + size_bytes, end)
        return offset

    def reserve_at(self, offset: int, size_bytes: int) -> bool:
        """Allocate *size_bytes* at exactly *offset*, as before a restart. Returns False, changing
        nothing, when any of it is allocated or outside, or *offset* is no granule.
        """
        if size_bytes < 1 or offset < 0 or offset % self._granule:
            return False
        stop = offset + self.rounded(size_bytes)
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or stop > self._ends[self._starts[at]]:
            return False
        start = self._starts[at]
        end = self._take_hole(start)
        self._add_hole(start, offset)
        self._add_hole(stop, end)
        return True

    def free_range(self, offset: int, size_bytes: int) -> None:
        """Free the allocation of *size_bytes* at *offset*; other ranges corrupt the list."""
        end = offset + self.rounded(size_bytes)
        at = bisect_left(self._starts, offset)
        if end in self._ends:
            end = self._take_hole(end)
        if at and self._ends[self._starts[at - 1]] == offset:
            offset = self._starts[at - 1]
            self._take_hole(offset)
        self._add_hole(offset, end)

    def _add_hole(self, start: int, end: int) -> None:
        if start < end:
            self._ends[start] = end
            insort(self._starts, start)
            insort(self._by_size, (end - start, start))
            self.used_bytes -= end - start

    def _take_hole(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self.used_bytes += end - start
        return end


def adjacent_run(spans: Iterable[Span], key: ChunkKey, size_bytes: int) -> list[ChunkKey]:
    """Return *key* and neighbours that, with the holes between them, span *size_bytes*.

    *spans* are the chunks and holes of one range. The run grows towards the smaller neighbour; it
    stays shorter between reservations or at the range's ends.
    """
    found = sorted(spans)
    low = high = [span.key for span in found].index(key)
    while found[high].end - found[low].start < size_bytes:
        before = found[low - 1] if low else None
        after = found[high + 1] if high + 1 < len(found) else None
        costs = {
            side: span.end - span.start if span.key else 0
            for side, span in ((-1, before), (1, after))
            if span and (span.end == found[low].start or span.start == found[high].end)
        }
        if not costs:
            break
        side = min(costs, key=costs.__getitem__)
        low, high = min(low, low + side), max(high, high + side)
    return [span.key for span in found[low : high + 1] if span.key]
