"""The rANS loops compiled by numba: scalar code that runs on any processor.

One call takes a batch of tiles and holds no lock. Each index is a loop's own or lies below a
bound that the loop has tested, whatever the stream says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numba import types
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from kvstore.codecs import rans_avx512
from kvstore.codecs.jit import compiled, i64, inner, read_only, u8, u16, u32, u64, written
from kvstore.codecs.rans import (
    GROUP_CHANNELS,
    LANES,
    MAX_SYMBOLS,
    MIN_STATE,
    SLOTS,
    U8,
    U16,
    U32,
    U64,
    Backend,
    ModelTable,
    uncodable,
)
from kvstore.codecs.rans_avx512 import decoder, encoder

I64: TypeAlias = NDArray[np.int64]
Batch: TypeAlias = "tuple[U8, U32, Any, U32]"
"""Symbols (tiles, n), rows (tiles, channels) of ``place_models``, table, states (tiles, 32)."""

TOGETHER = 2
"""Tiles that go in step: more gain nothing, measured on Sapphire Rapids."""


@inner
def place_models(models: U8, row_entries: int, rows: U32) -> None:
    """Write where each channel's row starts in a table, in the order that lanes take them."""
    for tile in range(len(models)):
        for group in range(0, models.shape[1], GROUP_CHANNELS):
            for lane in range(LANES):
                for parity in range(2):
                    model = np.uint32(models[tile, group + 2 * lane + parity])
                    rows[tile, group + parity * LANES + lane] = model * np.uint32(row_entries)


# The innermost loops, as ``rans_avx512`` has them: one tile, number *first* of the batch.


@inner
def _encode(batch: Batch, words: U16, at: I64, first: int) -> bool:
    """Encode one tile backwards from place ``at[first, 0]`` of *words*.

    Returns whether each symbol had a slot. 32 places more than the tile has symbols are free.
    """
    symbols, rows, table, states = batch
    place = at[first, 0]
    is_coded = True
    channels = rows.shape[1]
    column = channels
    for base in range(symbols.shape[1] - GROUP_CHANNELS, -1, -GROUP_CHANNELS):
        column -= GROUP_CHANNELS
        for parity in range(1, -1, -1):
            for lane in range(LANES - 1, -1, -1):
                row = rows[first, np.uint64(column + parity * LANES + lane)]
                symbol = symbols[first, np.uint64(base + parity + 2 * lane)]
                entry = table[np.uint64(row) + np.uint64(symbol)]
                frequency = entry & np.uint64(0xFFF)
                is_coded &= frequency > 0
                state = np.uint64(states[first, np.uint64(lane)])
                full = np.uint64(state >= frequency << np.uint64(20))
                words[np.uint64(place - 1)] = np.uint16(state)  # for good only when full
                place -= np.int64(full)
                state >>= full << np.uint64(4)
                quotient = (state * (entry >> np.uint64(32))) >> np.uint64(32)
                one_more = np.uint64(state - quotient * frequency >= frequency)
                state += (quotient + one_more) * (np.uint64(SLOTS) - frequency)
                state += (entry >> np.uint64(12)) & np.uint64(0xFFF)
                states[first, np.uint64(lane)] = np.uint32(state)
        if column == 0:
            column = channels
    at[first, 0] = place
    return is_coded


@inner
def _decode(batch: Batch, words: U16, at: I64, first: int, base: int) -> int:
    """Decode one tile from symbol *base* on while 64 words, a group's most, are there.

    ``at[first]`` has the place of the next word, moved on here, and the last place behind
    which 64 words are left. Returns the first symbol that is still to come.
    """
    symbols, rows, table, states = batch
    place, limit = at[first]
    channels = rows.shape[1]
    column = base % channels
    while base < symbols.shape[1] and place <= limit:
        for parity in range(2):
            for lane in range(LANES):
                state = np.uint64(states[first, np.uint64(lane)])
                row = rows[first, np.uint64(column + parity * LANES + lane)]
                entry = np.uint64(table[np.uint64(row) + (state & np.uint64(SLOTS - 1))])
                symbols[first, np.uint64(base + parity + 2 * lane)] = np.uint8(entry)
                state = ((entry >> np.uint64(8)) & np.uint64(0xFFF)) * (state >> np.uint64(12))
                state += entry >> np.uint64(20)
                needs = np.uint64(state < np.uint64(MIN_STATE))
                word = np.uint64(words[np.uint64(place)]) & (np.uint64(0) - needs)
                states[first, np.uint64(lane)] = np.uint32(state << (needs << np.uint64(4)) | word)
                place += np.int64(needs)
        base += GROUP_CHANNELS
        column += GROUP_CHANNELS
        if column == channels:
            column = 0
    at[first, 0] = place
    return base


@dataclass(frozen=True, slots=True)
class Loops:
    """Innermost loops: for one tile and for *together* tiles in step."""

    encode_one: Any
    encode_some: Any
    decode_one: Any
    decode_some: Any
    together: int


