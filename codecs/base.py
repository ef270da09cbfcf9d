"""The Codec interface.

A codec encodes the tensors of one chunk into a frame and decodes them, layer by layer. It owns no
buffers and has no state: callers provide the memory, and may call from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.block_part import BlockLayers, BlockPart, to_dense
from kvstore.proto.buffers import Bytes, checksum, copy_bytes
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import (
    ALIGN_BYTES,
    FLAG_UNSUMMED,
    NO_ASSET,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_segment,
    header_bytes,
)
from kvstore.proto.types import END_KINDS, Accuracy, Component, KVLayout, Model, RopeParameters

Importance: TypeAlias = NDArray[np.float32]
"""A weight for each token of the chunk, >= 0; larger ones are stored more exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTerms:
    """Optional facts and options for lossy codecs.

    ``rope`` is the rotary embedding of the keys; None: code them as rotated. ``layer_ids`` are the
    model's numbers of the chunk's layers, component by component, and ``model_layers`` the model's
    number of layers. ``importance`` is f32 (tokens,).
    """

    rope: RopeParameters | None = None
    layer_ids: tuple[int, ...] = ()
    model_layers: int = 0
    importance: Importance | None = None

    @classmethod
    def of(
        cls,
        representation: Model,
        importance: Importance | None = None,
        layout: KVLayout | None = None,
    ) -> EncodeTerms:
        """Return the terms of a model's chunks of *layout*.

        Without a *layout*, of chunks that have windows and states.
        """
        groups = representation.layer_groups
        last = max(layer for group in groups for layer in group.layer_ids)
        ids = tuple(
            layer
            for group in groups
            if layout is None or layout.has(group.kind)
            for layer in group.layer_ids
        )
        return cls(representation.rope, ids, 1 + last, importance)

    def layers(self, layout: KVLayout, position: int) -> Iterator[LayerTerms]:
        """Yield the terms of each layer of *layout*, in the order of its segments.

        Raises InvalidRequestError when the terms are of another layout.
        """
        self._check(layout)
        ids = self.layer_ids or tuple(range(layout.segment_count))
        layer_count = max(self.model_layers, 1 + max(ids))
        layer_ids = iter(ids)
        for component in layout.components:
            first = component.first_token
            weights = self.importance
            if weights is not None:
                weights = weights[first : first + component.tokens]
            for _ in range(component.layers):
                yield LayerTerms(
                    component, next(layer_ids), layer_count, position + first, self.rope, weights
                )

    def _check(self, layout: KVLayout) -> None:
        if self.layer_ids and len(self.layer_ids) != layout.segment_count:
            raise InvalidRequestError(
                "layer_ids", len(self.layer_ids), f"the chunk has {layout.segment_count} layers"
            )
        weights = self.importance
        if weights is None:
            return
        if weights.shape != (layout.tokens,) or weights.dtype != np.float32:
            fix = f"give float32 ({layout.tokens},)"
            raise InvalidRequestError("importance", (weights.shape, str(weights.dtype)), fix)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise InvalidRequestError("importance", float(weights.min()), "finite, not negative")


@dataclass(frozen=True, slots=True, eq=False)
class LayerTerms:
    """EncodeTerms of one layer: number ``layer_id`` of the model's ``model_layers``.

    ``position`` is the index in the prompt of the first token that the layer keeps.
    """

    component: Component
    layer_id: int = 0
    model_layers: int = 1
    position: int = 0
    rope: RopeParameters | None = None
    importance: Importance | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLayer:
    """One encoded layer: ``stored_bytes`` of its base in the caller's buffer, and refinements.

    ``error_bound`` is the largest absolute error of any element with all levels decoded, 0 unless
    ``accuracy`` is ``bounded``.
    """

    stored_bytes: int
    accuracy: Accuracy
    error_bound: float = 0.0
    refinements: tuple[NDArray[np.uint8], ...] = ()


Part: TypeAlias = NDArray[Any]
"""One tensor of one layer: (kv_heads, tokens, head_dim), any strides, the dtype's item size.

numpy has no bfloat16 or fp8; such tensors are unsigned integers of the same size.
"""

ChunkTensors: TypeAlias = Sequence[Sequence[Sequence[Part]]]
"""A chunk's tensors: components, then layers, then parts (K and V, or one latent or state)."""

AnyPart: TypeAlias = Part | BlockPart
"""A tensor of one layer in place: an array, or slots of an engine's blocks."""

AnyTensors: TypeAlias = Sequence[Sequence[Sequence[AnyPart]]]
"""A chunk's tensors in place, in the order of ChunkTensors."""


