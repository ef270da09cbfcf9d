"""One layer on its way through kvq: its tiles and streams put together, and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import FLOAT_TYPES, Floats, from_float32, to_float32
from kvstore.codecs.kvq_body import (
    NO_SINKS,
    Body,
    Stream,
    behind,
    parse_body,
    tile_count,
)
from kvstore.codecs.kvq_levels import (
    FineBackend,
    Thirds,
    decode_each,
    encode_each,
    pack_refinement,
    parse_refinement,
    ternary_table,
)
from kvstore.codecs.kvq_models import NO_CLASSES, Classes, kvq_models
from kvstore.codecs.kvq_native import fine_backend
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, Cut, Tiles
from kvstore.codecs.rans import Backend
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, DType, LayerKind

_HALF_ULP = {DType.bfloat16: 2.0**-8, DType.float16: 2.0**-11, DType.float32: 2.0**-24}
_TURNING = 2.0**-21
"""What rotating there and back adds to an error, in the largest magnitude; float32."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: what rounding adds to the smallest ones."""
_NO_FREQUENCIES = np.zeros(0, np.float32)

Coded = tuple[NDArray[Any], ...]
Move: TypeAlias = Callable[[NDArray[np.uint8], Classes], NDArray[np.uint8]]
"""From the models u8 (n, 128) of tiles and the classes of tokens to the model of each number."""


class Encoding:
    """Collects the tiles of a layer, block by block. ``bounds`` are those of each level.

    *layer* is that of the tokens behind the exact ones, *sinks*.
    """

    def __init__(
        self, layer: LayerTerms, levels: int, entropy: Backend, sinks: Part = NO_SINKS,
        classes: Classes = NO_CLASSES,
    ) -> None:  # fmt: skip
        self.frequencies = key_frequencies(layer)
        self.bounds = [0.0] * (1 + levels)
        self._layer = layer
        self._entropy = entropy
        self._sinks = sinks
        self._classes = classes
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

    def end_block(self, block: slice = slice(0), move: Move | None = None) -> None:
        """Code what was taken since the last block: the tokens *block*, where they have classes."""
        tiles = [each for each, _ in self._block]
        symbols, models = joined(tiles, "symbols"), joined(tiles, "models")
        classes, table = self._classes[block], kvq_models().table
        if len(classes):
            each = (move or fine_backend().move)(models, classes)
            coded = encode_each(symbols, each, table, self._entropy)
        else:
            coded = self._entropy.encode_tiles(symbols, models, table)
        self._streams[0].append(coded)
        for level, streams in enumerate(self._streams[1:]):
            thirds = [each[level] for _, each in self._block]
            symbols, contexts = joined(thirds, "symbols"), joined(thirds, "contexts")
            streams.append(encode_each(symbols, contexts, ternary_table(), self._entropy))
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
            self._sinks,
            self._classes,
        )

    def refinements(self) -> Iterator[Bytes]:
        """Yield the stored bytes of each refinement."""
        for level, streams in enumerate(self._streams[1:], 1):
            yield pack_refinement(level, Stream.joined(streams), rounded_up(self.bounds[level]))


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Takes a layer apart: its ``body``, whose tiles are of ``coded``, then its refinements."""

    body: Body
    coded: Component
    entropy: Backend
    refinements: tuple[Stream, ...] = ()
    move: Move | None = None

    @classmethod
    def of(
        cls, data: Sequence[Bytes], component: Component, entropy: Backend, move: Move
    ) -> Decoding:
        """Return the decoding of *data*, a base and as many refinements as there are.

        Raises InvalidFrameError.
        """
        body = parse_body(data[0], component)
        if len(body.classes) and len(data) > 1:
            raise InvalidFrameError("refinements", len(data) - 1, "tokens of classes have none")
        coded = behind(component, body.sinks.shape[1])
        tiles = tile_count(coded)
        finer = [parse_refinement(each, level, tiles)[0] for level, each in enumerate(data[1:], 1)]
        return cls(body, coded, entropy, tuple(finer), move)

    def blocks(self) -> Iterator[tuple[slice, list[Tiles], list[list[Stream]]]]:
        """Yield the tokens of each block, its parts' tiles and their streams of each level."""
        cut, parts = Cut.of(self.coded), self.coded.parts
        count = parts * cut.columns
        base = self.body.stream.pieces([count] * len(cut.blocks))
        finer = [each.pieces([cut.columns] * parts * len(cut.blocks)) for each in self.refinements]
        first = value = 0
        for block, stream in zip(cut.blocks, base, strict=True):
            tiles = self._tiles(slice(first, first + count), block, stream, value)
            first, value = first + count, value + len(tiles.values)
            pieces = [[next(each) for each in finer] for _ in range(parts)]
            yield block, _parts(tiles, cut.columns), pieces

    def _tiles(self, at: slice, block: slice, stream: Stream, value: int) -> Tiles:
        body, models, table = self.body, self.body.models[at], kvq_models().table
        if len(body.classes):
            each = (self.move or fine_backend().move)(models, body.classes[block])
            symbols = decode_each(stream, each, table, self.entropy)
        else:
            symbols = np.empty((len(models), block.stop - block.start, TILE_CHANNELS), np.uint8)
            self.entropy.decode_tiles(
                stream.states, stream.counts, stream.words, models, table, symbols
            )
        end = value + int(body.escapes[at].sum(dtype=np.uint64))
        return Tiles(
            body.steps[at], body.means[at], models, symbols, body.escapes[at],
            body.values[value:end],
        )  # fmt: skip


