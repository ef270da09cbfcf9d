"""Tiles of kvq: how a part is cut up, and what a quantised tile is.

A tile is up to 256 tokens of 128 neighbouring channels, the heads' channels laid end to end.
Every float32 operation is rounded by itself, sums are in float64 and in a stated order, so that
each backend gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats
from kvstore.proto.types import Component, DType

TILE_CHANNELS = 128
MAX_TILE_TOKENS = 256
LEAST_STEP = 2.0**-60
LARGEST = np.float32(2.0**126)
"""Magnitudes from here on are not quantised: a rounding could make them infinite."""
LARGEST_MEAN = np.float32(65504)
TOLERANCE = np.float32(0.5 + 2.0**-8)
"""Errors in steps: half of one, and what float32 adds to it for the largest quotients."""
ESCAPE_SHARE = 8
"""More escapes than one in so many numbers, and a block is not quantised."""

Quotients: TypeAlias = NDArray[np.int16]
Angles: TypeAlias = tuple[Floats, Floats]
"""Cosine and sine of each token's angles, f32 (tokens, pairs) each."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How parts of (kv_heads, tokens, head_dim) are cut: ``columns`` tiles for each block."""

    channels: int
    columns: int
    blocks: tuple[slice, ...]

    @classmethod
    def of(cls, component: Component) -> Cut:
        """Return the cut of *component*'s parts: blocks of tokens as equal as can be."""
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
    token and channel. ``errors`` and ``magnitudes`` f32 (n,): the largest |x - y| before the
    rounding to the dtype, and the largest |x| as given.
    """

    steps: Floats
    means: NDArray[np.float16]
    models: NDArray[np.uint8]
    symbols: NDArray[np.uint8]
    escapes: NDArray[np.uint32]
    values: Quotients
    errors: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    magnitudes: Floats = field(default_factory=lambda: np.zeros(0, np.float32))


Quantise: TypeAlias = Callable[..., "Tiles | None"]
"""From (heads, tokens, dim) of one block, and the step in standard deviations, to tiles.

None when the block cannot be coded within the promise: NaN, infinities, magnitudes too large.
"""
Dequantise: TypeAlias = Callable[[Tiles, DType, "Angles | None", Part], bool]
"""From tiles to a part's block; False when the escapes are not as many as the symbols say."""


@dataclass(frozen=True, slots=True)
class TileBackend:
    """One implementation of the two."""

    name: str
    quantise: Quantise = field(repr=False)
    dequantise: Dequantise = field(repr=False)


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

    def errors(self, quotients: Floats, largest: float = 1.0) -> Floats | None:
        """Return the largest error of each tile, f32 (n,), if it is *quotients* times the step.

        None when one is off by more than half of *largest* steps.
        """
        products = quotients * self.steps[:, None, None]
        restored = products + self.means.astype(np.float32)[:, None]
        found: Floats = np.abs(self.x - restored).max((1, 2))
        return found if (found <= self.steps * (np.float32(largest) * TOLERANCE)).all() else None


def steps_of(
    squares: NDArray[np.float64], is_real: NDArray[np.bool_], tokens: int, ratio: float
) -> Floats:
    """Return each tile's step: *ratio* standard deviations of its numbers about their means."""
    total = np.add.accumulate(squares, axis=1)[:, -1]  # in order: backends must agree
    deviation: NDArray[np.float64] = np.sqrt(total / (is_real.sum(1) * tokens))
    steps: Floats = (deviation * ratio).astype(np.float32)
    steps[deviation == 0] = 1
    np.maximum(steps, np.float32(LEAST_STEP), out=steps)
    return steps


def as_tiles(x: Floats) -> Floats:
    """Return (heads, tokens, dim) as (columns, tokens, 128), zeros for padding."""
    heads, tokens, dim = x.shape
    flat = x.transpose(1, 0, 2).reshape(tokens, heads * dim)
    columns = -(-heads * dim // TILE_CHANNELS)
    padded = np.zeros((tokens, columns * TILE_CHANNELS), np.float32)
    padded[:, : heads * dim] = flat
    return np.ascontiguousarray(padded.reshape(tokens, columns, TILE_CHANNELS).transpose(1, 0, 2))
