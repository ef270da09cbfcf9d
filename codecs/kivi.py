"""The kivi codec: integers with a scale per group of 64, part by part.

Groups run over tokens for keys and over channels for values and latents, as in KIVI (Liu et
al., ICML 2024, section 3.2); the last tokens, which fill no group of keys, are stored exactly.
Four and two bits are asymmetric, with a float16 scale and minimum; eight bits are symmetric.

Scales are rounded up and minima down, so that no number lies outside its group's range:
|error| <= scale / 2, except for float32 arithmetic and the rounding to the part's dtype. A part
that violates this is stored exactly. docs/format.md specifies the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.base import EncodedLayer, LayerTerms, LossyCodec, Part
from kvstore.codecs.floats import (
    ByteCutter,
    Floats,
    Halves,
    check_scales,
    from_float32,
    half_down,
    half_up,
    has_floats,
    is_finite,
    largest_error,
    to_float32,
)
from kvstore.proto import native
from kvstore.proto.buffers import Bytes, addresses
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.types import Accuracy, Component, DType

IDS_BY_BITS = {8: 6, 4: 7, 2: 8}
HEAD_BYTES = 8
GROUP = 64
_AS_IT_IS, _CODED = 0, 1
_BOX_ITEMS, _BOX_DIMS = 1 << 15, 1024
"""Numbers processed at a time, so that scratch stays in the second-level cache."""

Box: TypeAlias = tuple[slice, slice, slice]
Codes: TypeAlias = NDArray[np.uint8]
Quantised: TypeAlias = tuple[Codes, Floats]
Groups: TypeAlias = tuple[Halves, Halves | None, Codes, Floats]
"""Of one box: scales, minima, codes, and their dequantised values."""


class Loops:
    """The compiled loops of one path. Arrays are C-ordered; groups are of tokens or channels."""

    def __init__(self, path: str | None = None) -> None:
        self._native = native.loops(path)

    def bounds(self, values: Floats, by_token: bool) -> tuple[Floats, Floats]:
        """Return the least and the largest of each group."""
        heads, tokens, dim = values.shape
        shape = (heads, -(-tokens // GROUP), dim) if by_token else (heads, tokens, -(-dim // GROUP))
        low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._native.grouped_bounds(*addresses(values, low, high), *values.shape, by_token)
        return low, high

    def quantise(
        self, values: Floats, scale: Floats, base: Floats | None, levels: int, by_token: bool
    ) -> Quantised | None:
        """Return codes and their dequantised values.

        Without minima, *base*, codes are signed, from -levels to levels, else from 0 to levels.
        None when an error exceeds half a scale, apart from float32 arithmetic.
        """
        codes, back = np.empty(values.shape, np.uint8), np.empty(values.shape, np.float32)
        arrays = (values, scale, np.zeros_like(scale) if base is None else base, codes, back)
        least = -levels if base is None else 0
        off = self._native.grouped_quantise(
            *addresses(*arrays), *values.shape, by_token, least, levels
        )
        return None if off else (codes, back)

    def expand(self, codes: Codes, scale: Floats, base: Floats | None, by_token: bool) -> Floats:
        """Return the dequantised values of *codes*."""
        values = np.empty(codes.shape, np.float32)
        arrays = (codes, scale, np.zeros_like(scale) if base is None else base, values)
        self._native.grouped_expand(*addresses(*arrays), *codes.shape, by_token, base is None)
        return values


class KiviCodec(LossyCodec):
    """``kivi:8``, ``kivi:4`` and ``kivi:2``, of that many bits per number.

    Eight bits are -127 to 127 times the scale; fewer are 0 to 15, or 0 to 3, times the scale above
    the minimum. *loops* default to those of the fastest path.
    """

    name = "kivi"
    codec_id = IDS_BY_BITS[4]
    revision = 1
    accuracy = Accuracy.bounded

    def __init__(self, bits: int = 4, loops: Loops | None = None) -> None:
        self.bits = bits
        self.codec_id = IDS_BY_BITS[bits]
        self.loops = loops or Loops()

    @override
    @classmethod
    def of(cls, terms: str) -> KiviCodec:
        if terms not in map(str, IDS_BY_BITS):
            known = ", ".join(f"{cls.name}:{bits}" for bits in IDS_BY_BITS)
            raise UnknownCodecError(f"{cls.name}:{terms}", known)
        return cls(int(terms))

    def _encode_part(
        self, bits: Part, component: Component, by_token: bool, out: Bytes
    ) -> float | None:
        """Code *bits*; return the largest error, or None if the error bound cannot be kept."""
        if not has_floats(component):
            return None
        if not all(is_finite(bits[box], component.dtype) for box in boxes(component.shape)):
            return None
        fields, error = _Fields.of(out, component, by_token, self.bits), 0.0
        grouped = fields.codes.shape[1]
        if not grouped:
            return None  # too few tokens for a group
        for box in boxes((component.kv_heads, grouped, component.head_dim)):
            values = to_float32(bits[box], component.dtype)
            found = self._fit(values, by_token)
            if found is None:
                return None
            scale, base, codes, back = found
            at = _group_box(box, by_token)
            fields.scales[at] = scale
            if fields.minima is not None:
                fields.minima[at] = base
            fields.codes[_code_box(box, self.bits)] = pack(codes, self.bits)
            error = max(error, _rounded_error(back, values, component.dtype))
        np.copyto(fields.rest, bits[:, grouped:])
        return error

    def _fit(self, values: Floats, by_token: bool) -> Groups | None:
        """Quantise a box; None if a scale exceeds float16 or the error bound is not kept."""
        low, high = self.loops.bounds(values, by_token)
        for extreme in (low, high):  # paths may differ in the sign of zero
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
        return None if found is None else (scale, base, *found)

    def _decode_part(self, data: Bytes, component: Component, by_token: bool, out: Part) -> None:
        """Decode *data* into *out*. Raises InvalidFrameError for invalid scales or minima."""
        fields = _Fields.of(data, component, by_token, self.bits)
        check_scales(fields.scales)
        if fields.minima is not None and not np.isfinite(fields.minima).all():
            raise InvalidFrameError("minimum", "NaN or infinite", "a minimum is a number")
        grouped, expand = fields.codes.shape[1], self.loops.expand
        for box in boxes((component.kv_heads, grouped, component.head_dim)):
            width = box[2].stop - box[2].start
            codes = unpack(fields.codes[_code_box(box, self.bits)], width, self.bits)
            at = _group_box(box, by_token)
            base = None if fields.minima is None else _single(fields.minima[at])
            values = expand(codes, _single(fields.scales[at]), base, by_token)
            from_float32(values, component.dtype, out[box])
        np.copyto(out[:, grouped:], fields.rest)

    @override
    def max_segment_bytes(self, component: Component) -> int:
        coded = [_Fields.size(component, each, self.bits) for each in _by_token(component)]
        sizes = [max(component.part_bytes, size) for size in coded]
        return HEAD_BYTES + sum(sizes)

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode one layer into *out*; exact if no part could be coded."""
        component, accuracy, error, end = layer.component, Accuracy.exact, 0.0, HEAD_BYTES
        out[:HEAD_BYTES] = 0
        for index, (part, by_token) in enumerate(zip(parts, _by_token(component), strict=True)):
            bits = part.view(f"<u{part.dtype.itemsize}")
            size = _Fields.size(component, by_token, self.bits)
            found = self._encode_part(bits, component, by_token, out[end : end + size])
            if found is None:
                size = component.part_bytes
                np.copyto(_elements(out[end : end + size], component), bits)
            else:
                out[index] = _CODED
                accuracy, error = self.accuracy, max(error, found)
            end += size
        return EncodedLayer(end, accuracy, error)

    @override
    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        cutter, known = ByteCutter(data), _CODED if has_floats(component) else _AS_IT_IS
        head: list[int] = cutter.take("<u1", HEAD_BYTES).tolist()
        methods, found = head[: component.parts], []
        if max(methods) > known or any(head[component.parts :]):
            raise InvalidFrameError("methods", head, f"at most {known} for each part, then zeros")
        for method, by_token in zip(methods, _by_token(component), strict=True):
            coded_bytes = _Fields.size(component, by_token, self.bits)
            found.append(cutter.take("<u1", coded_bytes if method else component.part_bytes))
        cutter.end()
        for part, method, by_token, body in zip(
            out, methods, _by_token(component), found, strict=True
        ):
            target = part.view(f"<u{part.dtype.itemsize}")
            if method == _CODED:
                self._decode_part(body, component, by_token, target)
            else:
                np.copyto(target, _elements(body, component))


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one coded part, as views.

    scales, minima: (kv_heads, groups of tokens, head_dim) for keys, else (kv_heads, tokens,
    groups of channels); codes: (kv_heads, grouped tokens, bytes of a row); rest: (kv_heads,
    remaining tokens, head_dim). Eight bits have no minima.
    """

    scales: Part
    minima: Part | None
    codes: NDArray[np.uint8]
    rest: Part

    @staticmethod
    def shapes(component: Component, by_token: bool, bits: int) -> list[tuple[int, ...]]:
        """Return the shapes of scales, codes and rest."""
        heads, tokens, dim = component.shape
        grouped = tokens // GROUP * GROUP if by_token else tokens
        groups = (grouped // GROUP, dim) if by_token else (tokens, -(-dim // GROUP))
        row = -(-dim * bits // 8)
        return [(heads, *groups), (heads, grouped, row), (heads, tokens - grouped, dim)]

    @classmethod
    def size(cls, component: Component, by_token: bool, bits: int) -> int:
        """Return the bytes of a coded part."""
        scales, codes, rest = map(prod, cls.shapes(component, by_token, bits))
        scales *= 2 if bits == 8 else 4
        return scales + codes + rest * component.dtype.item_bytes

    @classmethod
    def of(cls, data: Bytes, component: Component, by_token: bool, bits: int) -> _Fields:
        """Return the fields of *data*, which has the size of a coded part."""
        groups, codes, rest = cls.shapes(component, by_token, bits)
        take = ByteCutter(data).take
        return cls(
            take("<f2", prod(groups)).reshape(groups),
            None if bits == 8 else take("<f2", prod(groups)).reshape(groups),
            take("<u1", prod(codes)).reshape(codes),
            take(f"<u{component.dtype.item_bytes}", prod(rest)).reshape(rest),
        )


def _rounded_error(back: Floats, values: Floats, dtype: DType) -> float:
    """Return the largest absolute error after decoding, rounding included."""
    bits = np.empty(back.shape, f"<u{dtype.item_bytes}")
    from_float32(back, dtype, bits)
    return largest_error(to_float32(bits, dtype), values)


def _single(halves: Part) -> Floats:
    return halves.astype(np.float32, order="C")


def _group_box(box: Box, by_token: bool) -> Box:
    heads, tokens, dim = box
    return (heads, _groups_of(tokens), dim) if by_token else (heads, tokens, _groups_of(dim))


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


def _by_token(component: Component) -> Sequence[bool]:
    """Return for each part whether groups run over tokens: keys have outlier channels."""
    return (False,) if component.parts == 1 else (True, False)


def _elements(data: Bytes, component: Component) -> Part:
    return data.view(f"<u{component.dtype.item_bytes}").reshape(component.shape)


def boxes(shape: tuple[int, int, int]) -> Iterator[Box]:
    """Cut *shape* into boxes of about _BOX_ITEMS; those in the middle are whole groups wide."""
    heads, tokens, dim = shape
    dim_step = min(dim, _BOX_DIMS)
    token_step = max(1, _BOX_ITEMS // (dim_step * GROUP)) * GROUP
    head_step = max(1, _BOX_ITEMS // max(1, tokens * dim_step))
    for head in range(0, heads, head_step):
        for token in range(0, tokens, token_step):
            for at in range(0, dim, dim_step):
                yield (
                    slice(head, min(heads, head + head_step)),
                    slice(token, min(tokens, token + token_step)),
                    slice(at, min(dim, at + dim_step)),
                )
