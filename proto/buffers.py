"""Copies between caller-owned buffers that do not hold the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.proto.native import Loops, loops

Bytes: TypeAlias = NDArray[np.uint8]
"""A one-dimensional, contiguous view of bytes."""


class Sliced(Protocol):
    """Bytes that can be read by slices: an array, or a file."""

    def __len__(self) -> int:
        """Return the number of bytes."""

    def __getitem__(self, piece: slice, /) -> Bytes:
        """Return the bytes of *piece*."""


Pieces: TypeAlias = "Sequence[tuple[Bytes, Bytes]]"
"""Pairs of destination and source of the same length."""

BLOCK_BYTES = 1 << 19
"""Copy and checksum in steps that stay in the second-level cache."""

LOOP_FROM_BYTES = 1 << 19
"""Below this numpy copies as fast and leaves the data in cache for the next reader."""
LOOP_UNIT_BYTES = 1024
"""The compiled loop takes pieces of a multiple of this size."""


def as_bytes(buffer: memoryview | bytes | bytearray | Bytes) -> Bytes:
    """Return *buffer* as a flat array of bytes that shares its memory."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)


def address(data: NDArray[Any]) -> int:
    """Return the memory address of *data*; 0 if it is empty."""
    if not data.size:
        return 0
    if data.flags.writeable and data.flags.c_contiguous:  # four times as fast as numpy's accessor
        with suppress(ValueError):  # the dtype is another library's
            return ctypes.addressof(ctypes.c_char.from_buffer(data.data))
    return int(data.ctypes.data)


def addresses(*data: NDArray[Any]) -> list[int]:
    """Return the memory address of each of *data*."""
    return [address(each) for each in data]


checksum: Callable[[memoryview | bytes | Bytes], int] = xxh3_64_intdigest  # type: ignore[assignment,unused-ignore]
"""Returns xxh3_64 of its argument."""


def copy_bytes(out: Bytes, data: Bytes) -> None:
    """Copy *data* to *out* of the same length, without the interpreter lock."""
    np.copyto(out, data)


def copy_groups(groups: Sequence[Pieces]) -> list[int]:
    """Copy all pieces of *groups*; return xxh3_64 of the copied bytes of each group.

    The checksum covers the destination, or each word is loaded once for both copy and checksum: a
    concurrent write to the source cannot go unnoticed.
    """
    if _is_for_loop(groups, LOOP_FROM_BYTES):
        return copy_by_loop(groups)
    return list(map(_copy_blocks, groups))


def _is_for_loop(groups: Sequence[Sequence[tuple[Bytes, object]]], least_bytes: int) -> bool:
    """Return whether all pieces are whole units, and together at least *least_bytes*."""
    total = 0
    for pieces in groups:
        if not pieces:
            return False
        for out, _ in pieces:
            size = len(out)
            if not size or size % LOOP_UNIT_BYTES:
                return False
            total += size
    return total >= least_bytes


def _copy_blocks(pieces: Pieces) -> int:
    state = xxh3_64()
    for out, data in pieces:
        copy_summed(out, data, state)
    return state.intdigest()


loops()  # the library is required: fail at import, not at the first large copy


class PieceRow(ctypes.Structure):
    """A piece for the loops of ``native/sums.c``; the last of a group has the group's size."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("out", "at", "units", "size", "sum")]


def copy_by_loop(groups: Sequence[Pieces], native: Loops | None = None) -> list[int]:
    """Do what ``copy_groups`` does, in the compiled loop, for pieces of whole units.

    Each word is loaded once, stored past the caches where possible, as the next reader is another
    core, and added to its XXH3. Raises ValueError for a piece whose source and destination differ
    in length, for one that is not a multiple of the unit, and for an empty group.
    """
    rows = _rows(groups)
    (native or loops()).copy_summed(rows, len(rows), True)
    return [row.sum for row in rows if row.size]


def _rows(groups: Sequence[Sequence[tuple[Bytes, Bytes | int]]]) -> ctypes.Array[PieceRow]:
    """Return the rows of pieces to fill, each from memory or from a file offset."""
    rows = (PieceRow * sum(map(len, groups)))()
    count = 0
    for pieces in groups:
        size = 0
        for out, source in pieces:
            nbytes = out.nbytes
            units, rest = divmod(nbytes, LOOP_UNIT_BYTES)
            if rest or not units or not (out.flags.c_contiguous and out.flags.writeable):
                raise ValueError(f"cannot copy to or fill {nbytes} bytes")
            row = rows[count]
            row.out, row.units = address(out), units
            if isinstance(source, int):
                row.at = source
            elif source.nbytes == nbytes and source.flags.c_contiguous:
                row.at = address(source)
            else:
                raise ValueError(f"could not broadcast or copy {source.nbytes} to {nbytes} bytes")
            count += 1
            size += nbytes
        if not size:
            raise ValueError("give at least one piece in each group")
        rows[count - 1].size = size
    return rows


def copy_summed(out: Bytes, data: Bytes, state: xxh3_64) -> None:
    """Copy *data* to *out* and add the copied bytes to *state*, block by block."""
    if len(data) <= BLOCK_BYTES:
        np.copyto(out, data)
        state.update(out)  # type: ignore[arg-type,unused-ignore]
        return
    for start in range(0, len(data), BLOCK_BYTES):
        block = out[start : start + BLOCK_BYTES]
        np.copyto(block, data[start : start + BLOCK_BYTES])
        state.update(block)  # type: ignore[arg-type,unused-ignore]


FileGroups: TypeAlias = "Sequence[tuple[int, Sequence[Bytes]]]"
"""Pairs of a file offset and the pieces to fill from there, back to back."""

READ_LOOP_FROM_BYTES = 1 << 18
"""Below this single calls are as fast."""


def read_summed(descriptor: int, groups: FileGroups) -> list[int] | None:
    """Fill the pieces of *groups* from the file; return xxh3_64 of the bytes of each group.

    None when pieces are not whole units or too small, or a read failed or was short: the caller
    reads all of it again by other means, which raise with the reason.
    """
    is_for_loop = _is_for_loop(_placed(groups), READ_LOOP_FROM_BYTES)
    return read_by_loop(descriptor, groups) if is_for_loop else None


def _placed(groups: FileGroups) -> list[list[tuple[Bytes, int]]]:
    """Return each piece with its file offset."""
    placed = []
    for offset, pieces in groups:
        starts = accumulate((out.nbytes for out in pieces), initial=offset)
        placed.append(list(zip(pieces, starts, strict=False)))
    return placed


def read_by_loop(
    descriptor: int, groups: FileGroups, native: Loops | None = None
) -> list[int] | None:
    """Do what ``read_summed`` does, in the compiled loop.

    Threads that read and sum in Python contend for the interpreter lock. Raises ValueError for a
    piece that it cannot fill, and for an empty group.
    """
    rows = _rows(_placed(groups))
    if (native or loops()).read_summed(rows, len(rows), descriptor) != len(rows):
        return None
    return [row.sum for row in rows if row.size]
