"""The stored bytes of a kvq layer: what stands where, and every check before it is believed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Codec, Part, codec_by_id, codec_by_name
from kvstore.codecs.floats import ByteCutter, Floats
from kvstore.codecs.kvq_models import MODELS, NO_CLASSES, Classes
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Cut
from kvstore.codecs.rans import LANES
from kvstore.codecs.rope import MAX_PAIRS
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Accuracy, Component

AS_IT_IS, QUANTISED, REFINED = 0, 1, 2
HEAD = struct.Struct("<BBHIIIfI")
EXACT_HEAD = struct.Struct("<BBHHH")
_FINE_HEAD = struct.Struct("<BBHIf4x")

MAX_SINKS = 4
"""First tokens of a prompt that may be kept exactly."""
_CLASSES_A_BYTE = 4
NO_SINKS: Part = np.zeros((2, 0, 1, 1), np.uint16)

assert HEAD.size == 24
assert EXACT_HEAD.size == 8


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The rANS stream of n tiles: ``states`` u32 (n, 32), ``counts`` u32 (n,), ``words`` u16."""

    states: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    words: NDArray[np.uint16]

    @classmethod
    def joined(cls, streams: Iterable[tuple[NDArray[Any], ...]]) -> Stream:
        """Return one stream of those that ``Backend.encode_tiles`` returned."""
        return cls(*map(np.concatenate, zip(*streams, strict=True)))

    def pieces(self, sizes: list[int]) -> Iterator[Stream]:
        """Cut the stream into those of *sizes* tiles, one after another."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        first = word = 0
        for size in sizes:
            stop = first + size
            end = int(ends[stop - 1])
            yield Stream(self.states[first:stop], self.counts[first:stop], self.words[word:end])
            first, word = stop, end


@dataclass(frozen=True, slots=True)
class Head:
    """What a body begins with, checked against its ``stored_bytes`` and the component.

    Its ``tiles`` are those of ``coded``, the component less the first ``sinks`` tokens.
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
        """Return the head that *data* begins with. Raises InvalidFrameError."""
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
        coded = behind(component, sinks)
        found = cls(
            coded, tile_count(coded), sinks, pairs, position, words, values, error_bound,
            bool(has_classes),
        )  # fmt: skip
        size = found.classes_at + has_classes * -(-coded.tokens // _CLASSES_A_BYTE)
        if stored_bytes != size:
            raise InvalidFrameError("stored_bytes", stored_bytes, f"its counts make {size}")
        return found

    @property
    def sinks_at(self) -> int:
        """Where the exact tokens begin, behind the arrays of the tiles."""
        size = HEAD.size + 4 * self.pairs + self.tiles * (12 + 4 * LANES + 3 * TILE_CHANNELS)
        return size + 2 * self.words + 2 * self.values

    @property
    def classes_at(self) -> int:
        """Where the classes begin, if there are any."""
        return self.sinks_at + self.sinks * (self.coded.layer_bytes // self.coded.tokens)


def behind(component: Component, sinks: int) -> Component:
    """Return *component* less its first *sinks* tokens."""
    return replace(component, tokens=component.tokens - sinks) if sinks else component


def tile_count(component: Component) -> int:
    """Return how many tiles a layer of *component* has."""
    cut = Cut.of(component)
    return len(cut.blocks) * component.parts * cut.columns


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A quantised layer of n tiles: blocks of tokens, in them parts, in them columns.

    ``frequencies`` f32 are those that the keys were turned back by, from ``position`` on;
    empty when they were not. ``sinks`` are the bits of the tokens before, (parts, tokens,
    kv_heads, head_dim). ``classes`` are empty where every token has its tile's step. The other
    arrays are those of ``Tiles``.
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
    """Write *arrays* to *out*, one after another from *at*; return where they end."""
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
        raise InvalidFrameError("classes", int(found[tokens:].max()), "zeros behind the last token")
    return found[:tokens]


def check_body(body: Body) -> None:
    """Raise InvalidFrameError unless its numbers are such as a writer has."""
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
    """Upper bound of a refinement: no third takes as much as eight bits."""
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


@lru_cache(maxsize=1)
def _writer() -> Codec:
    return codec_by_name(_WRITER)


def max_exact_bytes(component: Component) -> int:
    """Upper bound of such a layer."""
    return EXACT_HEAD.size + _writer().max_segment_bytes(component)


def encode_exact(parts: Sequence[Part], component: Component, out: Bytes) -> int:
    """Write *parts* under a lossless codec behind its number and revision."""
    codec = _writer()
    head = EXACT_HEAD.pack(AS_IT_IS, 0, codec.codec_id, codec.revision, 0)
    out[: EXACT_HEAD.size] = np.frombuffer(head, np.uint8)
    return EXACT_HEAD.size + codec.encode_segment(parts, component, out[EXACT_HEAD.size :])


def decode_exact(data: Bytes, component: Component, out: Sequence[Part]) -> None:
    """Read what ``encode_exact`` wrote. Raises InvalidFrameError, UnknownCodecError."""
    if len(data) < EXACT_HEAD.size:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {EXACT_HEAD.size}")
    method, zero, codec_id, revision, rest = EXACT_HEAD.unpack(data[: EXACT_HEAD.size].tobytes())
    if method != AS_IT_IS or zero or rest:
        raise InvalidFrameError("method", method, "this reader knows 0 and 1, then zeros")
    codec = codec_by_id(codec_id)
    if codec.accuracy is not Accuracy.exact or not codec.reads(revision):
        raise InvalidFrameError("codec", (codec_id, revision), "name a lossless one")
    codec.decode_segment(data[EXACT_HEAD.size :], component, out)
