"""Sieved planes read as docs/format.md tells them, byte by byte."""

from __future__ import annotations

import struct

_HEAD_BYTES = 36


def unsieved(data: bytes, items: int) -> bytes:
    """Return the *items* bytes of a sieved plane."""
    values, counts = data[:15], struct.unpack_from("<5I", data, 16)
    passes, at = [], _HEAD_BYTES
    for number, count in enumerate((items, *counts[:4])):
        kinds = []
        for place in range(count):
            low, high = struct.unpack_from("<QQ", data, at + 16 * (place // 64))
            kinds.append((low >> place % 64 & 1) + 2 * (high >> place % 64 & 1))
        at += 16 * -(-count // 64)
        passes.append((values[3 * number : 3 * number + 3], kinds))
    assert at + counts[4] == len(data)
    left = data[at:]
    for kept, kinds in reversed(passes):
        rest = iter(left)
        left = bytes(next(rest) if kind == 3 else kept[kind] for kind in kinds)
    return left
