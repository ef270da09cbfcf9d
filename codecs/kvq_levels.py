"""Refinements of kvq: each cuts every step into three, and says which third a number is in.

What a third costs depends on the channel's model and on how far out the number is, so that base
and refinements together take hardly more than the fine step alone. The stream is that of the
base; every number has a model of its own, chosen by what was decoded before it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.floats import Floats, from_float32, to_float32
from kvstore.codecs.kvq_body import Stream, pack_arrays, take_stream
from kvstore.codecs.kvq_classes import moved
from kvstore.codecs.kvq_models import SCALE_STEP_OF_THREE, SCALES, SHAPES, kvq_models
from kvstore.codecs.kvq_tiles import (
    TOLERANCE,
    Angles,
    Tiles,
    as_tiles,
    from_tiles,
    quotients_of,
)
from kvstore.codecs.rans import Backend, ModelTable
from kvstore.codecs.rope import rotate
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import DType

REFINED = 2
LEVELS = 2
HEAD = struct.Struct("<BBHIf4x")
_FARTHEST = 2
_THREE = np.float32(3)

assert HEAD.size == 16


@dataclass(frozen=True, slots=True, eq=False)
class Thirds:
    """One level of some tiles: ``symbols`` u8 (n, tokens, 128), 0 towards zero, 1, 2 away;
    ``contexts`` u8 of the same shape; ``errors`` f32 (n,) once they are added.
    """

    symbols: NDArray[np.uint8]
    contexts: NDArray[np.uint8]
    errors: Floats


@lru_cache(maxsize=1)
def ternary_table() -> ModelTable:
    """Return the models of thirds: row 3 m + min(|q|, 2) for model m."""
    return ModelTable(kvq_models().ternary.reshape(-1, 3))


def contexts_of(quotients: Floats, models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the row of ``ternary_table`` for each third of *level*, from the level before."""
    distance = np.minimum(np.abs(quotients), np.float32(_FARTHEST)).astype(np.uint8)
    found: NDArray[np.uint8] = rows_of(models, level)[:, None] + distance
    return found


