"""What the cachegen codec knows of a model: bin widths, and which table codes which channel.

The paper profiles a distribution for each layer and channel. Here each layer and channel picks
one of at most 64 distributions that are shared by the model, one set for anchors and one for
deltas: tables of a few kilobytes instead of tens of megabytes, at the cost of how much a
channel differs from its pick, which calibration minimises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.assets import Asset
from kvstore.codecs.rans import GROUP_CHANNELS, SLOTS, ModelTable
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Component

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