def make_backend(name: str, loops: Loops) -> Backend:
    """Return the backend whose innermost loops are *loops*."""
    encode_batch, decode_batch = _encode_batch(loops), _decode_batch(loops)

    def encode(symbols: U8, models: U8, table: ModelTable) -> tuple[U32, U32, U16]:
        tiles, tokens, channels = symbols.shape
        states = np.full((tiles, LANES), MIN_STATE, np.uint32)
        counts = np.empty(tiles, np.uint32)
        words = np.empty(symbols.size, np.uint16)
        flat = symbols.reshape(tiles, tokens * channels)
        entries = table.encode_symbols.reshape(-1)
        used = encode_batch(flat, models, entries, states, counts, words)
        if used < 0:
            raise uncodable()
        return states, counts, words[:used]

    def decode(
        states: U32, counts: U32, words: U16, models: U8, table: ModelTable, out: U8
    ) -> bool:
        tiles, tokens, channels = out.shape
        flat = out.reshape(tiles, tokens * channels)
        slots = table.decode_slots.reshape(-1)
        return bool(decode_batch(states.copy(), counts, words, models, slots, flat))

    return Backend(name, encode, decode)


def _encode_batch(loops: Loops) -> Any:
    encode_one, encode_some, together = loops.encode_one, loops.encode_some, loops.together

    @compiled(
        i64, read_only(u8, 2), read_only(u8, 2), read_only(u64), written(u32, 2), written(u32),
        written(u16),
    )  # fmt: skip
    def encode_batch(
        symbols: U8, models: U8, table: U64, states: U32, counts: U32, words: U16
    ) -> int:
        tiles, size = symbols.shape
        rows = np.empty(models.shape, np.uint32)
        place_models(models, MAX_SYMBOLS, rows)
        batch = (symbols, rows, table, states)
        room = size + LANES  # loops may write a register's width before their words
        scratch = np.empty(together * room, np.uint16)
        at = np.empty((tiles, 2), np.int64)
        end = 0
        for first in range(0, tiles, together):
            stop = min(first + together, tiles)
            for tile in range(first, stop):
                at[tile, 0] = (tile - first + 1) * room
            is_coded = True
            if together > 1 and stop - first == together:
                is_coded = encode_some(batch, scratch, at, first)
            else:
                for tile in range(first, stop):
                    is_coded &= encode_one(batch, scratch, at, tile)
            if not is_coded:
                return -1
            for tile in range(first, stop):
                back = (tile - first + 1) * room
                count = back - at[tile, 0]
                for k in range(count):
                    words[end + k] = scratch[at[tile, 0] + k]
                counts[tile] = np.uint32(count)
                end += count
        return end

    return encode_batch


def _decode_end(decode_one: Any) -> Any:
    @inner
    def decode_end(batch: Batch, words: U16, at: I64, tile: int, base: int) -> bool:
        """Decode the rest of a tile from its last words, zeros behind them; whether it ends."""
        left: Any = at[tile, 1] + GROUP_CHANNELS - at[tile, 0]
        if base < batch[0].shape[1]:
            padded = np.zeros(3 * GROUP_CHANNELS, np.uint16)
            for k in range(left):
                padded[k] = words[at[tile, 0] + k]
            at[tile, 0], at[tile, 1] = 0, 2 * GROUP_CHANNELS
            base = decode_one(batch, padded, at, tile, base)
            left -= at[tile, 0]
        for lane in range(LANES):
            left |= np.int64(batch[3][tile, lane]) - MIN_STATE
        return bool(left == 0 and base == batch[0].shape[1])

    return decode_end


def _decode_batch(loops: Loops) -> Any:
    decode_one, decode_some, together = loops.decode_one, loops.decode_some, loops.together
    decode_end = _decode_end(decode_one)

    @compiled(
        types.boolean, written(u32, 2), read_only(u32), read_only(u16), read_only(u8, 2),
        read_only(u32), written(u8, 2),
    )  # fmt: skip
    def decode_batch(states: U32, counts: U32, words: U16, models: U8, table: U32, out: U8) -> bool:
        tiles = len(out)
        rows = np.empty(models.shape, np.uint32)
        place_models(models, SLOTS, rows)
        batch = (out, rows, table, states)
        at = np.empty((tiles, 2), np.int64)
        end: Any = 0
        for tile in range(tiles):
            at[tile, 0] = end
            end += np.int64(counts[tile])
            at[tile, 1] = end - GROUP_CHANNELS
        for first in range(0, tiles, together):
            stop = min(first + together, tiles)
            base = 0
            if together > 1 and stop - first == together:
                base = decode_some(batch, words, at, first, base)
            for tile in range(first, stop):
                behind = decode_one(batch, words, at, tile, base)
                if not decode_end(batch, words, at, tile, behind):
                    return False
        return True

    return decode_batch


def compiled_backends() -> Iterator[Backend]:
    """Compile and yield the backends of this processor, the fastest first; unchecked.

    One that does not compile, under a version of LLVM that knows other words, is left out.
    """
    for make in (_vectors, _scalars):
        if make is _vectors and not rans_avx512.is_supported():
            continue
        try:
            yield make()
        except (NumbaError, RuntimeError):
            continue


@lru_cache(maxsize=1)
def _vectors() -> Backend:
    one, some = 1, TOGETHER
    loops = Loops(encoder(one), encoder(some), decoder(one), decoder(some), some)
    return make_backend("avx512", loops)


@lru_cache(maxsize=1)
def _scalars() -> Backend:
    return make_backend("numba", Loops(_encode, _encode, _decode, _decode, 1))
