"""The xans codec: exponents by rANS, a table for each tile. Lossless for every dtype.

As ``zplane``, with an entropy coder made for wide machines: a tile's exponents are one stream
of 32 lanes, so that a GPU takes a warp for each. Tables adapt to the tile and have 40 bytes,
since exponents of a tensor lie close together: 24 in a row, zero, and what escapes. Types
without an exponent of eight bits are stored as they are. The layout stands in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.exponents import (
    U8,
    Count,
    ExponentCodec,
    Records,
    TileReader,
    TileWriter,
    best_count,
    tile_items,
)
from kvstore.codecs.planes import Splitter, best_splitter
from kvstore.codecs.rans import GROUP_CHANNELS, LANES, SLOTS, U16, Backend, ModelTable, best_backend
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component

ESCAPE = 255
"""The symbol of what the tile's table lacks; the exponent 255 always escapes."""
WINDOW = 24
MAX_FIRST = ESCAPE - WINDOW
_SYMBOLS = WINDOW + 2

_RECORD = np.dtype(
    [
        ("first", "u1"),
        ("frequencies", "u1", (3 * _SYMBOLS // 2,)),
        ("words", "<u4"),
        ("escapes", "<u4"),
        ("states", "<u4", (LANES,)),
    ]
)
assert _RECORD.itemsize == 176


class XansCodec(ExponentCodec):
    """Exact, about two thirds of the size for bfloat16. *backend* changes no byte."""

    name = "xans"
    codec_id = 3
    revision = 1
    record = _RECORD

    def __init__(
        self,
        backend: Backend | None = None,
        splitter_of: Callable[[str], Splitter] = best_splitter,
    ) -> None:
        super().__init__(splitter_of)
        self._backend = backend

    @override
    def writer(self, component: Component, room: Bytes) -> TileWriter:
        return _Writer(self._backend or best_backend(), best_count(), room)

    @override
    def reader(self, component: Component, records: Records, payload: Bytes) -> TileReader:
        return _Reader(self._backend or best_backend(), component, records, payload)


def tile_frequencies(counts: NDArray[np.uint32]) -> tuple[NDArray[np.int64], U16]:
    """Return each tile's first exponent of the window, and its frequencies u16 (tiles, 256).

    *counts* (tiles, 256) says how often each exponent occurs. The window is where most lie;
    zero and the escape always have a slot, so that no symbol has all.
    """
    found = counts.astype(np.int64)
    items = found.sum(1, keepdims=True)
    sums = np.cumsum(found, axis=1)
    inside = sums[:, WINDOW:ESCAPE] - sums[:, :MAX_FIRST]
    first = inside.argmax(1) + 1
    place = np.arange(256) - first[:, None]
    is_coded = (place >= 0) & (place < WINDOW)
    is_coded[:, 0] = True
    found *= is_coded
    found[:, ESCAPE] = items[:, 0] - found.sum(1)
    shares = np.maximum(found * SLOTS // items, found > 0)
    shares[:, [0, ESCAPE]] = np.maximum(shares[:, [0, ESCAPE]], 1)
    shares[np.arange(len(shares)), shares.argmax(1)] += SLOTS - shares.sum(1)
    return first, shares.astype(np.uint16)


def pack_frequencies(first: NDArray[np.int64], frequencies: U16) -> U8:
    """Return the 39 bytes of each tile: zero, the window, the escape, twelve bits each."""
    row = np.arange(len(first))[:, None]
    window = frequencies[row, first[:, None] + np.arange(WINDOW)]
    coded = np.concatenate([frequencies[:, :1], window, frequencies[:, ESCAPE:]], axis=1)
    even, odd = coded[:, ::2], coded[:, 1::2]
    packed = np.stack([even & 0xFF, even >> 8 | (odd & 0xF) << 4, odd >> 4], axis=2)
    return packed.astype(np.uint8).reshape(len(first), -1)


def unpack_frequencies(first: NDArray[np.int64], packed: U8) -> U16:
    """Return what ``pack_frequencies`` was given. Raises InvalidFrameError on a bad window."""
    if ((first < 1) | (first > MAX_FIRST)).any():
        raise InvalidFrameError("first", int(first.max()), f"an exponent from 1 to {MAX_FIRST}")
    low, middle, high = np.moveaxis(packed.reshape(len(first), -1, 3).astype(np.uint16), 2, 0)
    coded = np.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], axis=2)
    coded = coded.reshape(len(first), _SYMBOLS)
    frequencies = np.zeros((len(first), 256), np.uint16)
    row = np.arange(len(first))[:, None]
    frequencies[row, first[:, None] + np.arange(WINDOW)] = coded[:, 1:-1]
    frequencies[:, 0], frequencies[:, ESCAPE] = coded[:, 0], coded[:, -1]
    return frequencies


def _models(tiles: int) -> U8:
    return np.repeat(np.arange(tiles, dtype=np.uint8), GROUP_CHANNELS).reshape(tiles, -1)


def _padded(items: int) -> int:
    return -(-items // GROUP_CHANNELS) * GROUP_CHANNELS


class _Writer(TileWriter):
    def __init__(self, backend: Backend, count: Count, room: Bytes) -> None:
        self._backend, self._count, self._room = backend, count, room
        self._end = 0
        self._escaped: list[U8] = []

    @override
    def add(self, records: Records, exponents: U8) -> None:
        tiles, items = exponents.shape
        counts = self._count(exponents)
        first, frequencies = tile_frequencies(counts)
        escapes = [np.empty(0, np.uint8)] * tiles
        for tile in np.flatnonzero((counts * (frequencies == 0)).any(1) | (counts[:, ESCAPE] > 0)):
            escapes[tile] = _take_escapes(exponents[tile], frequencies[tile])
        symbols = exponents
        if items % GROUP_CHANNELS:
            symbols = np.empty((tiles, _padded(items)), np.uint8)
            symbols[:, :items] = exponents
            symbols[:, items:] = frequencies.argmax(1)[:, None]
        states, sizes, words = self._backend.encode_tiles(
            symbols.reshape(tiles, -1, GROUP_CHANNELS), _models(tiles), ModelTable(frequencies)
        )
        records["first"], records["states"] = first, states
        records["frequencies"] = pack_frequencies(first, frequencies)
        is_stored = 2 * sizes.astype(np.int64) + list(map(len, escapes)) >= items
        if is_stored.any():
            cuts = np.split(words, np.cumsum(sizes)[:-1].astype(np.intp))
            words = np.concatenate(
                [cuts[tile] for tile in np.flatnonzero(~is_stored)] or [words[:0]]
            )
            for stored in np.flatnonzero(is_stored).tolist():
                row = exponents[stored]
                row[row == ESCAPE] = escapes[stored]
                escapes[stored] = row.copy()
            records[is_stored] = np.zeros((), _RECORD)
            sizes[is_stored] = 0
        self._write(words)
        records["words"], records["escapes"] = sizes, list(map(len, escapes))
        self._escaped += escapes

    def _write(self, words: U16) -> None:
        data = words.view(np.uint8)
        np.copyto(self._room[self._end : self._end + len(data)], data)
        self._end += len(data)

    @override
    def finish(self) -> int:
        for values in self._escaped:
            np.copyto(self._room[self._end : self._end + len(values)], values)
            self._end += len(values)
        return self._end


def _take_escapes(exponents: U8, frequencies: U16) -> U8:
    """Replace what the table lacks by the escape and return it, in order."""
    is_coded = frequencies > 0
    is_coded[ESCAPE] = False
    places = np.flatnonzero(~is_coded[exponents])
    values = exponents[places]
    exponents[places] = ESCAPE
    return values


class _Reader(TileReader):
    def __init__(
        self, backend: Backend, component: Component, records: Records, payload: Bytes
    ) -> None:
        items = np.array(tile_items(component), np.int64)
        sizes, escapes = (records[name].astype(np.int64) for name in ("words", "escapes"))
        if (sizes > items + GROUP_CHANNELS).any() or (escapes > items).any():
            raise InvalidFrameError("tile", int(sizes.max()), "has fewer words and escapes")
        if ((escapes == items) & (sizes > 0)).any():
            raise InvalidFrameError("words", int(sizes.max()), "a tile of escapes has none")
        if 2 * int(sizes.sum()) + int(escapes.sum()) != len(payload):
            raise InvalidFrameError("payload", len(payload), "is not what the tiles count")
        cut = 2 * int(sizes.sum())
        self._backend, self._records = backend, records
        self._words, self._escaped = payload[:cut].view("<u2"), payload[cut:]
        self._word_ends, self._escape_ends = np.cumsum(sizes), np.cumsum(escapes)
        self._has_stream = escapes < items
        first = np.where(self._has_stream, records["first"].astype(np.int64), 1)
        self._frequencies = unpack_frequencies(first, records["frequencies"])

    @override
    def fill(self, first_tile: int, exponents: U8) -> None:
        tiles, items = exponents.shape
        escapes = self._records["escapes"][first_tile : first_tile + tiles]
        coded = np.flatnonzero(self._has_stream[first_tile : first_tile + tiles])
        symbols = exponents
        if items % GROUP_CHANNELS or len(coded) < tiles:
            symbols = np.empty((len(coded), _padded(items)), np.uint8)
        self._decode(first_tile + coded, symbols)
        is_escaped = symbols[:, :items].max(1, initial=0) == ESCAPE
        if (is_escaped != (escapes[coded] > 0)).any():
            raise InvalidFrameError("escapes", int(escapes.max()), "not as many as coded")
        if symbols is not exponents:
            exponents[coded] = symbols[:, :items]
        for tile in np.flatnonzero(escapes):
            end = int(self._escape_ends[first_tile + tile])
            self._patch(exponents[tile], self._escaped[end - int(escapes[tile]) : end])

    def _decode(self, tiles: NDArray[np.intp], out: U8) -> None:
        if not len(tiles):
            return
        rows = self._records[tiles]
        stop = int(self._word_ends[tiles[-1]])
        start = int(self._word_ends[tiles[0]]) - int(rows["words"][0])
        self._backend.decode_tiles(
            rows["states"], rows["words"], self._words[start:stop], _models(len(tiles)),
            ModelTable(self._frequencies[tiles]), out.reshape(len(tiles), -1, GROUP_CHANNELS),
        )  # fmt: skip

    @staticmethod
    def _patch(exponents: U8, values: Bytes) -> None:
        if len(values) == len(exponents):
            np.copyto(exponents, values)
            return
        places = np.flatnonzero(exponents == ESCAPE)
        if len(places) != len(values):
            raise InvalidFrameError("escapes", len(values), f"the tile has {len(places)}")
        exponents[places] = values
