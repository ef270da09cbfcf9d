"""Rate-distortion curves: bits per value against divergence, and bytes at equal divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 64
"""Divergences at which two curves are compared by ``mean_ratio``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a decoded prefix does to the text behind it; all zero but the match when exact.

    ``kl``: nats a token. ``loss_delta``: nats a token. ``greedy_match``: share of 64 tokens.
    The errors are squared errors over squared values: of the attention outputs, of the keys, of
    the values.
    """

    kl: float
    loss_delta: float
    greedy_match: float
    attention_error: float
    key_error: float
    value_error: float


@dataclass(frozen=True, slots=True)
class Point:
    """One codec at one setting on one set of tensors.

    ``facts``: the share of facts told in a prompt that are answered right; None where none are.
    """

    codec: str
    setting: str
    bits_per_value: float
    quality: Quality
    facts: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_value < math.inf:
            raise ValueError(f"bits_per_value: {self.bits_per_value}: must be positive")

    @property
    def rate(self) -> Rate:
        """Its bits and its divergence."""
        return self.bits_per_value, self.quality.kl


Rate = tuple[float, float]
"""Bits per value, and KL or another error that falls as bits are added."""


def bits_per_value(stored_bytes: int, values: int) -> float:
    """Return the bits that each of *values* takes of *stored_bytes*, headers and all."""
    return 8 * stored_bytes / values


def frontier(curve: Sequence[Rate]) -> list[Rate]:
    """Return the points of *curve* with an error that no cheaper point undercuts, by bits.

    Points without error are left out: they have no place on a logarithmic axis.
    """
    best: list[Rate] = []
    for bits, error in sorted(curve):
        if error > 0 and (not best or error < best[-1][1]):
            best.append((bits, error))
    return best


def bits_at(curve: Sequence[Rate], error: float) -> float | None:
    """Return the bits *curve* needs for *error*: a line between its points over log(error).

    None where the curve does not reach: nothing is extrapolated.
    """
    points = frontier(curve)
    if not points or not points[-1][1] <= error <= points[0][1]:
        return None
    logs = [math.log(found) for _, found in reversed(points)]
    bits = [found for found, _ in reversed(points)]
    return float(np.interp(math.log(error), logs, bits))


def error_at(curve: Sequence[Rate], bits: float) -> float | None:
    """Return the error of *curve* at *bits*, the reverse of ``bits_at``."""
    points = frontier(curve)
    if not points or not points[0][0] <= bits <= points[-1][0]:
        return None
    rates = [rate for rate, _ in points]
    logs = [math.log(error) for _, error in points]
    return math.exp(float(np.interp(bits, rates, logs)))


def ratio_at(ours: Sequence[Rate], theirs: Rate) -> float | None:
    """Return our bytes over theirs at the error that *theirs* has; None where ours end before."""
    bits = bits_at(ours, theirs[1])
    return None if bits is None else bits / theirs[0]


def mean_ratio(ours: Sequence[Rate], theirs: Sequence[Rate]) -> float | None:
    """Return our bytes over theirs, the geometric mean over the errors both curves reach.

    Bjøntegaard's rate difference (VCEG-M33), with lines between the points. None for curves
    that do not overlap.
    """
    sides = frontier(ours), frontier(theirs)
    if not all(sides):
        return None
    low = max(side[-1][1] for side in sides)
    high = min(side[0][1] for side in sides)
    if not low < high:
        return None
    errors = np.geomspace(low, high, STEPS)[1:-1]
    rates = [[bits_at(side, float(error)) for error in errors] for side in sides]
    pairs = zip(*rates, strict=True)
    return math.exp(float(np.mean([math.log(a / b) for a, b in pairs if a and b])))
