"""kvq in numpy, a step at a time: what the compiled loops are compared with.

Every float32 operation is rounded by itself, sums are in float64 and in a stated order, so that
each implementation gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from oracles.rans import NUMPY as NUMPY_RANS

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, from_float32, is_finite, to_float32
from kvstore.codecs.kvq_models import (
    ESCAPE,
    MAX_QUOTIENT,
    NO_CLASSES,
    PADDING_MODEL,
    PLAIN,
    SCALES,
    SHAPES,
    SYMBOLS,
    ZERO,
    Classes,
    factors_of,
    kvq_models,
    rows_of,
)
from kvstore.codecs.kvq_tiles import (
    ESCAPE_SHARE,
    LARGEST,
    LARGEST_MEAN,
    LEVELS,
    TILE_CHANNELS,
    TOLERANCE,
    Angles,
    KvqLoops,
    Thirds,
    Tiles,
    as_tiles,
    errors_of,
    steps_of,
)
from kvstore.codecs.rope import rotate
from kvstore.proto.types import DType

Quotients: TypeAlias = NDArray[np.int16]

_FARTHEST = 2
_SCALES_OF_TWO = 4
_THREE = np.float32(3)


@dataclass(frozen=True, slots=True, eq=False)
class Centred:
    """Tiles about their channels' means: ``difference`` f32 (n, tokens, 128) is x less ``means``
    f16 (n, 128), ``squares`` f64 (n, 128) the sums of its squares over the tokens, ``steps``
    f32 (n,) the tiles' steps, ``is_real`` (n, 128) False for padding channels.
    """

    x: Floats
    difference: Floats
    means: NDArray[np.float16]
    squares: NDArray[np.float64]
    steps: Floats
    is_real: NDArray[np.bool_]

    @classmethod
    def of(cls, x: Floats, channels: int, ratio: float) -> Centred | None:
        """Return the tiles *x* (n, tokens, 128), of which *channels* are real; None for means
        that float16 does not hold. The step is *ratio* standard deviations.
        """
        count, tokens, _ = x.shape
        is_real = (np.arange(count * TILE_CHANNELS) < channels).reshape(count, TILE_CHANNELS)
        sums = np.zeros((count, TILE_CHANNELS))
        for token in range(tokens):
            sums += x[:, token]
        means = (sums / tokens).astype(np.float32)
        if (np.abs(means) > LARGEST_MEAN).any():
            return None
        halves = means.astype(np.float16)
        difference = x - halves.astype(np.float32)[:, None]
        squares = np.zeros_like(sums)
        for token in range(tokens):
            squares += difference[:, token].astype(np.float64) ** 2
        steps = steps_of(squares, is_real, tokens, ratio)
        return cls(x, difference, halves, squares, steps, is_real)

    @property
    def spread(self) -> NDArray[np.float64]:
        """Each channel's mean square, in squares of the step; f64 (n, 128)."""
        tokens = self.x.shape[1]
        found: NDArray[np.float64] = self.squares / tokens
        found /= self.steps.astype(np.float64)[:, None] ** 2
        return found


