"""The cachegen codec, after the paper: anchors, deltas to them, static tables for each model.

Liu et al., CacheGen, SIGCOMM 2024, section 5.2: tokens in groups of ten, the first of a group
in eight bits, the others as differences to it, in bins that widen with the layer's depth;
both entropy-coded by distributions that were profiled offline for each layer and channel.
Departures: the coder is rANS, channels share 64 distributions (ChannelModels), bins are
in units of each head's typical delta, and what no bin holds is escaped instead of clipped.

Without an asset for the model there is no such codec: a generic table would be another
algorithm under this name, and ``kvq`` is the one that needs no calibration.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.asset_codec import CODED, HEAD_BYTES, QUALITY_COUNT, AssetCodec
from kvstore.codecs.assets import Asset, AssetKind
from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import (
    Floats,
    check_scales,
    from_float32,
    half_up,
    largest_error,
    to_float32,
)
from kvstore.codecs.rans import GROUP_CHANNELS, LANES, SLOTS, ModelTable, native_backend
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Component

QUALITIES = (2.0, 1.0, 0.5, 0.25)
"""Bin widths of the qualities 0 to 3, in those of the paper's default level, which is 1."""
DEFAULT_QUALITY = 1
GROUP_TOKENS = 10
"""Tokens of a group: an anchor and nine deltas to it."""
MAX_BOOK = 64
ANCHOR_SYMBOLS, ANCHOR_ZERO = 256, 128
DELTA_SYMBOLS, DELTA_ZERO = 128, 64
ESCAPE = 0

Table: TypeAlias = NDArray[Any]
_Tables: TypeAlias = tuple[Table, Table, Table]


@dataclass(frozen=True, slots=True)
class ChannelModels:
    """The static distributions of one kind of symbol, and a row of them for padding."""

    table: ModelTable
    zero: int

    @classmethod
    def of(cls, rows: Table, zero: int) -> ChannelModels:
        """Return the distributions *rows*, u16 (models, symbols). Raises InvalidFrameError."""
        padding = np.zeros((1, rows.shape[1]), np.uint16)
        padding[0, zero] = SLOTS - 1
        padding[0, zero + 1] = 1
        return cls(ModelTable(np.concatenate([rows, padding]).astype(np.uint16)), zero)

    @property
    def padding(self) -> int:
        """The model of channels that only fill up a tile."""
        return len(self.table.frequencies) - 1


@dataclass(frozen=True, slots=True)
class LayerTables:
    """One layer: ``widths`` f4 (parts, heads), models u1 (parts, heads, dim)."""

    widths: Table
    anchor_models: Table
    delta_models: Table


@dataclass(frozen=True, slots=True)
class CachegenTables:
    """An asset of this codec, checked. Arrays are read-only.

    Per component: ``widths`` f4 (layers, parts, heads), ``anchor_models`` u1 (layers, parts,
    heads, dim), ``delta_models`` u1 (qualities x layers, parts, heads, dim).
    """

    anchors: ChannelModels
    deltas: ChannelModels
    components: tuple[_Tables, ...]

    @classmethod
    def of(cls, asset: Asset) -> CachegenTables:
        """Check *asset*. Raises InvalidRequestError that names the table at fault."""
        rows = asset.table("anchors", "<u2", (-1, ANCHOR_SYMBOLS))
        delta_rows = asset.table("deltas", "<u2", (-1, DELTA_SYMBOLS))
        if not (1 <= len(rows) <= MAX_BOOK and 1 <= len(delta_rows) <= MAX_BOOK):
            raise InvalidRequestError(
                "asset books", (len(rows), len(delta_rows)), f"1 to {MAX_BOOK}"
            )
        if not (rows[:, 1:].all() and delta_rows.all()):
            raise InvalidRequestError("asset books", "frequency 0", "every symbol must be codable")
        try:
            anchors = ChannelModels.of(rows, ANCHOR_ZERO)
            deltas = ChannelModels.of(delta_rows, DELTA_ZERO)
        except InvalidFrameError as error:
            raise InvalidRequestError("asset books", "frequencies", str(error)) from None
        components: list[_Tables] = []
        while f"{len(components)}.widths" in asset.tables:
            components.append(_component(asset, len(components), len(rows), len(delta_rows)))
        if not components:
            raise InvalidRequestError("asset", "0.widths", "cachegen needs this table")
        return cls(anchors, deltas, tuple(components))

    def layer(self, index: int, component: Component, quality: int) -> LayerTables | None:
        """Return the tables of the chunk's layer *index*, counted over all components.

        None unless the asset was made for such a layer.
        """
        shape = (component.parts, component.kv_heads, component.head_dim)
        for widths, anchors, deltas in self.components:
            layers = len(widths)
            if index < layers:
                if anchors.shape[1:] != shape:
                    return None
                width = widths[index] * np.float32(QUALITIES[quality])
                return LayerTables(width, anchors[index], deltas[quality * layers + index])
            index -= layers
        return None


