"""Conversion between stored bit patterns and float32.

numpy has no bfloat16, so the parts of a chunk are unsigned integers; the lossy codecs compute in
float32, which represents all three float types exactly.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, DType, LayerKind

Floats: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.float16]

FLOAT_TYPES = frozenset({DType.bfloat16, DType.float16, DType.float32})
"""The types that lossy codecs code; the others are already quantised, or are no numbers."""

_EXPONENTS = {DType.bfloat16: 0x7F80, DType.float16: 0x7C00, DType.float32: 0x7F800000}
_LARGEST_HALF = np.float32(65504)


def has_floats(component: Component) -> bool:
    """Return whether lossy codecs may code it: it has floats and is no state."""
    return component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state


def is_finite(bits: NDArray[Any], dtype: DType) -> bool:
    """Return whether *bits*, unsigned integers of *dtype*, have neither NaN nor infinity."""
    mask = bits.dtype.type(_EXPONENTS[dtype])
    return bool((bits & mask).max() != mask)


def to_float32(bits: NDArray[Any], dtype: DType) -> Floats:
    """Return the values of *bits* (unsigned integers, any strides) as a new C-ordered array."""
    if dtype is DType.bfloat16:
        wide = np.empty(bits.shape, np.uint32)
        np.left_shift(bits, np.uint32(16), out=wide, casting="unsafe", dtype=np.uint32)
        return wide.view(np.float32)
    kind = "<f2" if dtype is DType.float16 else "<f4"
    return bits.view(kind).astype(np.float32, order="C")


def from_float32(values: Floats, dtype: DType, out: NDArray[Any]) -> None:
    """Round *values*, finite and below 2^127, into *out*: unsigned integers of *dtype*'s size.

    To nearest, ties to even; values beyond float16 become its largest number. *values* may be
    overwritten.
    """
    if dtype is DType.bfloat16:
        wide = values.view(np.uint32)
        odd = wide >> np.uint32(16)
        odd &= np.uint32(1)
        odd += np.uint32(0x7FFF)
        odd += wide
        odd >>= np.uint32(16)
        np.copyto(out, odd, casting="unsafe")
    elif dtype is DType.float16:
        np.clip(values, -_LARGEST_HALF, _LARGEST_HALF, out=values)
        np.copyto(out, values.astype("<f2").view("<u2"))
    else:
        np.copyto(out, values.view("<u4"))


def half_up(values: Floats) -> Halves:
    """Return the least float16 >= each of *values*; infinity if none."""
    return _half_towards(values, np.inf)


def half_down(values: Floats) -> Halves:
    """Return the greatest float16 <= each of *values*; -infinity if none."""
    return _half_towards(values, -np.inf)


def _half_towards(values: Floats, limit: float) -> Halves:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
        back = half.astype(np.float32)
        short = back < values if limit > 0 else back > values
        if short.any():
            half[short] = np.nextafter(half[short], np.float16(limit))
    return half


def largest_error(found: Floats, wanted: Floats) -> float:
    """Return the largest |found - wanted|, rounded up to the next float32."""
    error = np.abs(found - wanted).max(initial=np.float32(0))
    return float(np.nextafter(error, np.float32(np.inf))) if error else 0.0


def check_scales(scales: NDArray[Any]) -> None:
    """Raise InvalidFrameError unless *scales*, float16, are finite and not negative."""
    if not ((scales >= 0) & (scales < np.inf)).all():
        raise InvalidFrameError("scale", "NaN, infinite or negative", "a scale is a number >= 0")


class ByteCutter:
    """Cuts bytes into consecutive typed views."""

    def __init__(self, data: Bytes, at: int = 0) -> None:
        self._data = data
        self.at = at

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        """Return the next *count* elements. Raises InvalidFrameError if there are fewer."""
        start = self.at
        self.at += count * np.dtype(dtype).itemsize
        if self.at > len(self._data):
            raise InvalidFrameError("stored_bytes", len(self._data), f"at least {self.at}")
        return self._data[start : self.at].view(dtype)

    def end(self) -> None:
        """Raise InvalidFrameError if bytes are left."""
        if self.at != len(self._data):
            raise InvalidFrameError("stored_bytes", len(self._data), f"its counts give {self.at}")
