"""The mixed codec: kvq with finer steps for the tokens that matter.

The caller says which by ``EncodeTerms.importance``, attention mass for instance; without it the
first tokens of a prompt are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvstore.codecs.base import Part
from kvstore.codecs.kvq import DEFAULT_QUALITY, RATIOS, ratios_of
from kvstore.codecs.kvq_body import QUANTISED, Body, Stream, parse_body
from kvstore.codecs.kvq_exact import decode_exact, encode_exact, max_exact_bytes
from kvstore.codecs.kvq_fine import FineBackend, Mixer, best_fine_backend, best_mixer
from kvstore.codecs.kvq_layer import (
    Coded,
    angles_of,
    bound_of,
    is_quantised,
    joined,
    key_frequencies,
    rounded_up,
)
from kvstore.codecs.kvq_models import ASSET, kvq_models
from kvstore.codecs.kvq_tiles import Cut, Quotients, Tiles
from kvstore.codecs.lossy import LossyCodec
from kvstore.codecs.mixed_tiles import Classes, classes_of, factors_of
from kvstore.codecs.rans import Backend, best_backend
from kvstore.codecs.terms import EncodedLayer, LayerTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.types import Component, DType, Fidelity

_CLASSES_A_BYTE = 4


@dataclass(frozen=True, slots=True)
class _Layer:
    """A quantised layer: its body as of kvq, and the class of each token."""

    body: Body
    classes: Classes
    bound: float


class MixedCodec(LossyCodec):
    """As kvq, ``mixed:0`` to ``mixed:3``, but each token has a step of its own class."""

    name = "mixed"
    codec_id = 11
    revision = 1
    fidelity = Fidelity.bounded
    asset = ASSET

    def __init__(
        self,
        quality: int = DEFAULT_QUALITY,
        entropy: Backend | None = None,
        fine: FineBackend | None = None,
        mixer: Mixer | None = None,
    ) -> None:
        self.ratio = RATIOS[quality]
        self._entropy = entropy
        self._fine = fine
        self._mixer = mixer

    @override
    @classmethod
    def of(cls, terms: str) -> MixedCodec:
        if terms not in map(str, range(len(RATIOS))):
            raise UnknownCodecError(f"{cls.name}:{terms}", "mixed:0 to mixed:3")
        return cls(int(terms))

    def fine(self, dtype: DType) -> FineBackend:
        """Return what reads numbers of *dtype*."""
        return self._fine or best_fine_backend(dtype)

    def mixer(self, dtype: DType) -> Mixer:
        """Return what quantises numbers of *dtype*."""
        return self._mixer or best_mixer(dtype)

    @property
    def entropy(self) -> Backend:
        """What codes the symbols."""
        return self._entropy or best_backend()

    @override
    def max_segment_bytes(self, component: Component) -> int:
        return max_exact_bytes(component)

    @override
    def encode_layer(self, parts: Sequence[Part], layer: LayerTerms, out: Bytes) -> EncodedLayer:
        component = layer.component
        found = self._quantised(parts, layer) if is_quantised(component) else None
        if found is not None:
            packed = _pack_classes(found.classes)
            size = found.body.stored_bytes
            if size + len(packed) < component.layer_bytes:
                found.body.pack(out)
                out[size : size + len(packed)] = packed
                return EncodedLayer(size + len(packed), Fidelity.bounded, found.bound)
        return EncodedLayer(encode_exact(parts, component, out), Fidelity.exact)

    def _quantised(self, parts: Sequence[Part], layer: LayerTerms) -> _Layer | None:
        component = layer.component
        frequencies = key_frequencies(layer)
        classes = classes_of(layer.importance, layer.position, component.tokens)
        fine = self.fine(component.dtype)
        tiles: list[Tiles] = []
        streams: list[Coded] = []
        bound = 0.0
        for block in Cut.of(component).blocks:
            angles = angles_of(frequencies, layer.position, block)
            ratios = ratios_of(component, self.ratio)
            for part, turned, ratio in zip(parts, (angles, None), ratios, strict=False):
                bits = part[:, block].view(f"<u{component.dtype.item_bytes}")
                found = self.mixer(component.dtype).quantise(
                    bits, component.dtype, turned, ratio, classes[block]
                )
                if found is None:
                    return None
                bound = max(
                    bound, bound_of(found.errors, found.magnitudes, component.dtype, turned)
                )
                tiles.append(found)
                streams.append(self._coded(found, fine.move(found.models, classes[block])))
        body = Body(
            layer.position if len(frequencies) else 0,
            rounded_up(bound),
            frequencies,
            joined(tiles, "steps"),
            joined(tiles, "escapes"),
            joined(tiles, "means"),
            joined(tiles, "models"),
            Stream.joined(streams),
            joined(tiles, "values"),
        )
        return _Layer(body, classes, bound)

    def _coded(self, tiles: Tiles, models: Classes) -> Coded:
        count = len(tiles.symbols)
        # One token of very many channels: that gives each number a model of its own.
        symbols = tiles.symbols.reshape(count, 1, -1)
        return self.entropy.encode_tiles(symbols, models.reshape(count, -1), kvq_models().table)

    @override
    def decode_layer(
        self,
        data: Sequence[Bytes],
        component: Component,
        out: Sequence[Part],
        position: int | None,
    ) -> None:
        whole = data[0]
        if not len(whole) or whole[0] != QUANTISED:
            decode_exact(whole, component, out)
            return
        if not is_quantised(component):
            raise InvalidFrameError("method", QUANTISED, f"{component.dtype.name} is not quantised")
        cut = Cut.of(component)
        size = len(whole) - -(-component.tokens // _CLASSES_A_BYTE)
        count = component.parts * cut.columns * len(cut.blocks)
        body = parse_body(whole[: max(size, 0)], count, component.head_dim)
        classes = _unpack_classes(whole[size:], component.tokens)
        place = body.position if position is None else position
        streams = body.stream.pieces([cut.columns] * (component.parts * len(cut.blocks)))
        fine = self.fine(component.dtype)
        first = value = 0
        for block in cut.blocks:
            angles = angles_of(body.frequencies, place, block)
            for part, turned in zip(out, (angles, None), strict=False):
                at = slice(first, first + cut.columns)
                end = value + int(body.escapes[at].sum(dtype=np.uint64))
                rows = fine.move(body.models[at], classes[block])
                tiles = self._tiles(body, at, body.values[value:end], next(streams), rows)
                quotients = fine.quotients(tiles)
                if quotients is None:
                    raise InvalidFrameError("escapes", end - value, "not as many as coded")
                bits = part[:, block].view(f"<u{component.dtype.item_bytes}")
                factors = factors_of(classes[block])
                fine.write(quotients, tiles, factors, (component.dtype, turned, bits))
                first, value = at.stop, end

    def _tiles(
        self, body: Body, at: slice, values: Quotients, stream: Stream, models: Classes
    ) -> Tiles:
        """Return the tiles *at* of *body*, their symbols decoded by the *models* of each."""
        count = len(models)
        symbols = np.empty(models.shape, np.uint8)
        self.entropy.decode_tiles(
            stream.states, stream.counts, stream.words,
            models.reshape(count, -1), kvq_models().table, symbols.reshape(count, 1, -1),
        )  # fmt: skip
        return Tiles(
            body.steps[at], body.means[at], body.models[at], symbols, body.escapes[at], values
        )


def _pack_classes(classes: Classes) -> Bytes:
    """Return *classes*, two bits each, the first in the lowest bits."""
    padded = np.zeros(-(-len(classes) // _CLASSES_A_BYTE) * _CLASSES_A_BYTE, np.uint8)
    padded[: len(classes)] = classes
    rows = padded.reshape(-1, _CLASSES_A_BYTE)
    packed: Bytes = np.bitwise_or.reduce(rows << np.arange(0, 8, 2, dtype=np.uint8), axis=1)
    return packed


def _unpack_classes(data: Bytes, tokens: int) -> Classes:
    found: Classes = (data[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).reshape(-1)
    if found[tokens:].any():
        raise InvalidFrameError("classes", int(found[tokens:].max()), "zeros behind the last token")
    return found[:tokens]
