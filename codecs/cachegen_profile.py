"""Profiles a model's KV for the cachegen codec: bin widths, distributions, who shares which.

Runs offline, in ``kvstore calibrate``. Two passes over the same samples: the first finds each
head's typical delta, the second counts symbols under the widths that follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors, check_tensors
from kvstore.codecs.cachegen_symbols import split
from kvstore.codecs.cachegen_tables import (
    ANCHOR_SYMBOLS,
    DELTA_SYMBOLS,
    GROUP_TOKENS,
    MAX_BOOK,
    QUALITIES,
)
from kvstore.codecs.floats import FLOAT_TYPES, Floats, is_finite, to_float32
from kvstore.codecs.rans import SLOTS
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import Component, KVLayout, LayerKind

Counts = NDArray[np.uint32]

THIRDS = (0.5, 1.0, 1.5)
"""Bin widths of the first, middle and last third of the layers (CacheGen, section 5.2)."""

_LEAST_WIDTH = 1e-6
_ROUNDS = 12
_TRAINED_CHANNELS = 1 << 15
_BLOCK_CHANNELS = 1 << 13
_COMMON_SHARE = 0.01
"""What every distribution has of that of all channels, for symbols it never saw."""


class CachegenProfile:
    """Counts over samples of one model's KV. Not thread-safe.

    *depths* say of each layer of the chunk, component by component, where in the model it is:
    0 for the first layer, below 1 for the last. Use ``measure`` for every sample, then
    ``count`` for every sample, then ``tables``.
    """

    def __init__(self, components: Sequence[Component], depths: Sequence[float]) -> None:
        for component in components:
            if component.dtype not in FLOAT_TYPES or component.kind is LayerKind.state:
                what = (component.kind.name, component.dtype.name)
                raise InvalidRequestError("component", what, "cachegen codes float KV only")
        if len(depths) != sum(c.layers for c in components) or not all(0 <= d < 1 for d in depths):
            raise InvalidRequestError("depths", len(depths), "one in [0, 1) for each layer")
        self._components = tuple(components)
        self._factors = [THIRDS[int(3 * depth)] for depth in depths]
        self._squares = [np.zeros((c.layers, c.parts, c.kv_heads)) for c in components]
        self._measured = 0
        self._anchors: list[Counts] = []
        self._deltas: list[Counts] = []

    def measure(self, tensors: ChunkTensors) -> None:
        """Add a sample to the sizes of deltas. Raises LayoutMismatchError for another model's."""
        for number, layer, values in self._layers(tensors):
            _, _, tokens, dim = values.shape
            lead = np.arange(tokens) // GROUP_TOKENS * GROUP_TOKENS
            deltas = values - values[:, :, lead]
            others = max(1, int((lead != np.arange(tokens)).sum()))
            self._squares[number][layer] += np.square(deltas).sum((2, 3)) / (others * dim)
        self._measured += 1

    def widths(self) -> list[Floats]:
        """Return the bin widths of quality 1, per component f4 (layers, parts, heads)."""
        if not self._measured:
            raise InvalidRequestError("samples", 0, "measure at least one")
        factors = iter(self._factors)
        found = []
        for component, squares in zip(self._components, self._squares, strict=True):
            third = np.array([next(factors) for _ in range(component.layers)])
            rms = np.sqrt(squares / self._measured)
            found.append(np.maximum(rms * third[:, None, None], _LEAST_WIDTH).astype("<f4"))
        return found

    def count(self, tensors: ChunkTensors) -> None:
        """Count the symbols of a sample, after every sample was measured."""
        if not self._anchors:
            for c in self._components:
                shape = (c.layers, c.parts, c.kv_heads, c.head_dim)
                self._anchors.append(np.zeros((*shape, ANCHOR_SYMBOLS), np.uint32))
                self._deltas.append(np.zeros((len(QUALITIES), *shape, DELTA_SYMBOLS), np.uint32))
        widths = self.widths()
        for number, layer, values in self._layers(tensors):
            for quality, factor in enumerate(QUALITIES):
                symbols = split(values, widths[number][layer] * np.float32(factor))
                if symbols is None:
                    continue
                _count(self._deltas[number][quality, layer], symbols.deltas)
                if quality == 0:
                    _count(self._anchors[number][layer], symbols.anchors)

    def tables(self) -> dict[str, NDArray[Any]]:
        """Return the tables of an asset."""
        if not self._anchors:
            raise InvalidRequestError("samples", 0, "count at least one")
        anchor_rows, anchor_picks = share(_rows(self._anchors))
        delta_rows, delta_picks = share(_rows(self._deltas))
        tables: dict[str, NDArray[Any]] = {"anchors": anchor_rows, "deltas": delta_rows}
        anchor_at = delta_at = 0
        for number, (component, width) in enumerate(
            zip(self._components, self.widths(), strict=True)
        ):
            shape = (component.parts, component.kv_heads, component.head_dim)
            channels = component.layers * int(np.prod(shape))
            picks = anchor_picks[anchor_at : anchor_at + channels]
            tables[f"{number}.widths"] = width
            tables[f"{number}.anchors"] = picks.reshape(component.layers, *shape)
            anchor_at += channels
            channels *= len(QUALITIES)
            picks = delta_picks[delta_at : delta_at + channels]
            tables[f"{number}.deltas"] = picks.reshape(len(QUALITIES) * component.layers, *shape)
            delta_at += channels
        return tables

    def _layers(self, tensors: ChunkTensors) -> list[tuple[int, int, Floats]]:
        """Return the component, the layer and the values (parts, heads, tokens, dim) of each."""
        check_tensors(layout_like(self._components, tensors), tensors)
        found = []
        for number, (component, layers) in enumerate(zip(self._components, tensors, strict=True)):
            for layer, parts in enumerate(layers):
                bits = [part.view(f"<u{part.dtype.itemsize}") for part in parts]
                if not all(is_finite(part, component.dtype) for part in bits):
                    raise InvalidRequestError("samples", "NaN or infinity", "leave this one out")
                values = np.stack([to_float32(part, component.dtype) for part in bits])
                found.append((number, layer, values))
        return found


