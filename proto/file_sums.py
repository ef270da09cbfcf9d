"""Runs of a file read and summed at once, where a loop for that can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.proto.background import improving
from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes

FileGroups: TypeAlias = "Sequence[tuple[int, Sequence[Bytes]]]"
"""From where in the file, and what to fill, one piece behind the other."""

LOOP_FROM_BYTES = 1 << 18
"""Less is read as fast by single calls."""

ReadGroups: TypeAlias = "Callable[[int, FileGroups], list[int] | None]"


def can_sum() -> bool:
    """Whether there is such a loop yet. The first who asks has it made."""
    return _best_loop() is not None


def read_summed(descriptor: int, groups: FileGroups) -> list[int] | None:
    """Fill the pieces of *groups* from the file; return xxh3_64 of what arrived for each group.

    None where there is no such loop, it does not take pieces like these, or a read failed or was
    short: read it all again by other means, which say what is wrong.
    """
    loop = _best_loop() if _is_for_loop(groups) else None
    return None if loop is None else loop(descriptor, groups)


def _is_for_loop(groups: FileGroups) -> bool:
    total = 0
    for _, pieces in groups:
        sizes = [piece.nbytes for piece in pieces]
        if not sizes or not all(sizes) or any(size % LOOP_UNIT_BYTES for size in sizes):
            return False
        total += sum(sizes)
    return total >= LOOP_FROM_BYTES


def _no_loop() -> ReadGroups | None:
    return None


@improving(_no_loop)
def _best_loop() -> ReadGroups | None:
    """Return the compiled loop, where the extra ``cpu-fast`` is there; while it is made, None."""
    try:
        from kvstore.proto.read_loop import ReadLoop, agrees

        loop = ReadLoop()
    except (ImportError, OSError, RuntimeError):  # not there, or not for this machine
        return None
    return loop if agrees(loop) else None
