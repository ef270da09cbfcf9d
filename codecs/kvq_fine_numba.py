"""Refinements and classes of tokens compiled by numba: the bytes of the reference."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvstore.codecs import kvq_fine_loops as loops
from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, to_float32
from kvstore.codecs.jit import compiled, i64, read_only, u8, u32, void, written
from kvstore.codecs.kvq_classes import Classes
from kvstore.codecs.kvq_fine import FineBackend
from kvstore.codecs.kvq_levels import LEVELS, Thirds, rows_of
from kvstore.codecs.kvq_numba import (
    ANGLES,
    FAMILY,
    QUANTISED,
    WORDS,
    angles_or_none,
    dequantise,
    tiles_filled,
    writable,
)
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Angles, TileBackend, Tiles
from kvstore.proto.types import DType

_F32, _F64, _I16 = types.float32, types.float64, types.int16
_tuple_of: Any = types.Tuple


@lru_cache(maxsize=1)
def _plain() -> tuple[Any, Any, Any, Any]:
    """Return the loops that are the same for all types of numbers."""
    return (
        compiled(
            types.boolean, read_only(u8, 3), read_only(u32), read_only(_I16), written(_F32, 3)
        )(loops.quotients),
        compiled(void, read_only(_F32, 3), read_only(u8, 2), written(u8, 3))(loops.contexts),
        compiled(void, written(_F32), read_only(u8))(loops.add),
        compiled(void, read_only(u8, 2), read_only(u8), written(u8, 3))(loops.move),
    )


@lru_cache(maxsize=2)
def _writer(item_bytes: int) -> Any:
    tiles = _tuple_of((read_only(_F32), read_only(_F32, 2), read_only(_F32)))
    out = written(WORDS[item_bytes], 3)
    return compiled(void, read_only(_F32, 3), tiles, u32, ANGLES, out)(loops.write)


@lru_cache(maxsize=1)
def _refiner() -> Any:
    words = read_only(u32, 3)
    tiles = _tuple_of((read_only(_F32), read_only(_F32, 2), written(_F32, 3), read_only(u8, 3)))
    out = _tuple_of((written(u8, 4), written(u8, 4), written(_F32, 2)))
    return compiled(types.boolean, words, u32, ANGLES, tiles, out)(loops.refine)


@lru_cache(maxsize=1)
def _class_quantiser() -> Any:
    words = read_only(u32, 3)
    terms = _tuple_of((_F64, read_only(u8)))
    return compiled(i64, words, u32, ANGLES, terms, FAMILY, QUANTISED)(loops.quantise_by_class)


def quotients(tiles: Tiles) -> Floats | None:
    """Return the whole numbers of *tiles*; see ``kvq_tiles.quotients_of``."""
    found = np.empty(tiles.symbols.shape, np.float32)
    contiguous = np.ascontiguousarray
    done = _plain()[0](
        contiguous(tiles.symbols), contiguous(tiles.escapes), contiguous(tiles.values), found
    )
    return found if done else None


def contexts(found: Floats, models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the row of each third; see ``kvq_levels.contexts_of``."""
    out: NDArray[np.uint8] = np.empty(found.shape, np.uint8)
    _plain()[1](found, rows_of(models, level), out)
    return out


def add(found: Floats, thirds: NDArray[np.uint8]) -> None:
    """Make *found* those of the next level; see ``kvq_levels.add_symbols``."""
    _plain()[2](found.reshape(-1), thirds.reshape(-1))


def move(models: NDArray[np.uint8], classes: Classes) -> NDArray[np.uint8]:
    """Return the model of each number; see ``kvq_classes.moved``."""
    out: NDArray[np.uint8] = np.empty((len(models), len(classes), TILE_CHANNELS), np.uint8)
    _plain()[3](np.ascontiguousarray(models), np.ascontiguousarray(classes), out)
    return out


def write(
    found: Floats, tiles: Tiles, factors: Floats, given: tuple[DType, Angles | None, Part]
) -> None:
    """Write the numbers of *tiles*; see ``kvq_levels.write_scaled``."""
    dtype, angles, out = given
    steps = np.ascontiguousarray(tiles.steps)
    with writable(out, dtype) as (room, shift):
        _writer(room.itemsize)(
            found, (steps, tiles.means.astype(np.float32), factors), shift, angles_or_none(angles),
            room,
        )  # fmt: skip


def _widened(bits: Part, dtype: DType) -> NDArray[np.uint32]:
    """Return *bits* as float32's: compiling the loops for each width takes longer than this."""
    return to_float32(bits, dtype).view(np.uint32)


def refine(bits: Part, dtype: DType, angles: Angles | None, tiles: Tiles) -> list[Thirds] | None:
    """Return the levels behind *tiles*; see ``kvq_levels.refine``."""
    numbers = quotients(tiles)
    assert numbers is not None
    words = _widened(bits, dtype)
    rows = np.stack([rows_of(tiles.models, level) for level in range(1, LEVELS + 1)])
    shape = (LEVELS, *numbers.shape)
    symbols, found = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
    errors = np.empty(shape[:2], np.float32)
    done = _refiner()(
        words, np.uint32(0), angles_or_none(angles),
        (tiles.steps, tiles.means.astype(np.float32), numbers, rows), (symbols, found, errors),
    )  # fmt: skip
    if not done:
        return None
    return [Thirds(*level) for level in zip(symbols, found, errors, strict=True)]


def quantise_by_class(
    bits: Part, dtype: DType, angles: Angles | None, ratio: float, classes: Classes
) -> Tiles | None:
    """Quantise the block *bits* by *classes*; see ``kvq_tiles.quantise``."""
    words = _widened(bits, dtype)
    terms = (ratio, np.ascontiguousarray(classes))
    return tiles_filled(
        words.shape,
        lambda family, room: _class_quantiser()(
            words, np.uint32(0), angles_or_none(angles), terms, family, room
        ),
    )


NUMBA_FINE = FineBackend("numba", quotients, contexts, add, write, refine, move)
NUMBA_CLASSES = TileBackend("numba", quantise_by_class, dequantise)
