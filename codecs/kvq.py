"""The kvq codec: uniform steps about each channel's mean, coded under parametric models.

Keys are turned back by their rotary embedding first, where the caller says by which: their
channels then have steady means, which halves their error at the same size (KVQuant, Hooper et
al., arXiv 2401.18079, section 3.2, quantises keys before rotation for the same reason). Then a
tile of tokens and channels gets one step, in proportion to its deviation, and each channel one of
64 distributions, whose index is all that the stream says of it; what CacheGen (Liu et al.,
SIGCOMM 2024, section 5.2) stores as a table for every channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from kvstore.codecs.base import Part
from kvstore.codecs.kvq_backends import best_tile_backend
from kvstore.codecs.kvq_body import QUANTISED, Stream, parse_body
from kvstore.codecs.kvq_exact import decode_exact, encode_exact, max_exact_bytes
from kvstore.codecs.kvq_fine import FineBackend, best_fine_backend
from kvstore.codecs.kvq_layer import Decoding, Encoding, angles_of, is_quantised, refined
from kvstore.codecs.kvq_levels import (
    LEVELS,
    at_level,
    max_refined_bytes,
    ones,
    parse_refinement,
)
from kvstore.codecs.kvq_models import ASSET
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, Cut, TileBackend, Tiles
from kvstore.codecs.lossy import LossyCodec
from kvstore.codecs.rans import Backend, best_backend
from kvstore.codecs.terms import EncodedLayer, LayerTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import Component, DType, Fidelity

RATIOS = (1.0, 0.5, 0.25, 0.125)
"""Step of each quality, in standard deviations of the tile: about 2, 3, 4 and 5 bits a number."""
DEFAULT_QUALITY = 2
KEY_SHARE, VALUE_SHARE = 2**-0.5, 2**0.5
"""What of the quality's step keys and values have: as many bits as with equal steps, and less
divergence, most of which comes from keys (KVQuant finds so, section 3; bench.codecs measures it).
"""
LAYERED = "layered"


class KvqCodec(LossyCodec):
    """2 to 5 bits a number, the error of each bounded; layers with NaN or infinity kept exactly.

    ``kvq:0`` to ``kvq:3`` go from small to exact; ``kvq:layered``, or None, has the coarsest as
    its base and two refinements. A frame is read whatever it was written with.
    """

    name = "kvq"
    codec_id = 9
    revision = 1
    fidelity = Fidelity.bounded
    asset = ASSET

    max_levels = LEVELS

    def __init__(
        self,
        quality: int | None = DEFAULT_QUALITY,
        tiles: TileBackend | None = None,
        entropy: Backend | None = None,
        fine: FineBackend | None = None,
    ) -> None:
        self.ratio = RATIOS[0 if quality is None else quality]
        self.levels = LEVELS if quality is None else 0
        self._tiles = tiles
        self._entropy = entropy
        self._fine = fine

    @override
    @classmethod
    def of(cls, terms: str) -> KvqCodec:
        if terms == LAYERED:
            return cls(None)
        if terms not in map(str, range(len(RATIOS))):
            raise UnknownCodecError(f"{cls.name}:{terms}", f"kvq:0 to kvq:3, kvq:{LAYERED}")
        return cls(int(terms))

    def tiles(self, dtype: DType) -> TileBackend:
        """Return what quantises numbers of *dtype*."""
        return self._tiles or best_tile_backend(dtype)

    def fine(self, dtype: DType) -> FineBackend:
        """Return what refines numbers of *dtype*."""
        return self._fine or best_fine_backend(dtype)

    @property
    def entropy(self) -> Backend:
        """What codes the symbols."""
        return self._entropy or best_backend()

    @override
    def max_segment_bytes(self, component: Component) -> int:
        return max_exact_bytes(component)

    @override
    def max_refinement_bytes(self, component: Component) -> int:
        cut = Cut.of(component)
        tiles = component.parts * cut.columns
        numbers = tiles * component.tokens * TILE_CHANNELS
        return max_refined_bytes(tiles * len(cut.blocks), numbers)

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        component = layer.component
        encoding = self._encoded(parts, layer) if is_quantised(component) else None
        body = None if encoding is None else encoding.body()
        if encoding is None or body is None or body.stored_bytes >= component.layer_bytes:
            nothing = (np.empty(0, np.uint8),) * self.levels
            size = encode_exact(parts, component, out)
            return EncodedLayer(size, Fidelity.exact, 0.0, nothing)
        size = body.pack(out)
        return EncodedLayer(
            size, Fidelity.bounded, encoding.bounds[-1], tuple(encoding.refinements())
        )

    def _encoded(self, parts: Sequence[Part], layer: LayerTerms) -> Encoding | None:
        """Return *parts* quantised and coded, or None when they cannot keep the promise."""
        component = layer.component
        dtype = component.dtype
        encoding = Encoding(layer, self.levels, self.entropy)
        for block in Cut.of(component).blocks:
            angles = angles_of(encoding.frequencies, layer.position, block)
            ratios = ratios_of(component, self.ratio)
            for part, turned, ratio in zip(parts, (angles, None), ratios, strict=False):
                bits = part[:, block].view(f"<u{component.dtype.item_bytes}")
                tiles = self.tiles(dtype).quantise(bits, dtype, turned, ratio)
                has_more = tiles is not None and self.levels
                thirds = self.fine(dtype).refine(bits, dtype, turned, tiles) if has_more else []
                if tiles is None or thirds is None:
                    return None
                encoding.add(tiles, thirds, turned)
            encoding.end_block()
        return encoding

    @override
    def decode_layer(
        self,
        data: Sequence[Bytes],
        component: Component,
        out: Sequence[Part],
        position: int | None,
    ) -> None:
        if not len(data[0]) or data[0][0] != QUANTISED:
            if any(map(len, data[1:])):
                raise InvalidFrameError("refinement", len(data), "of a layer kept exactly")
            decode_exact(data[0], component, out)
            return
        if not is_quantised(component):
            raise InvalidFrameError("method", QUANTISED, f"{component.dtype.name} is not quantised")
        decoding = Decoding(data, component, self.entropy)
        place = decoding.body.position if position is None else position
        for block, tiles, streams in decoding.blocks():
            angles = angles_of(decoding.body.frequencies, place, block)
            turned = (angles, None)
            for index, part in enumerate(out):
                bits = part[:, block].view(f"<u{component.dtype.item_bytes}")
                given = (component.dtype, turned[index], bits)
                if not self._restore(tiles[index], streams[index], given):
                    raise InvalidFrameError("escapes", len(tiles[index].values), "not as coded")

    def _restore(
        self, tiles: Tiles, streams: Sequence[Stream], given: tuple[DType, Angles | None, Part]
    ) -> bool:
        """Write one part of a block to memory; False when its escapes are not those coded."""
        dtype, angles, bits = given
        if not streams:
            return self.tiles(dtype).dequantise(tiles, dtype, angles, bits)
        fine = self.fine(dtype)
        quotients = refined(tiles, streams, self.entropy, fine)
        if quotients is None:
            return False
        fine.write(quotients, at_level(tiles, len(streams)), ones(tiles), (dtype, angles, bits))
        return True

    def bound_at(self, header: FrameHeader, prefix: Bytes, level: int) -> float:
        """Return the largest error when *prefix*, the first bytes of a frame, is read at *level*.

        Raises InvalidFrameError.
        """
        layout = header.layout
        components = [c for c in layout.components for _ in range(c.layers)]
        bound = 0.0
        for index, component in enumerate(components):
            data = header.segment(prefix, index + level * layout.segment_count)
            cut = Cut.of(component)
            count = len(cut.blocks) * component.parts * cut.columns
            base = header.segment(prefix, index)
            if not len(base) or base[0] != QUANTISED:
                continue
            if level:
                bound = max(bound, parse_refinement(data, level, count)[1])
            else:
                bound = max(bound, parse_body(data, count, component.head_dim).error_bound)
        return bound


def ratios_of(component: Component, ratio: float) -> tuple[float, ...]:
    """Return the step of each part of *component*, in standard deviations, at *ratio*."""
    if component.parts == 1:
        return (ratio,)
    return (ratio * KEY_SHARE, ratio * VALUE_SHARE)
