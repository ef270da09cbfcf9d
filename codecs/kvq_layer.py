"""One layer on its way through kvq: its tiles and streams put together, and taken apart.

A refinement cuts every step into three, and says which third a number is in. What a third costs
depends on the channel's model and on how far out the number is, so that base and refinements
together take hardly more than the fine step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import LayerTerms, Part
from kvstore.codecs.floats import Floats, from_float32, to_float32
from kvstore.codecs.kvq_body import (
    NO_SINKS,
    Body,
    Stream,
    behind,
    pack_refinement,
    parse_body,
    parse_refinement,
    tile_count,
)
from kvstore.codecs.kvq_models import NO_CLASSES, Classes, factors_of, kvq_models, ternary_table
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, Cut, KvqLoops, Thirds, Tiles
from kvstore.codecs.rans import ModelTable
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, DType

_HALF_ULP = {DType.bfloat16: 2.0**-8, DType.float16: 2.0**-11, DType.float32: 2.0**-24}
_TURNING = 2.0**-21
"""What rotating there and back adds to an error, in the largest magnitude; float32."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: what rounding adds to the smallest ones."""
NO_FREQUENCIES: Floats = np.zeros(0, np.float32)

Coded: TypeAlias = tuple[NDArray[Any], ...]
Given: TypeAlias = "tuple[DType, Angles | None, Part]"
"""The type of a part's block, the angles to turn it by, and where it is."""


