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

from kvstore.codecs.floats import Floats
from kvstore.codecs.kvq_body import Stream, pack_arrays, take_stream
from kvstore.codecs.kvq_models import SCALE_STEP_OF_THREE, SCALES, SHAPES, kvq_models
from kvstore.codecs.kvq_tiles import (
    Tiles,
)
from kvstore.codecs.rans import Backend, ModelTable
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError

REFINED = 2
LEVELS = 2
HEAD = struct.Struct("<BBHIf4x")
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


def rows_of(models: NDArray[np.uint8], level: int) -> NDArray[np.uint8]:
    """Return the first of the three rows of ``ternary_table`` of each model, u8 (n, 128)."""
    wider = models // SHAPES + SCALE_STEP_OF_THREE * (level - 1)
    row = SHAPES * np.minimum(wider, SCALES - 1) + models % SHAPES
    found: NDArray[np.uint8] = (3 * row).astype(np.uint8)
    return found


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
