"""Tiles of kvq: the cut of a part, quantised tiles, and the loops that compute them.

A tile is up to 256 tokens of 128 adjacent channels, the heads' channels laid end to end. Every
float32 operation is rounded separately, sums are in float64 and in a fixed order, so that each path
of ``native/kvq.c`` gives the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy import ascontiguousarray as contiguous
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, from_float32, to_float32
from kvstore.codecs.kvq_models import KINDS, NO_CLASSES, Classes, kvq_models, rows_of
from kvstore.codecs.rans import Backend, native_backend
from kvstore.proto.buffers import address, addresses
from kvstore.proto.native import done, loops
from kvstore.proto.types import Component, DType

TILE_CHANNELS = 128
MAX_TILE_TOKENS = 256
LEVELS = 2
"""Refinements of a layered frame; each divides every step into three."""
LEAST_STEP = 2.0**-60
LARGEST = np.float32(2.0**126)
"""Larger magnitudes are not quantised: rounding could make them infinite."""
LARGEST_MEAN = np.float32(65504)
TOLERANCE = np.float32(0.5 + 2.0**-8)
"""Largest error in steps: half of one, plus float32's error for the largest quotients."""
ESCAPE_SHARE = 8
"""A block with more escapes than one in this many numbers is not quantised."""

Bytes8: TypeAlias = NDArray[np.uint8]
Angles: TypeAlias = tuple[Floats, Floats]
"""Cosine and sine of each token's angles, f32 (tokens, pairs) each."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a part (kv_heads, tokens, head_dim): ``columns`` tiles for each block."""

    channels: int
    columns: int
    blocks: tuple[slice, ...]

    @classmethod
    def of(cls, component: Component) -> Cut:
        """Return the cut of *component*'s parts, with blocks of nearly equal tokens."""
        return _cut(component.kv_heads * component.head_dim, component.tokens)


