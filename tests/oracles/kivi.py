"""The arithmetic of kivi in numpy: what the compiled loops have to agree with."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import Floats
from kvstore.codecs.kivi import GROUP, Codes, Loops, Quantised

SLACK = np.float32(2.0**-21)
"""What float32 arithmetic may add to an error, in proportion to the numbers themselves."""
HALF = np.float32(0.5 + 2.0**-11)
"""Errors in scales: half of one, and what float32 arithmetic adds to it for large codes."""


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


class NumpyLoops(Loops):
    """The reference in place of the compiled loops."""

    bounds = staticmethod(_bounds)
    quantise = staticmethod(_quantise)
    expand = staticmethod(_expand)


NUMPY = NumpyLoops()
