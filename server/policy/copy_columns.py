"""Columns of what differs between the copies of one chunk, by row of the RadixIndex."""

from __future__ import annotations

from array import array


class CopyColumns:
    """The copies on one tier. Not thread-safe, as the index."""

    def __init__(self) -> None:
        self.sizes = array("Q")
        self.codecs = array("H")
        self.fidelities = array("B")
        """One more than the copy's; 0 where this tier has none."""

    def extend(self, count: int) -> None:
        """Make room for that many more rows."""
        for column in (self.sizes, self.codecs, self.fidelities):
            column.frombytes(bytes(count * column.itemsize))
