"""What calibration finds in samples of a model's KV: tables of cachegen, kvtc and kvq. Offline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors, check_tensors
from kvstore.codecs.cachegen import (
    ANCHOR_SYMBOLS,
    DELTA_SYMBOLS,
    GROUP_TOKENS,
    MAX_BOOK,
    QUALITIES,
    split,
)
from kvstore.codecs.floats import Floats, has_floats, is_finite, to_float32
from kvstore.codecs.kvq_models import RATIOS, SHAPES
from kvstore.codecs.kvq_static import MIDDLE, SCALES_AN_OCTAVE
from kvstore.codecs.kvq_tiles import LARGEST_MEAN
from kvstore.codecs.kvtc import MAX_CHANNELS, SINK_TOKENS
from kvstore.codecs.rans import SLOTS
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.types import Component, KVLayout, RopeParameters

Counts = NDArray[np.uint32]

THIRDS = (0.5, 1.0, 1.5)
"""Bin widths of the first, middle and last third of the layers (CacheGen, section 5.2)."""

_LEAST_WIDTH = 1e-6
_ROUNDS = 12
_TRAINED_CHANNELS = 1 << 15
_BLOCK_CHANNELS = 1 << 13
_COMMON_SHARE = 0.01
"""What every distribution has of that of all channels, for symbols it never saw."""


def cachegen_tables(
    components: Sequence[Component], chunks: Sequence[ChunkTensors]
) -> dict[str, NDArray[Any]]:
    """Return the tables of an asset of cachegen by *chunks* of one model's KV.

    Raises LayoutMismatchError for another model's, InvalidRequestError for NaN.
    """
    _check_components(components, "cachegen")
    if not chunks:
        raise InvalidRequestError("samples", 0, "give at least one")
    shapes = [(c.layers, c.parts, c.kv_heads, c.head_dim) for c in components]
    anchors = [np.zeros((*shape, ANCHOR_SYMBOLS), np.uint32) for shape in shapes]
    deltas = [np.zeros((len(QUALITIES), *shape, DELTA_SYMBOLS), np.uint32) for shape in shapes]
    widths = cachegen_widths(components, chunks)
    for number, layer, values in _layers(components, chunks):
        for quality, factor in enumerate(QUALITIES):
            symbols = split(values, widths[number][layer] * np.float32(factor))
            if symbols is not None:
                _count(deltas[number][quality, layer], symbols.deltas)
                if quality == 0:
                    _count(anchors[number][layer], symbols.anchors)
    anchor_rows, anchor_picks = share(_rows(anchors))
    delta_rows, delta_picks = share(_rows(deltas))
    tables: dict[str, NDArray[Any]] = {"anchors": anchor_rows, "deltas": delta_rows}
    at = 0
    for number, (shape, width) in enumerate(zip(shapes, widths, strict=True)):
        stop = at + int(np.prod(shape))
        picks = delta_picks[len(QUALITIES) * at : len(QUALITIES) * stop]
        tables[f"{number}.widths"] = width
        tables[f"{number}.anchors"] = anchor_picks[at:stop].reshape(shape)
        tables[f"{number}.deltas"] = picks.reshape(-1, *shape[1:])
        at = stop
    return tables


def cachegen_widths(
    components: Sequence[Component], chunks: Sequence[ChunkTensors]
) -> list[Floats]:
    """Return the bin widths of quality 1, per component f4 (layers, parts, heads)."""
    squares = [np.zeros((c.layers, c.parts, c.kv_heads)) for c in components]
    for number, layer, values in _layers(components, chunks):
        _, _, tokens, dim = values.shape
        lead = np.arange(tokens) // GROUP_TOKENS * GROUP_TOKENS
        deltas = values - values[:, :, lead]
        others = max(1, int((lead != np.arange(tokens)).sum()))
        squares[number][layer] += np.square(deltas).sum((2, 3)) / (others * dim)
    total = sum(c.layers for c in components)
    thirds = iter([THIRDS[3 * layer // total] for layer in range(total)])
    found = []
    for square in squares:
        third = np.array([next(thirds) for _ in square])[:, None, None]
        rms = np.sqrt(square / len(chunks))
        found.append(np.maximum(rms * third, _LEAST_WIDTH).astype("<f4"))
    return found


def _layers(
    components: Sequence[Component], chunks: Sequence[ChunkTensors]
) -> Iterator[tuple[int, int, Floats]]:
    """Yield the component, the layer and the values (parts, heads, tokens, dim) of each."""
    for tensors in chunks:
        check_tensors(layout_like(components, tensors), tensors)
        for number, component in enumerate(components):
            for layer, parts in enumerate(tensors[number]):
                yield number, layer, np.stack([_numbers(part, component) for part in parts])


def layout_like(components: Sequence[Component], tensors: ChunkTensors) -> KVLayout:
    """Return the layout of *components* with as many tokens as *tensors* seem to have."""
    if len(tensors) != len(components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(components)}")
    tokens = [layers[0][0].shape[1] for layers in tensors]
    return KVLayout(tuple(map(lambda c, n: replace(c, tokens=n), components, tokens)))


def _check_components(components: Sequence[Component], codec: str) -> None:
    for component in components:
        if not has_floats(component):
            fix = f"{codec} codes float KV only, no {component.dtype.name}"
            raise InvalidRequestError("component", component.kind.name, fix)


def _numbers(part: NDArray[Any], component: Component) -> Floats:
    """Return *part* as float32. Raises InvalidRequestError for NaN and infinity."""
    bits = part.view(f"<u{part.dtype.itemsize}")
    if not is_finite(bits, component.dtype):
        raise InvalidRequestError("samples", "NaN or infinity", "leave this one out")
    return to_float32(bits, component.dtype)


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


_LEAST_DEVIATION = 1e-6


class TurnedProfile(ABC):
    """What is found in samples of one model's KV, its keys turned back. Not thread-safe.

    *rope* is the rotary embedding that the keys carry, None when they are to be taken as they
    are.
    """

    codec: ClassVar[str]

    def __init__(self, components: Sequence[Component], rope: RopeParameters | None) -> None:
        _check_components(components, self.codec)
        self._components = tuple(components)
        self._frequencies = [calibrated_frequencies(c, rope) for c in components]
        self._tokens = [0] * len(components)

    def add(self, tensors: ChunkTensors, position: int) -> None:
        """Add a chunk whose first token stands at *position*; first tokens of a prompt aside.

        Raises LayoutMismatchError for another model's, InvalidRequestError for NaN.
        """
        layout = layout_like(self._components, tensors)
        check_tensors(layout, tensors)
        skipped = SINK_TOKENS if position == 0 else 0
        for number, (component, layers) in enumerate(zip(layout.components, tensors, strict=True)):
            for at in np.ndindex(component.layers, component.parts):
                values = _numbers(layers[at[0]][at[1]], component)
                turned = None if at[1] else self._frequencies[number]
                if turned is not None:
                    cosine, sine = rotation(turned, position, component.tokens)
                    rotate(values, cosine, -sine)
                rows = values.transpose(1, 0, 2).reshape(component.tokens, -1)[skipped:]
                self._take(number, at, rows)
            self._tokens[number] += component.tokens - min(skipped, component.tokens)

    def tables(self) -> dict[str, NDArray[Any]]:
        """Return the tables of an asset."""
        if min(self._tokens) < 2:
            raise InvalidRequestError("samples", min(self._tokens), "add chunks first")
        tables: dict[str, NDArray[Any]] = {}
        for number, (tokens, rope) in enumerate(zip(self._tokens, self._frequencies, strict=True)):
            found = self._found(number, tokens) | ({} if rope is None else {"rope": rope})
            tables |= {f"{number}.{name}": table for name, table in found.items()}
        return tables

    @abstractmethod
    def _take(self, component: int, at: tuple[int, ...], rows: Floats) -> None:
        """Take *rows* (tokens, channels) of a layer and part of a component."""

    @abstractmethod
    def _found(self, component: int, tokens: int) -> dict[str, NDArray[Any]]:
        """Return what was found in so many tokens of a component, by the table's name."""


