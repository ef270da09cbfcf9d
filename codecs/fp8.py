"""The fp8 codec: eight-bit floats (e4m3) under float16 scales.

Scales stand per channel for keys, whose large channels stay large over the tokens, and per
token for values and latents, as KIVI groups them (Liu et al., KIVI, ICML 2024, section 3).
The eight bits are those of OCP OFP8 E4M3: largest number 448, no infinities.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, check_scales, from_float32, half_up, to_float32
from kvstore.codecs.part_codec import Box, PartCodec, Role, boxes
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, Fidelity

LARGEST = 448.0
_NAN = 0x7F
_REBIAS = np.uint32((127 - 7) << 3)
_HALF_LESS_ONE = np.uint32((1 << 19) - 1)
_LEAST_NORMAL, _STEPS_OF_LEAST = np.float32(2.0**-6), np.float32(2.0**9)


class Fp8Codec(PartCodec):
    """Half of bfloat16's bytes, an error in proportion to each number; no bound is promised."""

    name = "fp8"
    codec_id = 5
    revision = 1
    fidelity = Fidelity.none

    def coded_bytes(self, component: Component, role: Role) -> int:
        """Size of one coded part: its scales, then a byte a number."""
        heads, tokens, dim = component.shape
        return 2 * heads * (dim if role is Role.keys else tokens) + heads * tokens * dim

    def encode_part(self, bits: Part, component: Component, role: Role, out: Bytes) -> float | None:
        """Code *bits*; return 0.0, or None where a scale is too large for float16."""
        scales, codes = _fields(out, component, role)
        dtype = component.dtype
        magnitude = np.zeros(scales.shape, np.float32)
        axis = 1 if role is Role.keys else 2
        for box in boxes(component.shape):
            at = _scale_box(box, role)
            largest = np.abs(to_float32(bits[box], dtype)).max(axis, keepdims=True)
            np.maximum(magnitude[at], largest, out=magnitude[at])
        scale = half_up(magnitude / np.float32(LARGEST))
        if not np.isfinite(scale).all():
            return None
        np.copyto(scales, scale)
        divisor = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
        for box in boxes(component.shape):
            values = to_float32(bits[box], dtype)
            values /= divisor[_scale_box(box, role)]
            np.copyto(codes[box], to_e4m3(values))
        return 0.0

    def decode_part(self, data: Bytes, component: Component, role: Role, out: Part) -> None:
        """Decode *data* into *out*. Raises InvalidFrameError for scales and codes never written."""
        scales, codes = _fields(data, component, role)
        check_scales(scales)
        wide = scales.astype(np.float32)
        for box in boxes(component.shape):
            piece = codes[box]
            if (piece & _NAN).max() == _NAN:
                raise InvalidFrameError("code", _NAN, "e4m3 numbers here are never NaN")
            values = from_e4m3(piece)
            values *= wide[_scale_box(box, role)]
            from_float32(values, component.dtype, out[box])


def _fields(data: Bytes, component: Component, role: Role) -> tuple[Part, Part]:
    """Return the scales, shaped to be multiplied with a part, and the codes, as views."""
    heads, tokens, dim = component.shape
    shape = (heads, 1, dim) if role is Role.keys else (heads, tokens, 1)
    count = 2 * heads * max(shape[1:])
    return data[:count].view("<f2").reshape(shape), data[count:].reshape(component.shape)


def _scale_box(box: Box, role: Role) -> Box:
    heads, tokens, dim = box
    return (heads, slice(0, 1), dim) if role is Role.keys else (heads, tokens, slice(0, 1))


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Return the codes nearest to *values*, finite; ties to even, saturating at 448."""
    bits = values.view(np.uint32)
    size = np.minimum(np.abs(values), np.float32(LARGEST))
    wide = size.view(np.uint32)
    code = wide >> np.uint32(20)
    code &= np.uint32(1)
    code += _HALF_LESS_ONE
    code += wide
    code >>= np.uint32(20)
    code -= _REBIAS
    small = size < _LEAST_NORMAL
    if small.any():
        code[small] = np.rint(size[small] * _STEPS_OF_LEAST).astype(np.uint32)
    code |= (bits >> np.uint32(24)) & np.uint32(0x80)
    return code.astype(np.uint8)


def from_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """Return the value of each of *codes*; NaN for 0x7F and 0xFF."""
    values: Floats = np.take(_table(), codes)
    return values


@lru_cache(maxsize=1)
def _table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(code & _NAN) == _NAN] = np.nan
    table = np.where(code & 0x80, -size, size).astype(np.float32)
    table.flags.writeable = False
    return table
