"""Runs of a file read and summed in one call: each step is summed while it is in cache.

A thread that reads and sums step by step asks for the interpreter's lock twice a step, and
threads that do so side by side wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes, PieceRow, sums_of
from kvstore.proto.native import Loops, address, loops

FileGroups: TypeAlias = "Sequence[tuple[int, Sequence[Bytes]]]"
"""From where in the file, and what to fill, one piece behind the other."""

LOOP_FROM_BYTES = 1 << 18
"""Less is read as fast by single calls."""


def read_summed(descriptor: int, groups: FileGroups) -> list[int] | None:
    """Fill the pieces of *groups* from the file; return xxh3_64 of what arrived for each group.

    None where pieces are not of whole units or few bytes, or a read failed or was short: read it
    all again by other means, which say what is wrong.
    """
    return read_by_loop(descriptor, groups) if _is_for_loop(groups) else None


def _is_for_loop(groups: FileGroups) -> bool:
    total = 0
    for _, pieces in groups:
        sizes = [piece.nbytes for piece in pieces]
        if not sizes or not all(sizes) or any(size % LOOP_UNIT_BYTES for size in sizes):
            return False
        total += sum(sizes)
    return total >= LOOP_FROM_BYTES


def read_by_loop(
    descriptor: int, groups: FileGroups, native: Loops | None = None
) -> list[int] | None:
    """Do what ``read_summed`` does, by the compiled loop.

    None when a read failed or was short; what the pieces hold is then anything. Raises
    ValueError for a piece that it cannot fill, and for a group of none.
    """
    rows = (PieceRow * sum(len(pieces) for _, pieces in groups))()
    count = 0
    for offset, pieces in groups:
        at = offset
        for out in pieces:
            units, rest = divmod(out.nbytes, LOOP_UNIT_BYTES)
            if rest or not units or not (out.flags.c_contiguous and out.flags.writeable):
                raise ValueError(f"cannot fill {out.nbytes} bytes")
            row = rows[count]
            row.out, row.at, row.units = address(out), at, units
            count += 1
            at += out.nbytes
        if at == offset:
            raise ValueError("give at least one piece in each group")
        rows[count - 1].size = at - offset
    if (native or loops()).read_summed(rows, count, descriptor) != count:
        return None
    return sums_of(rows)
