"""The stored bytes of a kvq layer: encoding and checked decoding.

A refinement divides every step into three, and codes each number's third. A third's cost depends on
the channel's model and on the number's magnitude, so that base and refinements together take hardly
more than the fine step alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import LayerTerms, Part, codec_by_id, codec_by_name
from kvstore.codecs.floats import ByteCutter, Floats, from_float32, to_float32
from kvstore.codecs.kvq_models import (
    MODELS,
    NO_CLASSES,
    Classes,
    factors_of,
    kvq_models,
    ternary_table,
)
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, Cut, KvqLoops, Thirds, Tiles
from kvstore.codecs.rans import LANES, ModelTable, Stream
from kvstore.codecs.rope import MAX_PAIRS, inverse_frequencies, rotate, rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Accuracy, Component, DType

AS_IT_IS, QUANTISED, REFINED = 0, 1, 2
HEAD = struct.Struct("<BBHIIIfI")
EXACT_HEAD = struct.Struct("<BBHHH")
_FINE_HEAD = struct.Struct("<BBHIf4x")

MAX_SINKS = 4
"""First tokens of a prompt that may be stored exactly."""
_CLASSES_A_BYTE = 4
NO_FREQUENCIES: Floats = np.zeros(0, np.float32)
NO_SINKS: Part = np.zeros((2, 0, 1, 1), np.uint16)

assert HEAD.size == 24
assert EXACT_HEAD.size == 8


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a body, checked against its ``stored_bytes`` and the component.

    ``tiles`` counts those of ``coded``, the component without its first ``sinks`` tokens.
    ``position`` is that of the first token of ``coded``.
    """

    coded: Component
    tiles: int
    sinks: int
    pairs: int
    position: int
    words: int
    values: int
    error_bound: float
    has_classes: bool

    @classmethod
    def of(cls, data: Bytes, stored_bytes: int, component: Component) -> Head:
        """Return the head of *data*. Raises InvalidFrameError."""
        if stored_bytes < HEAD.size:
            raise InvalidFrameError("stored_bytes", stored_bytes, f"at least {HEAD.size}")
        _, sinks, pairs, position, words, values, error_bound, has_classes = HEAD.unpack(
            data[: HEAD.size].tobytes()
        )
        if has_classes > 1 or not 0 <= error_bound < np.inf:
            raise InvalidFrameError("head", (has_classes, error_bound), "0 or 1, a finite bound")
        if sinks > MAX_SINKS or sinks >= component.tokens:
            raise InvalidFrameError(
                "sinks", sinks, f"at most {MAX_SINKS}, and fewer than the {component.tokens} tokens"
            )
        head_dim = component.head_dim
        if 2 * pairs > min(head_dim, 2 * MAX_PAIRS):
            raise InvalidFrameError("pairs", pairs, f"at most half of {head_dim} channels")
        coded = without_sinks(component, sinks)
        found = cls(
            coded, tile_count(coded), sinks, pairs, position, words, values, error_bound,
            bool(has_classes),
        )  # fmt: skip
        size = found.classes_at + has_classes * -(-coded.tokens // _CLASSES_A_BYTE)
        if stored_bytes != size:
            raise InvalidFrameError("stored_bytes", stored_bytes, f"its counts give {size}")
        return found

    @property
    def sinks_at(self) -> int:
        """Offset of the exact tokens, after the arrays of the tiles."""
        size = HEAD.size + 4 * self.pairs + self.tiles * (12 + 4 * LANES + 3 * TILE_CHANNELS)
        return size + 2 * self.words + 2 * self.values

    @property
    def classes_at(self) -> int:
        """Offset of the classes, if there are any."""
        return self.sinks_at + self.sinks * (self.coded.layer_bytes // self.coded.tokens)


def without_sinks(component: Component, sinks: int) -> Component:
    """Return *component* without its first *sinks* tokens."""
    return replace(component, tokens=component.tokens - sinks) if sinks else component


def tile_count(component: Component) -> int:
    """Return the number of tiles of a layer of *component*."""
    cut = Cut.of(component)
    return len(cut.blocks) * component.parts * cut.columns


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A quantised layer of n tiles, ordered by block of tokens, part and column.

    ``frequencies`` f32 are of the rotation undone from ``position`` on; empty if none was.
    ``sinks`` are the bits of the tokens before, (parts, tokens, kv_heads, head_dim). ``classes``
    are empty if every token has its tile's step. The other arrays are those of ``Tiles``.
    """

    position: int
    error_bound: float
    frequencies: Floats
    steps: Floats
    escapes: NDArray[np.uint32]
    means: NDArray[np.float16]
    models: NDArray[np.uint8]
    stream: Stream
    values: NDArray[np.int16]
    sinks: Part = field(default_factory=lambda: NO_SINKS)
    classes: Classes = field(default_factory=lambda: NO_CLASSES)

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the body."""
        stream = self.stream
        return [
            self.frequencies, self.steps, stream.counts, self.escapes, stream.states,
            self.means, self.models, stream.words, self.values, self.sinks,
            _packed(self.classes),
        ]  # fmt: skip

    @property
    def stored_bytes(self) -> int:
        """Size of the packed body."""
        return HEAD.size + sum(array.nbytes for array in self.arrays())

    def pack(self, out: Bytes) -> int:
        """Write the body to the start of *out* and return its size."""
        head = HEAD.pack(
            QUANTISED, self.sinks.shape[1], len(self.frequencies), self.position,
            len(self.stream.words), len(self.values), self.error_bound, bool(len(self.classes)),
        )  # fmt: skip
        out[: HEAD.size] = np.frombuffer(head, np.uint8)
        return pack_arrays(self.arrays(), out, HEAD.size)


def pack_arrays(arrays: list[NDArray[Any]], out: Bytes, at: int) -> int:
    """Write *arrays* to *out* from *at* on, back to back; return their end."""
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[at : at + len(flat)] = flat
        at += len(flat)
    return at


def parse_body(data: Bytes, component: Component) -> Body:
    """Return the body in *data*, as views of it. Raises InvalidFrameError."""
    head = Head.of(data, len(data), component)
    tiles, (heads, _, dim) = head.tiles, component.shape
    cut = ByteCutter(data, HEAD.size)
    frequencies, steps = cut.take("<f4", head.pairs), cut.take("<f4", tiles)
    counts, escapes = cut.take("<u4", tiles), cut.take("<u4", tiles)
    states = cut.take("<u4", tiles * LANES).reshape(tiles, LANES)
    means = cut.take("<f2", tiles * TILE_CHANNELS).reshape(tiles, TILE_CHANNELS)
    models = cut.take("<u1", tiles * TILE_CHANNELS).reshape(tiles, TILE_CHANNELS)
    stream = Stream(states, counts, cut.take("<u2", head.words))
    values = cut.take("<i2", head.values)
    shape = (component.parts, head.sinks, heads, dim)
    sinks = data[head.sinks_at : head.classes_at].view(f"<u{component.dtype.item_bytes}")
    body = Body(
        head.position, head.error_bound, frequencies, steps, escapes, means, models, stream,
        values, sinks.reshape(shape), _unpacked(data[head.classes_at :], head),
    )  # fmt: skip
    check_body(body)
    return body


def _packed(classes: Classes) -> Bytes:
    """Return *classes*, two bits each, the first in the lowest bits."""
    padded = np.zeros(-(-len(classes) // _CLASSES_A_BYTE) * _CLASSES_A_BYTE, np.uint8)
    padded[: len(classes)] = classes
    rows = padded.reshape(-1, _CLASSES_A_BYTE)
    packed: Bytes = np.bitwise_or.reduce(rows << np.arange(0, 8, 2, dtype=np.uint8), axis=1)
    return packed


def _unpacked(data: Bytes, head: Head) -> Classes:
    if not head.has_classes:
        return NO_CLASSES
    found: Classes = (data[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).reshape(-1)
    tokens = head.coded.tokens
    if found[tokens:].any():
        raise InvalidFrameError("classes", int(found[tokens:].max()), "zeros after the last token")
    return found[:tokens]


def check_body(body: Body) -> None:
    """Raise InvalidFrameError unless its numbers are valid."""
    sums = [int(a.sum(dtype=np.uint64)) for a in (body.stream.counts, body.escapes)]
    if sums != [len(body.stream.words), len(body.values)]:
        raise InvalidFrameError("counts", sums, "must sum up to the words and escapes")
    if not (np.isfinite(body.steps) & (body.steps > 0)).all():
        raise InvalidFrameError("steps", float(body.steps.min()), "finite and positive")
    if not (np.isfinite(body.means).all() and np.isfinite(body.frequencies).all()):
        raise InvalidFrameError("means", "NaN", "means and frequencies are finite")
    if body.models.max() >= MODELS:
        raise InvalidFrameError("models", int(body.models.max()), f"there are {MODELS}")


def max_refined_bytes(tiles: int, numbers: int) -> int:
    """Upper bound of a refinement: a third takes less than eight bits."""
    return _FINE_HEAD.size + tiles * 4 * (1 + 32 + 32) + numbers


def pack_refinement(level: int, stream: Stream, error_bound: float) -> Bytes:
    """Return the stored bytes of a layer's refinement."""
    arrays: list[NDArray[Any]] = [stream.counts, stream.states, stream.words]
    out = np.empty(_FINE_HEAD.size + sum(array.nbytes for array in arrays), np.uint8)
    head = _FINE_HEAD.pack(REFINED, level, 0, len(stream.words), error_bound)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    pack_arrays(arrays, out, len(head))
    return out


def parse_refinement(data: Bytes, level: int, tiles: int) -> tuple[Stream, float]:
    """Return the stream and the error bound in *data*. Raises InvalidFrameError."""
    at = _FINE_HEAD.size
    if len(data) < at:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {at}")
    method, found, zero, words, error_bound = _FINE_HEAD.unpack(data[:at].tobytes())
    if (method, found, zero) != (REFINED, level, 0) or not 0 <= error_bound < np.inf:
        raise InvalidFrameError("refinement", (method, found), f"must be {REFINED}, {level}")
    cut = ByteCutter(data, at)
    counts, states = cut.take("<u4", tiles), cut.take("<u4", tiles * LANES)
    stream = Stream(states.reshape(tiles, LANES), counts, cut.take("<u2", words))
    cut.end()
    if int(counts.sum(dtype=np.uint64)) != words:
        raise InvalidFrameError("counts", words, "must sum up to the words")
    return stream, error_bound


_WRITER = "lossless"


def max_exact_bytes(component: Component) -> int:
    """Upper bound of a layer stored exactly."""
    return EXACT_HEAD.size + codec_by_name(_WRITER).max_segment_bytes(component)


def encode_exact(parts: Sequence[Part], component: Component, out: Bytes) -> int:
    """Write number and revision of a lossless codec, then *parts* encoded by it."""
    codec = codec_by_name(_WRITER)
    head = EXACT_HEAD.pack(AS_IT_IS, 0, codec.codec_id, codec.revision, 0)
    out[: EXACT_HEAD.size] = np.frombuffer(head, np.uint8)
    return EXACT_HEAD.size + codec.encode_segment(parts, component, out[EXACT_HEAD.size :])


def decode_exact(data: Bytes, component: Component, out: Sequence[Part]) -> None:
    """Decode bytes of ``encode_exact``. Raises InvalidFrameError, UnknownCodecError."""
    if len(data) < EXACT_HEAD.size:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {EXACT_HEAD.size}")
    method, zero, codec_id, revision, rest = EXACT_HEAD.unpack(data[: EXACT_HEAD.size].tobytes())
    if method != AS_IT_IS or zero or rest:
        raise InvalidFrameError("method", method, "this reader supports 0 and 1, then zeros")
    codec = codec_by_id(codec_id)
    if codec.accuracy is not Accuracy.exact or not codec.reads(revision):
        raise InvalidFrameError("codec", (codec_id, revision), "name a lossless one")
    codec.decode_segment(data[EXACT_HEAD.size :], component, out)


# --- encoding and decoding

_HALF_ULP = {DType.bfloat16: 2.0**-8, DType.float16: 2.0**-11, DType.float32: 2.0**-24}
_TURNING = 2.0**-21
"""Error of rotating there and back in float32, relative to the largest magnitude."""
_SMALLEST = 2.0**-25
"""Half of float16's smallest number: the rounding error of the smallest numbers."""

Given: TypeAlias = "tuple[DType, Angles | None, Part]"
"""The dtype of a part's block, the angles to rotate it by, and its destination."""


class Encoding:
    """Collects the tiles of a layer, block by block. ``bounds`` has each level's error bound.

    *layer* covers the tokens after the exact ones, *sinks*.
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
        self._streams: list[list[Stream]] = [[] for _ in self.bounds]

    def add(self, tiles: Tiles, thirds: list[Thirds], angles: Angles | None) -> None:
        """Add the next part of the current block."""
        self._tiles.append(tiles)
        self._block.append((tiles, thirds))
        dtype = self._layer.component.dtype
        for level, errors in enumerate([tiles.errors, *(each.errors for each in thirds)]):
            bound = bound_of(errors, tiles.magnitudes, dtype, angles)
            self.bounds[level] = max(self.bounds[level], bound)

    def end_block(self, block: slice = slice(0)) -> None:
        """Code the parts added since the last block; *block*: its tokens, if they have classes."""
        tiles, classes = [each for each, _ in self._block], self._classes[block]
        symbols, models = joined(tiles, "symbols"), joined(tiles, "models")
        if len(classes):
            models = self._loops.move(models, classes)
        self._code(0, symbols, models, kvq_models().table)
        for level in range(1, len(self._streams)):
            thirds = [each[level - 1] for _, each in self._block]
            symbols, contexts = joined(thirds, "symbols"), joined(thirds, "contexts")
            self._code(level, symbols, contexts, ternary_table())
        self._block.clear()

    def _code(
        self, level: int, symbols: NDArray[Any], models: NDArray[Any], table: ModelTable
    ) -> None:
        stream = self._loops.entropy.encode_tiles(symbols, models, table)
        self._streams[level].append(stream)

    def body(self) -> Body:
        """Return the base."""
        names = ("steps", "escapes", "means", "models", "values")
        steps, escapes, means, models, values = (joined(self._tiles, name) for name in names)
        return Body(
            self._layer.position if len(self.frequencies) else 0, rounded_up(self.bounds[0]),
            self.frequencies, steps, escapes, means, models, joined_streams(self._streams[0]),
            values, self._sinks, self._classes,
        )  # fmt: skip

    def refinements(self) -> Iterator[Bytes]:
        """Yield the stored bytes of each refinement."""
        for level, streams in enumerate(self._streams[1:], 1):
            yield pack_refinement(level, joined_streams(streams), rounded_up(self.bounds[level]))


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Decodes a layer: its ``body``, whose tiles are of ``coded``, then its refinements."""

    body: Body
    coded: Component
    refinements: tuple[Stream, ...] = ()
    loops: KvqLoops = field(default_factory=KvqLoops)

    @classmethod
    def of(cls, data: Sequence[Bytes], component: Component, loops: KvqLoops) -> Decoding:
        """Return the decoding of *data*, a base and its refinements.

        Raises InvalidFrameError.
        """
        body = parse_body(data[0], component)
        if len(body.classes) and len(data) > 1:
            raise InvalidFrameError("refinements", len(data) - 1, "tokens of classes have none")
        coded = without_sinks(component, body.sinks.shape[1])
        tiles = tile_count(coded)
        finer = [parse_refinement(each, level, tiles)[0] for level, each in enumerate(data[1:], 1)]
        return cls(body, coded, tuple(finer), loops)

    def write(self, out: Sequence[Part], frequencies: Floats, place: int) -> None:
        """Write the tokens of ``coded`` to *out*, keys rotated by *frequencies* to *place*.

        Raises InvalidFrameError when a stream ends wrong or its escapes differ from their count.
        """
        body, dtype, cut = self.body, self.coded.dtype, Cut.of(self.coded)
        count = self.coded.parts * cut.columns
        base = pieces_of(body.stream, count)
        finer = [pieces_of(each, cut.columns) for each in self.refinements]
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
        body, models = self.body, self.body.models[at]
        each, tokens = models, block.stop - block.start
        if len(body.classes):
            each = self.loops.move(models, body.classes[block])
        symbols = np.empty((len(models), tokens, TILE_CHANNELS), np.uint8)
        self.loops.entropy.decode_tiles(*stream, each, kvq_models().table, symbols)
        end = value + int(body.escapes[at].sum(dtype=np.uint64))
        return Tiles(
            body.steps[at], body.means[at], models, symbols, body.escapes[at],
            body.values[value:end],
        )  # fmt: skip

    def _restore(
        self, tiles: Tiles, streams: Sequence[Stream], classes: Classes, given: Given
    ) -> bool:
        """Write one part of a block to memory; False if its escapes differ from their count."""
        if not streams and not len(classes):
            return self.loops.dequantise(tiles, *given)
        quotients, steps = self.loops.quotients(tiles), tiles.steps
        if quotients is None:
            return False
        for level, stream in enumerate(streams, 1):
            contexts = self.loops.contexts(quotients, tiles.models, level)
            thirds = np.empty_like(contexts)
            self.loops.entropy.decode_tiles(*stream, contexts, ternary_table(), thirds)
            self.loops.add(quotients, thirds)
            steps = steps / np.float32(3)
        tokens = tiles.symbols.shape[1]
        factors = factors_of(classes) if len(classes) else np.ones(tokens, np.float32)
        self.loops.write(quotients, replace(tiles, steps=steps), factors, given)
        return True


def sinks_moved(sinks: Part, frequencies: Floats, distance: int, dtype: DType) -> Part:
    """Return exact tokens (parts, tokens, kv_heads, head_dim) with keys moved by *distance*."""
    if not (distance and len(frequencies) and sinks.size):
        return sinks
    moved_on, keys = sinks.copy(), to_float32(sinks[0], dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # invalid frames may have infinities
        rotate(keys, *rotation(frequencies, distance, 1))
        from_float32(keys, dtype, moved_on[0])
    return moved_on


def layer_without_sinks(layer: LayerTerms, sinks: int) -> LayerTerms:
    """Return *layer* without its first *sinks* tokens."""
    return replace(
        layer,
        component=without_sinks(layer.component, sinks),
        position=layer.position + sinks,
        importance=None if layer.importance is None else layer.importance[sinks:],
    )


def key_frequencies(layer: LayerTerms) -> Floats:
    """Return the frequencies that undo the keys' rotation; empty: it stays."""
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
    """Return a chunk's angles, cached for all layers: computing them takes as long as coding."""
    return rotation(np.frombuffer(frequencies, np.float32), position, tokens)


def bound_of(errors: Floats, magnitudes: Floats, dtype: DType, angles: Angles | None) -> float:
    """Return the largest possible error of decoding, rounding to *dtype* included."""
    wide, largest = errors.astype(np.float64), magnitudes.astype(np.float64)
    if angles is not None:  # rotation mixes two orthogonal errors
        wide = wide * np.sqrt(2) + largest * _TURNING
    rounding = (wide + largest) * _HALF_ULP[dtype] + _SMALLEST
    return float((wide + rounding).max()) * (1 + 2.0**-20)


def rounded_up(bound: float) -> float:
    """Return the least float32 >= *bound*."""
    near = np.float32(bound)
    return float(near if float(near) >= bound else np.nextafter(near, np.float32(np.inf)))


def joined_streams(streams: Iterable[Stream]) -> Stream:
    """Return *streams* concatenated."""
    return Stream(*map(np.concatenate, zip(*streams, strict=True)))


def pieces_of(stream: Stream, tiles: int) -> Iterator[Stream]:
    """Cut *stream* into streams of *tiles* tiles."""
    ends = np.cumsum(stream.counts, dtype=np.int64)
    word = 0
    for first in range(0, len(ends), tiles):
        stop = first + tiles
        end = int(ends[stop - 1])
        yield Stream(stream.states[first:stop], stream.counts[first:stop], stream.words[word:end])
        word = end


def joined(tiles: Sequence[Tiles | Thirds], name: str) -> NDArray[Any]:
    """Return the arrays called *name* concatenated."""
    return np.concatenate([getattr(each, name) for each in tiles])
