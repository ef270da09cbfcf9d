"""The cachegen codec, after the paper: anchors, deltas to them, static tables for each model.

Liu et al., CacheGen, SIGCOMM 2024, section 5.2: tokens in groups of ten, the first of a group
in eight bits, the others as differences to it, in bins that widen with the layer's depth;
both entropy-coded by distributions profiled offline for each layer and channel. Departures: the
coder is rANS, channels share 64 distributions (ChannelModels), bins are in units of each head's
typical delta, and values outside all bins are escaped instead of clipped.

The codec requires an asset for the model: generic tables would be another algorithm, and ``kvq``
needs no calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import (
    LARGEST_STEP,
    AssetCodec,
    AssetTables,
    Coded,
    CodedLayer,
    Escapes,
)
from kvstore.codecs.assets import Asset, AssetKind, Table
from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import (
    ByteCutter,
    Floats,
    check_scales,
    from_float32,
    half_up,
    largest_error,
    to_float32,
)
from kvstore.codecs.rans import GROUP_CHANNELS, LANES, SLOTS, ModelTable, native_backend
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Accuracy, Component

QUALITIES = (2.0, 1.0, 0.5, 0.25)
"""Bin widths of the qualities 0 to 3, relative to the paper's default level, quality 1."""
GROUP_TOKENS = 10
"""Tokens of a group: an anchor and nine deltas to it."""
MAX_BOOK = 64
ANCHOR_SYMBOLS, ANCHOR_ZERO = 256, 128
DELTA_SYMBOLS, DELTA_ZERO = 128, 64
ESCAPE = 0


@dataclass(frozen=True, slots=True)
class ChannelModels:
    """The static distributions of one kind of symbol, and a row for padding."""

    table: ModelTable
    zero: int

    @classmethod
    def of(cls, rows: Table, zero: int) -> ChannelModels:
        """Return the distributions *rows*, u16 (models, symbols). Raises InvalidFrameError."""
        padding = np.zeros((1, rows.shape[1]), np.uint16)
        padding[0, zero] = SLOTS - 1
        padding[0, zero + 1] = 1
        return cls(ModelTable(np.concatenate([rows, padding]).astype(np.uint16)), zero)

    def encode(self, symbols: Table, models: Table) -> tuple[NDArray[Any], ...]:
        """Return states, counts and words of *symbols* u8 (parts, heads, tokens, dim)."""
        return native_backend().encode_tiles(
            to_tiles(symbols, self.zero), self._rows(models), self.table
        )

    def decode(
        self, stream: Sequence[NDArray[Any]], models: Table, tokens: int, component: Component
    ) -> Table:
        """Return the symbols of *stream*: states, counts and words."""
        parts, heads, dim = component.parts, component.kv_heads, component.head_dim
        rows = self._rows(models)
        out: Table = np.empty((len(rows), tokens, rows.shape[1]), np.uint8)
        states, counts, words = stream
        states = states.reshape(len(out), LANES)
        native_backend().decode_tiles(states, counts, words, rows, self.table, out)
        if dim % GROUP_CHANNELS == 0:
            return out.reshape(parts, heads, -1, dim)
        return out[..., : heads * dim].reshape(parts, -1, heads, dim).transpose(0, 2, 1, 3)

    def _rows(self, models: Table) -> Table:
        return to_tiles(models, len(self.table.frequencies) - 1)


@dataclass(frozen=True, slots=True)
class LayerTables:
    """One layer: ``widths`` f4 (parts, heads), anchor models u1 (parts, heads, dim), delta models
    u1 (qualities, parts, heads, dim), and the distributions of both.
    """

    widths: Table
    anchor_models: Table
    delta_models: Table
    anchors: ChannelModels
    deltas: ChannelModels


