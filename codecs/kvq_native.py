"""The tiles and refinements of kvq, by the compiled loops."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy import ascontiguousarray as contiguous
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, from_float32, to_float32
from kvstore.codecs.kvq_levels import LEVELS, FineBackend, Thirds, rows_of
from kvstore.codecs.kvq_models import KINDS, NO_CLASSES, Classes, kvq_models
from kvstore.codecs.kvq_tiles import ESCAPE_SHARE, TILE_CHANNELS, Angles, TileBackend, Tiles
from kvstore.proto.buffers import address, addresses
from kvstore.proto.native import Loops, done, loops
from kvstore.proto.types import DType

_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64


def _fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    each: list[tuple[str, Any]] = [(name, _POINTER) for name in pointers.split()]
    return each + [(name, _I64) for name in numbers.split()]


class _Block(ctypes.Structure):
    _fields_ = [
        *_fields("words", "item_bytes heads tokens dim"),
        *_fields("cosine sine", "pairs"),
    ]


class _Family(ctypes.Structure):
    _fields_ = _fields("costs edges reach", "")


class _TilesOut(ctypes.Structure):
    _fields_ = _fields(
        "steps means models symbols escapes values errors magnitudes", "tiles values_room"
    )


class _TilesIn(ctypes.Structure):
    _fields_ = [
        *_fields("steps means symbols escapes values", "tiles values_count"),
        *_fields("quotients factors", ""),
    ]


class _Refinement(ctypes.Structure):
    _fields_ = _fields("steps means quotients rows symbols contexts errors", "tiles levels")


@lru_cache(maxsize=1)
def _family() -> _Family:
    family = kvq_models()  # lives as long as the process
    return _Family(address(family.costs), address(family.edges), address(family.reach))


def _block(words: Part, angles: Angles | None) -> _Block:
    """Return *words* (heads, tokens, dim) of bfloat16 or float32 as the loops take them."""
    heads, tokens, dim = words.shape
    block = _Block(address(words), words.itemsize, heads, tokens, dim, 0, 0, 0)
    if angles is not None:
        cosine, sine = angles
        pairs = cosine.shape[1]
        if cosine.shape != (tokens, pairs) or sine.shape != cosine.shape or 2 * pairs > dim:
            raise ValueError(f"angles {cosine.shape} do not fit {words.shape}")
        if not (cosine.flags.c_contiguous and sine.flags.c_contiguous):
            raise ValueError("give C-ordered angles")
        block.cosine, block.sine, block.pairs = address(cosine), address(sine), pairs
    return block


def _wide(bits: Part, dtype: DType) -> Part:
    """Return *bits* C-ordered; half floats as float32's."""
    if dtype is DType.float16:
        return to_float32(bits, dtype).view(np.uint32)
    return contiguous(bits)


@contextmanager
def _writable(out: Part, dtype: DType) -> Iterator[Part]:
    """Give what the loops write for *out*, then fill *out*.

    Half floats are written as float32's bits first, and rounded by numpy.
    """
    if not out.flags.writeable:
        raise ValueError("assignment destination is read-only")
    if dtype is DType.float16:
        wide = np.zeros(out.shape, "<u4")  # as what a refused frame leaves is seen, too
        yield wide
        from_float32(wide.view(np.float32), dtype, out)
        return
    room = out if out.flags.c_contiguous else np.zeros(out.shape, out.dtype)
    yield room
    if room is not out:
        np.copyto(out, room)


