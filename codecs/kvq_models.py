"""The models of kvq: symbol probabilities, frozen in a file of the package.

Sixty-four models: 32 standard deviations, in steps of the quantiser, each as a normal and as a
Laplace distribution. Written once by tests/golden/kvq_models.py; no logarithms are computed at run
time, so that all machines and backends have the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.codecs.base import Importance
from kvstore.codecs.floats import Floats
from kvstore.codecs.rans import ModelTable
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import DIGEST_BYTES

ASSET = bytes.fromhex("7b3579af1ee2d3e1a54a5f101cd2efb4")
"""First 16 bytes of blake3 of the file; stored in frames."""
MODELS, SYMBOLS, ZERO, ESCAPE = 64, 128, 64, 0
RATIOS = (1.0, 0.5, 0.25, 0.125)
"""Step of each quality in standard deviations: about 2, 3, 4 and 5 bits per number."""
SHAPES, SCALES = 2, 32
"""Model 2k and 2k + 1: the normal and the Laplace of scale k."""
MAX_QUOTIENT = 63
PADDING_MODEL = 0
SCALE_STEP_OF_THREE = 6
"""Scales are 2^(1/4) apart: six of them are closest to a factor of three."""

_ROOTS = (1.189207115002721, 1.681792830507429)  # 2^(1/4), 2^(3/4)
_PATH = Path(__file__).with_name("kvq_models.bin")


@dataclass(frozen=True, eq=False)
class KvqModels:
    """``frequencies`` u16 (64, 128); ``costs`` u16 (64, 128) in 1/256 bit; ``ternary`` u16
    (64, 3, 3): model, min(|q|, 2), then towards zero, middle, away; all read-only.
    """

    frequencies: NDArray[np.uint16]
    costs: NDArray[np.uint16]
    ternary: NDArray[np.uint16]
    table: ModelTable = field(init=False)
    reach: NDArray[np.int16] = field(init=False)
    """i16 (64,): the largest |q| that each model codes without an escape."""
    edges: NDArray[np.float64] = field(init=False)
    """f64 (31,): squares of the standard deviations between one scale and the next."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", ModelTable(self.frequencies))
        reach = (self.frequencies[:, ZERO + 1 :] > 0).sum(1).astype(np.int16)
        object.__setattr__(self, "reach", reach)
        edges = [_ROOTS[k % 2] * 2.0 ** (k // 2 - 5) for k in range(SCALES - 1)]
        object.__setattr__(self, "edges", np.array(edges))


@lru_cache(maxsize=1)
def kvq_models() -> KvqModels:
    """Return the models. Raises KVStoreError unless the file is the one that frames name."""
    data = _PATH.read_bytes()
    if blake3(data).digest(DIGEST_BYTES) != ASSET:
        raise KVStoreError(f"{_PATH.name} is damaged: install kvstore again")
    words: NDArray[Any] = np.frombuffer(data, "<u2").astype(np.uint16)
    words.flags.writeable = False
    size = MODELS * SYMBOLS
    return KvqModels(
        words[:size].reshape(MODELS, SYMBOLS),
        words[size : 2 * size].reshape(MODELS, SYMBOLS),
        words[2 * size :].reshape(MODELS, 3, 3),
    )


@lru_cache(maxsize=1)
def ternary_table() -> ModelTable:
    """Return the models of thirds: row 3 m + min(|q|, 2) for model m."""
    return ModelTable(kvq_models().ternary.reshape(-1, 3))


def rows_of(models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the first of the three rows of ``ternary_table`` of each model, u8 (n, 128)."""
    wider = models // SHAPES + SCALE_STEP_OF_THREE * (level - 1)
    row = SHAPES * np.minimum(wider, SCALES - 1) + models % SHAPES
    found: NDArray[np.uint8] = (3 * row).astype(np.uint8)
    return found


Classes: TypeAlias = NDArray[np.uint8]
"""u8 (tokens,): 0 a quarter of the step, 1 half, 2 the step, 3 twice the step."""
NO_CLASSES: Classes = np.zeros(0, np.uint8)
PLAIN = 2
KINDS = 4
"""Number of classes."""
FINEST_SHARE, FINER_SHARE = 0.02, 0.12
"""Shares of the most important tokens that get a quarter of the step, and, up to here, half."""


def classes_of(importance: Importance) -> Classes:
    """Return the class of each token; tokens of importance 0 get twice the step."""
    tokens = len(importance)
    classes = np.full(tokens, PLAIN, np.uint8)
    order = np.argsort(-importance, kind="stable")
    classes[order[: int(np.ceil(FINER_SHARE * tokens))]] = 1
    classes[order[: int(np.ceil(FINEST_SHARE * tokens))]] = 0
    classes[importance == 0] = PLAIN + 1
    return classes


def factors_of(classes: Classes) -> Floats:
    """Return each token's step in steps of the tile, f32 (tokens,)."""
    return np.ldexp(np.float32(1), classes.astype(np.int32) - PLAIN).astype(np.float32)
