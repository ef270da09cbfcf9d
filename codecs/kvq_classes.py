"""Classes of tokens, whose steps are a quarter of the tile's, half of it, it or twice it.

A token that gets much attention is worth more bits than its neighbours (MiKV, Yang et al., arXiv
2402.18096, section 3). Steps are powers of two apart and so are the models' scales, four indices
to a power: a channel's one model, moved by four, is the model of another class.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats
from kvstore.codecs.kvq_models import SCALES, SHAPES
from kvstore.codecs.terms import Importance

Classes: TypeAlias = NDArray[np.uint8]
"""u8 (tokens,): 0 a quarter of the step, 1 half, 2 the step, 3 twice the step."""
NO_CLASSES: Classes = np.zeros(0, np.uint8)
PLAIN = 2
KINDS = 4
"""Classes there are."""
FINEST_SHARE, FINER_SHARE = 0.02, 0.12
"""Of the most important tokens: these get a quarter of the step, those up to here half."""
_SCALES_OF_TWO = 4


def classes_of(importance: Importance) -> Classes:
    """Return the class of each token; tokens of no importance at all get twice the step."""
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


def moved(models: NDArray[np.uint8], classes: Classes) -> NDArray[np.uint8]:
    """Return the model of each number, u8 (n, tokens, 128), of *models* u8 (n, 128)."""
    finer = _SCALES_OF_TWO * (PLAIN - classes.astype(np.int16))
    scale = (models // SHAPES).astype(np.int16)[:, None] + finer[:, None]
    wide = SHAPES * np.clip(scale, 0, SCALES - 1) + (models % SHAPES)[:, None]
    found: NDArray[np.uint8] = wide.astype(np.uint8)
    return found