def _component(asset: Asset, index: int, anchor_rows: int, delta_rows: int) -> _Tables:
    widths = asset.table(f"{index}.widths", "<f4", (-1, -1, -1))
    layers, parts, heads = widths.shape
    anchors = asset.table(f"{index}.anchors", "|u1", (layers, parts, heads, -1))
    dim = anchors.shape[3]
    deltas = asset.table(f"{index}.deltas", "|u1", (len(QUALITIES) * layers, parts, heads, dim))
    if not ((widths > 0) & (widths < 2.0**64)).all():
        raise InvalidRequestError(f"asset table {index}.widths", "not positive", "a width is > 0")
    if int(anchors.max()) >= anchor_rows or int(deltas.max()) >= delta_rows:
        raise InvalidRequestError(f"asset table {index}.models", "too large", "no such model")
    return widths, anchors, deltas


def to_tiles(array: Table, padding: int) -> Table:
    """Return u8 (parts, heads, [tokens,] dim) as (tiles, [tokens,] channels), C-ordered.

    A head is a tile where its channels are a multiple of 64; else all heads of a part are one,
    with channels of *padding* behind them.
    """
    parts, heads, *tokens, dim = array.shape
    if dim % GROUP_CHANNELS == 0:
        return np.ascontiguousarray(array.reshape(parts * heads, *tokens, dim))
    channels = heads * dim
    room = np.full((parts, *tokens, channels + -channels % GROUP_CHANNELS), padding, np.uint8)
    room[..., :channels] = np.moveaxis(array, 1, -2).reshape(parts, *tokens, channels)
    return room


def empty_tiles(component: Component, tokens: int) -> Table:
    """Return uninitialised tiles of *tokens* tokens of a layer of *component*."""
    parts, heads, dim = component.parts, component.kv_heads, component.head_dim
    if dim % GROUP_CHANNELS == 0:
        return np.empty((parts * heads, tokens, dim), np.uint8)
    return np.empty((parts, tokens, heads * dim + -(heads * dim) % GROUP_CHANNELS), np.uint8)


def from_tiles(tiles: Table, component: Component) -> Table:
    """Return tiles as a view (parts, heads, tokens, dim)."""
    parts, heads, dim = component.parts, component.kv_heads, component.head_dim
    if dim % GROUP_CHANNELS == 0:
        return tiles.reshape(parts, heads, -1, dim)
    split = tiles[..., : heads * dim].reshape(parts, -1, heads, dim)
    return split.transpose(0, 2, 1, 3)


MAX_ESCAPED = 8
"""A layer of which more than one delta in so many has no bin is kept as it is."""

_LARGEST_STEP = 32767
_BOX_ITEMS = 1 << 15


@dataclass(frozen=True, slots=True)
class Split:
    """A layer as symbols: scales f2 (parts, heads, groups), anchors u8 (parts, heads, groups,
    dim), deltas u8 (parts, heads, other tokens, dim); the steps i2 of escaped deltas, by their
    ascending places u32 among the deltas in C order.
    """

    scales: Part
    anchors: NDArray[np.uint8]
    deltas: NDArray[np.uint8]
    escape_places: NDArray[np.uint32]
    escape_steps: NDArray[np.int16]


def split(values: Floats, widths: Part) -> Split | None:
    """Quantise *values* f4 (parts, heads, tokens, dim); None where the fields cannot hold it."""
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
    if size.max(initial=np.float32(0)) > _LARGEST_STEP:
        return None
    places = np.flatnonzero(size >= DELTA_ZERO)
    if len(places) > deltas.size // MAX_ESCAPED:
        return None
    escape_steps = deltas.reshape(-1)[places].astype("<i2")
    deltas += DELTA_ZERO
    deltas.reshape(-1)[places] = ESCAPE
    return Split(scales, anchors, deltas.astype(np.uint8), places.astype("<u4"), escape_steps)


def join(symbols: Split, widths: Part, component: Component, out: Sequence[Part]) -> None:
    """Write the numbers that *split* stands for into *out*, box by box."""
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
        start = first + group * rest * dim
        low, high = np.searchsorted(symbols.escape_places, (start, start + piece.size))
        steps.reshape(-1)[symbols.escape_places[low:high] - start] = symbols.escape_steps[low:high]
        steps *= np.float32(width)
        values = np.empty((len(lead), GROUP_TOKENS, dim), np.float32)
        values[:, 0] = lead
        np.add(steps.reshape(len(lead), rest, dim), lead[:, None], out=values[:, 1:])
        token = group * GROUP_TOKENS
        stop = min(tokens, token + values.shape[0] * GROUP_TOKENS)
        flat = values.reshape(-1, dim)[: stop - token]
        from_float32(flat, component.dtype, out[token:stop])


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
        anchors = native_backend().encode_tiles(
            to_tiles(symbols.anchors, ANCHOR_ZERO),
            to_tiles(mine.anchor_models, tables.anchors.padding),
            tables.anchors.table,
        )
        deltas = native_backend().encode_tiles(
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
    native_backend().decode_tiles(
        states.reshape(tiles, LANES), counts, words,
        to_tiles(layer.anchor_models, tables.anchors.padding), tables.anchors.table, anchors,
    )  # fmt: skip
    native_backend().decode_tiles(
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