class Codec(ABC):
    """Encodes tensors to frames and decodes frames into tensors.

    ``tests/contracts/codec.py`` runs one suite over every codec, backend and dtype; a new codec
    must pass it and commit its golden frame.
    """

    name: ClassVar[str]
    codec_id: int
    """The codec's number in frames. Never reused."""
    revision: ClassVar[int]
    accuracy: ClassVar[Accuracy]
    """The least accuracy of a frame: a layer that would fall below is stored exactly."""
    levels: int = 0
    """Refinements in frames it writes."""
    max_levels: ClassVar[int] = 0
    """Refinements it can read."""
    asset: bytes = NO_ASSET
    """Digest of the tables that its frames need."""

    @classmethod
    def of(cls, terms: str) -> Codec:
        """Return the codec with *terms*, the part of its name after the colon.

        Raises UnknownCodecError for unknown terms; most codecs have none.
        """
        raise UnknownCodecError(f"{cls.name}:{terms}", cls.name)

    @abstractmethod
    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer of *component*, without its refinements."""

    def max_refinement_bytes(self, component: Component) -> int:
        """Upper bound of one refinement of one layer."""
        del component
        return 0

    @abstractmethod
    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return the number of bytes used."""

    @abstractmethod
    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents.

        Never allocates more than the component's ``layer_bytes`` and a fixed amount of scratch, for
        any *data*.
        """

    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode the base of one layer into *out*, and return its refinements, if any.

        *out* has at least ``max_segment_bytes``.
        """
        return EncodedLayer(self.encode_segment(parts, layer.component, out), self.accuracy)

    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode a layer's base and all refinements in *data* into *out*.

        Keys are rotated to *position*; None: to their own. Raises InvalidFrameError;
        InvalidRequestError for a *position* if keys cannot be rotated.
        """
        if position is not None:
            fix = f"{self.name} cannot rotate stored keys"
            raise InvalidRequestError("position", position, fix)
        self.decode_segment(data[0], component, out)

    def reads(self, revision: int) -> bool:
        """Return whether it decodes segments of *revision*: its own, and all before."""
        return 1 <= revision <= self.revision

    def check_header(self, header: FrameHeader) -> None:
        """Raise UnknownCodecError unless *header* names this codec, revision and tables.

        Raises InvalidFrameError for more levels than it has.
        """
        if header.codec_id != self.codec_id or not self.reads(header.codec_revision):
            raise UnknownCodecError(
                f"{header.codec_id} revision {header.codec_revision}",
                f"{self.name} is {self.codec_id} revision {self.revision}",
            )
        self.check_asset(header)
        if header.levels > self.max_levels:
            raise InvalidFrameError("levels", header.levels, f"{self.name} has {self.max_levels}")

    def check_asset(self, header: FrameHeader) -> None:
        """Raise UnknownCodecError unless this codec has the tables that *header* names."""
        if header.asset != self.asset:
            raise UnknownCodecError(
                f"{self.name} with asset {header.asset.hex()}", f"asset {self.asset.hex()}"
            )

    def max_frame_bytes(self, layout: KVLayout) -> int:
        """Upper bound of the encoded frame of *layout*."""
        size = header_bytes(layout, self.levels)
        for component in layout.components:
            base = self.max_segment_bytes(component) + ALIGN_BYTES
            refinement = self.max_refinement_bytes(component) + ALIGN_BYTES
            size += component.layers * (base + self.levels * refinement)
        return size

    def encode(
        self,
        template: FrameTemplate,
        tensors: AnyTensors,
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *tensors* to the start of *out* and return its header.

        Checksums stay zero if the template has FLAG_UNSUMMED. Raises LayoutMismatchError when
        *tensors* do not have the template's layout, InvalidRequestError when *terms* do not.
        """
        check_tensors(template.layout, tensors)
        dense = (list(map(to_dense, places)) for layers in tensors for places in layers)
        return self.encode_layers(template, dense, out, terms)

    def encode_layers(
        self,
        template: FrameTemplate,
        layers: Iterable[Sequence[Part]],
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *layers*; each must stay valid until the next is requested."""
        writer = FrameWriter(template, out, self.levels)
        later: list[list[Bytes]] = [[] for _ in range(self.levels)]
        accuracy, error_bound = Accuracy.exact, 0.0
        unsummed = 0 if template.flags & FLAG_UNSUMMED else None
        every = (terms or EncodeTerms()).layers(template.layout, template.position)
        for layer, parts in zip(every, layers, strict=True):
            buffer = writer.reserve(self.max_segment_bytes(layer.component))
            encoded = self.encode_layer(parts, layer, buffer)
            writer.commit(encoded.stored_bytes, unsummed)
            for level, data in zip(later, encoded.refinements, strict=True):
                level.append(data)
            accuracy = min(accuracy, encoded.accuracy)
            error_bound = max(error_bound, encoded.error_bound)
        for level in later:
            for data in level:
                copy_bytes(writer.reserve(len(data)), data)
                writer.commit(len(data), unsummed)
        if accuracy is not Accuracy.bounded:
            error_bound = 0.0
        return writer.finish(self.codec_id, self.revision, accuracy, error_bound, self.asset)

    def decode_into(self, header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
        """Verify each segment of *frame* and decode it into *out*.

        A window or state for which *out* has no layers is skipped, without verification. Raises
        ChunkCorruptError or InvalidFrameError; *out* is then undefined. Raises UnknownCodecError
        for a frame of another codec or revision; *out* is then unchanged.
        """
        self.decode_prefix(header, frame, header.levels, out)

    def decode_prefix(
        self,
        header: FrameHeader,
        prefix: Bytes,
        level: int,
        out: AnyTensors,
        position: int | None = None,
    ) -> None:
        """Verify and decode the levels 0 to *level* of a frame from its first bytes, *prefix*.

        Keys are rotated as they were, or as if the chunk began at *position*. Raises as
        ``decode_into`` does, and InvalidFrameError for a level that the frame does not have.
        """
        self.check_header(header)
        if not 0 <= level <= header.levels:
            raise InvalidFrameError("level", level, f"the frame has 0 to {header.levels}")
        check_tensors(header.layout, out, is_target=True)
        count = header.layout.segment_count
        for index, component, places in each_wanted(header.layout, out):
            data = []
            for segment in range(index, (level + 1) * count, count):
                data.append(header.segment(prefix, segment))
                check_segment(header, segment, checksum(data[-1]))
            place = None if position is None else position + component.first_token
            self._decode_places(data, component, places, place)

    def decode_checked(
        self, header: FrameHeader, index: int, data: Bytes, out: Sequence[AnyPart]
    ) -> None:
        """Verify and decode *data*, the stored bytes of only the base segment *index*.

        Raises ChunkCorruptError or InvalidFrameError; *out* is then undefined.
        """
        check_segment(header, index, checksum(data))
        component = header.layout.components[int(header.segments[index]["component"])]
        self._decode_places([data], component, out, None)

    def _decode_places(
        self,
        data: Sequence[Bytes],
        component: Component,
        places: Sequence[AnyPart],
        position: int | None,
    ) -> None:
        dense = [np.empty(p.shape, p.dtype) if isinstance(p, BlockPart) else p for p in places]
        self.decode_layer(data, component, dense, position)
        for place, array in zip(places, dense, strict=True):
            if isinstance(place, BlockPart):
                place.scatter(array)


class LossyCodec(Codec):
    """A codec whose frames state the accuracy that their layers reached.

    Subclasses define ``encode_layer``, and ``decode_layer`` or, if they never rotate keys,
    ``decode_segment``. ``tests/contracts/lossy_codec.py`` has the suite.
    """

    @abstractmethod
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """As ``Codec.encode_layer``."""

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer without terms."""
        return self.encode_layer(parts, LayerTerms(component), out).stored_bytes

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified base into *out*."""
        self.decode_layer([data], component, out, None)


def each_wanted(
    layout: KVLayout, out: AnyTensors
) -> Iterator[tuple[int, Component, Sequence[AnyPart]]]:
    """Yield the segment, component and parts of each layer that *out* has."""
    first = 0
    for component, layers in zip(layout.components, out, strict=True):
        for layer, parts in enumerate(layers):
            yield first + layer, component, parts
        first += component.layers


def check_tensors(layout: KVLayout, tensors: AnyTensors, *, is_target: bool = False) -> None:
    """Raise LayoutMismatchError unless *tensors* has exactly the shapes of *layout*.

    In a target, windows and states may have no layers; raises InvalidRequestError for read-only
    memory.
    """
    if not isinstance(tensors, Sequence):
        fix = "give components, layers, parts"
        raise LayoutMismatchError("tensors", type(tensors).__name__, fix)
    if len(tensors) != len(layout.components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(layout.components)}")
    for component, layers in zip(layout.components, tensors, strict=True):
        if is_target and not len(layers) and component.kind in END_KINDS:
            continue
        if len(layers) != component.layers:
            raise LayoutMismatchError("layers", len(layers), f"give {component.layers}")
        is_alike = isinstance(layers, BlockLayers)
        for parts in layers[:1] if is_alike else layers:
            check_parts(component, parts)
            for part in parts if is_target else ():
                if isinstance(part, np.ndarray) and not part.flags.writeable:
                    fix = "give writable memory"
                    raise InvalidRequestError("out", "read-only", fix)


def check_parts(component: Component, parts: Sequence[AnyPart]) -> None:
    """Raise LayoutMismatchError unless *parts* are one layer of *component*."""
    if len(parts) != component.parts:
        raise LayoutMismatchError("parts", len(parts), f"give {component.parts}")
    shape, item_bytes = component.shape, component.dtype.item_bytes
    for part in parts:
        if part.shape != shape:
            raise LayoutMismatchError("shape", part.shape, f"give {shape}")
        if part.dtype.itemsize != item_bytes:
            raise LayoutMismatchError("dtype", str(part.dtype), f"give {component.dtype.name}")


def empty_tensors(layout: KVLayout) -> list[list[list[Part]]]:
    """Return uninitialised tensors of *layout*, as unsigned integers of the dtype's size."""
    # One array per part: malloc reuses memory of that size, while memory of a whole component is
    # mapped and faulted in again for every get.
    tensors: list[list[list[Part]]] = []
    for component in layout.components:
        shape, dtype = component.shape, np.dtype(f"u{component.dtype.item_bytes}")
        layers: list[list[Part]] = []
        for _ in range(component.layers):
            parts: list[Part] = []
            for _ in range(component.parts):
                parts.append(np.empty(shape, dtype))  # noqa: PERF401 - for each part of a get
            layers.append(parts)
        tensors.append(layers)
    return tensors


CODECS = {
    "cachegen": "kvstore.codecs.cachegen:CachegenCodec",
    "kivi": "kvstore.codecs.kivi:KiviCodec",
    "kvq": "kvstore.codecs.kvq:KvqCodec",
    "kvtc": "kvstore.codecs.kvtc:KvtcCodec",
    "lossless": "kvstore.codecs.lossless:LosslessCodec",
    "raw": "kvstore.codecs.raw:RawCodec",
}
"""Module and class by name; a codec is imported at first use."""

REMOVED = {1: "zstd", 3: "xans", 4: "xpack", 5: "fp8", 11: "mixed"}
"""Ids of removed codecs, never reused. A frame of one is a miss."""
NAMES_BY_ID = {
    0: "raw",
    2: "lossless",
    6: "kivi:8",
    7: "kivi:4",
    8: "kivi:2",
    9: "kvq",
    10: "cachegen",
    12: "kvtc",
    13: "kvq:static",
}

REPLACED = {
    "fp8": "kvq:3",
    "gq2": "kivi:2",
    "gq4": "kivi:4",
    "gq8": "kivi:8",
    "kvqs": "kvq:N,static",
    "kvt": "kvtc",
    "mixed": "kvq:N,importance",
    "xans": "lossless",
    "xpack": "lossless",
    "zplane": "lossless",
    "zstd": "lossless",
}
"""Removed names and their successors."""


def codec_class(name: str) -> type[Codec]:
    """Import and return the class of the codec *name*."""
    module, _, attribute = CODECS[name].partition(":")
    return cast(type[Codec], getattr(import_module(module), attribute))


def boundless_codecs() -> list[str]:
    """Return the names of the codecs whose copies state no bound."""
    return [name for name in CODECS if codec_class(name).accuracy is Accuracy.approximate]


def codec_by_name(name: str) -> Codec:
    """Return the codec called *name*, or *name:terms* for those with terms.

    Raises UnknownCodecError naming the known ones.
    """
    plain, colon, terms = name.partition(":")
    if plain in REPLACED:
        raise UnknownCodecError(name, f"{REPLACED[plain]}, which replaces {plain}")
    if plain not in CODECS:
        raise UnknownCodecError(plain, ", ".join(CODECS))
    return codec_class(plain).of(terms) if colon else codec_class(plain)()


def codec_by_id(codec_id: int) -> Codec:
    """Return the codec of *codec_id*. Raises UnknownCodecError."""
    if codec_id not in NAMES_BY_ID:
        raise UnknownCodecError(codec_id, ", ".join(map(str, NAMES_BY_ID)))
    return codec_by_name(NAMES_BY_ID[codec_id])


def codec_name(codec_id: int) -> str:
    """Return the name of the codec of *codec_id*, known or not."""
    return NAMES_BY_ID.get(codec_id) or REMOVED.get(codec_id, f"unknown-{codec_id}")
