"""Counting exponents, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.jit import compiled, i64, read_only, u8, u16, u32, void, written
from kvstore.proto.buffers import Bytes


@compiled(void, read_only(u8, 2), written(u32, 3))
def _count(exponents: NDArray[np.uint8], counts: NDArray[np.uint32]) -> None:
    """Add to *counts* (rows, 4, 256): four tables, since equal neighbours wait for each other."""
    for row in range(min(exponents.shape[0], counts.shape[0])):
        for k in range(exponents.shape[1]):
            counts[row, np.uint64(k) & np.uint64(3), exponents[row, np.uint64(k)]] += np.uint32(1)


def count_by_numba(exponents: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return how often each value occurs in each row: u32 (rows, 256)."""
    counts = np.zeros((len(exponents), 4, 256), np.uint32)
    _count(np.ascontiguousarray(exponents), counts)
    found: NDArray[np.uint32] = counts.sum(1, dtype=np.uint32)
    return found


@compiled(i64, read_only(u8), read_only(u8), written(u8), written(u16))
def pack_by_numba(
    exponents: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    out: Bytes,
    places: NDArray[np.uint16],
) -> int:
    """As ``xpack.Packer`` says; nothing is written where the room is too small."""
    items = exponents.size
    if codes.size < 256 or out.size < (items + 1) // 2 or places.size < items + 1:
        return 0
    count: Any = np.uint64(0)
    for at in range(0, items - 1, 2):
        low = codes[exponents[np.uint64(at)]]
        high = codes[exponents[np.uint64(at + 1)]]
        out[np.uint64(at // 2)] = np.uint8(low & 15 | (high & 15) << 4)
        places[count] = np.uint16(at)  # for good only when it escapes
        count += np.uint64(low >> 4)
        places[count] = np.uint16(at + 1)
        count += np.uint64(high >> 4)
    if items % 2:
        low = codes[exponents[items - 1]]
        out[items // 2] = low & 15
        places[count] = np.uint16(items - 1)
        count += np.uint64(low >> 4)
    return count  # type: ignore[no-any-return]


@compiled(void, read_only(u8), read_only(u16), written(u8))
def unpack_by_numba(packed: Bytes, pairs: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Write the two exponents that *pairs* (256,) has for each byte."""
    if pairs.size < 256 or packed.size < (out.size + 1) // 2:
        return
    for k in range(out.size // 2):
        pair = pairs[packed[np.uint64(k)]]
        out[np.uint64(2 * k)] = np.uint8(pair)
        out[np.uint64(2 * k + 1)] = np.uint8(pair >> 8)
    if out.size % 2:
        out[out.size - 1] = np.uint8(pairs[packed[out.size // 2]])