def calibrated_frequencies(component: Component, rope: RopeParameters | None) -> Floats | None:
    """Return what a component's keys are turned back by; None where they are not. Raises."""
    if rope is None or rope.scaling == "none" or component.parts != 2:
        return None
    found = inverse_frequencies(rope, component.head_dim)
    if found is None:
        raise InvalidRequestError("rope", rope.scaling, "such keys cannot be turned back")
    return found


class KvtcProfile(TurnedProfile):
    """Means and covariances.

    Holds channels^2 float64 numbers for each part of each layer: 540 MB for a model of 32
    layers with 8 heads of 128.
    """

    codec = "kvtc"

    def __init__(self, components: Sequence[Component], rope: RopeParameters | None) -> None:
        super().__init__(components, rope)
        shapes = [(c.layers, c.parts, c.kv_heads * c.head_dim) for c in components]
        if max(shape[-1] for shape in shapes) > MAX_CHANNELS:
            raise InvalidRequestError("channels", max(s[-1] for s in shapes), "too many for kvtc")
        self._sums = [np.zeros(shape) for shape in shapes]
        self._products = [np.zeros((*shape, shape[-1])) for shape in shapes]

    def _take(self, component: int, at: tuple[int, ...], rows: Floats) -> None:
        wide = rows.astype(np.float64)
        self._sums[component][at] += wide.sum(0)
        self._products[component][at] += wide.T @ wide

    def _found(self, component: int, tokens: int) -> dict[str, NDArray[Any]]:
        means = self._sums[component] / tokens
        layers, parts, channels = means.shape
        bases = np.empty((layers, parts, channels, channels), np.float32)
        variances = np.empty((layers, parts, channels), np.float32)
        deviations = np.empty((layers, parts), np.float32)
        for at in np.ndindex(layers, parts):
            covariance = self._products[component][at] / tokens - np.outer(means[at], means[at])
            values, vectors = np.linalg.eigh(covariance)
            values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
            vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(channels)])
            bases[at], variances[at] = vectors, values
            deviations[at] = max(np.sqrt(values.mean()), _LEAST_DEVIATION)
        # What the finest step cannot see is never coded.
        least = (deviations[..., None] * min(RATIOS) / 4) ** 2
        kept = max(1, int((variances >= least).sum(-1).max()))
        return {
            "means": means.astype("<f4"),
            "basis": bases[..., :kept],
            "variances": variances[..., :kept],
            "deviations": deviations,
        }


