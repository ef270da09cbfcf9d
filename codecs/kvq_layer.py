"""One layer on its way through kvq: its tiles and streams put together, and taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import FLOAT_TYPES, Floats
from kvstore.codecs.kvq_body import Body, Stream, parse_body
from kvstore.codecs.kvq_fine import FineBackend
from kvstore.codecs.kvq_levels import (
    Thirds,
    encode_thirds,
    pack_refinement,
    parse_refinement,
    ternary_table,
)
from kvstore.codecs.kvq_models import kvq_models
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, Cut, Tiles
from kvstore.codecs.rans import Backend
from kvstore.codecs.rope import inverse_frequencies, rotation
from kvstore.codecs.terms import LayerTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.types import Component, DType, LayerKind

_HALF_ULP = {DType.bfloat16: 2.0**-8, DType.float16: 2.0**-11, DType.float32: 2.0**-24}
_TURNING = 2.0**-21
"""What rotating there and back adds to an error, in the largest magnitude; float32."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: what rounding adds to the smallest ones."""
_NO_FREQUENCIES = np.zeros(0, np.float32)

Coded = tuple[NDArray[Any], ...]


class Encoding:
    """Collects the tiles of a layer, block by block. ``bounds`` are those of each level."""

    def __init__(self, layer: LayerTerms, levels: int, entropy: Backend) -> None:
        self.frequencies = key_frequencies(layer)
        self.bounds = [0.0] * (1 + levels)
        self._layer = layer
        self._entropy = entropy
        self._tiles: list[Tiles] = []
        self._block: list[tuple[Tiles, list[Thirds]]] = []
        self._streams: list[list[Coded]] = [[] for _ in self.bounds]

    def add(self, tiles: Tiles, thirds: list[Thirds], angles: Angles | None) -> None:
        """Take the next part of the block that is being encoded."""
        self._tiles.append(tiles)
        self._block.append((tiles, thirds))
        dtype = self._layer.component.dtype
        for level, errors in enumerate([tiles.errors, *(each.errors for each in thirds)]):
            bound = bound_of(errors, tiles.magnitudes, dtype, angles)
            self.bounds[level] = max(self.bounds[level], bound)

    def end_block(self) -> None:
        """Code what was taken since the last block."""
        tiles = [each for each, _ in self._block]
        symbols, models = joined(tiles, "symbols"), joined(tiles, "models")
        self._streams[0].append(self._entropy.encode_tiles(symbols, models, kvq_models().table))
        for level, streams in enumerate(self._streams[1:]):
            thirds = [each[level] for _, each in self._block]
            streams.append(encode_thirds(thirds, self._entropy))
        self._block.clear()

    def body(self) -> Body:
        """Return the base."""
        tiles = self._tiles
        return Body(
            self._layer.position if len(self.frequencies) else 0,
            rounded_up(self.bounds[0]),
            self.frequencies,
            joined(tiles, "steps"),
            joined(tiles, "escapes"),
            joined(tiles, "means"),
            joined(tiles, "models"),
            Stream.joined(self._streams[0]),
            joined(tiles, "values"),
        )

    def refinements(self) -> Iterator[Bytes]:
        """Yield the stored bytes of each refinement."""
        for level, streams in enumerate(self._streams[1:], 1):
            yield pack_refinement(level, Stream.joined(streams), rounded_up(self.bounds[level]))


