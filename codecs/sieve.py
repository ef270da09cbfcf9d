"""Sieved planes: bytes of which a few values are most, as two bits each, by whole registers.

A pass goes over the bytes and writes two bits for each: which of three values it is, or none of
them. Those that are none go on to the next pass, which has three values of its own; what the last
pass leaves is kept as it is. For exponents of KV tensors that takes some 3 % more room than
Huffman's code, and no step waits for the one before it: 64 bytes are sifted with three
comparisons and one compression, and put back with one expansion. The layout stands in
docs/format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
from numpy import ascontiguousarray as contiguous

from kvstore.proto.buffers import Bytes, address
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.native import Loops, loops

PASSES = 5
VALUES = 3
"""Byte values that a pass keeps."""
GROUP = 64
"""Bytes whose bits lie together: 64 low ones, then 64 high ones."""
GROUP_BYTES = 16
PAD_BYTES = GROUP
"""Readable, and writable, bytes that loops need behind those of a pass."""

_HEAD = struct.Struct(f"<{PASSES * VALUES}BB{PASSES}I")

_SAMPLE_SHIFT = 11
"""About 2^11 bytes are counted, an odd number apart: heads have even numbers of channels."""
_MAX_COMMON = (2, 3)
"""Share of the two commonest values above which an entropy coder gains much more."""
_MAX_BITS = (33, 10)
"""Bits a byte above which so few values are not most of them."""

Squeeze: TypeAlias = Callable[[Bytes, Bytes, Bytes, Bytes], "list[int] | None"]
"""``squeeze(data, values, scratch, out)``: what each pass left; None where *out* is too short."""
Spread: TypeAlias = Callable[[Bytes, Bytes, "list[int]", Bytes, Bytes], bool]
"""``spread(body, values, counts, scratch, out)``: whether every pass had what its bits say."""


@dataclass(frozen=True, slots=True)
class Sieve:
    """One way to sift: ``squeeze`` and ``spread``, which allocate next to nothing."""

    name: str
    squeeze: Squeeze = field(repr=False)
    spread: Spread = field(repr=False)


def scratch_for(items: int) -> Bytes:
    """Return what the loops need for planes of at most *items* bytes."""
    return np.empty(2 * (items + PAD_BYTES), np.uint8)


def body_bytes(items: int, counts: list[int]) -> int:
    """Return the size of what follows a sieved plane's head: passes, then the bytes left."""
    entering = [items, *counts[:-1]]
    return sum(GROUP_BYTES * -(-count // GROUP) for count in entering) + counts[-1]


def commonest(plane: Bytes) -> Bytes | None:
    """Return the values that the passes should keep, or None where another code is shorter.

    By a sample and in whole numbers, so that all machines choose alike.
    """
    counts = np.bincount(plane[:: len(plane) >> _SAMPLE_SHIFT | 1], minlength=256)
    order = np.argsort(-counts, kind="stable")[: PASSES * VALUES]
    found = counts[order]
    total = int(counts.sum())
    left = [total - int(found[: VALUES * k].sum()) for k in range(PASSES + 1)]
    bits = 2 * sum(left[:-1]) + 8 * left[-1]
    common, of = _MAX_COMMON
    most, each = _MAX_BITS
    if int(found[:2].sum()) * of > common * total or bits * each > most * total:
        return None
    return order.astype(np.uint8)


def pack_sieved(plane: Bytes, sieve: Sieve, scratch: Bytes, out: Bytes) -> Bytes | None:
    """Return *plane* sieved, at the start of *out*; None where that does not suit it.

    *out* has as many bytes as a shorter result may have.
    """
    values = commonest(plane)
    if values is None or len(out) <= _HEAD.size:
        return None
    counts = sieve.squeeze(plane, values, scratch, out[_HEAD.size :])
    if counts is None:
        return None
    _HEAD.pack_into(out.data, 0, *values.tolist(), 0, *counts)
    return out[: _HEAD.size + body_bytes(len(plane), counts)]


def unpack_sieved(data: Bytes, sieve: Sieve, scratch: Bytes, out: Bytes) -> None:
    """Fill *out* from the sieved plane *data*. Raises InvalidFrameError."""
    if len(data) < _HEAD.size:
        raise InvalidFrameError("sieved plane", len(data), f"its head has {_HEAD.size} bytes")
    head = _HEAD.unpack(data[: _HEAD.size].tobytes())
    zero, *counts = head[PASSES * VALUES :]
    if zero:
        raise InvalidFrameError("sieved plane", zero, "a byte that is 0")
    if any(after > before for before, after in zip([len(out), *counts], counts, strict=False)):
        raise InvalidFrameError("sieved plane", counts, f"passes of {len(out)} bytes leave fewer")
    if _HEAD.size + body_bytes(len(out), counts) != len(data):
        raise InvalidFrameError("sieved plane", len(data), f"its passes leave {counts}")
    values = data[: PASSES * VALUES]
    if not sieve.spread(data[_HEAD.size :], values, counts, scratch, out):
        raise InvalidFrameError("sieved plane", counts, "its bits say otherwise")


@lru_cache(maxsize=4)
def native_sieve(path: str | None = None) -> Sieve:
    """Return the compiled loops of *path*; of this processor's best where it is None."""
    native = loops(path)
    return Sieve(native.path, partial(_squeeze_native, native), partial(_spread_native, native))


def _squeeze_native(
    native: Loops, data: Bytes, values: Bytes, scratch: Bytes, out: Bytes
) -> list[int] | None:
    _check(data, values, scratch)
    given, kept, counts = contiguous(data), contiguous(values), np.empty(PASSES, np.int64)
    is_done = native.sieve_squeeze(
        address(given), len(given), address(kept), address(scratch), address(out),
        len(out), address(counts),
    )  # fmt: skip
    return counts.tolist() if is_done else None


def _spread_native(
    native: Loops, body: Bytes, values: Bytes, counts: list[int], scratch: Bytes, out: Bytes
) -> bool:
    _check(out, values, scratch)
    if body_bytes(len(out), counts) != len(body) or max(counts) > len(out):
        return False
    given, kept, each = contiguous(body), contiguous(values), np.array(counts, np.int64)
    return bool(
        native.sieve_spread(
            address(given), len(given), address(kept), address(each), address(scratch),
            address(out), len(out),
        )
    )  # fmt: skip


def _check(data: Bytes, values: Bytes, scratch: Bytes) -> None:
    if len(scratch) < 2 * (len(data) + PAD_BYTES) or len(values) != PASSES * VALUES:
        raise ValueError(f"{len(scratch)} bytes of scratch and {len(values)} values")
