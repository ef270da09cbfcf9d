"""The LossyCodec interface: codecs that keep a promise for each frame instead of every bit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from typing_extensions import override

from kvstore.codecs.base import (
    AnyPart,
    AnyTensors,
    Codec,
    EncodedLayer,
    EncodeTerms,
    LayerTerms,
    Part,
    check_room,
    check_tensors,
    each_wanted,
)
from kvstore.codecs.block_part import BlockPart, to_dense
from kvstore.proto.buffers import Bytes, checksum, copy_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import (
    ALIGN_BYTES,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_segment,
    header_bytes,
)
from kvstore.proto.types import Accuracy, Component, KVLayout


class LossyCodec(Codec):
    """Encode layers as exactly as each allows, and say in the frame how exact that was.

    ``accuracy`` is the least that a frame may have: a layer that cannot be coded within the
    promise is kept exactly. ``tests/contracts/lossy_codec.py`` has the suite.
    """

    @abstractmethod
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        """Encode the base of one layer into *out*, and return its refinements, if any.

        *out* has at least ``max_segment_bytes``.
        """

    @abstractmethod
    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode a layer's base and as many refinements as *data* has into *out*.

        Keys are rotated to *position*, or to where they were for None. Raises
        InvalidFrameError; never allocates more than ``layer_bytes`` and a fixed scratch.
        """

    def max_refinement_bytes(self, component: Component) -> int:
        """Upper bound of one refinement of one layer."""
        del component
        return 0

    @override
    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        return self.encode_layer(parts, LayerTerms(component), out).stored_bytes

    @override
    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        self.decode_layer([data], component, out, None)

    @override
    def max_frame_bytes(self, layout: KVLayout) -> int:
        size = header_bytes(layout, self.levels)
        for component in layout.components:
            base = self.max_segment_bytes(component) + ALIGN_BYTES
            refinement = self.max_refinement_bytes(component) + ALIGN_BYTES
            size += component.layers * (base + self.levels * refinement)
        return size

    @override
    def encode(
        self,
        template: FrameTemplate,
        tensors: AnyTensors,
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Write the frame of *tensors* to the start of *out* and return its header.

        Raises LayoutMismatchError when *tensors* do not have the template's layout,
        InvalidRequestError when *terms* do not.
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
        """Write the frame of *layers*, each needed until the next is asked for."""
        writer = FrameWriter(template, out, self.levels)
        later: list[list[Bytes]] = [[] for _ in range(self.levels)]
        accuracy, error_bound = Accuracy.exact, 0.0
        every = (terms or EncodeTerms()).layers(template.layout, template.position)
        for layer, parts in zip(every, layers, strict=True):
            room = writer.reserve(self.max_segment_bytes(layer.component))
            encoded = self.encode_layer(parts, layer, room)
            writer.commit(encoded.stored_bytes)
            for level, data in zip(later, encoded.refinements, strict=True):
                level.append(data)
            accuracy = min(accuracy, encoded.accuracy)
            error_bound = max(error_bound, encoded.error_bound)
        for level in later:
            for data in level:
                copy_bytes(writer.reserve(len(data)), data)
                writer.commit(len(data))
        if accuracy is not Accuracy.bounded:
            error_bound = 0.0
        return writer.finish(self.codec_id, self.revision, accuracy, error_bound, self.asset)

    @override
    def decode_into(self, header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
        self.decode_prefix(header, frame, header.levels, out)

    def decode_prefix(
        self,
        header: FrameHeader,
        prefix: Bytes,
        level: int,
        out: AnyTensors,
        position: int | None = None,
    ) -> None:
        """Verify and decode the levels 0 to *level* of a frame, whose first bytes *prefix* has.

        Keys come back as they were, or rotated as if the chunk began at *position*. Raises as
        ``decode_into`` does, and InvalidFrameError for a level that the frame does not have.
        """
        self.check_header(header)
        if not 0 <= level <= header.levels:
            raise InvalidFrameError("level", level, f"the frame has 0 to {header.levels}")
        check_room(header.layout, out)
        count = header.layout.segment_count
        for index, component, places in each_wanted(header.layout, out):
            data = []
            for segment in range(index, (level + 1) * count, count):
                data.append(header.segment(prefix, segment))
                check_segment(header, segment, checksum(data[-1]))
            place = None if position is None else position + component.first_token
            self._decode_places(data, component, places, place)

    @override
    def decode_checked(
        self, header: FrameHeader, index: int, data: Bytes, out: Sequence[AnyPart]
    ) -> None:
        """Verify *data*, the stored bytes of the base segment *index*, and decode it alone."""
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
