"""The Codec interface.

A codec turns the tensors of one chunk into a frame and back, layer by layer. It owns no
buffers and keeps no state: callers bring the memory, and may call from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.block_part import BlockLayers, BlockPart, BlockStack, to_dense
from kvstore.proto.buffers import Bytes, checksum
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
"""A weight for each token of the chunk, not negative; larger tokens are kept more exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTerms:
    """Facts and wishes that a lossy codec may use, and none has to have.

    ``rope`` is the rotary embedding that the keys carry; None leaves them as they are.
    ``layer_ids`` are the model's numbers of the chunk's layers, component by component, and
    ``model_layers`` how many the model has. ``importance`` is f32 (tokens,).
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
        """Return what *representation* says of its model's chunks, of those of *layout* if given.

        Without one they are chunks that have all that a chunk can have of its end.
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

        Raises InvalidRequestError when the terms are another layout's.
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
    """The same for one layer: the model calls it ``layer_id`` and has ``model_layers``.

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
    """One layer's base took ``stored_bytes`` of the caller's room; refinements come along.

    ``error_bound`` is the largest absolute error of any element once everything is decoded,
    0 unless ``accuracy`` is ``bounded``.
    """

    stored_bytes: int
    accuracy: Accuracy
    error_bound: float = 0.0
    refinements: tuple[NDArray[np.uint8], ...] = ()


T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name; modules with heavy imports load only when named."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._paths: dict[str, str] = {}

    def register(self, name: str, path: str) -> None:
        """Add ``path`` (``"package.module:Class"``) under *name*. Raises ValueError if taken."""
        if name in self._paths:
            raise ValueError(f"{self._kind} {name!r} is already registered")
        self._paths[name] = path

    def load(self, name: str) -> type[T]:
        """Import and return the class registered under *name*. Raises LookupError."""
        try:
            module, _, attribute = self._paths[name].partition(":")
        except KeyError:
            known = ", ".join(self)
            raise LookupError(f"unknown {self._kind} {name!r}; known: {known}") from None
        return cast(type[T], getattr(import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._paths))

    def __contains__(self, name: object) -> bool:
        return name in self._paths


Part: TypeAlias = NDArray[Any]
"""One tensor of one layer: (kv_heads, tokens, head_dim), any strides, the dtype's item size.

numpy has no bfloat16 or fp8; such tensors come as unsigned integers of the same size.
"""

ChunkTensors: TypeAlias = Sequence[Sequence[Sequence[Part]]]
"""A chunk's tensors: components, then layers, then parts (K and V, or one latent or state)."""

AnyPart: TypeAlias = Part | BlockPart
"""A tensor of one layer where it lies: an array, or slots of an engine's blocks."""

AnyTensors: TypeAlias = Sequence[Sequence[Sequence[AnyPart]]]
"""A chunk's tensors where they lie, in the order of ChunkTensors."""