def _quantise(
    native: Loops, bits: Part, dtype: DType, angles: Angles | None, ratio: float,
    classes: Classes = NO_CLASSES,
) -> Tiles | None:  # fmt: skip
    words = _wide(bits, dtype)
    heads, tokens, dim = words.shape
    kinds = contiguous(classes)
    if len(kinds) not in (0, tokens) or (len(kinds) and int(kinds.max()) >= KINDS):
        raise ValueError(f"{len(kinds)} classes of {tokens} tokens")
    count = -(-heads * dim // TILE_CHANNELS)
    steps, errors = np.empty(count, np.float32), np.empty(count, np.float32)
    means = np.zeros((count, TILE_CHANNELS), np.float32)
    models = np.empty(means.shape, np.uint8)
    symbols: NDArray[np.uint8] = np.empty((count, tokens, TILE_CHANNELS), np.uint8)
    escapes, magnitudes = np.empty(count, np.uint32), np.empty(count, np.uint32)
    values = np.empty(symbols.size // ESCAPE_SHARE, np.int16)
    arrays = (steps, means, models, symbols, escapes, values, errors, magnitudes)
    out = _TilesOut(*addresses(*arrays), count, len(values))
    block, ref = _block(words, angles), ctypes.byref
    used = done(native.kvq_quantise(ref(block), ratio, address(kinds), ref(_family()), ref(out)))
    if used < 0:
        return None
    return Tiles(
        steps, means.astype(np.float16), models, symbols, escapes, values[:used], errors,
        magnitudes.view(np.float32),
    )  # fmt: skip


def _check_tiles(tiles: Tiles, heads: int, dim: int) -> None:
    count = -(-heads * dim // TILE_CHANNELS)
    shapes = (len(tiles.steps), len(tiles.escapes), tiles.means.shape)
    if shapes != (count, count, (count, TILE_CHANNELS)):
        raise ValueError(f"{len(tiles.steps)} tiles do not fill {heads} heads of {dim}")


def _dequantise(
    native: Loops, tiles: Tiles, dtype: DType, angles: Angles | None, out: Part
) -> bool:
    heads, tokens, dim = out.shape
    _check_tiles(tiles, heads, dim)
    if tiles.symbols.shape != (len(tiles.steps), tokens, TILE_CHANNELS):
        raise ValueError(f"symbols {tiles.symbols.shape} of {tokens} tokens")
    with _writable(out, dtype) as room:
        arrays = (
            contiguous(tiles.steps), tiles.means.astype(np.float32), contiguous(tiles.symbols),
            contiguous(tiles.escapes), contiguous(tiles.values),
        )  # fmt: skip
        given = _TilesIn(*addresses(*arrays), len(tiles.steps), len(tiles.values), 0, 0)
        block = _block(room, angles)
        found = native.kvq_dequantise(ctypes.byref(given), ctypes.byref(block), address(room))
    return done(found) == 1


def _quotients(native: Loops, tiles: Tiles) -> Floats | None:
    """Return the whole numbers of *tiles*, f32; None when their escapes do not fit."""
    arrays = (contiguous(tiles.symbols), contiguous(tiles.escapes), contiguous(tiles.values))
    found = np.empty(tiles.symbols.shape, np.float32)
    given = _TilesIn(0, 0, *addresses(*arrays), len(tiles.escapes), len(tiles.values), 0, 0)
    tokens = tiles.symbols.shape[1]
    return found if native.kvq_quotients(ctypes.byref(given), tokens, address(found)) else None


def _contexts(
    native: Loops, found: Floats, models: NDArray[np.uint8], level: int
) -> NDArray[np.uint8]:
    """Return the row of ``ternary_table`` for each third of *level*, from the level before."""
    out: NDArray[np.uint8] = np.empty(found.shape, np.uint8)
    rows = contiguous(rows_of(models, level))
    native.kvq_contexts(address(found), address(rows), address(out), *found.shape[:2])
    return out


def _add(native: Loops, found: Floats, thirds: NDArray[np.uint8]) -> None:
    """Make *found* those of the next level, in place."""
    if found.size != thirds.size:
        raise ValueError(f"{thirds.size} thirds of {found.size} numbers")
    given = contiguous(thirds)
    native.kvq_add(address(found), address(given), found.size)


def _move(native: Loops, models: NDArray[np.uint8], classes: Classes) -> NDArray[np.uint8]:
    """Return the model of each number, u8 (n, tokens, 128), of *models* u8 (n, 128)."""
    out: NDArray[np.uint8] = np.empty((len(models), len(classes), TILE_CHANNELS), np.uint8)
    given, kinds = contiguous(models), contiguous(classes)
    native.kvq_move(address(given), address(kinds), address(out), len(models), len(classes))
    return out


def _write(
    native: Loops, found: Floats, tiles: Tiles, factors: Floats,
    given: tuple[DType, Angles | None, Part],
) -> None:  # fmt: skip
    """Write *found*, times *factors* f32 (tokens,), times the steps and about the means of *tiles*.

    *given*: the type of a part's block, the angles to turn it by, and where it goes.
    """
    dtype, angles, out = given
    heads, tokens, dim = out.shape
    _check_tiles(tiles, heads, dim)
    if found.shape != (len(tiles.steps), tokens, TILE_CHANNELS) or len(factors) != tokens:
        raise ValueError(f"quotients {found.shape} and {len(factors)} factors of {out.shape}")
    with _writable(out, dtype) as room:
        arrays = (contiguous(tiles.steps), tiles.means.astype(np.float32))
        numbers = (contiguous(found), contiguous(factors))
        packed = _TilesIn(*addresses(*arrays), 0, 0, 0, len(tiles.steps), 0, *addresses(*numbers))
        block = _block(room, angles)
        done(native.kvq_dequantise(ctypes.byref(packed), ctypes.byref(block), address(room)))


def _refine(
    native: Loops, bits: Part, dtype: DType, angles: Angles | None, tiles: Tiles
) -> list[Thirds] | None:
    """Return the levels behind *tiles*, which *bits* were quantised to.

    None when float32 is too coarse for the finest step.
    """
    numbers = _quotients(native, tiles)
    assert numbers is not None
    words = _wide(bits, dtype)
    rows = np.stack([rows_of(tiles.models, level) for level in range(1, LEVELS + 1)])
    shape = (LEVELS, *numbers.shape)
    symbols, found = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
    errors = np.empty(shape[:2], np.float32)
    arrays = (
        contiguous(tiles.steps), tiles.means.astype(np.float32), numbers, rows, symbols, found,
        errors,
    )  # fmt: skip
    packed = _Refinement(*addresses(*arrays), len(tiles.steps), LEVELS)
    block = _block(words, angles)
    if done(native.kvq_refine(ctypes.byref(block), ctypes.byref(packed))) != 1:
        return None
    return [Thirds(*level) for level in zip(symbols, found, errors, strict=True)]


@lru_cache(maxsize=4)
def tile_backend(path: str | None = None) -> TileBackend:
    """Return the tiles by the loops of *path*, the best one's where it is None."""
    native = loops(path)
    return TileBackend(native.path, partial(_quantise, native), partial(_dequantise, native))


@lru_cache(maxsize=4)
def fine_backend(path: str | None = None) -> FineBackend:
    """Return the refinements by the loops of *path*, the best one's where it is None."""
    native = loops(path)
    return FineBackend(
        native.path,
        partial(_quotients, native),
        partial(_contexts, native),
        partial(_add, native),
        partial(_write, native),
        partial(_refine, native),
        partial(_move, native),
    )