class CachegenTables(AssetTables):
    """Per component: widths f4 (layers, parts, heads), anchor models u1 (layers, parts, heads,
    dim), delta models u1 (layers, qualities, parts, heads, dim). Arrays are read-only.
    """

    needed = "widths"

    def __init__(self, asset: Asset) -> None:
        rows = asset.table("anchors", "<u2", (-1, ANCHOR_SYMBOLS))
        delta_rows = asset.table("deltas", "<u2", (-1, DELTA_SYMBOLS))
        counts = (len(rows), len(delta_rows))
        if not (min(counts) >= 1 and max(counts) <= MAX_BOOK):
            raise InvalidRequestError("asset books", counts, f"1 to {MAX_BOOK}")
        if not (rows[:, 1:].all() and delta_rows.all()):
            raise InvalidRequestError("asset books", "frequency 0", "every symbol must be codable")
        self._counts = counts
        try:
            self._anchors = ChannelModels.of(rows, ANCHOR_ZERO)
            self._deltas = ChannelModels.of(delta_rows, DELTA_ZERO)
        except InvalidFrameError as error:
            raise InvalidRequestError("asset books", "frequencies", str(error)) from None
        super().__init__(asset)

    @override
    def component(self, asset: Asset, prefix: str) -> tuple[Any, ...]:
        widths = asset.table(f"{prefix}widths", "<f4", (-1, -1, -1))
        layers, parts, heads = widths.shape
        anchors = asset.table(f"{prefix}anchors", "|u1", (layers, parts, heads, -1))
        shape = (len(QUALITIES) * layers, parts, heads, anchors.shape[3])
        deltas = asset.table(f"{prefix}deltas", "|u1", shape)
        if not ((widths > 0) & (widths < 2.0**64)).all():
            raise InvalidRequestError(f"asset table {prefix}widths", "not positive", "> 0")
        if int(anchors.max()) >= self._counts[0] or int(deltas.max()) >= self._counts[1]:
            raise InvalidRequestError(f"asset table {prefix}models", "too large", "no such model")
        by_quality = deltas.reshape(len(QUALITIES), *anchors.shape)
        return widths, anchors, by_quality.swapaxes(0, 1)

    @override
    def parts_of(
        self, arrays: tuple[Any, ...], index: int, component: Component
    ) -> LayerTables | None:
        widths, anchors, deltas = arrays
        if anchors.shape[1:] != (component.parts, component.kv_heads, component.head_dim):
            return None
        return LayerTables(
            widths[index], anchors[index], deltas[index], self._anchors, self._deltas
        )


def to_tiles(array: Table, padding: int) -> Table:
    """Return u8 (parts, heads, [tokens,] dim) as (tiles, [tokens,] channels), C-ordered.

    A head is a tile if its channels are a multiple of 64; else all heads of a part form one tile,
    padded with channels of *padding*.
    """
    parts, heads, *tokens, dim = array.shape
    if dim % GROUP_CHANNELS == 0:
        return np.ascontiguousarray(array.reshape(parts * heads, *tokens, dim))
    channels = heads * dim
    padded = np.full((parts, *tokens, channels + -channels % GROUP_CHANNELS), padding, np.uint8)
    padded[..., :channels] = np.moveaxis(array, 1, -2).reshape(parts, *tokens, channels)
    return padded


_BOX_ITEMS = 1 << 15


@dataclass(frozen=True, slots=True)
class Split:
    """A layer as symbols: scales f2 (parts, heads, groups), anchors u8 (parts, heads, groups,
    dim), deltas u8 (parts, heads, other tokens, dim), and escapes among the deltas in C order.
    """

    scales: Part
    anchors: NDArray[np.uint8]
    deltas: NDArray[np.uint8]
    escapes: Escapes