class Codec(ABC):
    """Encode tensors to frames and decode frames into tensors.

    ``tests/contracts/codec.py`` runs one suite over every codec, backend and dtype; a new
    codec is done when that suite passes and its golden frame is committed.
    """

    name: ClassVar[str]
    codec_id: int
    """The number that frames carry. Never reused."""
    revision: ClassVar[int]
    accuracy: ClassVar[Accuracy]
    takes_blocks: ClassVar[bool] = False
    """Whether its own methods take BlockParts; others are given arrays, and one layer's copy."""
    levels: int = 0
    """Refinements behind the base of the frames it writes."""
    max_levels: ClassVar[int] = 0
    """Refinements that it reads."""
    asset: bytes = NO_ASSET
    """Digest of the tables that its frames are read with."""

    @classmethod
    def of(cls, terms: str) -> Codec:
        """Return the codec under *terms*, what follows the colon of its name.

        Raises UnknownCodecError for terms it does not know; most know none.
        """
        raise UnknownCodecError(f"{cls.name}:{terms}", cls.name)

    @abstractmethod
    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer of *component*."""

    @abstractmethod
    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return how many bytes were used."""

    @abstractmethod
    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents.

        Never allocates more than the component's ``layer_bytes`` and a fixed amount of scratch,
        whatever *data* says.
        """

    def encode_checked(
        self, parts: Sequence[Part], component: Component, out: Bytes
    ) -> tuple[int, int]:
        """Encode one layer into *out*; return the bytes used and their checksum."""
        stored_bytes = self.encode_segment(parts, component, out)
        return stored_bytes, checksum(out[:stored_bytes])

    def decode_checked(
        self, header: FrameHeader, index: int, data: Bytes, out: Sequence[AnyPart]
    ) -> None:
        """Verify *data*, the stored bytes of segment *index*, and decode it into *out*.

        Raises ChunkCorruptError or InvalidFrameError; *out* then holds rubbish.
        """
        check_segment(header, index, checksum(data))
        component = header.layout.components[int(header.segments[index]["component"])]
        dense = [
            np.empty(part.shape, part.dtype) if isinstance(part, BlockPart) else part
            for part in out
        ]
        self.decode_segment(data, component, dense)
        for part, array in zip(out, dense, strict=True):
            if isinstance(part, BlockPart):
                part.scatter(array)

    def reads(self, revision: int) -> bool:
        """Whether it decodes segments of *revision*: its own, and all before."""
        return 1 <= revision <= self.revision

    def check_header(self, header: FrameHeader) -> None:
        """Raise UnknownCodecError unless *header* names this codec, revision and tables.

        InvalidFrameError for levels that it does not have.
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
        size = header_bytes(layout)
        for component in layout.components:
            bound = self.max_segment_bytes(component) + ALIGN_BYTES
            size += component.layers * bound
        return size

    def encode(
        self,
        template: FrameTemplate,
        tensors: AnyTensors,
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *tensors* to the start of *out* and return its header.

        Checksums stay zero where the template says FLAG_UNSUMMED. Only lossy codecs look at
        *terms*.

        Raises LayoutMismatchError when *tensors* do not have the template's layout.
        """
        check_tensors(template.layout, tensors)
        writer = FrameWriter(template, out)
        for component, layers in zip(template.layout.components, tensors, strict=True):
            room_bytes = self.max_segment_bytes(component)
            for places in layers:
                room = writer.reserve(room_bytes)
                parts: Any = places if self.takes_blocks else list(map(to_dense, places))
                if template.flags & FLAG_UNSUMMED:
                    writer.commit(self.encode_segment(parts, component, room), 0)
                else:
                    writer.commit(*self.encode_checked(parts, component, room))
        return writer.finish(self.codec_id, self.revision, self.accuracy)

    def decode_into(self, header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
        """Verify each segment of *frame* and decode it into *out*.

        A window or state for which *out* has no layers is not wanted, and not looked at.
        Raises ChunkCorruptError or InvalidFrameError; *out* then holds rubbish. Raises
        UnknownCodecError for a frame of another codec or revision; *out* is then untouched.
        """
        self.check_header(header)
        check_room(header.layout, out)
        for index, _, parts in each_wanted(header.layout, out):
            self.decode_checked(header, index, header.segment(frame, index), parts)


def check_room(layout: KVLayout, out: AnyTensors) -> None:
    """Raise LayoutMismatchError unless *out* has the shapes of *layout*, as far as it is wanted."""
    check_tensors(layout, out, may_lack=True)


def each_wanted(
    layout: KVLayout, out: AnyTensors
) -> Iterator[tuple[int, Component, Sequence[AnyPart]]]:
    """Yield the segment, component and parts of each layer that *out* has room for."""
    first = 0
    for component, layers in zip(layout.components, out, strict=True):
        for layer, parts in enumerate(layers):
            yield first + layer, component, parts
        first += component.layers


def check_tensors(layout: KVLayout, tensors: AnyTensors, *, may_lack: bool = False) -> None:
    """Raise LayoutMismatchError unless *tensors* has exactly the shapes of *layout*.

    With *may_lack* windows and states may have no layers.
    """
    if len(tensors) != len(layout.components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(layout.components)}")
    for component, layers in zip(layout.components, tensors, strict=True):
        if may_lack and not len(layers) and component.kind in END_KINDS:
            continue
        if len(layers) != component.layers:
            raise LayoutMismatchError("layers", len(layers), f"give {component.layers}")
        is_alike = isinstance(layers, BlockStack | BlockLayers)
        for parts in layers[:1] if is_alike else layers:
            check_parts(component, parts)


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
    # One array a part: memory of that size is used again, that of a whole component comes anew from
    # the system with every get, to be faulted in.
    return [
        [
            [np.empty(c.shape, dtype=f"u{c.dtype.item_bytes}") for _ in range(c.parts)]
            for _ in range(c.layers)
        ]
        for c in layout.components
    ]


CODECS: Registry[Codec] = Registry("codec")

REMOVED = {1: "zstd", 3: "xans", 4: "xpack", 5: "fp8", 11: "mixed"}
"""Ids that are never used again: of codecs that are gone. A frame of one is a miss."""
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
"""Names that are gone, and what to write instead."""

CODECS.register("raw", "kvstore.codecs.raw:RawCodec")
CODECS.register("lossless", "kvstore.codecs.lossless:LosslessCodec")
CODECS.register("kvq", "kvstore.codecs.kvq:KvqCodec")
CODECS.register("kivi", "kvstore.codecs.kivi:KiviCodec")
CODECS.register("cachegen", "kvstore.codecs.cachegen:CachegenCodec")
CODECS.register("kvtc", "kvstore.codecs.kvtc:KvtcCodec")


def boundless_codecs() -> list[str]:
    """Return the names of the codecs whose copies state no bound."""
    return [name for name in CODECS if CODECS.load(name).accuracy is Accuracy.approximate]


def codec_by_name(name: str) -> Codec:
    """Return the codec called *name*, or *name:terms* for those that take some.

    Raises UnknownCodecError naming the known ones.
    """
    plain, colon, terms = name.partition(":")
    if plain in REPLACED:
        raise UnknownCodecError(name, f"{REPLACED[plain]}, which replaces {plain}")
    if plain not in CODECS:
        raise UnknownCodecError(plain, ", ".join(CODECS))
    return CODECS.load(plain).of(terms) if colon else CODECS.load(plain)()


def codec_by_id(codec_id: int) -> Codec:
    """Return the codec a frame names. Raises UnknownCodecError."""
    if codec_id not in NAMES_BY_ID:
        raise UnknownCodecError(codec_id, ", ".join(map(str, NAMES_BY_ID)))
    return codec_by_name(NAMES_BY_ID[codec_id])


def codec_name(codec_id: int) -> str:
    """Return what the codec of *codec_id* is called, be it known or not."""
    return NAMES_BY_ID.get(codec_id) or REMOVED.get(codec_id, f"unknown-{codec_id}")
