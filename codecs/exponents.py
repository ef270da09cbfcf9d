"""What the codecs of exponents share: tiles of a layer, their planes, and where they lie.

A segment is a record for each tile, the planes of signs and mantissas as they are, then what
the codec makes of the exponents. A tile is a run of rows of one part, 2^15 elements at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Codec, Part
from kvstore.codecs.planes import (
    Splitter,
    Words,
    best_splitter,
    block_count,
    flat_rows,
    gather_rows,
    kind_of,
    scatter_rows,
)
from kvstore.codecs.raw import RawCodec
from kvstore.proto.background import improving
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, DType, Fidelity

U8: TypeAlias = NDArray[np.uint8]
Records: TypeAlias = NDArray[Any]

TILE_ITEMS = 1 << 15
BATCH_TILES = 8
"""Tiles that are split and coded by one call: their exponents stay in the second-level cache."""

_WITH_EXPONENTS = frozenset({DType.bfloat16, DType.float32})


@dataclass(frozen=True, slots=True)
class Batch:
    """Tiles of one part with equally many elements, and the rows that they cover."""

    part: int
    first_tile: int
    tiles: int
    items: int
    start_row: int
    stop_row: int


def has_tiles(component: Component) -> bool:
    """Whether layers of *component* have exponents of eight bits, and rows that fit a tile."""
    return component.dtype in _WITH_EXPONENTS and component.head_dim <= TILE_ITEMS


def tile_items(component: Component) -> list[int]:
    """Return how many elements each tile of a layer has."""
    return [b.items for b in batches(component) for _ in range(b.tiles)]


@lru_cache(maxsize=64)
def batches(component: Component) -> tuple[Batch, ...]:
    """Return the batches of a layer, in the order of its raw bytes."""
    rows = component.kv_heads * component.tokens
    step = TILE_ITEMS // component.head_dim
    found: list[Batch] = []
    tile = 0
    for part in range(component.parts):
        at = 0
        while at < rows:
            tiles = max(1, min(BATCH_TILES, (rows - at) // step))
            stop = min(rows, at + tiles * step)
            items = (stop - at) // tiles * component.head_dim
            found.append(Batch(part, tile, tiles, items, at, stop))
            tile, at = tile + tiles, stop
    return tuple(found)


class TileWriter(ABC):
    """Codes the exponents of a layer's tiles, one batch after another."""

    @abstractmethod
    def add(self, records: Records, exponents: U8) -> None:
        """Code *exponents* (tiles, items), scratch to write into, and fill in their *records*."""

    @abstractmethod
    def finish(self) -> int:
        """Return how many bytes of the room were used."""


class TileReader(ABC):
    """Decodes the exponents of a layer's tiles, one batch after another."""

    @abstractmethod
    def fill(self, first_tile: int, exponents: U8) -> None:
        """Decode tiles *first_tile* and on into *exponents* (tiles, items).

        Raises InvalidFrameError.
        """


