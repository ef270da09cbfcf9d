"""The cachegen codec, after the paper: anchors, deltas to them, static tables for each model.

Liu et al., CacheGen, SIGCOMM 2024, section 5.2: tokens in groups of ten, the first of a group
in eight bits, the others as differences to it, in bins that widen with the layer's depth;
both entropy-coded by distributions that were profiled offline for each layer and channel.
Departures: the coder is rANS, channels share 64 distributions (``cachegen_tables``), bins are
in units of each head's typical delta, and what no bin holds is escaped instead of clipped.

Without an asset for the model there is no such codec: a generic table would be another
algorithm under this name, and ``kvq`` is the one that needs no calibration.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import CODED, HEAD_BYTES, QUALITY_COUNT, AssetCodec
from kvstore.codecs.assets import Asset, AssetKind
from kvstore.codecs.base import Part
from kvstore.codecs.cachegen_symbols import MAX_ESCAPED, Split, join, split
from kvstore.codecs.cachegen_tables import (
    ANCHOR_ZERO,
    DEFAULT_QUALITY,
    DELTA_ZERO,
    GROUP_TOKENS,
    QUALITIES,
    CachegenTables,
    LayerTables,
    empty_tiles,
    from_tiles,
    to_tiles,
)
from kvstore.codecs.floats import check_scales, largest_error, to_float32
from kvstore.codecs.rans import LANES, decode_tiles, encode_tiles
from kvstore.codecs.terms import LayerTerms
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Component

_HEAD = struct.Struct(f"<BBHI{DIGEST_BYTES}s")

assert _HEAD.size == HEAD_BYTES
assert len(QUALITIES) == QUALITY_COUNT


class CachegenCodec(AssetCodec):
    """One layer is one stream of anchors and one of deltas. Needs an asset of its model."""

    name = "cachegen"
    codec_id = 10
    revision = 1
    accuracy = Accuracy.bounded
    kind = AssetKind.cachegen
    default_quality = DEFAULT_QUALITY

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, asset: Asset
    ) -> tuple[Bytes, float] | None:
        """Return a layer's bytes and its largest error; None where too much has no bin."""
        component, tables = layer.component, _tables(asset)
        mine = tables.layer(layer.layer_id, component, self.quality)
        if mine is None:
            raise self.another_model(layer)
        symbols = split(np.stack([to_float32(p, component.dtype) for p in bits]), mine.widths)
        if symbols is None:
            return None
        anchors = encode_tiles(
            to_tiles(symbols.anchors, ANCHOR_ZERO),
            to_tiles(mine.anchor_models, tables.anchors.padding),
            tables.anchors.table,
        )
        deltas = encode_tiles(
            to_tiles(symbols.deltas, DELTA_ZERO),
            to_tiles(mine.delta_models, tables.deltas.padding),
            tables.deltas.table,
        )
        escapes = len(symbols.escape_places)
        head = _HEAD.pack(CODED, self.quality, layer.layer_id, escapes, asset.digest)
        fields = (
            symbols.scales, anchors[0], anchors[1], deltas[0], deltas[1], symbols.escape_places,
            symbols.escape_steps, anchors[2], deltas[2],
        )  # fmt: skip
        data = as_bytes(head + b"".join(field.tobytes() for field in fields))
        return data, self._error(data, bits, component)

    def _error(self, data: Bytes, bits: Sequence[Part], component: Component) -> float:
        """Return the largest absolute error of what decoding *data* gives."""
        back = [np.empty(component.shape, part.dtype) for part in bits]
        self.decode_coded(data, component, back, None)
        dtype = component.dtype
        pairs = zip(back, bits, strict=True)
        return max(largest_error(to_float32(b, dtype), to_float32(a, dtype)) for b, a in pairs)

    @override
    def decode_coded(
        self, data: Bytes, component: Component, out: Sequence[Part], position: int | None
    ) -> None:
        """Decode one coded layer; its keys are as they were rotated."""
        if position is not None:
            raise InvalidRequestError("position", position, "cachegen does not rotate keys")
        _, quality, index, escapes, digest = _HEAD.unpack(data[:HEAD_BYTES].tobytes())
        if quality >= QUALITY_COUNT:
            raise InvalidFrameError("quality", quality, f"0 to {QUALITY_COUNT - 1}")
        tables = _tables(self.asset_of(digest))
        layer = tables.layer(index, component, quality)
        if layer is None:
            raise InvalidFrameError("layer", index, "the asset has no such layer")
        symbols = _parse(data[HEAD_BYTES:], component, escapes, tables, layer)
        join(symbols, layer.widths, component, out)

    @override
    def layer_count(self, asset: Asset) -> int:
        return sum(len(component[0]) for component in _tables(asset).components)


@lru_cache(maxsize=16)
def _tables(asset: Asset) -> CachegenTables:
    return CachegenTables.of(asset)


def _parse(
    body: Bytes, component: Component, escapes: int, tables: CachegenTables, layer: LayerTables
) -> Split:
    """Return the symbols in *body*, every length checked before it is used."""
    groups = -(-component.tokens // GROUP_TOKENS)
    others = component.tokens - groups
    items = component.parts * component.kv_heads * others * component.head_dim
    if escapes > items // MAX_ESCAPED:
        raise InvalidFrameError("escapes", escapes, f"at most {items // MAX_ESCAPED}")
    anchors, deltas = empty_tiles(component, groups), empty_tiles(component, others)
    tiles = len(anchors)
    scales_shape = (component.parts, component.kv_heads, groups)
    sizes = [
        2 * component.parts * component.kv_heads * groups, 4 * LANES * tiles, 4 * tiles,
        4 * LANES * tiles, 4 * tiles, 4 * escapes, 2 * escapes,
    ]  # fmt: skip
    ends = np.cumsum(sizes).tolist()
    if len(body) < ends[-1]:
        raise InvalidFrameError("stored_bytes", len(body), f"at least {ends[-1]}")
    kinds = ("<f2", "<u4", "<u4", "<u4", "<u4", "<u4", "<i2")
    scales, states, counts, delta_states, delta_counts, places, steps = (
        _field(body, end - size, end, kind)
        for size, end, kind in zip(sizes, ends, kinds, strict=True)
    )
    check_scales(scales)
    words_end = ends[-1] + 2 * int(counts.sum(dtype=np.uint64))
    stop = words_end + 2 * int(delta_counts.sum(dtype=np.uint64))
    if stop != len(body):
        raise InvalidFrameError("words", stop, f"the layer has {len(body)} bytes")
    words = _field(body, ends[-1], words_end, "<u2")
    delta_words = _field(body, words_end, stop, "<u2")
    decode_tiles(
        states.reshape(tiles, LANES), counts, words,
        to_tiles(layer.anchor_models, tables.anchors.padding), tables.anchors.table, anchors,
    )  # fmt: skip
    decode_tiles(
        delta_states.reshape(tiles, LANES), delta_counts, delta_words,
        to_tiles(layer.delta_models, tables.deltas.padding), tables.deltas.table, deltas,
    )  # fmt: skip
    if escapes and (int(places[-1]) >= items or (places[1:] <= places[:-1]).any()):
        raise InvalidFrameError("escapes", int(places[-1]), "must ascend, within the layer")
    return Split(
        scales.reshape(scales_shape), from_tiles(anchors, component), from_tiles(deltas, component),
        places, steps,
    )  # fmt: skip


def _field(body: Bytes, start: int, stop: int, kind: str) -> NDArray[Any]:
    return np.require(body[start:stop].view(kind), requirements="A")