def moved(models: NDArray[np.uint8], classes: Classes) -> NDArray[np.uint8]:
    """Return the model of each number, u8 (n, tokens, 128), of *models* u8 (n, 128)."""
    finer = _SCALES_OF_TWO * (PLAIN - classes.astype(np.int16))
    scale = (models // SHAPES).astype(np.int16)[:, None] + finer[:, None]
    wide = SHAPES * np.clip(scale, 0, SCALES - 1) + (models % SHAPES)[:, None]
    found: NDArray[np.uint8] = wide.astype(np.uint8)
    return found


def quantise(
    bits: Part, dtype: DType, angles: Angles | None, ratio: float, classes: Classes = NO_CLASSES
) -> Tiles | None:
    """Quantise the block *bits*; see ``KvqLoops``. *classes*, if any, are those of its tokens."""
    if not is_finite(bits, dtype):
        return None
    x = to_float32(bits, dtype)
    magnitudes = np.abs(as_tiles(x)).max((1, 2))
    if magnitudes.max() >= LARGEST:
        return None
    if angles is not None:
        rotate(x, angles[0], -angles[1])
    tiles = Centred.of(as_tiles(x), x.shape[0] * x.shape[2], ratio)
    if tiles is None:
        return None
    return _quantised(tiles, classes, magnitudes)


def _quantised(tiles: Centred, classes: Classes, magnitudes: Floats) -> Tiles | None:
    quotients = tiles.difference * (np.float32(1) / tiles.steps)[:, None, None]
    if len(classes):
        factors = factors_of(classes)[:, None]
        quotients = np.rint(quotients / factors)
        errors = errors_of(
            tiles.x, tiles.means, tiles.steps, quotients * factors, float(factors.max())
        )
    else:
        np.rint(quotients, out=quotients)
        errors = errors_of(tiles.x, tiles.means, tiles.steps, quotients)
    if errors is None:
        return None
    q = quotients.astype(np.int16)
    models = np.where(tiles.is_real, _pick(q, classes, tiles), PADDING_MODEL).astype(np.uint8)
    every = moved(models, classes) if len(classes) else models[:, None]
    is_near = np.abs(q) <= kvq_models().reach[every]
    symbols = np.where(is_near, q + ZERO, ESCAPE).astype(np.uint8)
    escapes = (~is_near).sum((1, 2), dtype=np.uint32)
    values = q[~is_near]
    if len(values) * ESCAPE_SHARE > q.size:
        return None
    return Tiles(tiles.steps, tiles.means, models, symbols, escapes, values, errors, magnitudes)


def _pick(q: Quotients, classes: Classes, tiles: Centred) -> NDArray[np.intp]:
    """Return each channel's model that is cheapest over its classes together.

    Of the five scales about the channel's standard deviation.
    """
    family = kvq_models()
    every = np.arange(len(family.costs), dtype=np.uint8)
    cost: Any = None
    for kind in np.unique(classes) if len(classes) else (PLAIN,):
        of_kind = moved(every[None], np.array([kind], np.uint8))[0, 0]
        costs = family.costs[of_kind].astype(np.float64)
        mine = q[:, classes == kind] if len(classes) else q
        found = _histograms(mine) @ costs.T  # whole numbers, exact
        cost = found if cost is None else cost + found
    scale = np.searchsorted(family.edges, tiles.spread, side="left")[..., None]
    distance = every // SHAPES - scale
    cost[np.abs(distance) > 2] = np.inf
    models: NDArray[np.intp] = np.argmin(cost, axis=-1)
    return models


def _histograms(q: Quotients) -> NDArray[np.float64]:
    """Return how often each channel of *q* (n, tokens, 128) has each symbol, (n, 128, symbols)."""
    count, _, channels = q.shape
    symbols = np.where(np.abs(q) <= MAX_QUOTIENT, q + ZERO, ESCAPE).astype(np.intp)
    rows = np.arange(count * channels).reshape(count, 1, channels) * SYMBOLS
    found = np.bincount((rows + symbols).reshape(-1), minlength=count * channels * SYMBOLS)
    return found.reshape(count, channels, SYMBOLS).astype(np.float64)


def from_tiles(y: Floats, heads: int, dim: int) -> Floats:
    """Return (columns, tokens, 128) as a new (heads, tokens, dim)."""
    columns, tokens, _ = y.shape
    flat = y.transpose(1, 0, 2).reshape(tokens, columns * TILE_CHANNELS)[:, : heads * dim]
    return np.ascontiguousarray(flat.reshape(tokens, heads, dim).transpose(1, 0, 2))


def quotients_of(tiles: Tiles) -> NDArray[np.float32] | None:
    """Return the whole numbers q of *tiles* as f32; None when their escapes do not fit."""
    is_escape = tiles.symbols == ESCAPE
    if not np.array_equal(is_escape.sum((1, 2)), tiles.escapes):
        return None
    q = tiles.symbols.astype(np.float32)
    q -= np.float32(ZERO)
    q[is_escape] = tiles.values
    return q


def dequantise(tiles: Tiles, dtype: DType, angles: Angles | None, out: Part) -> bool:
    """Write the numbers of *tiles* to *out*; see ``KvqLoops``."""
    y = quotients_of(tiles)
    if y is None:
        return False
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody wrote may be infinite
        y *= tiles.steps[:, None, None]
        y += tiles.means.astype(np.float32)[:, None]
        rows = from_tiles(y, out.shape[0], out.shape[2])
        if angles is not None:
            rotate(rows, *angles)
        from_float32(rows, dtype, out)
    return True


def contexts_of(quotients: Floats, models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the row of ``ternary_table`` for each third of *level*, from the level before."""
    distance = np.minimum(np.abs(quotients), np.float32(_FARTHEST)).astype(np.uint8)
    found: NDArray[np.uint8] = rows_of(models, level)[:, None] + distance
    return found


def refine(bits: Part, dtype: DType, angles: Angles | None, tiles: Tiles) -> list[Thirds] | None:
    """Return the levels behind *tiles*, which *bits* were quantised to.

    None when float32 is too coarse for the finest step.
    """
    x = to_float32(bits, dtype)
    if angles is not None:
        rotate(x, angles[0], -angles[1])
    x = as_tiles(x)
    quotients = quotients_of(tiles)
    assert quotients is not None
    centre = tiles.means.astype(np.float32)[:, None]
    difference = x - centre
    steps = tiles.steps
    found = []
    for level in range(1, LEVELS + 1):
        steps = steps / _THREE
        contexts = contexts_of(quotients, tiles.models, level)
        third = difference * (np.float32(1) / steps)[:, None, None]
        np.rint(third, out=third)
        is_below = quotients < 0
        quotients = _THREE * quotients
        third -= quotients
        np.clip(third, -1, 1, out=third)
        quotients += third
        mirrored = _mirrored(third.astype(np.int8), is_below)
        mirrored += 1
        missed = quotients * steps[:, None, None]
        missed += centre
        np.subtract(x, missed, out=missed)
        errors = np.abs(missed, out=missed).max((1, 2))
        if not (errors <= steps * TOLERANCE).all():
            return None
        found.append(Thirds(mirrored.view(np.uint8), contexts, errors))
    return found


def _mirrored(thirds: NDArray[np.int8], is_below: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Negate, in place, the *thirds* of numbers below their means; return them."""
    sign = is_below.view(np.int8)  # x ^ -1 + 1 is -x: no branch, and a byte a number
    thirds ^= -sign
    thirds += sign
    return thirds


def add_symbols(quotients: Floats, thirds: NDArray[np.uint8]) -> None:
    """Make *quotients* those of the next level, in place; *thirds* are overwritten."""
    third = thirds.view(np.int8)
    third -= 1
    _mirrored(third, quotients < 0)
    quotients *= _THREE
    quotients += third


def write_scaled(
    quotients: Floats, tiles: Tiles, factors: Floats, given: tuple[DType, Angles | None, Part]
) -> None:
    """Write *quotients*, which are overwritten, times their tokens' *factors* f32 (tokens,), times
    the steps and about the means of *tiles*, to a part's block: *given* is its type, the angles
    to turn it by, and where it goes.
    """
    dtype, angles, out = given
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody wrote may be infinite
        quotients *= factors[:, None]
        quotients *= tiles.steps[:, None, None]
        quotients += tiles.means.astype(np.float32)[:, None]
        rows = from_tiles(quotients, out.shape[0], out.shape[2])
        if angles is not None:
            rotate(rows, *angles)
        from_float32(rows, dtype, out)


class NumpyLoops(KvqLoops):
    """The reference in place of the compiled loops."""

    entropy = NUMPY_RANS
    quantise = staticmethod(quantise)
    dequantise = staticmethod(dequantise)
    quotients = staticmethod(quotients_of)
    contexts = staticmethod(contexts_of)
    add = staticmethod(add_symbols)
    write = staticmethod(write_scaled)
    refine = staticmethod(refine)
    move = staticmethod(moved)

    def __init__(self) -> None:
        pass


NUMPY_KVQ = NumpyLoops()
