"""Moving bytes between caller-owned buffers without holding the interpreter lock.

Both sides of every data path need these three verbs and nothing else touches payload bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.proto.background import improving

Bytes: TypeAlias = NDArray[np.uint8]
"""A one-dimensional, contiguous view of bytes."""


class Sliced(Protocol):
    """Bytes that are had slice by slice: an array of them, or a file's."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, piece: slice, /) -> Bytes:
        """Return those of *piece*."""


Pieces: TypeAlias = "Sequence[tuple[Bytes, Bytes]]"
"""Where to, and what, of the same length each."""

BLOCK_BYTES = 1 << 19
"""Copy and checksum in steps that stay in the second-level cache."""

LOOP_FROM_BYTES = 1 << 19
"""Below, what numpy copies is in cache for who reads it next, and no slower to copy."""
LOOP_UNIT_BYTES = 1024
"""It takes pieces of a multiple of this."""


def as_bytes(buffer: memoryview | bytes | bytearray | Bytes) -> Bytes:
    """Return *buffer* as a flat array of bytes that shares its memory."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def checksum(data: memoryview | bytes | Bytes) -> int:
    """Return xxh3_64 of *data*."""
    return xxh3_64_intdigest(data)  # type: ignore[arg-type,unused-ignore]


def copy_bytes(out: Bytes, data: Bytes) -> None:
    """Copy *data* to *out* of the same length; the interpreter lock is free meanwhile."""
    np.copyto(out, data)


def copy_checked(out: Bytes, data: Bytes) -> int:
    """Copy *data* to *out* and return xxh3_64 of what arrived."""
    return copy_pieces([(out, data)])


def copy_pieces(pieces: Pieces) -> int:
    """Copy each of *pieces* and return xxh3_64 of what arrived, one behind the other."""
    return copy_groups([pieces])[0]


def copy_groups(groups: Sequence[Pieces]) -> list[int]:
    """Copy all pieces of *groups*; return xxh3_64 of what arrived for each group.

    What is summed is what was stored: read from its place, or loaded once for both. Who writes to
    the data meanwhile slips nothing past.
    """
    loop = _best_loop() if _is_for_loop(groups) else None
    return list(map(_copy_blocks, groups)) if loop is None else loop(groups)


def copy_many(pieces: Pieces) -> None:
    """Copy each of *pieces*, past the caches where they are many bytes: whoever reads them next is
    another core.
    """
    loop = _best_loop() if _is_for_loop([pieces]) else None
    if loop is not None:
        loop([pieces])
        return
    for out, data in pieces:
        np.copyto(out, data)


def _is_for_loop(groups: Sequence[Pieces]) -> bool:
    total = 0
    for pieces in groups:
        size = 0
        for _, data in pieces:
            if not len(data) or len(data) % LOOP_UNIT_BYTES:
                return False
            size += len(data)
        if not size:
            return False
        total += size
    return total >= LOOP_FROM_BYTES


def _copy_blocks(pieces: Pieces) -> int:
    state = xxh3_64()
    for out, data in pieces:
        copy_summed(out, data, state)
    return state.intdigest()


CopyGroups: TypeAlias = "Callable[[Sequence[Pieces]], list[int]]"


def _no_loop() -> CopyGroups | None:
    return None


@improving(_no_loop)
def _best_loop() -> CopyGroups | None:
    """Return the compiled loop, where the extra ``cpu-fast`` is there; while it is made, None."""
    try:
        from kvstore.proto.checksum_loops import CopyLoop, copies_agree

        loop = CopyLoop()
    except (ImportError, OSError, RuntimeError):  # not there, or not for this machine
        return None
    return loop if copies_agree(loop) else None


def copy_summed(out: Bytes, data: Bytes, state: xxh3_64) -> None:
    """Copy *data* to *out* and add what arrived to *state*, block by block."""
    if len(data) <= BLOCK_BYTES:
        np.copyto(out, data)
        state.update(out)  # type: ignore[arg-type,unused-ignore]
        return
    for start in range(0, len(data), BLOCK_BYTES):
        block = out[start : start + BLOCK_BYTES]
        np.copyto(block, data[start : start + BLOCK_BYTES])
        state.update(block)  # type: ignore[arg-type,unused-ignore]


FileGroups: TypeAlias = "Sequence[tuple[int, Sequence[Bytes]]]"
"""From where in the file, and what to fill, one piece behind the other."""

READ_LOOP_FROM_BYTES = 1 << 18
"""Less is read as fast by single calls."""

ReadGroups: TypeAlias = "Callable[[int, FileGroups], list[int] | None]"


def can_sum() -> bool:
    """Whether there is such a loop yet. The first who asks has it made."""
    return _best_read_loop() is not None


def read_summed(descriptor: int, groups: FileGroups) -> list[int] | None:
    """Fill the pieces of *groups* from the file; return xxh3_64 of what arrived for each group.

    None where there is no such loop, it does not take pieces like these, or a read failed or was
    short: read it all again by other means, which say what is wrong.
    """
    loop = _best_read_loop() if _is_for_read_loop(groups) else None
    return None if loop is None else loop(descriptor, groups)


def _is_for_read_loop(groups: FileGroups) -> bool:
    total = 0
    for _, pieces in groups:
        sizes = [piece.nbytes for piece in pieces]
        if not sizes or not all(sizes) or any(size % LOOP_UNIT_BYTES for size in sizes):
            return False
        total += sum(sizes)
    return total >= READ_LOOP_FROM_BYTES


def _no_read_loop() -> ReadGroups | None:
    return None


@improving(_no_read_loop)
def _best_read_loop() -> ReadGroups | None:
    """Return the compiled loop, where the extra ``cpu-fast`` is there; while it is made, None."""
    try:
        from kvstore.proto.checksum_loops import ReadLoop, reads_agree

        loop = ReadLoop()
    except (ImportError, OSError, RuntimeError):  # not there, or not for this machine
        return None
    return loop if reads_agree(loop) else None