def rows_of(models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the first of the three rows of ``ternary_table`` of each model, u8 (n, 128)."""
    wider = models // SHAPES + SCALE_STEP_OF_THREE * (level - 1)
    row = SHAPES * np.minimum(wider, SCALES - 1) + models % SHAPES
    found: NDArray[np.uint8] = (3 * row).astype(np.uint8)
    return found


def refine(bits: Part, dtype: DType, angles: Angles | None, tiles: Tiles) -> list[Thirds] | None:
    """Return the levels behind *tiles*, which *bits* were quantised to.

    None when float32 is too coarse for the finest step.
    """
    x = to_float32(bits, dtype)
    if angles is not None:
        rotate(x, angles[0], -angles[1])
    x = as_tiles(x)
    quotients = quotients_of(tiles)
    assert quotients is not None
    centre = tiles.means.astype(np.float32)[:, None]
    difference = x - centre
    steps = tiles.steps
    found = []
    for level in range(1, LEVELS + 1):
        steps = steps / _THREE
        contexts = contexts_of(quotients, tiles.models, level)
        third = difference * (np.float32(1) / steps)[:, None, None]
        np.rint(third, out=third)
        is_below = quotients < 0
        quotients = _THREE * quotients
        third -= quotients
        np.clip(third, -1, 1, out=third)
        quotients += third
        mirrored = _mirrored(third.astype(np.int8), is_below)
        mirrored += 1
        missed = quotients * steps[:, None, None]
        missed += centre
        np.subtract(x, missed, out=missed)
        errors = np.abs(missed, out=missed).max((1, 2))
        if not (errors <= steps * TOLERANCE).all():
            return None
        found.append(Thirds(mirrored.view(np.uint8), contexts, errors))
    return found


def _mirrored(thirds: NDArray[np.int8], is_below: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Negate, in place, the *thirds* of numbers below their means; return them."""
    sign = is_below.view(np.int8)  # x ^ -1 + 1 is -x: no branch, and a byte a number
    thirds ^= -sign
    thirds += sign
    return thirds


def encode_each(
    symbols: NDArray[np.uint8], models: NDArray[np.uint8], table: ModelTable, entropy: Backend
) -> tuple[NDArray[Any], ...]:
    """Return what codes *symbols* (n, tokens, 128), each under its own of *models*.

    One token of very many channels: that gives each number a model of its own.
    """
    count = len(symbols)
    return entropy.encode_tiles(symbols.reshape(count, 1, -1), models.reshape(count, -1), table)


def decode_each(
    stream: Stream, models: NDArray[np.uint8], table: ModelTable, entropy: Backend
) -> NDArray[np.uint8]:
    """Return the symbols of *stream*, as many as *models*. Raises InvalidFrameError."""
    count = len(models)
    symbols: NDArray[np.uint8] = np.empty((count, 1, models[0].size), np.uint8)
    rows = models.reshape(count, -1)
    entropy.decode_tiles(stream.states, stream.counts, stream.words, rows, table, symbols)
    return symbols.reshape(models.shape)


def add_symbols(quotients: Floats, symbols: NDArray[np.uint8]) -> None:
    """Make *quotients* those of the next level, in place; *symbols* are overwritten."""
    third = symbols.view(np.int8)
    third -= 1
    _mirrored(third, quotients < 0)
    quotients *= _THREE
    quotients += third


def write_scaled(
    quotients: Floats, tiles: Tiles, factors: Floats, given: tuple[DType, Angles | None, Part]
) -> None:
    """Write *quotients*, which are overwritten, times their tokens' *factors* f32 (tokens,), times
    the steps and about the means of *tiles*, to a part's block: *given* is its type, the angles
    to turn it by, and where it goes.
    """
    dtype, angles, out = given
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody wrote may be infinite
        quotients *= factors[:, None]
        quotients *= tiles.steps[:, None, None]
        quotients += tiles.means.astype(np.float32)[:, None]
        rows = from_tiles(quotients, out.shape[0], out.shape[2])
        if angles is not None:
            rotate(rows, *angles)
        from_float32(rows, dtype, out)


def ones(tiles: Tiles) -> Floats:
    """Return the factors of tokens that all have the tile's step."""
    found: Floats = np.ones(tiles.symbols.shape[1], np.float32)
    return found


def at_level(tiles: Tiles, level: int) -> Tiles:
    """Return *tiles* with the steps of *level*."""
    steps = tiles.steps
    for _ in range(level):
        steps = steps / _THREE
    return replace(tiles, steps=steps)


def max_refined_bytes(tiles: int, numbers: int) -> int:
    """Upper bound of a refinement: no third takes as much as eight bits."""
    return HEAD.size + tiles * 4 * (1 + 32 + 32) + numbers


def pack_refinement(level: int, stream: Stream, error_bound: float) -> Bytes:
    """Return the stored bytes of a layer's refinement."""
    arrays: list[NDArray[Any]] = [stream.counts, stream.states, stream.words]
    out = np.empty(HEAD.size + sum(array.nbytes for array in arrays), np.uint8)
    head = HEAD.pack(REFINED, level, 0, len(stream.words), error_bound)
    out[: HEAD.size] = np.frombuffer(head, np.uint8)
    pack_arrays(arrays, out, HEAD.size)
    return out


def parse_refinement(data: Bytes, level: int, tiles: int) -> tuple[Stream, float]:
    """Return the stream and the error bound in *data*. Raises InvalidFrameError."""
    if len(data) < HEAD.size:
        raise InvalidFrameError("stored_bytes", len(data), f"at least {HEAD.size}")
    method, found, zero, words, error_bound = HEAD.unpack(data[: HEAD.size].tobytes())
    if (method, found, zero) != (REFINED, level, 0) or not 0 <= error_bound < np.inf:
        raise InvalidFrameError("refinement", (method, found), f"must be {REFINED}, {level}")
    return take_stream(data, HEAD.size, tiles, words), error_bound


@dataclass(frozen=True, slots=True)
class FineBackend:
    """One implementation of refinements, with the arguments of the reference."""

    name: str
    quotients: Callable[..., Any] = field(repr=False)
    contexts: Callable[..., Any] = field(repr=False)
    add: Callable[..., None] = field(repr=False)
    write: Callable[..., None] = field(repr=False)
    refine: Callable[..., list[Thirds] | None] = field(repr=False)
    move: Callable[..., Any] = field(repr=False)


NUMPY_FINE = FineBackend(
    "numpy", quotients_of, contexts_of, add_symbols, write_scaled, refine, moved
)
