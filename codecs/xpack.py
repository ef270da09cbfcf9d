"""The xpack codec: four bits for each exponent, and a list of what has none. Lossless.

Fixed width is what a copy engine keeps up with (SplitZip, arXiv 2605.01708, whose layout this
follows: the sixteen most common exponents of a tile, and escapes by position). Three quarters
of bfloat16's size at nearly the speed of memory. Types without an exponent of eight bits are
stored as they are. The segment's layout stands in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.exponents import (
    U8,
    ExponentCodec,
    Records,
    TileReader,
    TileWriter,
    best_count,
    tile_items,
)
from kvstore.codecs.planes import Splitter, best_splitter
from kvstore.proto.background import improving
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component

CODES = 16
AS_IT_IS = 0xFFFFFFFF
"""The count of escapes that says that a tile's exponents were not packed."""

_RECORD = np.dtype([("exponents", "u1", (CODES,)), ("escapes", "<u4")])
assert _RECORD.itemsize == 20
_ESCAPE_BYTES = 3


@dataclass(frozen=True, slots=True)
class Packer:
    """One way to pack: ``pack(exponents, codes, out, places)`` and ``unpack(packed, pairs, out)``.

    *codes* u8 (256,) are less than 16, or 16 for what escapes: its code is 0, and its place is
    written to *places* u16, which has one more than there are exponents. ``pack`` returns how
    many escaped. *pairs* u16 (256,) are the two exponents of each byte.
    """

    name: str
    pack: Callable[[U8, U8, U8, NDArray[np.uint16]], int] = field(repr=False)
    unpack: Callable[[U8, NDArray[np.uint16], U8], None] = field(repr=False)


