"""Codecs that need an asset of the model: its selection, its tables, and uncodable layers.

A layer names the asset that it was coded with, so that it can be decoded alone; the frame's
header names it too, so that a reader can check before decoding.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.assets import ASSETS, Asset, AssetKind, AssetRegistry, Table
from kvstore.codecs.base import EncodedLayer, EncodeTerms, LayerTerms, LossyCodec, Part
from kvstore.codecs.floats import ByteCutter, Floats, has_floats, is_finite
from kvstore.codecs.kvq_models import RATIOS
from kvstore.codecs.raw import part_views
from kvstore.codecs.rope import MAX_PAIRS
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import NO_ASSET, FrameHeader, FrameTemplate
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Component, KVLayout, LayerKind

HEAD = struct.Struct(f"<BBHI{DIGEST_BYTES}s")
"""Method, quality, layer of the asset, a codec-specific number, the asset."""
HEAD_BYTES = HEAD.size
CODED = 1
MAX_DIM = 8192
"""Parts with wider heads are stored uncoded, so that scratch memory stays fixed."""
QUALITY_COUNT = len(RATIOS)
LARGEST_NUMBER = np.float32(2.0**60)
"""Upper limit of means, deviations and coded numbers."""

assert HEAD_BYTES == 24

CodedLayer: TypeAlias = "tuple[int, Sequence[Table | bytes], float]"
"""The codec-specific number, the fields after the head, and the largest error."""


MAX_ESCAPED = 8
"""A layer with more than one number in this many without a bin is stored uncoded."""
LARGEST_STEP = 32767


class Escapes(NamedTuple):
    """Integers without a symbol: ``steps`` i16, at their ascending ``places`` u32."""

    places: NDArray[np.uint32]
    steps: NDArray[np.int16]

    @classmethod
    def of(cls, numbers: NDArray[Any], is_escaped: NDArray[np.bool_]) -> Escapes | None:
        """Return the escaped *numbers*; None if there are too many."""
        places = np.flatnonzero(is_escaped).astype("<u4")
        if len(places) > numbers.size // MAX_ESCAPED:
            return None
        return cls(places, numbers.reshape(-1)[places].astype("<i2"))

    @classmethod
    def take(cls, cut: ByteCutter, count: int, items: int) -> Escapes:
        """Return the next *count* of *items* numbers. Raises InvalidFrameError."""
        if count > items // MAX_ESCAPED:
            raise InvalidFrameError("escapes", count, f"at most {items // MAX_ESCAPED}")
        found = cls(cut.take("<u4", count), cut.take("<i2", count))
        places = found.places
        if count and (int(places[-1]) >= items or (places[1:] <= places[:-1]).any()):
            raise InvalidFrameError("escapes", int(places[-1]), f"must ascend, below {items}")
        return found

    def put(self, numbers: Floats, first: int) -> None:
        """Write them into *numbers*, C-ordered, which begin at place *first*."""
        low, high = np.searchsorted(self.places, (first, first + numbers.size))
        numbers.reshape(-1)[self.places[low:high] - first] = self.steps[low:high]


class Coded(NamedTuple):
    """The head of a coded layer; ``tables`` are the asset's for this layer."""

    quality: int
    number: int
    tables: Any


class AssetTables(ABC):
    """The checked tables of an asset: for each component of the chunk arrays, layers first."""

    needed: ClassVar[str]
    """A table that every component has."""

    def __init__(self, asset: Asset) -> None:
        """Raise InvalidRequestError, naming the table, if one is invalid."""
        self.components: list[tuple[Any, ...]] = []
        while f"{len(self.components)}.{self.needed}" in asset.tables:
            self.components.append(self.component(asset, f"{len(self.components)}."))
        if not self.components:
            name = f"0.{self.needed}"
            raise InvalidRequestError("asset", name, f"{asset.kind.name} needs this table")

    @abstractmethod
    def component(self, asset: Asset, prefix: str) -> tuple[Any, ...]:
        """Check and return the arrays of the component whose tables begin with *prefix*."""

    @abstractmethod
    def parts_of(self, arrays: tuple[Any, ...], index: int, component: Component) -> Any:
        """Return the codec's tables of layer *index* of *arrays*; None for another shape."""

    @property
    def layers(self) -> int:
        """Number of layers with tables."""
        return sum(len(arrays[0]) for arrays in self.components)

    def layer(self, index: int, component: Component) -> Any:
        """Return the codec's tables of the chunk's layer *index*, counted over all components.

        None if the asset was not made for such a layer.
        """
        for arrays in self.components:
            if index < len(arrays[0]):
                return self.parts_of(arrays, index, component)
            index -= len(arrays[0])
        return None


