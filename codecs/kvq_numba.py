"""The tiles of kvq compiled by numba: the bytes of the reference, some ten times as fast."""

from __future__ import annotations

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
    heads, tokens, dim = words.shape
    count = -(-heads * dim // TILE_CHANNELS)
    shape = (count, TILE_CHANNELS)
    steps, errors = np.empty(count, np.float32), np.empty(count, np.float32)
    means, models = np.zeros(shape, np.float32), np.empty(shape, np.uint8)
    symbols: NDArray[np.uint8] = np.empty((count, tokens, TILE_CHANNELS), np.uint8)
    escapes, magnitudes = np.empty(count, np.uint32), np.empty(count, np.uint32)
    values = np.empty(symbols.size // ESCAPE_SHARE, np.int16)
    family = kvq_models()
    used = _quantiser(words.itemsize)(
        words, np.uint32(shift), angles_or_none(angles), ratio,
        (family.costs, family.edges, family.reach),
        (steps, means, models, symbols, escapes, values, errors, magnitudes),
    )  # fmt: skip
    if used < 0:
        return None
    return Tiles(
        steps, means.astype(np.float16), models, symbols, escapes, values[:used], errors,
        magnitudes.view(np.float32),
    )  # fmt: skip


def dequantise(tiles: Tiles, dtype: DType, angles: Angles | None, out: Part) -> bool:
    """Write the numbers of *tiles* to *out*; see ``kvq_tiles.Dequantise``."""
    is_half = dtype is DType.float16
    room = out
    if is_half or not out.flags.c_contiguous:
        room = np.empty(out.shape, "<u4" if is_half else out.dtype)
    contiguous = np.ascontiguousarray
    done = _dequantiser(room.itemsize)(
        (
            contiguous(tiles.steps), tiles.means.astype(np.float32), contiguous(tiles.symbols),
            contiguous(tiles.escapes), contiguous(tiles.values),
        ),
        np.uint32(16 if dtype is DType.bfloat16 else 0), angles_or_none(angles), room,
    )  # fmt: skip
    if is_half:
        from_float32(room.view(np.float32), dtype, out)
    elif room is not out:
        np.copyto(out, room)
    return bool(done)


NUMBA = TileBackend("numba", quantise, dequantise)