_SHARP = 4.2
"""Fourth moment, in squares of the variance, from which on a channel is coded as a Laplace
distribution, which has 6; a normal one has 3."""


class StaticKvqProfile(TurnedProfile):
    """Four moments of each channel."""

    codec = "kvq"

    def __init__(self, components: Sequence[Component], rope: RopeParameters | None) -> None:
        super().__init__(components, rope)
        shapes = [(c.layers, c.parts, c.kv_heads * c.head_dim) for c in components]
        self._moments = [np.zeros((4, *shape)) for shape in shapes]

    def _take(self, component: int, at: tuple[int, ...], rows: Floats) -> None:
        power = np.ones(rows.shape)
        for moment in self._moments[component]:
            power *= rows
            moment[at] += power.sum(0)

    def _found(self, component: int, tokens: int) -> dict[str, NDArray[Any]]:
        mean, second, third, fourth = self._moments[component] / tokens
        variance = np.maximum(second - mean**2, _LEAST_DEVIATION**2)
        peak = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        deviation = np.sqrt(variance.mean(-1))
        octaves = np.log2(variance / deviation[..., None] ** 2) / 2
        scale = np.clip(np.rint(SCALES_AN_OCTAVE * octaves) + MIDDLE, 0, 2 * MIDDLE - 1)
        limit = float(LARGEST_MEAN)
        return {
            "means": np.clip(mean, -limit, limit).astype("<f2"),
            "scales": (scale * SHAPES + (peak > _SHARP * variance**2)).astype(np.uint8),
            "deviations": deviation.astype("<f4"),
        }
