"""The grouped codecs gq8, gq4, gq2: whole numbers under the scale of a group of 64.

Groups run over tokens for keys and over channels for values and latents, as in KIVI (Liu et
al., ICML 2024, section 3.2); the last tokens, which fill no group of keys, keep their bits.
Four and two bits are asymmetric, with a float16 scale and minimum; eight bits are symmetric.

Scales are rounded up and minima down, so that no number lies outside its group's range:
|error| <= scale / 2, but for float32 arithmetic and the rounding to the part's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import (
    Floats,
    Halves,
    check_scales,
    from_float32,
    half_down,
    half_up,
    largest_error,
    to_float32,
)
from kvstore.codecs.grouped_loops import GROUP, Loops, native_loops
from kvstore.codecs.part_codec import Box, PartCodec, Role, boxes
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Accuracy, Component, DType


class GroupedCodec(PartCodec):
    """What the three have in common; a subclass says how many bits."""

    accuracy = Accuracy.bounded
    bits: ClassVar[int]

    def __init__(self, loops: Loops | None = None) -> None:
        self._loops = loops

    @property
    def loops(self) -> Loops:
        """What computes: the fastest there is, unless the maker chose."""
        return self._loops or native_loops()

    def coded_bytes(self, component: Component, role: Role) -> int:
        """Size of one coded part: scales, minima, packed codes, and the tokens left over."""
        return _Fields.places(component, role, self.bits)[-1]

    def encode_part(self, bits: Part, component: Component, role: Role, out: Bytes) -> float | None:
        """Code *bits*; return the largest error, or None where the promise cannot be kept."""
        fields, error = _Fields.of(out, component, role, self.bits), 0.0
        grouped = fields.codes.shape[1]
        if not grouped:
            return None  # too few tokens for a group: nothing would be coded
        for box in boxes((component.kv_heads, grouped, component.head_dim), GROUP):
            values = to_float32(bits[box], component.dtype)
            group = self._fit(values, role is Role.keys)
            if group is None:
                return None
            at = _group_box(box, role)
            fields.scales[at] = group.scale
            if fields.minima is not None:
                fields.minima[at] = group.base
            fields.codes[_code_box(box, self.bits)] = pack(group.codes, self.bits)
            error = max(error, _rounded_error(group.back, values, component.dtype))
        np.copyto(fields.rest, bits[:, grouped:])
        return error

    def _fit(self, values: Floats, by_token: bool) -> _Groups | None:
        """Quantise a box; None where float16 cannot hold a scale or the promise is not kept."""
        low, high = self.loops.bounds(values, by_token)
        for extreme in (low, high):  # of two zeros, backends may take either
            extreme += np.float32(0)
        levels = 127 if self.bits == 8 else (1 << self.bits) - 1
        base = None if self.bits == 8 else half_down(low)
        centre = None if base is None else base.astype(np.float32)
        span: Floats = np.maximum(high, -low) if centre is None else high - centre
        scale = half_up(span / np.float32(levels))
        if not np.isfinite(scale).all() or (base is not None and not np.isfinite(base).all()):
            return None
        wide = scale.astype(np.float32)
        found = self.loops.quantise(values, wide, centre, levels, by_token)
        return None if found is None else _Groups(scale, base, *found)

    def decode_part(self, data: Bytes, component: Component, role: Role, out: Part) -> None:
        """Decode *data* into *out*. Raises InvalidFrameError for scales never written."""
        fields = _Fields.of(data, component, role, self.bits)
        check_scales(fields.scales)
        if fields.minima is not None and not np.isfinite(fields.minima).all():
            raise InvalidFrameError("minimum", "NaN or infinite", "a minimum is a number")
        grouped, expand = fields.codes.shape[1], self.loops.expand
        for box in boxes((component.kv_heads, grouped, component.head_dim), GROUP):
            width = box[2].stop - box[2].start
            codes = unpack(fields.codes[_code_box(box, self.bits)], width, self.bits)
            at = _group_box(box, role)
            base = None if fields.minima is None else _single(fields.minima[at])
            values = expand(codes, _single(fields.scales[at]), base, role is Role.keys)
            from_float32(values, component.dtype, out[box])
        np.copyto(out[:, grouped:], fields.rest)


class Gq8Codec(GroupedCodec):
    """Eight bits, symmetric: -127 to 127 times the scale."""

    name = "gq8"
    codec_id = 6
    revision = 1
    bits = 8


class Gq4Codec(GroupedCodec):
    """Four bits: 0 to 15 times the scale above the minimum."""

    name = "gq4"
    codec_id = 7
    revision = 1
    bits = 4


class Gq2Codec(GroupedCodec):
    """Two bits: 0 to 3 times the scale above the minimum."""

    name = "gq2"
    codec_id = 8
    revision = 1
    bits = 2


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one coded part, as views.

    scales, minima: (kv_heads, groups of tokens, head_dim) for keys, else (kv_heads, tokens,
    groups of channels); codes: (kv_heads, grouped tokens, bytes of a row); rest: (kv_heads,
    tokens left over, head_dim). Eight bits have no minima.
    """

    scales: Part
    minima: Part | None
    codes: NDArray[np.uint8]
    rest: Part

    @staticmethod
    def places(component: Component, role: Role, bits: int) -> tuple[int, ...]:
        """Return where scales, minima, codes and rest end."""
        heads, tokens, dim = component.shape
        grouped = tokens // GROUP * GROUP if role is Role.keys else tokens
        groups = grouped // GROUP * dim if role is Role.keys else tokens * -(-dim // GROUP)
        scales = 2 * heads * groups
        minima = scales + (0 if bits == 8 else scales)
        codes = minima + heads * grouped * -(-dim * bits // 8)
        rest = codes + heads * (tokens - grouped) * dim * component.dtype.item_bytes
        return scales, minima, codes, rest

    @classmethod
    def of(cls, data: Bytes, component: Component, role: Role, bits: int) -> _Fields:
        """Return the fields of *data*, which has the size of a coded part."""
        heads, tokens, dim = component.shape
        grouped = tokens // GROUP * GROUP if role is Role.keys else tokens
        if role is Role.keys:
            shape = (heads, grouped // GROUP, dim)
        else:
            shape = (heads, tokens, -(-dim // GROUP))
        scales, minima, codes, rest = cls.places(component, role, bits)
        return cls(
            data[:scales].view("<f2").reshape(shape),
            None if bits == 8 else data[scales:minima].view("<f2").reshape(shape),
            data[minima:codes].reshape(heads, grouped, -(-dim * bits // 8)),
            data[codes:rest]
            .view(f"<u{component.dtype.item_bytes}")
            .reshape(heads, tokens - grouped, dim),
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one box: what is stored of it, and ``back``, what that stands for."""

    scale: Halves
    base: Halves | None
    codes: NDArray[np.uint8]
    back: Floats


def _rounded_error(back: Floats, values: Floats, dtype: DType) -> float:
    """Return the largest absolute error of what decoding gives, rounding included."""
    bits = np.empty(back.shape, f"<u{dtype.item_bytes}")
    from_float32(back, dtype, bits)
    return largest_error(to_float32(bits, dtype), values)


def _single(halves: Part) -> Floats:
    return halves.astype(np.float32, order="C")


def _group_box(box: Box, role: Role) -> Box:
    heads, tokens, dim = box
    if role is Role.keys:
        return heads, _groups_of(tokens), dim
    return heads, tokens, _groups_of(dim)


def _groups_of(items: slice) -> slice:
    return slice(items.start // GROUP, -(-items.stop // GROUP))


def _code_box(box: Box, bits: int) -> Box:
    heads, tokens, dim = box
    return heads, tokens, slice(dim.start * bits // 8, -(-dim.stop * bits // 8))


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack *codes* (..., n) into rows of whole bytes, the first code in the lowest bits."""
    each = 8 // bits
    packed = codes[..., ::each].copy()
    for index in range(1, each):
        piece = codes[..., index::each]
        packed[..., : piece.shape[-1]] |= piece << np.uint8(bits * index)
    return packed


def unpack(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.uint8]:
    """Return the *count* codes in each row of *packed*."""
    each, mask = 8 // bits, np.uint8((1 << bits) - 1)
    codes = np.empty((*packed.shape[:-1], count), np.uint8)
    for index in range(each):
        piece = codes[..., index::each]
        np.copyto(piece, (packed[..., : piece.shape[-1]] >> np.uint8(bits * index)) & mask)
    return codes
