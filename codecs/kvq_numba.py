"""The tiles of kvq compiled by numba: the bytes of the reference, some ten times as fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from kvstore.codecs import kvq_dequantise_loops, kvq_quantise_loops
from kvstore.codecs.base import Part
from kvstore.codecs.floats import from_float32, to_float32
from kvstore.codecs.jit import compiled, i64, read_only, u8, u16, u32, written
from kvstore.codecs.kvq_models import kvq_models
from kvstore.codecs.kvq_tiles import ESCAPE_SHARE, TILE_CHANNELS, Angles, TileBackend, Tiles
from kvstore.proto.types import DType

_NO_ANGLES = np.zeros((0, 0), np.float32)

_F32, _F64, _I16 = types.float32, types.float64, types.int16
_tuple_of: Any = types.Tuple
ANGLES = _tuple_of((read_only(_F32, 2),) * 2)
FAMILY = _tuple_of((read_only(u16, 2), read_only(_F64), read_only(_I16)))
QUANTISED = _tuple_of(
    (
        written(_F32), written(_F32, 2), written(u8, 2), written(u8, 3), written(u32),
        written(_I16), written(_F32), written(u32),
    )
)  # fmt: skip
_TILES = _tuple_of(
    (read_only(_F32), read_only(_F32, 2), read_only(u8, 3), read_only(u32), read_only(_I16))
)
WORDS = {2: u16, 4: u32}
"""Types of the loops, also of those of refinements: numbers of two bytes and of four."""


@lru_cache(maxsize=2)
def _quantiser(item_bytes: int) -> Any:
    words = read_only(WORDS[item_bytes], 3)
    return compiled(i64, words, u32, ANGLES, _F64, FAMILY, QUANTISED)(kvq_quantise_loops.quantise)


@lru_cache(maxsize=2)
def _dequantiser(item_bytes: int) -> Any:
    words = written(WORDS[item_bytes], 3)
    return compiled(types.boolean, _TILES, u32, ANGLES, words)(kvq_dequantise_loops.dequantise)


def angles_or_none(angles: Angles | None) -> Angles:
    """Return *angles* as the loops take them: empty for none."""
    return (_NO_ANGLES, _NO_ANGLES) if angles is None else angles


def _wide(bits: Part, dtype: DType) -> tuple[Part, int]:
    """Return *bits* as the loops take them, C-ordered, and how far to shift them left."""
    if dtype is DType.float16:
        return to_float32(bits, dtype).view(np.uint32), 0
    return np.ascontiguousarray(bits), 16 if dtype is DType.bfloat16 else 0


def quantise(bits: Part, dtype: DType, angles: Angles | None, ratio: float) -> Tiles | None:
    """Quantise the block *bits*; see ``kvq_tiles.Quantise``."""
    words, shift = _wide(bits, dtype)
    quantiser = _quantiser(words.itemsize)
    return tiles_filled(
        words.shape,
        lambda family, room: quantiser(
            words, np.uint32(shift), angles_or_none(angles), ratio, family, room
        ),
    )


def tiles_filled(shape: tuple[int, ...], fill: Callable[[Any, Any], int]) -> Tiles | None:
    """Return the tiles of a block of *shape* (heads, tokens, dim) that the loop *fill* wrote.

    It takes ``FAMILY`` and ``QUANTISED``, and returns how many escapes there are; negative: None.
    """
    heads, tokens, dim = shape
    count = -(-heads * dim // TILE_CHANNELS)
    steps, errors = np.empty(count, np.float32), np.empty(count, np.float32)
    means = np.zeros((count, TILE_CHANNELS), np.float32)
    models = np.empty(means.shape, np.uint8)
    symbols: NDArray[np.uint8] = np.empty((count, tokens, TILE_CHANNELS), np.uint8)
    escapes, magnitudes = np.empty(count, np.uint32), np.empty(count, np.uint32)
    values = np.empty(symbols.size // ESCAPE_SHARE, np.int16)
    family = kvq_models()
    used = fill(
        (family.costs, family.edges, family.reach),
        (steps, means, models, symbols, escapes, values, errors, magnitudes),
    )
    if used < 0:
        return None
    return Tiles(
        steps, means.astype(np.float16), models, symbols, escapes, values[:used], errors,
        magnitudes.view(np.float32),
    )  # fmt: skip


def dequantise(tiles: Tiles, dtype: DType, angles: Angles | None, out: Part) -> bool:
    """Write the numbers of *tiles* to *out*; see ``kvq_tiles.Dequantise``."""
    contiguous = np.ascontiguousarray
    packed = (
        contiguous(tiles.steps), tiles.means.astype(np.float32), contiguous(tiles.symbols),
        contiguous(tiles.escapes), contiguous(tiles.values),
    )  # fmt: skip
    with writable(out, dtype) as (room, shift):
        done = _dequantiser(room.itemsize)(packed, shift, angles_or_none(angles), room)
    return bool(done)


@contextmanager
def writable(out: Part, dtype: DType) -> Iterator[tuple[Part, np.uint32]]:
    """Give what the loops write for *out*, and how far they shift right; then fill *out*.

    Half floats are written as float32's bits first, and rounded by numpy.
    """
    if dtype is DType.float16:
        wide = np.empty(out.shape, "<u4")
        yield wide, np.uint32(0)
        from_float32(wide.view(np.float32), dtype, out)
        return
    room = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    yield room, np.uint32(16 if dtype is DType.bfloat16 else 0)
    if room is not out:
        np.copyto(out, room)


NUMBA = TileBackend("numba", quantise, dequantise)