class Decoding:
    """Takes a layer apart: *data* is its base, then refinements as far as there are some.

    Raises InvalidFrameError.
    """

    def __init__(self, data: Sequence[Bytes], component: Component, entropy: Backend) -> None:
        tiles = tile_count(component)
        self.body = parse_body(data[0], tiles, component.head_dim)
        self._refinements = [
            parse_refinement(each, level, tiles)[0] for level, each in enumerate(data[1:], 1)
        ]
        self._cut = Cut.of(component)
        self._count = component.parts * self._cut.columns
        self._entropy = entropy

    @classmethod
    def of_body(cls, body: Body, component: Component, entropy: Backend) -> Decoding:
        """Return the decoding of a *body* that was parsed and checked already."""
        found = cls.__new__(cls)
        found.body, found._refinements, found._entropy = body, [], entropy
        found._cut = Cut.of(component)
        found._count = component.parts * found._cut.columns
        return found

    def blocks(self) -> Iterator[tuple[slice, list[Tiles], list[list[Stream]]]]:
        """Yield the tokens of each block, its parts' tiles and their streams of each level."""
        cut = self._cut
        parts = self._count // cut.columns
        base = self.body.stream.pieces([self._count] * len(cut.blocks))
        finer = [each.pieces([cut.columns] * parts * len(cut.blocks)) for each in self._refinements]
        value = 0
        for number, (block, stream) in enumerate(zip(cut.blocks, base, strict=True)):
            tiles = self._tiles(number, block, stream, value)
            value += len(tiles.values)
            yield block, self._parts(tiles), [[next(each) for each in finer] for _ in range(parts)]

    def _tiles(self, number: int, block: slice, stream: Stream, value: int) -> Tiles:
        body, at = self.body, slice(number * self._count, (number + 1) * self._count)
        symbols = np.empty((self._count, block.stop - block.start, TILE_CHANNELS), np.uint8)
        self._entropy.decode_tiles(
            stream.states, stream.counts, stream.words, body.models[at], kvq_models().table, symbols
        )
        end = value + int(body.escapes[at].sum(dtype=np.uint64))
        return Tiles(
            body.steps[at], body.means[at], body.models[at], symbols, body.escapes[at],
            body.values[value:end],
        )  # fmt: skip

    def _parts(self, tiles: Tiles) -> list[Tiles]:
        parts, value = [], 0
        for first in range(0, self._count, self._cut.columns):
            at = slice(first, first + self._cut.columns)
            end = value + int(tiles.escapes[at].sum(dtype=np.uint64))
            part = Tiles(
                tiles.steps[at], tiles.means[at], tiles.models[at], tiles.symbols[at],
                tiles.escapes[at], tiles.values[value:end],
            )  # fmt: skip
            parts.append(part)
            value = end
        return parts


def refined(
    tiles: Tiles, streams: Sequence[Stream], entropy: Backend, fine: FineBackend
) -> Floats | None:
    """Return the quotients of *tiles* at the level of the last of *streams*, f32.

    None when the escapes are not as many as were coded. Raises InvalidFrameError.
    """
    quotients: Floats | None = fine.quotients(tiles)
    if quotients is None:
        return None
    symbols = np.empty((len(quotients), 1, quotients[0].size), np.uint8)
    for level, stream in enumerate(streams, 1):
        contexts = fine.contexts(quotients, tiles.models, level).reshape(len(quotients), -1)
        entropy.decode_tiles(
            stream.states, stream.counts, stream.words, contexts, ternary_table(), symbols
        )
        fine.add(quotients, symbols.reshape(quotients.shape))
    return quotients


def tile_count(component: Component) -> int:
    """Return how many tiles a layer of *component* has."""
    cut = Cut.of(component)
    return len(cut.blocks) * component.parts * cut.columns


def is_quantised(component: Component) -> bool:
    """Whether kvq quantises such layers: float keys, values and latents; states never."""
    return component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state


def key_frequencies(layer: LayerTerms) -> Floats:
    """Return what to turn the layer's keys back by; empty when they stay as they are."""
    if layer.component.parts != 2:
        return _NO_FREQUENCIES
    found = inverse_frequencies(layer.rope, layer.component.head_dim)
    return _NO_FREQUENCIES if found is None else found


def angles_of(frequencies: Floats, position: int, block: slice) -> Angles | None:
    """Return the angles of the tokens of *block* of a chunk at *position*."""
    if not len(frequencies):
        return None
    tokens = block.stop - block.start
    return _angles(frequencies.tobytes(), position + block.start, tokens)


@lru_cache(maxsize=32)
def _angles(frequencies: bytes, position: int, tokens: int) -> Angles:
    """Return the angles that all layers of a chunk have: computing them takes as long as coding."""
    return rotation(np.frombuffer(frequencies, np.float32), position, tokens)


def bound_of(errors: Floats, magnitudes: Floats, dtype: DType, angles: Angles | None) -> float:
    """Return the largest error that decoding can make, the rounding to *dtype* included."""
    wide, largest = errors.astype(np.float64), magnitudes.astype(np.float64)
    if angles is not None:  # of two errors at right angles, the length
        wide = wide * np.sqrt(2) + largest * _TURNING
    rounding = (wide + largest) * _HALF_ULP[dtype] + _SMALLEST
    return float((wide + rounding).max()) * (1 + 2.0**-20)


def rounded_up(bound: float) -> float:
    """Return the least float32 that is no less."""
    near = np.float32(bound)
    return float(near if float(near) >= bound else np.nextafter(near, np.float32(np.inf)))


def joined(tiles: Sequence[Tiles], name: str) -> NDArray[Any]:
    """Return the arrays called *name* one behind the other."""
    return np.concatenate([getattr(each, name) for each in tiles])
