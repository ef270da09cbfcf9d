"""Tiles whose tokens have steps of their own: a quarter, half, once or twice the tile's.

A token that gets much attention is worth more bits than its neighbours (MiKV, Yang et al., arXiv
2402.18096, section 3). Steps are powers of two apart and so are the models' scales, four indices
to a power: a channel's one model, moved by four, is the model of another class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, is_finite, to_float32
from kvstore.codecs.kvq_models import (
    ESCAPE,
    PADDING_MODEL,
    SCALES,
    SHAPES,
    ZERO,
    kvq_models,
)
from kvstore.codecs.kvq_tiles import (
    ESCAPE_SHARE,
    LARGEST,
    Angles,
    Centred,
    Tiles,
    as_tiles,
    cheapest,
    histograms,
)
from kvstore.codecs.rope import rotate
from kvstore.codecs.terms import Importance
from kvstore.proto.types import DType

Classes = NDArray[np.uint8]
"""u8 (tokens,): 0 a quarter of the step, 1 half, 2 the step, 3 twice the step."""

PLAIN = 2
KINDS = 4
"""Classes there are."""
SINK_TOKENS = 4
"""A prompt's first tokens, which all later ones attend to (StreamingLLM, arXiv 2309.17453)."""
FINEST_SHARE, FINER_SHARE = 0.02, 0.12
"""Of the most important tokens: these get a quarter of the step, those up to here half."""
_SCALES_OF_TWO = 4


def classes_of(importance: Importance | None, position: int, tokens: int) -> Classes:
    """Return the class of each of *tokens* tokens from *position* of a prompt on.

    Tokens of no importance at all get twice the step. Without *importance*, the first tokens of
    the prompt are the important ones and all others alike.
    """
    classes = np.full(tokens, PLAIN, np.uint8)
    if importance is None:
        classes[: max(0, SINK_TOKENS - position)] = 0
        return classes
    weights = importance[:tokens]
    order = np.argsort(-weights, kind="stable")
    classes[order[: int(np.ceil(FINER_SHARE * tokens))]] = 1
    classes[order[: int(np.ceil(FINEST_SHARE * tokens))]] = 0
    classes[weights == 0] = PLAIN + 1
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


def quantise_mixed(
    bits: Part, dtype: DType, angles: Angles | None, ratio: float, classes: Classes
) -> Tiles | None:
    """Quantise the block *bits* (heads, tokens, dim), as ``kvq_tiles.Quantise`` says."""
    if not is_finite(bits, dtype):
        return None
    x = to_float32(bits, dtype)
    magnitudes = np.abs(as_tiles(x)).max((1, 2))
    if magnitudes.max() >= LARGEST:
        return None
    if angles is not None:
        rotate(x, angles[0], -angles[1])
    tiles = Centred.of(as_tiles(x), x.shape[0] * x.shape[2], ratio)
    if tiles is None:
        return None
    factors = factors_of(classes)[:, None]
    quotients = np.rint(tiles.difference * (np.float32(1) / tiles.steps)[:, None, None] / factors)
    errors = tiles.errors(quotients * factors, float(factors.max()))
    if errors is None:
        return None
    q = quotients.astype(np.int16)
    models = np.where(tiles.is_real, _pick(q, classes, tiles), PADDING_MODEL).astype(np.uint8)
    is_near = np.abs(q) <= kvq_models().reach[moved(models, classes)]
    symbols = np.where(is_near, q + ZERO, ESCAPE).astype(np.uint8)
    values = q[~is_near]
    if len(values) * ESCAPE_SHARE > q.size:
        return None
    escapes = (~is_near).sum((1, 2), dtype=np.uint32)
    return Tiles(tiles.steps, tiles.means, models, symbols, escapes, values, errors, magnitudes)


def _pick(q: NDArray[np.int16], classes: Classes, tiles: Centred) -> NDArray[np.intp]:
    """Return each channel's model that is cheapest over its classes together."""
    family = kvq_models()
    every = np.arange(len(family.costs), dtype=np.uint8)
    costs = family.costs.astype(np.float64)
    cost = np.zeros((*tiles.means.shape, len(every)))
    for kind in np.unique(classes):
        of_kind = moved(every[None], np.array([kind], np.uint8))[0, 0]
        cost += histograms(q[:, classes == kind]) @ costs[of_kind].T
    return cheapest(cost, tiles.spread, family)