def split(values: Floats, widths: Part) -> Split | None:
    """Quantise *values* f4 (parts, heads, tokens, dim); None if they exceed the fields."""
    tokens = np.arange(values.shape[2])
    leads = values[:, :, ::GROUP_TOKENS]
    scales = half_up(np.abs(leads).max(3) / np.float32(127))
    if not np.isfinite(scales).all():
        return None
    scale = scales.astype(np.float32)[..., None]
    steps = np.rint(leads / np.where(scale == 0, np.float32(1), scale))
    np.clip(steps, -127, 127, out=steps)
    anchors = (steps + ANCHOR_ZERO).astype(np.uint8)
    others = tokens[tokens % GROUP_TOKENS != 0]
    steps *= scale
    deltas = np.take(values, others, 2)
    deltas -= np.take(steps, others // GROUP_TOKENS, 2)
    with np.errstate(over="ignore"):  # infinity is larger than any step
        deltas /= widths[..., None, None]
    np.rint(deltas, out=deltas)
    size = np.abs(deltas)
    if size.max(initial=np.float32(0)) > LARGEST_STEP:
        return None
    escapes = Escapes.of(deltas, size >= DELTA_ZERO)
    if escapes is None:
        return None
    deltas += DELTA_ZERO
    deltas.reshape(-1)[escapes.places] = ESCAPE
    return Split(scales, anchors, deltas.astype(np.uint8), escapes)


def join(symbols: Split, widths: Part, component: Component, out: Sequence[Part]) -> None:
    """Dequantise *symbols*, from ``split``, into *out*, box by box."""
    for part in range(component.parts):
        for head in range(component.kv_heads):
            _join_head(symbols, float(widths[part, head]), (part, head), component, out[part][head])


def _join_head(
    symbols: Split, width: float, at: tuple[int, int], component: Component, out: Part
) -> None:
    tokens, dim = out.shape
    scales = symbols.scales[at].astype(np.float32)
    anchors, deltas = symbols.anchors[at], symbols.deltas[at]
    first = (at[0] * component.kv_heads + at[1]) * deltas.size
    step = max(1, _BOX_ITEMS // (GROUP_TOKENS * dim))
    rest = GROUP_TOKENS - 1
    for group in range(0, len(anchors), step):
        lead = anchors[group : group + step].astype(np.float32)
        lead -= np.float32(ANCHOR_ZERO)
        lead *= scales[group : group + step, None]
        piece = deltas[group * rest : (group + step) * rest]
        steps = np.zeros((len(lead) * rest, dim), np.float32)
        np.subtract(piece, np.float32(DELTA_ZERO), out=steps[: len(piece)])
        symbols.escapes.put(steps[: len(piece)], first + group * rest * dim)
        steps *= np.float32(width)
        values = np.empty((len(lead), GROUP_TOKENS, dim), np.float32)
        values[:, 0] = lead
        np.add(steps.reshape(len(lead), rest, dim), lead[:, None], out=values[:, 1:])
        token = group * GROUP_TOKENS
        stop = min(tokens, token + values.shape[0] * GROUP_TOKENS)
        flat = values.reshape(-1, dim)[: stop - token]
        from_float32(flat, component.dtype, out[token:stop])


class CachegenCodec(AssetCodec):
    """A layer is one stream of anchors and one of deltas. Needs an asset of its model."""

    name = "cachegen"
    codec_id = 10
    revision = 1
    accuracy = Accuracy.bounded
    kind = AssetKind.cachegen
    tables = CachegenTables

    @override
    def coded(
        self, bits: Sequence[Part], layer: LayerTerms, tables: LayerTables
    ) -> CodedLayer | None:
        component, dtype = layer.component, layer.component.dtype
        widths = tables.widths * np.float32(QUALITIES[self.quality])
        values = [to_float32(part, dtype) for part in bits]
        symbols = split(np.stack(values), widths)
        if symbols is None:
            return None
        *anchors, anchor_words = tables.anchors.encode(symbols.anchors, tables.anchor_models)
        models = tables.delta_models[self.quality]
        *deltas, delta_words = tables.deltas.encode(symbols.deltas, models)
        fields = (
            symbols.scales, *anchors, *deltas, *symbols.escapes, anchor_words, delta_words,
        )  # fmt: skip
        back = [np.empty(component.shape, part.dtype) for part in bits]
        join(symbols, widths, component, back)
        pairs = zip(back, values, strict=True)
        error = max(largest_error(to_float32(one, dtype), other) for one, other in pairs)
        return len(symbols.escapes.places), fields, error

    @override
    def decode_coded(
        self, cut: ByteCutter, component: Component, out: Sequence[Part], head: Coded,
        position: int | None,
    ) -> None:  # fmt: skip
        if position is not None:
            raise InvalidRequestError("position", position, "cachegen does not rotate keys")
        symbols = _parse(cut, component, head)
        join(symbols, head.tables.widths * np.float32(QUALITIES[head.quality]), component, out)


def _parse(cut: ByteCutter, component: Component, head: Coded) -> Split:
    """Return the symbols of a layer, checking every length before use."""
    parts, heads, tables, take = component.parts, component.kv_heads, head.tables, cut.take
    groups = -(-component.tokens // GROUP_TOKENS)
    others = component.tokens - groups
    tiles = parts * (heads if component.head_dim % GROUP_CHANNELS == 0 else 1)
    scales = take("<f2", parts * heads * groups)
    states, counts = take("<u4", LANES * tiles), take("<u4", tiles)
    delta_states, delta_counts = take("<u4", LANES * tiles), take("<u4", tiles)
    escapes = Escapes.take(cut, head.number, parts * heads * others * component.head_dim)
    check_scales(scales)
    words, delta_words = (take("<u2", int(c.sum(dtype=np.uint64))) for c in (counts, delta_counts))
    cut.end()
    anchors = tables.anchors.decode(
        (states, counts, words), tables.anchor_models, groups, component
    )
    stream = (delta_states, delta_counts, delta_words)
    deltas = tables.deltas.decode(stream, tables.delta_models[head.quality], others, component)
    return Split(scales.reshape(parts, heads, groups), anchors, deltas, escapes)