def _parts(tiles: Tiles, columns: int) -> list[Tiles]:
    """Return the tiles of each part, *columns* of them."""
    parts, value = [], 0
    for first in range(0, len(tiles.steps), columns):
        at = slice(first, first + columns)
        end = value + int(tiles.escapes[at].sum(dtype=np.uint64))
        part = Tiles(
            tiles.steps[at], tiles.means[at], tiles.models[at], tiles.symbols[at],
            tiles.escapes[at], tiles.values[value:end],
        )  # fmt: skip
        parts.append(part)
        value = end
    return parts


def sinks_moved(sinks: Part, frequencies: Floats, distance: int, dtype: DType) -> Part:
    """Return exact tokens, bits (parts, tokens, kv_heads, head_dim), keys turned *distance* on."""
    if not (distance and len(frequencies) and sinks.size):
        return sinks
    moved_on, keys = sinks.copy(), to_float32(sinks[0], dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody wrote may be infinite
        rotate(keys, *rotation(frequencies, distance, 1))
        from_float32(keys, dtype, moved_on[0])
    return moved_on


def refined(
    tiles: Tiles, streams: Sequence[Stream], entropy: Backend, fine: FineBackend
) -> Floats | None:
    """Return the quotients of *tiles* at the level of the last of *streams*, f32.

    None when the escapes are not as many as were coded. Raises InvalidFrameError.
    """
    quotients: Floats | None = fine.quotients(tiles)
    if quotients is None:
        return None
    for level, stream in enumerate(streams, 1):
        contexts = fine.contexts(quotients, tiles.models, level)
        fine.add(quotients, decode_each(stream, contexts, ternary_table(), entropy))
    return quotients


def is_quantised(component: Component) -> bool:
    """Whether kvq quantises such layers: float keys, values and latents; states never."""
    return component.dtype in FLOAT_TYPES and component.kind is not LayerKind.state


def layer_behind(layer: LayerTerms, sinks: int) -> LayerTerms:
    """Return *layer* less its first *sinks* tokens."""
    return replace(
        layer,
        component=behind(layer.component, sinks),
        position=layer.position + sinks,
        importance=None if layer.importance is None else layer.importance[sinks:],
    )


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


def joined(tiles: Sequence[Tiles | Thirds], name: str) -> NDArray[Any]:
    """Return the arrays called *name* one behind the other."""
    return np.concatenate([getattr(each, name) for each in tiles])
