"""KV tensors to measure codecs on, and rate-distortion curves of decoded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.speed import HEAD_DIM, make_sample
from kvstore.proto.types import RopeParameters

Bits: TypeAlias = NDArray[np.uint16]
"""bfloat16 as uint16: (windows, layers, 2, tokens, kv_heads, head_dim), K and then V."""
Floats: TypeAlias = NDArray[np.float32]

ROPE = RopeParameters(500_000.0, HEAD_DIM)
"""Rotation of the synthetic KV."""


def to_floats(bits: NDArray[Any]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(numbers: Floats) -> NDArray[np.uint16]:
    """Return finite *numbers* rounded to bfloat16, ties to even, as bits."""
    wide = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def digest(bits: NDArray[Any]) -> int:
    """Return 48 bits of the SHA-256 of *bits*; a JSON number holds them exactly."""
    return int.from_bytes(sha256(np.ascontiguousarray(bits).tobytes()).digest()[:6], "big")


def synthetic() -> Bits:
    """Return one window of synthetic KV, eight layers."""
    layers = [np.stack(layer) for seed in range(4) for layer in make_sample(seed).tensors[0]]
    return np.ascontiguousarray(np.stack(layers).transpose(0, 1, 3, 2, 4)[None])


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much text one model is measured on.

    ``windows`` texts of a stored ``prefix`` and the ``rest`` that is scored; ``calibrate`` texts
    fit tables.
    """

    windows: int = 16
    calibrate: int = 8
    prefix: int = 256
    rest: int = 256


@dataclass(frozen=True, slots=True)
class Point:
    """One codec at one setting on one model; ``kl`` of the text behind a decoded prefix, nats a
    token.
    """

    codec: str
    setting: str
    bits_per_value: float
    kl: float


Rate = tuple[float, float]
"""Bits per value, and KL or another error that falls as bits are added."""


def bits_per_value(stored_bytes: int, values: int) -> float:
    """Return the bits of *stored_bytes*, headers included, for each of *values*."""
    return 8 * stored_bytes / values


def frontier(curve: Sequence[Rate]) -> list[Rate]:
    """Return the points of *curve* whose error no smaller point undercuts, by bits.

    Points without error are left out, as the axis is logarithmic.
    """
    best: list[Rate] = []
    for bits, error in sorted(curve):
        if error > 0 and (not best or error < best[-1][1]):
            best.append((bits, error))
    return best


def bits_at(curve: Sequence[Rate], error: float) -> float | None:
    """Return the bits of *curve* at *error*, interpolated linearly over log(error).

    None outside the curve: nothing is extrapolated.
    """
    return _between(-math.log(error), *reversed(_scales(curve)))


def error_at(curve: Sequence[Rate], bits: float) -> float | None:
    """Return the error of *curve* at *bits*, the inverse of ``bits_at``."""
    found = _between(bits, *_scales(curve))
    return None if found is None else math.exp(-found)


def _scales(curve: Sequence[Rate]) -> tuple[list[float], list[float]]:
    """Return the bits of the frontier and the -log of its errors, both ascending."""
    points = frontier(curve)
    return [bits for bits, _ in points], [-math.log(error) for _, error in points]


def _between(at: float, scale: list[float], values: list[float]) -> float | None:
    if not scale or not scale[0] <= at <= scale[-1]:
        return None
    return float(np.interp(at, scale, values))
