"""The kivi codec: whole numbers under the scale of a group of 64, part by part.

Groups run over tokens for keys and over channels for values and latents, as in KIVI (Liu et
al., ICML 2024, section 3.2); the last tokens, which fill no group of keys, keep their bits.
Four and two bits are asymmetric, with a float16 scale and minimum; eight bits are symmetric.

Scales are rounded up and minima down, so that no number lies outside its group's range:
|error| <= scale / 2, but for float32 arithmetic and the rounding to the part's dtype. A part for
which that does not hold keeps its bits. The bytes are in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.base import EncodedLayer, LayerTerms, Part
from kvstore.codecs.floats import (
    FLOAT_TYPES,
    Floats,
    Halves,
    check_scales,
    from_float32,
    half_down,
    half_up,
    is_finite,
    largest_error,
    to_float32,
)
from kvstore.codecs.lossy import LossyCodec
from kvstore.proto import native
from kvstore.proto.buffers import Bytes, addresses
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError, UnknownCodecError
from kvstore.proto.types import Accuracy, Component, DType, LayerKind

IDS_BY_BITS = {8: 6, 4: 7, 2: 8}
HEAD_BYTES = 8
GROUP = 64
_AS_IT_IS, _CODED = 0, 1
_BOX_ITEMS, _BOX_DIMS = 1 << 15, 1024
"""Numbers computed with at a time, so that scratch stays in the second-level cache."""
SLACK = np.float32(2.0**-21)
"""What float32 arithmetic may add to an error, in proportion to the numbers themselves."""
HALF = np.float32(0.5 + 2.0**-11)
"""Errors in scales: half of one, and what float32 arithmetic adds to it for large codes."""

Box: TypeAlias = tuple[slice, slice, slice]

Codes: TypeAlias = NDArray[np.uint8]
Bounds: TypeAlias = Callable[[Floats, bool], "tuple[Floats, Floats]"]
"""From values and by_token to the least and the largest of each group."""
Quantise: TypeAlias = Callable[[Floats, Floats, "Floats | None", int, bool], "Quantised | None"]
"""From values, scales, minima, levels and by_token to codes and what they stand for.

