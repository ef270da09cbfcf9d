"""KV tensors to measure codecs on, and rate-distortion curves of what came back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.uint16]
"""bfloat16 as its bits: (windows, layers, 2, tokens, kv_heads, head_dim), K and then V."""
Floats: TypeAlias = NDArray[np.float32]

ROPE_THETA = 500000.0


def to_floats(bits: NDArray[Any]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(numbers: Floats) -> NDArray[np.uint16]:
    """Return finite *numbers* rounded to bfloat16, ties to even, as bits."""
    wide = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def digest(bits: NDArray[Any]) -> int:
    """Return 48 bits of the SHA-256 of *bits*: as many as a JSON number holds exactly."""
    return int.from_bytes(sha256(np.ascontiguousarray(bits).tobytes()).digest()[:6], "big")


@dataclass(frozen=True, slots=True)
class Extent:
    windows: int = 1
    layers: int = 8
    tokens: int = 256
    kv_heads: int = 8
    head_dim: int = 128


def make_synthetic(extent: Extent, seed: int) -> Bits:
    """Return KV whose statistics are invented after those reported of large models.

    Keys have a mean and a spread of their own in each channel, four channels of each head with
    means many times the rest (KIVI, section 3; massive in the slow half of the rotary pairs),
    neighbouring tokens alike, a first token that differs, and are rotated as Llama's. Values
    have no outlier channels but tokens of unequal size. For plumbing and speed; it says nothing
    of how well a model answers.
    """
    rng = np.random.default_rng(seed)
    windows, layers, tokens = extent.windows, extent.layers, extent.tokens
    channels = (extent.kv_heads, extent.head_dim)
    shape = (windows, layers, tokens, *channels)
    means = 0.5 * rng.standard_normal((1, layers, 1, *channels), np.float32)
    spread = 0.9 * np.exp(0.35 * rng.standard_normal(means.shape, np.float32))
    outliers = _slow_channels(rng, (layers, extent.kv_heads), extent.head_dim)
    sizes = rng.uniform(4, 12, outliers.shape) * rng.choice([-1, 1], outliers.shape)
    np.put_along_axis(means[0, :, 0], outliers, sizes.astype(np.float32), -1)
    keys = _drifting(rng, shape, 0.5) * spread + means
    keys[:, :, 0] *= 1.3
    grow = np.linspace(0.1, 0.8, layers, dtype=np.float32)[None, :, None, None, None]
    values = _drifting(rng, shape, 0.2) * grow
    values *= np.exp(0.4 * rng.standard_normal((1, layers, 1, *channels), np.float32))
    values *= np.exp(0.3 * rng.standard_normal((windows, layers, tokens, 1, 1), np.float32))
    values[:, :, 0] *= 0.05
    return to_bits(np.stack([rotate(keys), values], 2))


def _slow_channels(
    rng: np.random.Generator, heads: tuple[int, int], head_dim: int
) -> NDArray[np.int64]:
    """Return four channels of each head, in the half of the rotary pairs that turns slowly."""
    pairs = np.arange(head_dim // 4, head_dim // 2)
    slow = np.concatenate([pairs, pairs + head_dim // 2])
    order = rng.random((*heads, len(slow))).argsort(-1)[..., :4]
    chosen: NDArray[np.int64] = slow[order]
    return chosen


def _drifting(rng: np.random.Generator, shape: tuple[int, ...], keep: float) -> Floats:
    """Return unit noise whose neighbouring tokens, axis 2, correlate by *keep*."""
    noise = rng.standard_normal(shape, np.float32)
    fresh = np.float32((1 - keep * keep) ** 0.5)
    for token in range(1, shape[2]):
        noise[:, :, token] = keep * noise[:, :, token - 1] + fresh * noise[:, :, token]
    return noise


def rotate(keys: Floats, theta: float = ROPE_THETA) -> Floats:
    """Return *keys*, (..., tokens, kv_heads, head_dim), rotated to positions from 0 on."""
    tokens, _, head_dim = keys.shape[-3:]
    speeds = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(tokens)[:, None, None] * speeds
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = np.split(keys, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a decoded prefix does to the text behind it.

    ``kl``: nats a token. ``greedy_match``: the share of greedy tokens that stay.
    """

    kl: float
    greedy_match: float


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
