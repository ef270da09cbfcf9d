"""The arithmetic of the grouped codecs on float32 boxes, by the compiled loops.

A box is (heads, tokens, channels). Groups of 64 run over its tokens (``by_token``) or its
channels, of which the last group may be short; scales and minima have one number a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats
from kvstore.proto import native
from kvstore.proto.buffers import addresses

GROUP = 64
SLACK = np.float32(2.0**-21)
"""What float32 arithmetic may add to an error, in proportion to the numbers themselves."""
HALF = np.float32(0.5 + 2.0**-11)
"""Errors in scales: half of one, and what float32 arithmetic adds to it for large codes."""

Codes: TypeAlias = NDArray[np.uint8]
Bounds: TypeAlias = Callable[[Floats, bool], "tuple[Floats, Floats]"]
"""From values and by_token to the least and the largest of each group."""
Quantise: TypeAlias = Callable[[Floats, Floats, "Floats | None", int, bool], "Quantised | None"]
"""From values, scales, minima, levels and by_token to codes and what they stand for.

Without minima codes are signed and go from -levels to levels, else from 0. None when a number
is further from what its code stands for than half a scale, float32 arithmetic aside.
"""
Quantised: TypeAlias = tuple[Codes, Floats]
Expand: TypeAlias = Callable[[Codes, Floats, "Floats | None", bool], Floats]
"""From codes, scales, minima and by_token to what the codes stand for."""


@dataclass(frozen=True, slots=True)
class Loops:
    """One implementation of the three. Arrays are C-ordered."""

    name: str
    bounds: Bounds = field(repr=False)
    quantise: Quantise = field(repr=False)
    expand: Expand = field(repr=False)


@lru_cache(maxsize=4)
def native_loops(path: str | None = None) -> Loops:
    """Return the compiled loops of *path*; of this processor's best where it is None."""
    found = native.loops(path)
    return Loops(
        found.path,
        partial(_native_bounds, found),
        partial(_native_quantise, found),
        partial(_native_expand, found),
    )


def _native_bounds(found: native.Loops, values: Floats, by_token: bool) -> tuple[Floats, Floats]:
    heads, tokens, dim = values.shape
    shape = (heads, -(-tokens // GROUP), dim) if by_token else (heads, tokens, -(-dim // GROUP))
    low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
    found.grouped_bounds(*addresses(values, low, high), *values.shape, by_token)
    return low, high


def _native_quantise(
    found: native.Loops, values: Floats, scale: Floats, base: Floats | None, levels: int,
    by_token: bool,
) -> Quantised | None:  # fmt: skip
    codes, back = np.empty(values.shape, np.uint8), np.empty(values.shape, np.float32)
    minima = np.zeros_like(scale) if base is None else base
    arrays = (values, scale, minima, codes, back)
    least = -levels if base is None else 0
    off = found.grouped_quantise(*addresses(*arrays), *values.shape, by_token, least, levels)
    return None if off else (codes, back)


def _native_expand(
    found: native.Loops, codes: Codes, scale: Floats, base: Floats | None, by_token: bool
) -> Floats:
    values = np.empty(codes.shape, np.float32)
    arrays = (codes, scale, np.zeros_like(scale) if base is None else base, values)
    found.grouped_expand(*addresses(*arrays), *codes.shape, by_token, base is None)
    return values