class Encoding:
    """Collects the tiles of a layer, block by block. ``bounds`` are those of each level.

    *layer* is that of the tokens behind the exact ones, *sinks*.
    """

    def __init__(
        self, layer: LayerTerms, levels: int, loops: KvqLoops, sinks: Part = NO_SINKS,
        classes: Classes = NO_CLASSES,
    ) -> None:  # fmt: skip
        self.frequencies = key_frequencies(layer)
        self.bounds = [0.0] * (1 + levels)
        self._layer = layer
        self._loops = loops
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

    def end_block(self, block: slice = slice(0)) -> None:
        """Code what was taken since the last block: the tokens *block*, where they have classes."""
        tiles = [each for each, _ in self._block]
        symbols, models = joined(tiles, "symbols"), joined(tiles, "models")
        classes, table = self._classes[block], kvq_models().table
        if len(classes):
            self._code(0, symbols, self._loops.move(models, classes), table)
        else:
            self._streams[0].append(self._loops.entropy.encode_tiles(symbols, models, table))
        for level in range(1, len(self._streams)):
            thirds = [each[level - 1] for _, each in self._block]
            symbols, contexts = joined(thirds, "symbols"), joined(thirds, "contexts")
            self._code(level, symbols, contexts, ternary_table())
        self._block.clear()

    def _code(
        self, level: int, symbols: NDArray[Any], models: NDArray[Any], table: ModelTable
    ) -> None:
        """Code *symbols* (n, tokens, 128), each under its own of *models*.

        One token of very many channels: that gives each number a model of its own.
        """
        count = len(symbols)
        coded = self._loops.entropy.encode_tiles(
            symbols.reshape(count, 1, -1), models.reshape(count, -1), table
        )
        self._streams[level].append(coded)

    def body(self) -> Body:
        """Return the base."""
        names = ("steps", "escapes", "means", "models", "values")
        steps, escapes, means, models, values = (joined(self._tiles, name) for name in names)
        return Body(
            self._layer.position if len(self.frequencies) else 0, rounded_up(self.bounds[0]),
            self.frequencies, steps, escapes, means, models, Stream.joined(self._streams[0]),
            values, self._sinks, self._classes,
        )  # fmt: skip

    def refinements(self) -> Iterator[Bytes]:
        """Yield the stored bytes of each refinement."""
        for level, streams in enumerate(self._streams[1:], 1):
            yield pack_refinement(level, Stream.joined(streams), rounded_up(self.bounds[level]))


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Takes a layer apart: its ``body``, whose tiles are of ``coded``, then its refinements."""

    body: Body
    coded: Component
    refinements: tuple[Stream, ...] = ()
    loops: KvqLoops = field(default_factory=KvqLoops)

    @classmethod
    def of(cls, data: Sequence[Bytes], component: Component, loops: KvqLoops) -> Decoding:
        """Return the decoding of *data*, a base and as many refinements as there are.

        Raises InvalidFrameError.
        """
        body = parse_body(data[0], component)
        if len(body.classes) and len(data) > 1:
            raise InvalidFrameError("refinements", len(data) - 1, "tokens of classes have none")
        coded = behind(component, body.sinks.shape[1])
        tiles = tile_count(coded)
        finer = [parse_refinement(each, level, tiles)[0] for level, each in enumerate(data[1:], 1)]
        return cls(body, coded, tuple(finer), loops)

    def write(self, out: Sequence[Part], frequencies: Floats, place: int) -> None:
        """Write the tokens of ``coded`` to *out*, keys rotated by *frequencies* to *place*.

        Raises InvalidFrameError when a stream does not end as it must or has other escapes.
        """
        body, dtype, cut = self.body, self.coded.dtype, Cut.of(self.coded)
        parts, count = self.coded.parts, self.coded.parts * cut.columns
        base = body.stream.pieces([count] * len(cut.blocks))
        finer = [each.pieces([cut.columns] * parts * len(cut.blocks)) for each in self.refinements]
        first = value = 0
        for block, stream in zip(cut.blocks, base, strict=True):
            turned = (angles_of(frequencies, place, block), None)
            tiles = self._tiles(slice(first, first + count), block, stream, value)
            first, value = first + count, value + len(tiles.values)
            for index, piece in enumerate(tiles.pieces(cut.columns)):
                streams = [next(each) for each in finer]
                given = (dtype, turned[index], out[index][:, block])
                if not self._restore(piece, streams, body.classes[block], given):
                    raise InvalidFrameError("escapes", len(piece.values), "not as coded")

    def _tiles(self, at: slice, block: slice, stream: Stream, value: int) -> Tiles:
        body, models, table = self.body, self.body.models[at], kvq_models().table
        if len(body.classes):
            each = self.loops.move(models, body.classes[block])
            symbols = self._decode_each(stream, each, table)
        else:
            symbols = np.empty((len(models), block.stop - block.start, TILE_CHANNELS), np.uint8)
            self.loops.entropy.decode_tiles(
                stream.states, stream.counts, stream.words, models, table, symbols
            )
        end = value + int(body.escapes[at].sum(dtype=np.uint64))
        return Tiles(
            body.steps[at], body.means[at], models, symbols, body.escapes[at],
            body.values[value:end],
        )  # fmt: skip

    def _decode_each(
        self, stream: Stream, models: NDArray[np.uint8], table: ModelTable
    ) -> NDArray[np.uint8]:
        """Return the symbols of *stream*, as many as *models*. Raises InvalidFrameError."""
        symbols: NDArray[np.uint8] = np.empty((len(models), 1, models[0].size), np.uint8)
        self.loops.entropy.decode_tiles(
            stream.states, stream.counts, stream.words, models.reshape(len(models), -1), table,
            symbols,
        )  # fmt: skip
        return symbols.reshape(models.shape)

    def _restore(
        self, tiles: Tiles, streams: Sequence[Stream], classes: Classes, given: Given
    ) -> bool:
        """Write one part of a block to memory; False when its escapes are not those coded."""
        if not streams and not len(classes):
            return self.loops.dequantise(tiles, *given)
        quotients, steps = self.loops.quotients(tiles), tiles.steps
        if quotients is None:
            return False
        for level, stream in enumerate(streams, 1):
            contexts = self.loops.contexts(quotients, tiles.models, level)
            self.loops.add(quotients, self._decode_each(stream, contexts, ternary_table()))
            steps = steps / np.float32(3)
        tokens = tiles.symbols.shape[1]
        factors = factors_of(classes) if len(classes) else np.ones(tokens, np.float32)
        self.loops.write(quotients, replace(tiles, steps=steps), factors, given)
        return True


def sinks_moved(sinks: Part, frequencies: Floats, distance: int, dtype: DType) -> Part:
    """Return exact tokens, bits (parts, tokens, kv_heads, head_dim), keys turned *distance* on."""
    if not (distance and len(frequencies) and sinks.size):
        return sinks
    moved_on, keys = sinks.copy(), to_float32(sinks[0], dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody wrote may be infinite
        rotate(keys, *rotation(frequencies, distance, 1))
        from_float32(keys, dtype, moved_on[0])
    return moved_on


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
        return NO_FREQUENCIES
    found = inverse_frequencies(layer.rope, layer.component.head_dim)
    return NO_FREQUENCIES if found is None else found


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
