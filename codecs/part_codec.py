"""Codecs that code each part of a layer by itself, and keep as it is what they cannot code.

A segment is eight bytes that say so for each part, then the parts one after another; see
docs/format.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import TypeAlias

import numpy as np

from kvstore.codecs.base import Part
from kvstore.codecs.floats import FLOAT_TYPES, is_finite
from kvstore.codecs.lossy import LossyCodec
from kvstore.codecs.terms import EncodedLayer, LayerTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component, LayerKind

HEAD_BYTES = 8
_AS_IT_IS, _CODED = 0, 1

_BOX_ITEMS, _BOX_DIMS = 1 << 15, 1024
"""Numbers computed with at a time, so that scratch stays in the second-level cache."""

Box: TypeAlias = tuple[slice, slice, slice]


class Role(Enum):
    """What a part is. Keys have channels that stay large; values and latents have none."""

    keys = auto()
    values = auto()


class PartCodec(LossyCodec):
    """Subclass with the three methods of a part."""

    @abstractmethod
    def coded_bytes(self, component: Component, role: Role) -> int:
        """Size of one coded part, exact."""

    @abstractmethod
    def encode_part(self, bits: Part, component: Component, role: Role, out: Bytes) -> float | None:
        """Code *bits*, finite numbers as ``<u2`` or ``<u4``, into all of *out*.

        Returns the largest absolute error of what decoding will give, or None when the
        promise of this codec cannot be kept.
        """

    @abstractmethod
    def decode_part(self, data: Bytes, component: Component, role: Role, out: Part) -> None:
        """Decode the ``coded_bytes`` *data* into *out*. Raises InvalidFrameError."""

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer."""
        sizes = [component.part_bytes] * component.parts
        if _is_codable(component):
            sizes = [
                max(component.part_bytes, self.coded_bytes(component, r))
                for r in self.roles(component)
            ]
        return HEAD_BYTES + sum(sizes)

    def roles(self, component: Component) -> Sequence[Role]:
        """Return what each part of *component* is."""
        return (Role.values,) if component.parts == 1 else (Role.keys, Role.values)

    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode one layer into *out*; exact when no part of it could be coded."""
        component, accuracy, error, end = layer.component, Accuracy.exact, 0.0, HEAD_BYTES
        out[:HEAD_BYTES] = 0
        for index, (part, role) in enumerate(zip(parts, self.roles(component), strict=True)):
            bits = part.view(f"<u{part.dtype.itemsize}")
            found = self._try(bits, component, role, out[end:])
            if found is None:
                np.copyto(_elements(out[end : end + component.part_bytes], component), bits)
                end += component.part_bytes
                continue
            out[index] = _CODED
            end += self.coded_bytes(component, role)
            accuracy, error = self.accuracy, max(error, found)
        return EncodedLayer(end, accuracy, error)

    def _try(self, bits: Part, component: Component, role: Role, out: Bytes) -> float | None:
        if not _is_codable(component):
            return None
        if not all(is_finite(bits[box], component.dtype) for box in boxes(component.shape)):
            return None
        return self.encode_part(bits, component, role, out[: self.coded_bytes(component, role)])

    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents.

        Raises InvalidRequestError for a *position*: these codecs do not rotate.
        """
        if position is not None:
            fix = f"{self.name} stores keys as they are rotated"
            raise InvalidRequestError("position", position, fix)
        self._decode(data[0], component, out)

    def _decode(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        roles = self.roles(component)
        methods = self._methods(data, component)
        sizes = [
            self.coded_bytes(component, role) if method else component.part_bytes
            for method, role in zip(methods, roles, strict=True)
        ]
        if len(data) != HEAD_BYTES + sum(sizes):
            raise InvalidFrameError("stored_bytes", len(data), f"its parts have {sum(sizes)}")
        end = HEAD_BYTES
        for part, method, role, size in zip(out, methods, roles, sizes, strict=True):
            room, body = part.view(f"<u{part.dtype.itemsize}"), data[end : end + size]
            if method == _CODED:
                self.decode_part(body, component, role, room)
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
