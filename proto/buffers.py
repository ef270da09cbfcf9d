"""Moving bytes between caller-owned buffers without holding the interpreter lock.

Both sides of every data path need these three verbs and nothing else touches payload bytes.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

Bytes: TypeAlias = NDArray[np.uint8]
"""A one-dimensional, contiguous view of bytes."""


class Sliced(Protocol):
    """Bytes that are had slice by slice: an array of them, or a file's."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, piece: slice, /) -> Bytes:
        """Return those of *piece*."""


BLOCK_BYTES = 1 << 19
"""Copy and checksum in steps that stay in the second-level cache."""


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
    """Copy *data* to *out* and return xxh3_64 of what arrived, read while it is in cache."""
    if len(data) <= BLOCK_BYTES:
        np.copyto(out, data)
        return checksum(out)
    return _copy_blocks(out, data)


def _copy_blocks(out: Bytes, data: Bytes) -> int:
    state = xxh3_64()
    copy_summed(out, data, state)
    return state.intdigest()


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
