"""KV tensors to measure codecs on: bfloat16 as bits, their digest, and synthetic ones."""

from __future__ import annotations

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
    """Return the numbers that bfloat16 *bits* stand for."""
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
    """How large synthetic KV is."""

    windows: int = 1
    layers: int = 8
    tokens: int = 256
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class Synthetic:
    """KV with outlier channels, and queries (layers, queries, kv_heads, head_dim) for it."""

    bits: Bits
    queries: Floats

    def attention_error(self, decoded: Bits) -> float:
        """Return the squared error of what the queries read of *decoded*, over its square."""
        wanted, found = (self._read(to_floats(bits)) for bits in (self.bits, decoded))
        return float(np.square(found - wanted).sum() / np.square(wanted).sum())

    def _read(self, kv: Floats) -> Floats:
        scale = self.queries.shape[-1] ** -0.5
        scores = np.einsum("lqhd,wlthd->wlhqt", self.queries, kv[:, :, 0], optimize=True) * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        read: Floats = np.einsum("wlhqt,wlthd->wlqhd", weights, kv[:, :, 1], optimize=True)
        return read


def make_synthetic(extent: Extent, seed: int, queries: int = 64) -> Synthetic:
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
    bits = to_bits(np.stack([rotate(keys), values], 2))
    asked = rng.standard_normal((layers, queries, *channels), np.float32)
    return Synthetic(bits, asked * 2 / spread[0, :, :1].mean())


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
