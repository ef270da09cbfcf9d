"""The stored bytes of a kvq layer: what stands where, and every check before it is believed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats
from kvstore.codecs.kvq_models import MODELS
from kvstore.codecs.kvq_tiles import TILE_CHANNELS
from kvstore.codecs.rans import LANES
from kvstore.codecs.rope import MAX_PAIRS
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError

AS_IT_IS, QUANTISED = 0, 1
HEAD = struct.Struct("<BBHIIIfI")
EXACT_HEAD = struct.Struct("<BBHHH")

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


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A quantised layer of n tiles: blocks of tokens, in them parts, in them columns.

    ``frequencies`` f32 are those that the keys were turned back by, from ``position`` on;
    empty when they were not. The other arrays are those of ``Tiles``.
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

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the body."""
        stream = self.stream
        return [
            self.frequencies, self.steps, stream.counts, self.escapes, stream.states,
            self.means, self.models, stream.words, self.values,
        ]  # fmt: skip

    @property
    def stored_bytes(self) -> int:
        """Size of the packed body."""
        return HEAD.size + sum(array.nbytes for array in self.arrays())

    def pack(self, out: Bytes) -> int:
        """Write the body to the start of *out* and return its size."""
        head = HEAD.pack(
            QUANTISED, 0, len(self.frequencies), self.position, len(self.stream.words),
            len(self.values), self.error_bound, 0,
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


def parse_body(data: Bytes, tiles: int, head_dim: int) -> Body:
    """Return the body of *tiles* tiles in *data*, as views of it. Raises InvalidFrameError."""
    if len(data) < HEAD.size:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {HEAD.size}")
    _, zero, pairs, position, words, values, error_bound, rest = HEAD.unpack(
        data[: HEAD.size].tobytes()
    )
    if zero or rest or not 0 <= error_bound < np.inf:
        raise InvalidFrameError("head", (zero, rest, error_bound), "zeros, and a finite bound")
    if 2 * pairs > min(head_dim, 2 * MAX_PAIRS):
        raise InvalidFrameError("pairs", pairs, f"at most half of {head_dim} channels")
    cut = ByteCutter(data, HEAD.size)
    size = 4 * pairs + tiles * (12 + 4 * LANES + 3 * TILE_CHANNELS) + 2 * words + 2 * values
    if len(data) != HEAD.size + size:
        raise InvalidFrameError("stored_bytes", len(data), f"its counts make {HEAD.size + size}")
    frequencies, steps = cut.take("<f4", pairs), cut.take("<f4", tiles)
    counts, escapes = cut.take("<u4", tiles), cut.take("<u4", tiles)
    states = cut.take("<u4", tiles * LANES).reshape(tiles, LANES)
    means = cut.take("<f2", tiles * TILE_CHANNELS).reshape(tiles, TILE_CHANNELS)
    models = cut.take("<u1", tiles * TILE_CHANNELS).reshape(tiles, TILE_CHANNELS)
    stream = Stream(states, counts, cut.take("<u2", words))
    body = Body(
        position, error_bound, frequencies, steps, escapes, means, models, stream,
        cut.take("<i2", values),
    )  # fmt: skip
    check_body(body)
    return body


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


def take_stream(data: Bytes, at: int, tiles: int, words: int) -> Stream:
    """Return the stream that is *data* from *at* on: counts, states, words."""
    size = tiles * 4 * (1 + LANES) + 2 * words
    if len(data) != at + size:
        raise InvalidFrameError("stored_bytes", len(data), f"its counts make {at + size}")
    cut = ByteCutter(data, at)
    counts, states = cut.take("<u4", tiles), cut.take("<u4", tiles * LANES)
    stream = Stream(states.reshape(tiles, LANES), counts, cut.take("<u2", words))
    if int(counts.sum(dtype=np.uint64)) != words:
        raise InvalidFrameError("counts", words, "must sum up to the words")
    return stream


class ByteCutter:
    """Takes typed views from bytes whose length was checked."""

    def __init__(self, data: Bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        """Return the next *count* elements."""
        start = self._at
        self._at += count * np.dtype(dtype).itemsize
        return self._data[start : self._at].view(dtype)