Without minima codes are signed and go from -levels to levels, else from 0. None when a number
is further from what its code stands for than half a scale, float32 arithmetic aside.
"""
Quantised: TypeAlias = tuple[Codes, Floats]
Expand: TypeAlias = Callable[[Codes, Floats, "Floats | None", bool], Floats]
"""From codes, scales, minima and by_token to what the codes stand for."""


@dataclass(frozen=True, slots=True)
class Loops:
    """One implementation of the three. Arrays are C-ordered."""

    name: str
    bounds: Bounds = field(repr=False)
    quantise: Quantise = field(repr=False)
    expand: Expand = field(repr=False)


class Role(Enum):
    """What a part is. Keys have channels that stay large; values and latents have none."""

    keys = auto()
    values = auto()


class KiviCodec(LossyCodec):
    """``kivi:8``, ``kivi:4`` and ``kivi:2``, of so many bits a number.

    Eight bits are -127 to 127 times the scale; fewer are 0 to 15, or 0 to 3, times the scale above
    the minimum. With *loops* these compute, else the compiled ones.
    """

    name = "kivi"
    codec_id = IDS_BY_BITS[4]
    revision = 1
    accuracy = Accuracy.bounded

    def __init__(self, bits: int = 4, loops: Loops | None = None) -> None:
        self.bits = bits
        self.codec_id = IDS_BY_BITS[bits]
        self._loops = loops

    @override
    @classmethod
    def of(cls, terms: str) -> KiviCodec:
        if terms not in map(str, IDS_BY_BITS):
            known = ", ".join(f"{cls.name}:{bits}" for bits in IDS_BY_BITS)
            raise UnknownCodecError(f"{cls.name}:{terms}", known)
        return cls(int(terms))

    @property
    def loops(self) -> Loops:
        """What computes: the fastest there is, unless the maker chose."""
        return self._loops or native_loops()

    def _coded_bytes(self, component: Component, role: Role) -> int:
        """Size of one coded part: scales, minima, packed codes, and the tokens left over."""
        return _Fields.places(component, role, self.bits)[-1]

    def _encode_part(
        self, bits: Part, component: Component, role: Role, out: Bytes
    ) -> float | None:
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

    def _decode_part(self, data: Bytes, component: Component, role: Role, out: Part) -> None:
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

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer."""
        sizes = [component.part_bytes] * component.parts
        if _is_codable(component):
            sizes = [
                max(component.part_bytes, self._coded_bytes(component, r))
                for r in _roles(component)
            ]
        return HEAD_BYTES + sum(sizes)

    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode one layer into *out*; exact when no part of it could be coded."""
        component, accuracy, error, end = layer.component, Accuracy.exact, 0.0, HEAD_BYTES
        out[:HEAD_BYTES] = 0
        for index, (part, role) in enumerate(zip(parts, _roles(component), strict=True)):
            bits = part.view(f"<u{part.dtype.itemsize}")
            found = self._try(bits, component, role, out[end:])
            if found is None:
                np.copyto(_elements(out[end : end + component.part_bytes], component), bits)
                end += component.part_bytes
                continue
            out[index] = _CODED
            end += self._coded_bytes(component, role)
            accuracy, error = self.accuracy, max(error, found)
        return EncodedLayer(end, accuracy, error)

    def _try(self, bits: Part, component: Component, role: Role, out: Bytes) -> float | None:
        if not _is_codable(component):
            return None
        if not all(is_finite(bits[box], component.dtype) for box in boxes(component.shape)):
            return None
        return self._encode_part(bits, component, role, out[: self._coded_bytes(component, role)])

    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents.

        Raises InvalidRequestError for a *position*: it does not rotate.
        """
        if position is not None:
            fix = f"{self.name} stores keys as they are rotated"
            raise InvalidRequestError("position", position, fix)
        self._decode(data[0], component, out)

    def _decode(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        roles = _roles(component)
        methods = self._methods(data, component)
        sizes = [
            self._coded_bytes(component, role) if method else component.part_bytes
            for method, role in zip(methods, roles, strict=True)
        ]
        if len(data) != HEAD_BYTES + sum(sizes):
            raise InvalidFrameError("stored_bytes", len(data), f"its parts have {sum(sizes)}")
        end = HEAD_BYTES
        for part, method, role, size in zip(out, methods, roles, sizes, strict=True):
            room, body = part.view(f"<u{part.dtype.itemsize}"), data[end : end + size]
            if method == _CODED:
                self._decode_part(body, component, role, room)
            else:
                np.copyto(room, _elements(body, component))
            end += size

    @staticmethod
    def _methods(data: Bytes, component: Component) -> list[int]:
        """Return how each part was stored."""
        if len(data) < HEAD_BYTES:
            raise InvalidFrameError("stored_bytes", len(data), f"at least {HEAD_BYTES}")
        head: list[int] = data[:HEAD_BYTES].tolist()
        known = _CODED if _is_codable(component) else _AS_IT_IS
        methods = head[: component.parts]
        if any(method > known for method in methods) or any(head[component.parts :]):
            raise InvalidFrameError("methods", head, f"at most {known} for each part, then zeros")
        return methods


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


def _roles(component: Component) -> Sequence[Role]:
    """Return what each part of *component* is."""
    return (Role.values,) if component.parts == 1 else (Role.keys, Role.values)


def _is_codable(component: Component) -> bool:
    """Whether it has numbers that may lose some of their precision: no states, no codes."""
    return component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state


def _elements(data: Bytes, component: Component) -> Part:
    return data.view(f"<u{component.dtype.item_bytes}").reshape(component.shape)


def boxes(shape: tuple[int, int, int], group: int = 64) -> Iterator[Box]:
    """Cut *shape* into boxes of about _BOX_ITEMS; those in the middle are whole groups wide."""
    heads, tokens, dim = shape
    dim_step = min(dim, _BOX_DIMS)
    token_step = max(1, _BOX_ITEMS // (dim_step * group)) * group
    head_step = max(1, _BOX_ITEMS // max(1, tokens * dim_step))
    for head in range(0, heads, head_step):
        for token in range(0, tokens, token_step):
            for at in range(0, dim, dim_step):
                yield (
                    slice(head, min(heads, head + head_step)),
                    slice(token, min(tokens, token + token_step)),
                    slice(at, min(dim, at + dim_step)),
                )


@lru_cache(maxsize=4)
def native_loops(path: str | None = None) -> Loops:
    """Return the compiled loops of *path*; of this processor's best where it is None."""
    found = native.loops(path)
    return Loops(
        found.path,
        partial(_native_bounds, found),
        partial(_native_quantise, found),
        partial(_native_expand, found),
    )


def _native_bounds(found: native.Loops, values: Floats, by_token: bool) -> tuple[Floats, Floats]:
    heads, tokens, dim = values.shape
    shape = (heads, -(-tokens // GROUP), dim) if by_token else (heads, tokens, -(-dim // GROUP))
    low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
    found.grouped_bounds(*addresses(values, low, high), *values.shape, by_token)
    return low, high


def _native_quantise(
    found: native.Loops, values: Floats, scale: Floats, base: Floats | None, levels: int,
    by_token: bool,
) -> Quantised | None:  # fmt: skip
    codes, back = np.empty(values.shape, np.uint8), np.empty(values.shape, np.float32)
    minima = np.zeros_like(scale) if base is None else base
    arrays = (values, scale, minima, codes, back)
    least = -levels if base is None else 0
    off = found.grouped_quantise(*addresses(*arrays), *values.shape, by_token, least, levels)
    return None if off else (codes, back)


def _native_expand(
    found: native.Loops, codes: Codes, scale: Floats, base: Floats | None, by_token: bool
) -> Floats:
    values = np.empty(codes.shape, np.float32)
    arrays = (codes, scale, np.zeros_like(scale) if base is None else base, values)
    found.grouped_expand(*addresses(*arrays), *codes.shape, by_token, base is None)
    return values
