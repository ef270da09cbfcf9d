"""Opponents written here after what is published: KIVI's layout, and AIBrix's plain zstd."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.codecs_curve import bits_per_value
from bench.codecs_kv import Bits, Floats, to_bits, to_floats
from bench.opponents import Coded, Speed

AIBRIX_LEVEL = 3
"""What zstd takes when nobody says."""


def kivi(bits: Bits, code_bits: int, group: int) -> Coded:
    """Quantise as KIVI does (Liu et al., ICML 2024, section 3.2).

    Keys per channel over *group* tokens, values per token over *group* channels, each group by
    its smallest value and a step, both float16. Channels of all heads stand side by side, as
    this model's heads are narrower than a group. No recent tokens are left as they are: a
    stored chunk has none.
    """
    windows, layers, _, tokens = bits.shape[:4]
    numbers = to_floats(bits)
    keys = numbers[:, :, 0].reshape(windows, layers, tokens // group, group, -1)
    values = numbers[:, :, 1].reshape(windows, layers, tokens, -1, group)
    halves = [(keys, 3), (values, 4)]
    decoded = [
        _affine(part, axis, code_bits).reshape(numbers[:, :, 0].shape) for part, axis in halves
    ]
    stored = [part.size * code_bits // 8 + part.size // group * 4 for part, _ in halves]
    return Coded(
        "kivi", f"{code_bits} bit g{group}", bits_per_value(sum(stored), bits.size),
        to_bits(np.stack(decoded, 2)),
    )  # fmt: skip


def _affine(numbers: Floats, axis: int, code_bits: int) -> Floats:
    """Return *numbers* after codes of *code_bits* between the ends of each group along *axis*."""
    most = 2**code_bits - 1
    low = numbers.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
    step = (numbers.max(axis, keepdims=True) - low) / np.float32(most)
    step = np.maximum(step.astype(np.float16).astype(np.float32), np.float32(1e-7))
    codes = np.clip(np.rint((numbers - low) / step), 0, most)
    restored: Floats = codes * step + low
    return restored


def aibrix_time(bits: NDArray[Any]) -> Speed:
    """Return what zstd takes for the bytes of *bits* as they are, as AIBrix's compressor does."""
    data = np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
    started = time.process_time()
    stored = zstandard.ZstdCompressor(AIBRIX_LEVEL).compress(data.data)
    encoded = time.process_time()
    found = zstandard.ZstdDecompressor().decompress(stored)
    decoded = time.process_time()
    if found != data.tobytes():
        raise ValueError("zstd: came back changed")
    return Speed(encoded - started, decoded - encoded, len(stored))