def layout_like(components: Sequence[Component], tensors: ChunkTensors) -> KVLayout:
    """Return the layout of *components* with as many tokens as *tensors* seem to have."""
    if len(tensors) != len(components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(components)}")
    tokens = [layers[0][0].shape[1] for layers in tensors]
    return KVLayout(tuple(map(lambda c, n: replace(c, tokens=n), components, tokens)))


def _count(counts: Counts, symbols: NDArray[np.uint8]) -> None:
    """Add *symbols* (parts, heads, tokens, dim) to *counts* (parts, heads, dim, symbols)."""
    parts, heads, _, dim = symbols.shape
    kinds = counts.shape[-1]
    channel = np.arange(parts * heads * dim).reshape(parts, heads, 1, dim)
    places = channel * kinds + symbols
    found = np.bincount(places.reshape(-1), minlength=counts.size)
    counts += found.reshape(counts.shape).astype(np.uint32)


def _rows(counts: Sequence[Counts]) -> Counts:
    return np.concatenate([count.reshape(-1, count.shape[-1]) for count in counts])


def share(counts: Counts, most: int = MAX_BOOK) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return at most *most* frequency rows u16 for *counts* (channels, symbols), and who has which.

    Lloyd's algorithm under the cost of coding, from channels spread over spread and centre;
    the same counts give the same rows.
    """
    sample = counts[:: max(1, len(counts) // _TRAINED_CHANNELS)]
    common = counts.sum(0, dtype=np.float64) + 1.0
    common *= _COMMON_SHARE / common.sum()
    rows = _frequencies(_seeds(sample, most), common)
    for _ in range(_ROUNDS):
        picks = cheapest(sample, rows)
        sums = np.stack([sample[picks == pick].sum(0) for pick in np.unique(picks)])
        rows = np.unique(_frequencies(sums.astype(np.float64), common), axis=0)
    return rows, cheapest(counts, rows)


def _seeds(counts: Counts, most: int) -> NDArray[np.float64]:
    """Return the counts of *most* channels, evenly along how wide they are, and then where."""
    symbol = np.arange(counts.shape[1])
    total = np.maximum(1, counts.sum(1))
    mean = counts @ symbol / total
    spread = counts @ np.square(symbol) / total - np.square(mean)
    order = np.lexsort((mean, np.round(np.log2(np.maximum(spread, 1e-3)) * 2)))
    chosen = order[np.linspace(0, len(order) - 1, min(most, len(order))).astype(int)]
    seeds: NDArray[np.float64] = counts[np.unique(chosen)].astype(np.float64)
    return seeds


def _frequencies(counts: NDArray[np.float64], common: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return *counts* as 12-bit frequencies, none of them zero."""
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    shares = shares * (1 - _COMMON_SHARE) + common
    shares /= shares.sum(1, keepdims=True)
    symbols = counts.shape[1]
    rows = 1 + np.floor(shares * (SLOTS - symbols)).astype(np.int64)
    rows[np.arange(len(rows)), rows.argmax(1)] += SLOTS - rows.sum(1)
    frequencies: NDArray[np.uint16] = rows.astype(np.uint16)
    return frequencies


def cheapest(counts: Counts, rows: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return for each channel of *counts* which of *rows* codes it in the fewest bits."""
    bits = -np.log2(rows / SLOTS).astype(np.float32).T
    picks = np.empty(len(counts), np.uint8)
    for at in range(0, len(counts), _BLOCK_CHANNELS):
        block = counts[at : at + _BLOCK_CHANNELS].astype(np.float32)
        picks[at : at + _BLOCK_CHANNELS] = (block @ bits).argmin(1)
    return picks
