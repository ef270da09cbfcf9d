"""Bit exactness over many values: ``pytest tests/codecs/test_exact_values.py --exact-values N``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contracts.codec import normal_values, random_bits, special_values

from kvstore.codecs.base import codec_by_name
from kvstore.proto.types import Component, DType, LayerKind

COMPONENT = Component(LayerKind.attention, DType.bfloat16, 1, 4, 128, 256)
VALUES = COMPONENT.layer_bytes // 2

Fill = Callable[[tuple[int, ...], int, np.random.Generator], Any]


def every_word(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Every bit pattern equally often, in random order."""
    size = int(np.prod(shape))
    words = np.arange(size, dtype=np.uint64) % (1 << 8 * width)
    return rng.permutation(words).astype(f"u{width}").reshape(shape)


def every_exponent_in_turn(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Rows that each have exponents of a few kinds, from one to many."""
    spread = rng.integers(1, 60, (*shape[:2], 1))
    first = rng.integers(0, 256, (*shape[:2], 1))
    exponents = (first + rng.integers(0, 1 << 30, shape) % spread) & 0xFF
    rest = rng.integers(0, 1 << 16, shape) & 0x807F
    return (exponents << 7 | rest).astype(np.uint16)


def mostly_normal(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Normal numbers, and here and there what no table expects."""
    words = normal_values(shape, width, rng)
    odd = rng.random(shape) < 10.0 ** -rng.integers(1, 6)
    words[odd] = special_values(shape, width, rng)[odd]
    return words


FILLS: list[Fill] = [every_word, every_exponent_in_turn, mostly_normal, random_bits]


@pytest.mark.timeout(0)
def test_every_value_comes_back_bit_by_bit(request: pytest.FixtureRequest) -> None:
    codec = codec_by_name("lossless")
    room = np.empty(codec.max_segment_bytes(COMPONENT), np.uint8)
    out = [np.empty(COMPONENT.shape, np.uint16) for _ in range(2)]
    rng = np.random.default_rng(2024)
    todo = request.config.getoption("--exact-values")
    for turn in range(-(-todo // VALUES)):
        fill = FILLS[turn % len(FILLS)]
        parts = [fill(COMPONENT.shape, 2, rng) for _ in range(2)]
        used = codec.encode_segment(parts, COMPONENT, room)
        codec.decode_segment(room[:used].copy(), COMPONENT, out)
        for part, found in zip(parts, out, strict=True):
            assert np.array_equal(part, found), f"{fill.__name__}, turn {turn}"