class TurnedTables(AssetTables):
    """Tables for keys coded before rotation. Arrays are the means (layers, parts, channels), others
    of layers and parts, deviations f32 (layers, parts), frequencies f32 (pairs,) or None.
    """

    part: ClassVar[Any]
    """Makes the codec's tables of one part from the arrays, in this order."""

    @override
    def parts_of(self, arrays: tuple[Any, ...], index: int, component: Component) -> Any:
        *tables, deviations, frequencies = arrays
        channels = component.kv_heads * component.head_dim
        if tables[0].shape[1:] != (component.parts, channels):
            return None
        if frequencies is not None and 2 * len(frequencies) > component.head_dim:
            return None
        turned = [frequencies if component.parts == 2 else None, None]
        return [
            self.part(*(t[index, at] for t in tables), float(deviations[index, at]), turned[at])
            for at in range(component.parts)
        ]

    def scales_of(self, asset: Asset, prefix: str, shape: tuple[int, ...]) -> tuple[Table, Any]:
        """Return the deviations, of *shape*, and frequencies of a component."""
        deviations = asset.table(f"{prefix}deviations", "<f4", shape)
        if not ((deviations > 0) & (deviations < LARGEST_NUMBER)).all():
            raise InvalidRequestError(f"asset table {prefix}deviations", "not positive", "are > 0")
        frequencies = None
        if f"{prefix}rope" in asset.tables:
            frequencies = asset.table(f"{prefix}rope", "<f4", (-1,))
            if len(frequencies) > MAX_PAIRS or not np.isfinite(frequencies).all():
                raise InvalidRequestError(f"asset table {prefix}rope", len(frequencies), "too many")
        return deviations, frequencies


def moved_to(position: int | None, stored: int, frequencies: Floats | None) -> int:
    """Return the position to decode keys of *stored* to. Raises InvalidRequestError."""
    if position is not None and position != stored and frequencies is None:
        raise InvalidRequestError("position", position, "the asset has no rotary embedding")
    return stored if position is None else position