class ExponentCodec(Codec):
    """Subclass with a record and the two ways through the tiles."""

    record: ClassVar[np.dtype[Any]]
    fidelity = Fidelity.exact

    def __init__(self, splitter_of: Callable[[str], Splitter] = best_splitter) -> None:
        self._splitter_of = splitter_of

    @abstractmethod
    def writer(self, component: Component, room: Bytes) -> TileWriter:
        """Return what codes exponents into *room*, a byte for each."""

    @abstractmethod
    def reader(self, component: Component, records: Records, payload: Bytes) -> TileReader:
        """Return what decodes *payload*. Raises InvalidFrameError where sizes disagree."""

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer: a record for each tile, and its raw bytes."""
        if not has_tiles(component):
            return component.layer_bytes
        return _head_bytes(self.record, component) + component.layer_bytes

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return how many bytes were used."""
        if not has_tiles(component):
            return RawCodec().encode_segment(parts, component, out)
        splitter = self._splitter_of(kind_of(component.dtype))
        records = np.zeros(len(tile_items(component)), self.record)
        head_bytes = _head_bytes(self.record, component)
        planes, payload = _planes(out, component, head_bytes)
        writer = self.writer(component, payload)
        scratch = _Scratch(component)
        start = 0
        for batch in batches(component):
            bits = parts[batch.part].view(scratch.words.dtype)
            words = flat_rows(bits, batch.start_row, batch.stop_row)
            if words is None:
                words = gather_rows(bits, batch.start_row, batch.stop_row, scratch.words)
            stop = start + len(words)
            exponents = scratch.exponents[: len(words)]
            splitter.split(words, [exponents, *(plane[start:stop] for plane in planes)])
            rows = records[batch.first_tile : batch.first_tile + batch.tiles]
            writer.add(rows, exponents.reshape(batch.tiles, batch.items))
            start = stop
        used = writer.finish()
        np.copyto(out[:head_bytes], records.view(np.uint8))
        return len(out) - len(payload) + used

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents."""
        if not has_tiles(component):
            RawCodec().decode_segment(data, component, out)
            return
        splitter = self._splitter_of(kind_of(component.dtype))
        head_bytes = _head_bytes(self.record, component)
        least = head_bytes + (component.dtype.item_bytes - 1) * _items(component)
        if len(data) < least:
            raise InvalidFrameError("tiles", len(data), f"records and planes have {least} bytes")
        planes, payload = _planes(data, component, head_bytes)
        records = np.frombuffer(data[:head_bytes].tobytes(), self.record)
        reader = self.reader(component, records, payload)
        scratch = _Scratch(component)
        start = 0
        for batch in batches(component):
            bits = out[batch.part].view(scratch.words.dtype)
            words = flat_rows(bits, batch.start_row, batch.stop_row)
            is_run = words is not None
            if words is None:
                words = scratch.words[: batch.tiles * batch.items]
            stop = start + len(words)
            exponents = scratch.exponents[: len(words)]
            reader.fill(batch.first_tile, exponents.reshape(batch.tiles, batch.items))
            splitter.join(words, [exponents, *(plane[start:stop] for plane in planes)])
            if not is_run:
                scatter_rows(bits, batch.start_row, batch.stop_row, words)
            start = stop


class _Scratch:
    """Room for one batch: its words, for parts that are no run, and its exponents."""

    def __init__(self, component: Component) -> None:
        items = max(batch.tiles * batch.items for batch in batches(component))
        self.words: Words = np.empty(items, f"<u{component.dtype.item_bytes}")
        self.exponents = np.empty(items, np.uint8)


def _items(component: Component) -> int:
    return component.layer_bytes // component.dtype.item_bytes


def _head_bytes(record: np.dtype[Any], component: Component) -> int:
    return record.itemsize * component.parts * block_count(component, TILE_ITEMS)


def _planes(body: Bytes, component: Component, head_bytes: int) -> tuple[list[Bytes], Bytes]:
    """Return planes 1 to w-1 behind the records of *body*, and all behind them."""
    items = _items(component)
    ends = [head_bytes + k * items for k in range(component.dtype.item_bytes)]
    return [body[end : end + items] for end in ends[:-1]], body[ends[-1] :]


Count: TypeAlias = Callable[[U8], "NDArray[np.uint32]"]


def count_by_numpy(exponents: U8) -> NDArray[np.uint32]:
    """Return how often each value occurs in each row: u32 (rows, 256)."""
    return np.array([np.bincount(row, minlength=256) for row in exponents], np.uint32)


def _reference() -> Count:
    return count_by_numpy


@improving(_reference)
def best_count() -> Count:
    """Return the fastest way to count that agrees with numpy's."""
    try:
        from kvstore.codecs.exponents_numba import count_by_numba
    except ImportError:  # without the extra cpu-fast
        return count_by_numpy
    sample = np.random.default_rng(0).integers(0, 256, (3, 1001), np.uint8)
    agrees = np.array_equal(count_by_numba(sample), count_by_numpy(sample))
    return count_by_numba if agrees else count_by_numpy
