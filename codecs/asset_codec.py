"""Codecs that need an asset of the model: which asset, and layers that it cannot code.

A layer names the asset that it was coded with, so that it can be decoded alone; the frame's
header names it too, so that a reader can tell beforehand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

import numpy as np
from typing_extensions import override

from kvstore.codecs.assets import ASSETS, Asset, AssetKind, AssetShelf
from kvstore.codecs.base import EncodedLayer, EncodeTerms, LayerTerms, Part
from kvstore.codecs.floats import FLOAT_TYPES, is_finite
from kvstore.codecs.lossy import LossyCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import NO_ASSET, FrameHeader, FrameTemplate
from kvstore.proto.types import Accuracy, Component, KVLayout, LayerKind

HEAD_BYTES = 24
CODED = 1
MAX_DIM = 8192
"""Parts whose heads are wider are kept as they are, so that scratch stays fixed."""
QUALITY_COUNT = 4


class AssetCodec(LossyCodec):
    """Subclass with ``coded`` and ``decode_coded``, and the kind of the asset.

    Frames are encoded by the newest asset of their model, which ``encode_layers`` finds; only
    a codec that was given its *asset* encodes single layers. Any decodes what *shelf* has.
    """

    kind: ClassVar[AssetKind]
    default_quality: ClassVar[int]

    def __init__(
        self,
        quality: int | None = None,
        shelf: AssetShelf = ASSETS,
        asset: Asset | None = None,
    ) -> None:
        self.quality = self.default_quality if quality is None else quality
        if not 0 <= self.quality < QUALITY_COUNT:
            raise UnknownCodecError(f"{self.name}:{quality}", f"0 to {QUALITY_COUNT - 1}")
        self._shelf = shelf
        self._bound = asset
        self.asset = NO_ASSET if asset is None else asset.digest

    @classmethod
    @override
    def of(cls, terms: str) -> Self:
        """Return the codec of the quality *terms*: 0 is the coarsest, 3 the finest."""
        if terms not in map(str, range(QUALITY_COUNT)):
            raise UnknownCodecError(f"{cls.name}:{terms}", f"0 to {QUALITY_COUNT - 1}")
        return cls(int(terms))

    @abstractmethod
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, asset: Asset
    ) -> tuple[Bytes, float] | None:
        """Return a layer's bytes, the first of them CODED, and its largest error, or None.

        *bits* are finite floats as ``<u2`` or ``<u4``; ``layer_id`` is the asset's number.
        None keeps the layer as it is. Raises LayoutMismatchError when the asset is for
        layers of another shape.
        """

    @abstractmethod
    def decode_coded(
        self, data: Bytes, component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode what ``coded`` returned, at least HEAD_BYTES. Raises as ``decode_layer``."""

    @abstractmethod
    def layer_count(self, asset: Asset) -> int:
        """Return how many layers *asset* has tables for. Raises InvalidRequestError."""

    @override
    def check_asset(self, header: FrameHeader) -> None:
        """Raise UnknownCodecError for an asset that is not here, ModelError for another
        model's.
        """
        self._shelf.named(self.kind, header.asset, header.representation)

    def asset_of(self, digest: bytes) -> Asset:
        """Return the asset that a layer names. Raises UnknownCodecError."""
        if self._bound is not None and self._bound.digest == digest:
            return self._bound
        return self._shelf.any_named(self.kind, digest)

    @override
    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer: what it has as it is."""
        return HEAD_BYTES + component.layer_bytes

    @override
    def encode_layers(
        self,
        template: FrameTemplate,
        layers: Iterable[Sequence[Part]],
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *layers* by the newest asset of the template's model.

        Raises UnknownCodecError when there is none, LayoutMismatchError when it has tables for
        more layers or fewer than the chunk has keys and values of. Nothing in *terms* is used:
        what they would say of the model stands in the asset.
        """
        if self._bound is not None:
            # Terms of another layout are refused all the same.
            next((terms or EncodeTerms()).layers(template.layout, template.position))
            mine = EncodeTerms(layer_ids=self._numbers(template.layout, self._bound))
            return super().encode_layers(template, layers, out, mine)
        asset = self._shelf.for_model(self.kind, template.representation)
        bound = type(self)(self.quality, self._shelf, asset)
        return bound.encode_layers(template, layers, out, terms)

    def _numbers(self, layout: KVLayout, asset: Asset) -> tuple[int, ...]:
        """Number the layers as the asset does, which has none for states. Raises as it says."""
        numbers, count = [], 0
        for component in layout.components:
            is_state = component.kind is LayerKind.state
            numbers += [0 if is_state else count + layer for layer in range(component.layers)]
            count += 0 if is_state else component.layers
        known = self.layer_count(asset)
        codable = any(_is_float(component) for component in layout.components)
        if codable and count != known:
            fix = f"the asset has tables for {known}: only chunks with all of them are coded"
            raise LayoutMismatchError("layers", count, fix)
        return tuple(numbers)

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode one layer; exact when it cannot be coded. ``layer_id`` is the asset's number."""
        component = layer.component
        if self._bound is None:
            raise UnknownCodecError(f"{self.name} without an asset", "encode whole frames")
        bits = [part.view(f"<u{part.dtype.itemsize}") for part in parts]
        found = self.coded(bits, layer, self._bound) if _is_codable(bits, component) else None
        if found is not None and len(found[0]) < component.layer_bytes:
            data, error = found
            np.copyto(out[: len(data)], data)
            bound = error if self.accuracy is Accuracy.bounded else 0.0
            return EncodedLayer(len(data), self.accuracy, bound)
        out[:HEAD_BYTES] = 0
        end = HEAD_BYTES + component.layer_bytes
        for view, part in zip(_elements(out[HEAD_BYTES:end], component), bits, strict=True):
            np.copyto(view, part)
        return EncodedLayer(end, Accuracy.exact)

    @override
    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one verified layer into *out*.

        Raises InvalidFrameError on bad contents, UnknownCodecError when the layer's asset is
        not here, InvalidRequestError for a *position* where keys cannot be rotated.
        """
        body = data[0]
        if len(body) < HEAD_BYTES:
            raise InvalidFrameError("stored_bytes", len(body), f"at least {HEAD_BYTES}")
        views = [part.view(f"<u{part.dtype.itemsize}") for part in out]
        if body[0] == CODED and _is_float(component) and component.head_dim <= MAX_DIM:
            self.decode_coded(body, component, views, position)
            return
        if position is not None:
            raise InvalidRequestError("position", position, "this layer's keys cannot be rotated")
        if body[:HEAD_BYTES].any():
            raise InvalidFrameError("method", int(body[0]), "this reader knows 0 and 1")
        if len(body) != HEAD_BYTES + component.layer_bytes:
            fix = f"a layer has {component.layer_bytes}"
            raise InvalidFrameError("stored_bytes", len(body) - HEAD_BYTES, fix)
        for part, view in zip(views, _elements(body[HEAD_BYTES:], component), strict=True):
            np.copyto(part, view)

    def another_model(self, layer: LayerTerms) -> LayoutMismatchError:
        """Return the error of a layer that the asset does not describe."""
        c = layer.component
        fix = f"layer {layer.layer_id} of the asset is another: calibrate for this model"
        return LayoutMismatchError("layer", (c.parts, c.kv_heads, c.head_dim), fix)


def _is_float(component: Component) -> bool:
    """Whether it has numbers that may lose some of their precision: no states, no codes."""
    return component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state


def _is_codable(bits: Sequence[Part], component: Component) -> bool:
    if not _is_float(component) or component.head_dim > MAX_DIM:
        return False
    return all(is_finite(part, component.dtype) for part in bits)


def _elements(data: Bytes, component: Component) -> Part:
    typed = data.view(f"<u{component.dtype.item_bytes}")
    return typed.reshape(component.parts, *component.shape)
