"""The kvq codec: uniform quantisation about each channel's mean, coded with parametric models.

The rotary embedding of keys is undone first, if the caller states it: their channels then have
stable means, which halves their error at the same size (KVQuant, Hooper et al., arXiv 2401.18079,
section 3.2, quantises keys before rotation for the same reason). Then a tile of tokens and channels
gets one step, proportional to its deviation, and each channel one of 64 distributions. The stream
stores only its index, where CacheGen (Liu et al., SIGCOMM 2024, section 5.2) stores a table for
every channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvstore.codecs.base import EncodedLayer, LayerTerms, LossyCodec, Part
from kvstore.codecs.floats import has_floats, is_finite
from kvstore.codecs.kvq_layer import (
    MAX_SINKS,
    QUANTISED,
    Decoding,
    Encoding,
    angles_of,
    decode_exact,
    encode_exact,
    layer_without_sinks,
    max_exact_bytes,
    max_refined_bytes,
    sinks_moved,
)
from kvstore.codecs.kvq_models import ASSET, NO_CLASSES, RATIOS, classes_of
from kvstore.codecs.kvq_tiles import LEVELS, TILE_CHANNELS, Cut, KvqLoops
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.types import Accuracy, Component

DEFAULT_QUALITY = 2
KEY_SHARE, VALUE_SHARE = 2**-0.5, 2**0.5
"""Steps of keys and values, relative to the quality's: as many bits as with equal steps, and less
divergence, most of which comes from keys (KVQuant, section 3; bench.codecs measures it).
"""
LAYERED = "layered"
_TERMS = re.compile(rf"([0-{len(RATIOS) - 1}]|{LAYERED})(,sinks=[0-{MAX_SINKS}])?(,importance)?")
STATIC = "static"
_QUALITIES = tuple(map(str, range(len(RATIOS))))
KNOWN_TERMS = (
    f"kvq:0 to kvq:{len(RATIOS) - 1}, kvq:{LAYERED}; then ,sinks=0 to ,sinks={MAX_SINKS}; then, "
    f"except for kvq:{LAYERED}, ,importance; or kvq:0,{STATIC} to kvq:{len(RATIOS) - 1},{STATIC}"
)


@dataclass(frozen=True, slots=True)
class Options:
    """Options after the quality: exact first tokens of a prompt; steps by importance."""

    sinks: int = 1
    importance: bool = False


DEFAULT_OPTIONS = Options()


class KvqCodec(LossyCodec):
    """2 to 5 bits per number with bounded errors; layers with NaN or infinity are stored exactly.

    ``kvq:0`` to ``kvq:3`` go from small to accurate; ``kvq:layered``, or None, has the coarsest as
    its base and two refinements. The first ``sinks`` tokens of a prompt are stored exactly: as
    attention sinks they cause most of the divergence (StreamingLLM, Xiao et al., arXiv 2309.17453,
    section 3.1). With ``importance``, tokens have finer or coarser steps by the caller's weights,
    if given. Frames of any of these options are readable; ``static`` is another frame format,
    StaticKvqCodec's.
    """

    name = "kvq"
    codec_id = 9
    revision = 2
    accuracy = Accuracy.bounded
    asset = ASSET

    max_levels = LEVELS

    def __init__(
        self,
        quality: int | None = DEFAULT_QUALITY,
        loops: KvqLoops | None = None,
        options: Options = DEFAULT_OPTIONS,
    ) -> None:
        self.ratio = RATIOS[0 if quality is None else quality]
        self.levels = LEVELS if quality is None else 0
        self.options = options
        self.loops = loops or KvqLoops()

    @override
    @classmethod
    def of(cls, terms: str) -> LossyCodec:
        quality, comma, option = terms.rpartition(",")
        if option == STATIC and (quality in _QUALITIES or not comma):
            from kvstore.codecs.kvq_static import StaticKvqCodec  # which needs this module

            return StaticKvqCodec(int(quality) if quality else None)
        found = _TERMS.fullmatch(terms)
        quality, sinks, importance = found.groups() if found else ("", "", "")
        if not quality or (quality == LAYERED and importance):
            raise UnknownCodecError(f"{cls.name}:{terms}", KNOWN_TERMS)
        count = int(sinks[-1]) if sinks else DEFAULT_OPTIONS.sinks
        options = Options(count, bool(importance))
        return cls(None if quality == LAYERED else int(quality), options=options)

    @override
    def reads(self, revision: int) -> bool:
        return revision == self.revision

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
        encoding = self._encoded(parts, layer) if has_floats(component) else None
        body = None if encoding is None else encoding.body()
        if encoding is None or body is None or body.stored_bytes >= component.layer_bytes:
            nothing = (np.empty(0, np.uint8),) * self.levels
            size = encode_exact(parts, component, out)
            return EncodedLayer(size, Accuracy.exact, 0.0, nothing)
        size = body.pack(out)
        return EncodedLayer(
            size, Accuracy.bounded, encoding.bounds[-1], tuple(encoding.refinements())
        )

    def _encoded(self, parts: Sequence[Part], layer: LayerTerms) -> Encoding | None:
        """Return *parts* quantised and coded; None if the error bound cannot be kept."""
        dtype, sinks = layer.component.dtype, max(0, self.options.sinks - layer.position)
        if sinks >= layer.component.tokens:
            return None
        bits = [part.view(f"<u{dtype.item_bytes}") for part in parts]
        exact = np.stack([part[:, :sinks].transpose(1, 0, 2) for part in bits])
        if sinks and not is_finite(exact, dtype):
            return None
        coded, loops = layer_without_sinks(layer, sinks), self.loops
        weights = coded.importance if self.options.importance else None
        classes = NO_CLASSES if weights is None else classes_of(weights)
        encoding = Encoding(coded, self.levels, loops, exact, classes)
        ratios = ratios_of(coded.component, self.ratio)
        for block in Cut.of(coded.component).blocks:
            angles = angles_of(encoding.frequencies, coded.position, block)
            for part, turned, ratio in zip(bits, (angles, None), ratios, strict=False):
                rows = part[:, sinks:][:, block]
                tiles = loops.quantise(rows, dtype, turned, ratio, classes[block])
                if tiles is None:
                    return None
                thirds = loops.refine(rows, dtype, turned, tiles) if self.levels else []
                if thirds is None:
                    return None
                encoding.add(tiles, thirds, turned)
            encoding.end_block(block)
        return encoding

    @override
    def decode_layer(
        self, data: Sequence[Bytes], component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        if not len(data[0]) or data[0][0] != QUANTISED:
            if any(map(len, data[1:])):
                raise InvalidFrameError("refinement", len(data), "of a layer stored exactly")
            decode_exact(data[0], component, out)
            return
        if not has_floats(component):
            raise InvalidFrameError("method", QUANTISED, f"{component.dtype.name} is not quantised")
        dtype = component.dtype
        decoding = Decoding.of(data, component, self.loops)
        body, sinks = decoding.body, component.tokens - decoding.coded.tokens
        place = body.position if position is None else position + sinks
        exact = sinks_moved(body.sinks, body.frequencies, place - body.position, dtype)
        bits = [part.view(f"<u{dtype.item_bytes}") for part in out]
        for part, rows in zip(bits, exact, strict=True):
            part[:, :sinks] = rows.transpose(1, 0, 2)
        decoding.write([part[:, sinks:] for part in bits], body.frequencies, place)


def ratios_of(component: Component, ratio: float) -> tuple[float, ...]:
    """Return the step of each part of *component*, in standard deviations, at *ratio*."""
    if component.parts == 1:
        return (ratio,)
    return (ratio * KEY_SHARE, ratio * VALUE_SHARE)
