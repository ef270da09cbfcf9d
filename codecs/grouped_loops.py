"""The arithmetic of the grouped codecs on float32 boxes: the reference, and which loops run it.

A box is (heads, tokens, channels). Groups of 64 run over its tokens (``by_token``) or its
channels, of which the last group may be short; scales and minima have one number a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats
from kvstore.proto.background import improving

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


def _bounds(values: Floats, by_token: bool) -> tuple[Floats, Floats]:
    axis = 1 if by_token else 2
    starts = np.arange(0, values.shape[axis], GROUP)
    low: Floats = np.minimum.reduceat(values, starts, axis)
    high: Floats = np.maximum.reduceat(values, starts, axis)
    return low, high


def _quantise(
    values: Floats, scale: Floats, base: Floats | None, levels: int, by_token: bool
) -> Quantised | None:
    wide = _spread(scale, values.shape, by_token)
    centre = None if base is None else _spread(base, values.shape, by_token)
    steps: Floats = values.copy() if centre is None else values - centre
    steps /= np.where(wide == 0, np.float32(1), wide)
    np.rint(steps, out=steps)
    np.clip(steps, -levels if centre is None else 0, levels, out=steps)
    codes = steps.astype(np.int8).view(np.uint8) if base is None else steps.astype(np.uint8)
    steps *= wide
    if centre is not None:
        steps += centre
    bound = np.abs(values) * SLACK
    bound += wide * HALF
    if not (np.abs(steps - values) <= bound).all():
        return None
    return codes, steps


def _expand(codes: Codes, scale: Floats, base: Floats | None, by_token: bool) -> Floats:
    whole = codes.view(np.int8) if base is None else codes
    values = whole.astype(np.float32)
    values *= _spread(scale, codes.shape, by_token)
    values += np.float32(0) if base is None else _spread(base, codes.shape, by_token)
    return values


def _spread(groups: Floats, shape: tuple[int, ...], by_token: bool) -> Floats:
    """Return one number per element of *shape* from one per group."""
    wide = np.repeat(groups, GROUP, 1 if by_token else 2)
    return wide[:, : shape[1], : shape[2]]


NUMPY = Loops("numpy", _bounds, _quantise, _expand)


@improving(lambda: NUMPY)
def best_loops() -> Loops:
    """Return the compiled loops where they are there and agree with the reference.

    Compiling and checking them takes seconds; until then they are the reference.
    """
    try:
        from kvstore.codecs.grouped_numba import NUMBA
    except ImportError:  # the extra cpu-fast is not there
        return NUMPY
    return NUMBA if agrees(NUMBA) else NUMPY


def agrees(loops: Loops) -> bool:
    """Whether *loops* gives the reference's bits, whole groups and short ones."""
    rng = np.random.default_rng(0)
    for by_token, shape in [(True, (2, 128, 33)), (False, (2, 9, 150))]:
        values = rng.standard_normal(shape, np.float32)
        values *= np.exp2(rng.integers(-9, 9, shape)).astype(np.float32)
        low, high = NUMPY.bounds(values, by_token)
        if not all(map(np.array_equal, loops.bounds(values, by_token), (low, high))):
            return False
        for base, levels in [(None, 127), (low, 15), (low, 3)]:
            span = np.maximum(high, -low) if base is None else high - base
            scale: Floats = (span / np.float32(levels)).astype(np.float32)
            expected = NUMPY.quantise(values, scale, base, levels, by_token)
            found = loops.quantise(values, scale, base, levels, by_token)
            if expected is None or found is None:
                return False
            if not all(np.array_equal(expected[at], found[at]) for at in (0, 1)):
                return False
            if not np.array_equal(loops.expand(expected[0], scale, base, by_token), expected[1]):
                return False
            scale /= np.float32(2)
            if loops.quantise(values, scale, base, levels, by_token) is not None:
                return False
    return True