class AssetCodec(LossyCodec):
    """Base of codecs with an asset: subclasses define ``coded``, ``decode_coded`` and the kind.

    Frames are encoded with the newest asset of their model, which ``encode_layers`` finds; only
    a codec with an *asset* encodes single layers. Decoding uses any asset of *registry*.
    """

    kind: ClassVar[AssetKind]
    tables: ClassVar[type[AssetTables]]
    default_quality: ClassVar[int] = 1

    def __init__(
        self,
        quality: int | None = None,
        registry: AssetRegistry = ASSETS,
        asset: Asset | None = None,
    ) -> None:
        self.quality = self.default_quality if quality is None else quality
        if not 0 <= self.quality < QUALITY_COUNT:
            raise UnknownCodecError(f"{self.name}:{quality}", f"0 to {QUALITY_COUNT - 1}")
        self._registry = registry
        self._bound = asset
        self.asset = NO_ASSET if asset is None else asset.digest

    @classmethod
    @override
    def of(cls, terms: str) -> Self:
        if terms not in map(str, range(QUALITY_COUNT)):
            raise UnknownCodecError(f"{cls.name}:{terms}", f"0 to {QUALITY_COUNT - 1}")
        return cls(int(terms))

    @abstractmethod
    def coded(self, bits: Sequence[Part], layer: LayerTerms, tables: Any) -> CodedLayer | None:
        """Return the layer coded by its *tables*; None: store it uncoded.

        *bits* are finite floats as ``<u2`` or ``<u4``; ``layer_id`` is the asset's number.
        """

    @abstractmethod
    def decode_coded(
        self, cut: ByteCutter, component: Component, out: Sequence[Part], head: Coded,
        position: int | None,
    ) -> None:  # fmt: skip
        """Decode the fields of ``coded``, *cut* from after the *head*, to their end.

        Raises as ``decode_layer``.
        """

    @override
    def check_asset(self, header: FrameHeader) -> None:
        """Raise UnknownCodecError for an unknown asset, ModelError for another model's."""
        self._registry.named(self.kind, header.asset, header.representation)

    @override
    def max_segment_bytes(self, component: Component) -> int:
        return HEAD_BYTES + component.layer_bytes

    @override
    def encode_layers(
        self,
        template: FrameTemplate,
        layers: Iterable[Sequence[Part]],
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *layers* with the newest asset of the template's model.

        Raises UnknownCodecError when there is none, LayoutMismatchError when it has tables for
        more or fewer layers than the chunk has with keys and values. *terms* are only checked: the
        asset describes the model.
        """
        if self._bound is not None:
            # Terms of another layout are still refused.
            next((terms or EncodeTerms()).layers(template.layout, template.position))
            mine = EncodeTerms(layer_ids=self._numbers(template.layout, self._bound))
            return super().encode_layers(template, layers, out, mine)
        asset = self._registry.for_model(self.kind, template.representation)
        bound = type(self)(self.quality, self._registry, asset)
        return bound.encode_layers(template, layers, out, terms)

    def _numbers(self, layout: KVLayout, asset: Asset) -> tuple[int, ...]:
        """Return the asset's layer numbers; states have none. Raises LayoutMismatchError."""
        numbers, count = [], 0
        for component in layout.components:
            is_state = component.kind is LayerKind.state
            numbers += [0 if is_state else count + layer for layer in range(component.layers)]
            count += 0 if is_state else component.layers
        known = _tables(self.tables, asset).layers
        if any(map(has_floats, layout.components)) and count != known:
            fix = f"the asset has tables for {known}: only chunks with all of them are coded"
            raise LayoutMismatchError("layers", count, fix)
        return tuple(numbers)

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        component, asset = layer.component, self._bound
        if asset is None:
            raise UnknownCodecError(f"{self.name} without an asset", "encode whole frames")
        bits = [part.view(f"<u{part.dtype.itemsize}") for part in parts]
        found = None
        if _is_coded(component) and all(is_finite(part, component.dtype) for part in bits):
            tables = _tables(self.tables, asset).layer(layer.layer_id, component)
            if tables is None:
                shape = (component.parts, component.kv_heads, component.head_dim)
                fix = f"layer {layer.layer_id} of the asset differs: calibrate for this model"
                raise LayoutMismatchError("layer", shape, fix)
            found = self.coded(bits, layer, tables)
        if found is not None:
            number, fields, error = found
            head = HEAD.pack(CODED, self.quality, layer.layer_id, number, asset.digest)
            data = as_bytes(head + b"".join(map(_bytes_of, fields)))
            if len(data) < component.layer_bytes:
                np.copyto(out[: len(data)], data)
                bound = error if self.accuracy is Accuracy.bounded else 0.0
                return EncodedLayer(len(data), self.accuracy, bound)
        out[:HEAD_BYTES] = 0
        end = HEAD_BYTES + component.layer_bytes
        for view, part in zip(part_views(out[HEAD_BYTES:end], component), bits, strict=True):
            np.copyto(view, part)
        return EncodedLayer(end, Accuracy.exact)

    @override
    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        body = data[0]
        if len(body) < HEAD_BYTES:
            raise InvalidFrameError("stored_bytes", len(body), f"at least {HEAD_BYTES}")
        views = [part.view(f"<u{part.dtype.itemsize}") for part in out]
        if body[0] == CODED and _is_coded(component):
            head = self._head(body, component)
            self.decode_coded(ByteCutter(body, HEAD_BYTES), component, views, head, position)
            return
        if position is not None:
            raise InvalidRequestError("position", position, "this layer's keys cannot be rotated")
        if body[:HEAD_BYTES].any():
            raise InvalidFrameError("method", int(body[0]), "this reader supports 0 and 1")
        for part, view in zip(views, part_views(body[HEAD_BYTES:], component), strict=True):
            np.copyto(part, view)

    def _head(self, body: Bytes, component: Component) -> Coded:
        _, quality, index, number, digest = HEAD.unpack(body[:HEAD_BYTES].tobytes())
        if quality >= QUALITY_COUNT:
            raise InvalidFrameError("quality", quality, f"0 to {QUALITY_COUNT - 1}")
        asset = self._bound
        if asset is None or asset.digest != digest:
            asset = self._registry.any_named(self.kind, digest)
        tables = _tables(self.tables, asset).layer(index, component)
        if tables is None:
            raise InvalidFrameError("layer", index, "the asset has no such layer")
        return Coded(quality, number, tables)


@lru_cache(maxsize=16)
def _tables(kind: type[AssetTables], asset: Asset) -> AssetTables:
    return kind(asset)


def _is_coded(component: Component) -> bool:
    return has_floats(component) and component.head_dim <= MAX_DIM


def _bytes_of(field: Table | bytes) -> bytes:
    return field if isinstance(field, bytes) else np.ascontiguousarray(field).tobytes()