@lru_cache(maxsize=256)
def _cut(channels: int, tokens: int) -> Cut:
    count = -(-tokens // MAX_TILE_TOKENS)
    size = -(-tokens // count)
    blocks = tuple(slice(at, min(tokens, at + size)) for at in range(0, tokens, size))
    return Cut(channels, -(-channels // TILE_CHANNELS), blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Quantised tiles of one block of tokens, n of them.

    ``steps`` f32 (n,), ``means`` f16 (n, 128), ``models`` u8 (n, 128), ``symbols`` u8
    (n, tokens, 128), ``escapes`` u32 (n,) and their quotients ``values`` i16, in order of tile,
    token and channel. ``errors`` and ``magnitudes`` f32 (n,): the largest |x - y| before rounding
    to the dtype, and the largest |x| as given.
    """

    steps: Floats
    means: NDArray[np.float16]
    models: Bytes8
    symbols: Bytes8
    escapes: NDArray[np.uint32]
    values: NDArray[np.int16]
    errors: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    magnitudes: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def pieces(self, columns: int) -> Iterator[Tiles]:
        """Yield consecutive pieces of *columns* tiles."""
        value = 0
        for first in range(0, len(self.steps), columns):
            at = slice(first, first + columns)
            end = value + int(self.escapes[at].sum(dtype=np.uint64))
            yield Tiles(
                self.steps[at], self.means[at], self.models[at], self.symbols[at],
                self.escapes[at], self.values[value:end],
            )  # fmt: skip
            value = end


@dataclass(frozen=True, slots=True, eq=False)
class Thirds:
    """One level of some tiles: ``symbols`` u8 (n, tokens, 128), 0 towards zero, 1, 2 away;
    ``contexts`` u8 of the same shape; ``errors`` f32 (n,) once they are added.
    """

    symbols: Bytes8
    contexts: Bytes8
    errors: Floats


def steps_of(
    squares: NDArray[np.float64], is_real: NDArray[np.bool_], tokens: int, ratio: float
) -> Floats:
    """Return each tile's step: *ratio* standard deviations of its numbers about their means."""
    total = np.add.accumulate(squares, axis=1)[:, -1]  # in a fixed order: backends must agree
    deviation: NDArray[np.float64] = np.sqrt(total / (is_real.sum(1) * tokens))
    steps: Floats = (deviation * ratio).astype(np.float32)
    steps[deviation == 0] = 1
    np.maximum(steps, np.float32(LEAST_STEP), out=steps)
    return steps


def errors_of(
    x: Floats, means: NDArray[np.float16], steps: Floats, quotients: Floats
) -> Floats | None:
    """Return the largest error of each tile of *x*, f32 (n,), for *quotients* times the step.

    None if one exceeds half a step.
    """
    restored = quotients * steps[:, None, None] + means.astype(np.float32)[:, None]
    found: Floats = np.abs(x - restored).max((1, 2))
    return found if (found <= steps * TOLERANCE).all() else None


def as_tiles(x: Floats) -> Floats:
    """Return (heads, tokens, dim) as (columns, tokens, 128), zeros for padding."""
    heads, tokens, dim = x.shape
    flat = x.transpose(1, 0, 2).reshape(tokens, heads * dim)
    columns = -(-heads * dim // TILE_CHANNELS)
    padded = np.zeros((tokens, columns * TILE_CHANNELS), np.float32)
    padded[:, : heads * dim] = flat
    return np.ascontiguousarray(padded.reshape(tokens, columns, TILE_CHANNELS).transpose(1, 0, 2))


# --- the structures of native/kvq.c


def _structure(name: str, pointers: str, numbers: str = "", more: str = "") -> Any:
    """Return a structure of these pointers, 64-bit numbers, and more 64-bit fields."""
    kinds = [(pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (more, ctypes.c_void_p)]
    fields = [(each, kind) for names, kind in kinds for each in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Block = _structure("_Block", "words", "item_bytes heads tokens dim", "cosine sine pairs")
_Family = _structure("_Family", "costs edges reach")
_TilesOut = _structure(
    "_TilesOut", "steps means models symbols escapes values errors magnitudes", "tiles values_limit"
)
_TilesIn = _structure(
    "_TilesIn", "steps means symbols escapes values", "tiles values_count", "quotients factors"
)
_Refinement = _structure(
    "_Refinement", "steps means quotients rows symbols contexts errors", "tiles levels"
)
_ref = ctypes.byref


@lru_cache(maxsize=1)
def _family() -> Any:
    family = kvq_models()  # lives as long as the process
    return _Family(*addresses(family.costs, family.edges, family.reach))


def _block(words: Part, angles: Angles | None) -> Any:
    """Return the loops' structure of *words* (heads, tokens, dim), bfloat16 or float32."""
    heads, tokens, dim = words.shape
    if angles is None:
        return _Block(address(words), words.itemsize, heads, tokens, dim, 0, 0, 0)
    cosine, sine = angles
    pairs = cosine.shape[1]
    if cosine.shape != (tokens, pairs) or sine.shape != cosine.shape or 2 * pairs > dim:
        raise ValueError(f"angles {cosine.shape} do not fit {words.shape}")
    if not (cosine.flags.c_contiguous and sine.flags.c_contiguous):
        raise ValueError("give C-ordered angles")
    turned = (address(cosine), address(sine), pairs)
    return _Block(address(words), words.itemsize, heads, tokens, dim, *turned)


def _wide(bits: Part, dtype: DType) -> Part:
    """Return *bits* C-ordered; float16 as float32."""
    if dtype is DType.float16:
        return to_float32(bits, dtype).view(np.uint32)
    return contiguous(bits)


@contextmanager
def _writable(out: Part, dtype: DType) -> Iterator[Part]:
    """Yield an array for the loops to write, then copy it to *out*.

    float16 is written as float32 first, and rounded by numpy.
    """
    if not out.flags.writeable:
        raise ValueError("assignment destination is read-only")
    if dtype is DType.float16:
        wide = np.zeros(out.shape, "<u4")  # zeros, as the caller also sees the rest of a bad frame
        yield wide
        from_float32(wide.view(np.float32), dtype, out)
        return
    target = out if out.flags.c_contiguous else np.zeros(out.shape, out.dtype)
    yield target
    if target is not out:
        np.copyto(out, target)


class KvqLoops:
    """The loops of one path, with the checks of their arguments. Thread-safe."""

    def __init__(self, path: str | None = None) -> None:
        self._native = loops(path)
        self.entropy: Backend = native_backend(path)

    def quantise(
        self, bits: Part, dtype: DType, angles: Angles | None, ratio: float,
        classes: Classes = NO_CLASSES,
    ) -> Tiles | None:  # fmt: skip
        """Quantise one block (heads, tokens, dim) by steps of *ratio* standard deviations.

        *classes*, if any, are those of its tokens. None when the error bound cannot be kept: NaN,
        infinities, too large magnitudes.
        """
        words = _wide(bits, dtype)
        heads, tokens, dim = words.shape
        kinds = contiguous(classes)
        if len(kinds) not in (0, tokens) or (len(kinds) and int(kinds.max()) >= KINDS):
            raise ValueError(f"{len(kinds)} classes of {tokens} tokens")
        count = -(-heads * dim // TILE_CHANNELS)
        steps, errors = np.empty(count, np.float32), np.empty(count, np.float32)
        means = np.zeros((count, TILE_CHANNELS), np.float32)
        models = np.empty(means.shape, np.uint8)
        symbols: Bytes8 = np.empty((count, tokens, TILE_CHANNELS), np.uint8)
        escapes, magnitudes = np.empty(count, np.uint32), np.empty(count, np.uint32)
        values = np.empty(symbols.size // ESCAPE_SHARE, np.int16)
        arrays = (steps, means, models, symbols, escapes, values, errors, magnitudes)
        out = _TilesOut(*addresses(*arrays), count, len(values))
        block, family = _block(words, angles), _ref(_family())
        found = self._native.kvq_quantise(_ref(block), ratio, address(kinds), family, _ref(out))
        used = done(found)
        if used < 0:
            return None
        return Tiles(
            steps, means.astype(np.float16), models, symbols, escapes, values[:used], errors,
            magnitudes.view(np.float32),
        )  # fmt: skip

    def dequantise(self, tiles: Tiles, dtype: DType, angles: Angles | None, out: Part) -> bool:
        """Write *tiles* to a part's block; False if escapes differ from their count."""
        _check_tiles(tiles, out)
        if tiles.symbols.shape != (len(tiles.steps), out.shape[1], TILE_CHANNELS):
            raise ValueError(f"symbols {tiles.symbols.shape} of {out.shape[1]} tokens")
        arrays = (
            contiguous(tiles.steps), tiles.means.astype(np.float32), contiguous(tiles.symbols),
            contiguous(tiles.escapes), contiguous(tiles.values),
        )  # fmt: skip
        packed = _TilesIn(*addresses(*arrays), len(tiles.steps), len(tiles.values), 0, 0)
        return self._write(packed, dtype, angles, out)

    def _write(self, packed: Any, dtype: DType, angles: Angles | None, out: Part) -> bool:
        with _writable(out, dtype) as target:
            block = _block(target, angles)
            found = self._native.kvq_dequantise(_ref(packed), _ref(block), address(target))
        return done(found) == 1

    def quotients(self, tiles: Tiles) -> Any:
        """Return the quotients of *tiles*, f32; None if escapes differ from their count."""
        arrays = (contiguous(tiles.symbols), contiguous(tiles.escapes), contiguous(tiles.values))
        found = np.empty(tiles.symbols.shape, np.float32)
        given = _TilesIn(0, 0, *addresses(*arrays), len(tiles.escapes), len(tiles.values), 0, 0)
        is_right = self._native.kvq_quotients(_ref(given), tiles.symbols.shape[1], address(found))
        return found if is_right else None

    def contexts(self, quotients: Floats, models: Bytes8, level: int) -> Bytes8:
        """Return the row of ``ternary_table`` for each third of *level*, from the level before."""
        out: Bytes8 = np.empty(quotients.shape, np.uint8)
        rows = contiguous(rows_of(models, level))
        self._native.kvq_contexts(*addresses(quotients, rows, out), *out.shape[:2])
        return out

    def add(self, quotients: Floats, thirds: Bytes8) -> None:
        """Refine *quotients* to the next level, in place. *thirds* may be overwritten."""
        if quotients.size != thirds.size:
            raise ValueError(f"{thirds.size} thirds of {quotients.size} numbers")
        given = contiguous(thirds)
        self._native.kvq_add(*addresses(quotients, given), quotients.size)

    def move(self, models: Bytes8, classes: Classes) -> Bytes8:
        """Return the model of each number, u8 (n, tokens, 128), of *models* u8 (n, 128)."""
        out: Bytes8 = np.empty((len(models), len(classes), TILE_CHANNELS), np.uint8)
        given, kinds = contiguous(models), contiguous(classes)
        self._native.kvq_move(*addresses(given, kinds, out), len(models), len(classes))
        return out

    def write(
        self, quotients: Floats, tiles: Tiles, factors: Floats,
        given: tuple[DType, Angles | None, Part],
    ) -> None:  # fmt: skip
        """Write *quotients* times *factors* f32 (tokens,) times the steps of *tiles* plus their
        means. *given*: the dtype of a part's block, the angles to rotate it by, its destination.
        *quotients* may be overwritten.
        """
        dtype, angles, out = given
        _check_tiles(tiles, out)
        shape = (len(tiles.steps), out.shape[1], TILE_CHANNELS)
        if quotients.shape != shape or len(factors) != out.shape[1]:
            raise ValueError(f"quotients {quotients.shape}, {len(factors)} factors, {out.shape}")
        arrays = (
            contiguous(tiles.steps), tiles.means.astype(np.float32), contiguous(quotients),
            contiguous(factors),
        )  # fmt: skip
        steps, means, *numbers = addresses(*arrays)
        packed = _TilesIn(steps, means, 0, 0, 0, len(tiles.steps), 0, *numbers)
        self._write(packed, dtype, angles, out)

    def refine(
        self, bits: Part, dtype: DType, angles: Angles | None, tiles: Tiles
    ) -> list[Thirds] | None:
        """Return the refinements of *tiles*, the quantised *bits*.

        None if float32 is too coarse for the finest step.
        """
        numbers = self.quotients(tiles)
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
        if done(self._native.kvq_refine(_ref(block), _ref(packed))) != 1:
            return None
        return [Thirds(*level) for level in zip(symbols, found, errors, strict=True)]


def _check_tiles(tiles: Tiles, out: Part) -> None:
    heads, _, dim = out.shape
    count = -(-heads * dim // TILE_CHANNELS)
    shapes = (len(tiles.steps), len(tiles.escapes), tiles.means.shape)
    if shapes != (count, count, (count, TILE_CHANNELS)):
        raise ValueError(f"{len(tiles.steps)} tiles do not fill {heads} heads of {dim}")