def _pack(exponents: U8, codes: U8, out: U8, places: NDArray[np.uint16]) -> int:
    found = codes[exponents]
    escaped = np.flatnonzero(found == CODES)
    places[: len(escaped)] = escaped
    found[escaped] = 0
    np.copyto(out, found[::2])
    out[: len(found) // 2] |= found[1::2] << 4
    return len(escaped)


def _unpack(packed: U8, pairs: NDArray[np.uint16], out: U8) -> None:
    np.copyto(out, pairs[packed].view(np.uint8)[: len(out)])


NUMPY = Packer("numpy", _pack, _unpack)


@improving(lambda: NUMPY)
def best_packer() -> Packer:
    """Return the fastest packer that agrees with numpy's."""
    try:
        from kvstore.codecs.exponents_numba import pack_by_numba, unpack_by_numba
    except ImportError:  # without the extra cpu-fast
        return NUMPY
    found = Packer("numba", pack_by_numba, unpack_by_numba)
    return found if packs_alike(found) else NUMPY


def packs_alike(found: Packer) -> bool:
    """Whether *found* packs and unpacks as the reference does."""
    rng = np.random.default_rng(0)
    for items in (4097, 4096):
        exponents, codes = rng.integers(0, 256, items, np.uint8), rng.integers(0, 17, 256, np.uint8)
        pairs = rng.integers(0, 1 << 16, 256, np.uint16)
        packed, places = np.zeros((2, (items + 1) // 2), np.uint8), np.zeros((2, items + 1), "<u2")
        back = np.zeros((2, items), np.uint8)
        counts = [
            packer.pack(exponents, codes, packed[k], places[k])
            for k, packer in enumerate((NUMPY, found))
        ]
        for k, packer in enumerate((NUMPY, found)):
            packer.unpack(packed[0], pairs, back[k])
        places = places[:, : counts[0]]
        if counts[0] != counts[1] or any((x[0] != x[1]).any() for x in (packed, places, back)):
            return False
    return True


class XpackCodec(ExponentCodec):
    """Exact, three quarters of the size for bfloat16. *packer* changes no byte."""

    name = "xpack"
    codec_id = 4
    revision = 1
    record = _RECORD

    def __init__(
        self,
        packer: Packer | None = None,
        splitter_of: Callable[[str], Splitter] = best_splitter,
    ) -> None:
        super().__init__(splitter_of)
        self._packer = packer

    @override
    def writer(self, component: Component, room: Bytes) -> TileWriter:
        return _Writer(self._packer or best_packer(), room)

    @override
    def reader(self, component: Component, records: Records, payload: Bytes) -> TileReader:
        return _Reader(self._packer or best_packer(), component, records, payload)


def common_exponents(counts: NDArray[np.uint32]) -> U8:
    """Return the sixteen most common exponents of each row of *counts*, in ascending order.

    Of equally common ones the lower: the choice is part of the format's golden bytes.
    """
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable")
    return np.sort(order[:, :CODES], axis=1).astype(np.uint8)


class _Writer(TileWriter):
    def __init__(self, packer: Packer, room: Bytes) -> None:
        self._packer, self._room = packer, room
        self._end = 0
        self._places: list[NDArray[np.uint16]] = []
        self._values: list[U8] = []

    @override
    def add(self, records: Records, exponents: U8) -> None:
        items = exponents.shape[1]
        counts = best_count()(exponents)
        common = common_exponents(counts)
        escapes = items - np.take_along_axis(counts, common.astype(np.intp), 1).sum(1, np.int64)
        is_packed = (items + 1) // 2 + _ESCAPE_BYTES * escapes < items
        records["exponents"] = common * is_packed[:, None]
        records["escapes"] = np.where(is_packed, escapes, AS_IT_IS)
        for tile, row in enumerate(exponents):
            if not is_packed[tile]:
                self._write(row)
                continue
            codes = np.full(256, CODES, np.uint8)
            codes[common[tile]] = np.arange(CODES)
            room = self._room[self._end : self._end + (items + 1) // 2]
            places = np.empty(items + 1, "<u2")
            count = self._packer.pack(row, codes, room, places)
            if count:
                self._places.append(places[:count].copy())
                self._values.append(row[places[:count]])
            self._end += len(room)

    def _write(self, data: U8) -> None:
        np.copyto(self._room[self._end : self._end + len(data)], data)
        self._end += len(data)

    @override
    def finish(self) -> int:
        for places in self._places:
            self._write(places.view(np.uint8))
        for values in self._values:
            self._write(values)
        return self._end


class _Reader(TileReader):
    def __init__(
        self, packer: Packer, component: Component, records: Records, payload: Bytes
    ) -> None:
        items = np.array(tile_items(component), np.int64)
        counts = records["escapes"].astype(np.int64)
        is_packed = counts != AS_IT_IS
        counts *= is_packed
        if (counts > items).any():
            raise InvalidFrameError("escapes", int(counts.max()), "more than the tile's elements")
        sizes = np.where(is_packed, (items + 1) // 2, items)
        cut, total = int(sizes.sum()), int(counts.sum())
        if cut + _ESCAPE_BYTES * total != len(payload):
            raise InvalidFrameError("payload", len(payload), "is not what the tiles count")
        self._packer, self._records = packer, records
        self._counts, self._is_packed = counts, is_packed
        self._ends, self._escape_ends = np.cumsum(sizes), np.cumsum(counts)
        self._packed, self._values = payload[:cut], payload[cut + 2 * total :]
        self._places = payload[cut : cut + 2 * total].view("<u2")

    @override
    def fill(self, first_tile: int, exponents: U8) -> None:
        items = exponents.shape[1]
        for tile, row in enumerate(exponents, first_tile):
            end = int(self._ends[tile])
            if not self._is_packed[tile]:
                np.copyto(row, self._packed[end - items : end])
                continue
            low = self._records["exponents"][tile].astype(np.uint16)
            pairs = (low[:, None] << 8 | low).reshape(-1)
            self._packer.unpack(self._packed[end - (items + 1) // 2 : end], pairs, row)
            if self._counts[tile]:
                self._patch(tile, row)

    def _patch(self, tile: int, exponents: U8) -> None:
        stop = int(self._escape_ends[tile])
        some = slice(stop - int(self._counts[tile]), stop)
        places = self._places[some]
        if int(places.max()) >= len(exponents):
            raise InvalidFrameError("place", int(places.max()), f"a tile has {len(exponents)}")
        exponents[places] = self._values[some]
