"""Refinements and classes of tokens: every backend gives the reference's bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from oracles.kvq import classes_agree, refinements_agree, same_tiles
from oracles.kvq_numpy import NUMPY_KVQ as NUMPY
from oracles.kvq_numpy import NumpyLoops, add_symbols, contexts_of, moved, quotients_of, refine

from kvstore.codecs.kvq_models import ESCAPE, KINDS, factors_of
from kvstore.codecs.kvq_tiles import LEVELS, KvqLoops, Tiles
from kvstore.codecs.rope import rotation
from kvstore.proto.native import paths
from kvstore.proto.types import DType

BF16 = DType.bfloat16
SHAPES = [(1, 1, 8), (2, 7, 64), (3, 33, 80), (1, 40, 300)]


def block(shape: tuple[int, int, int], seed: int, wild: float = 0.0) -> Any:
    """Return bfloat16 bits; *wild* of them are anything but NaN and infinity."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32) * rng.gamma(0.5, 8, shape[-1:]).astype(np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    strange = rng.random(shape) < wild
    bits[strange] = rng.integers(0, 1 << 16, shape, np.uint16)[strange] & 0xFE7F
    return bits


@pytest.fixture(params=paths())
def fine(request: pytest.FixtureRequest) -> KvqLoops:
    return KvqLoops(request.param)


@pytest.fixture(params=paths())
def by_class(request: pytest.FixtureRequest) -> KvqLoops:
    return KvqLoops(request.param)


def test_every_backend_refines_to_the_same_bits(fine: KvqLoops) -> None:
    frequencies = np.float32(1000.0) ** -np.linspace(0, 1, 4, dtype=np.float32)
    for shape, wild, is_turned in product(SHAPES, (0.0, 0.01), (False, True)):
        bits = block(shape, 1, wild)
        turned = rotation(frequencies, 7, shape[1]) if is_turned else None
        tiles = NUMPY.quantise(bits, BF16, turned, 1.0)
        if tiles is None:
            assert wild
            continue
        wanted, found = refine(bits, BF16, turned, tiles), fine.refine(bits, BF16, turned, tiles)
        assert (wanted is None) == (found is None)
        for one, other in zip(wanted or [], found or [], strict=True):
            assert np.array_equal(one.symbols, other.symbols)
            assert np.array_equal(one.contexts, other.contexts)
            assert np.array_equal(one.errors, other.errors)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_backend_reads_rubbish_alike(fine: KvqLoops, shape: tuple[int, int, int]) -> None:
    for seed in range(4):
        reads_rubbish_alike(fine, shape, seed)


def reads_rubbish_alike(fine: KvqLoops, shape: tuple[int, int, int], seed: int) -> None:
    """Symbols, thirds, models and steps that no writer wrote, but that a frame can have."""
    rng = np.random.default_rng(seed)
    heads, tokens, dim = shape
    count = -(-heads * dim // 128)
    symbols = rng.integers(0, 128, (count, tokens, 128)).astype(np.uint8)
    escapes = (symbols == ESCAPE).sum((1, 2), dtype=np.uint32)
    values = rng.integers(-32768, 32768, int(escapes.sum())).astype(np.int16)
    steps = np.float32(2.0) ** rng.uniform(-126, 127, count).astype(np.float32)
    means = rng.uniform(-6e4, 6e4, (count, 128)).astype(np.float16)
    models = rng.integers(0, 64, (count, 128)).astype(np.uint8)
    tiles = Tiles(steps, means, models, symbols, escapes, values)
    one, other = quotients_of(tiles), fine.quotients(tiles)
    assert one is not None
    for level in range(1, LEVELS + 1):
        thirds = rng.integers(0, 3, symbols.shape).astype(np.uint8)
        contexts = contexts_of(one, models, level)
        assert np.array_equal(contexts, fine.contexts(other, models, level))
        fine.add(other, thirds.copy())
        add_symbols(one, thirds)
        assert np.array_equal(one, other)
    classes = rng.integers(0, KINDS, tokens).astype(np.uint8)
    assert np.array_equal(moved(models, classes), fine.move(models, classes))
    wrong = replace(tiles, escapes=escapes + np.uint32(1))
    assert NUMPY.quotients(wrong) is None
    assert fine.quotients(wrong) is None
    if len(values):
        assert fine.quotients(replace(tiles, values=values[:-1])) is None
    room = [np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)]
    for backend, q, out in zip((NUMPY, fine), (one, other), room, strict=True):
        backend.write(q, tiles, factors_of(classes), (BF16, None, out))
    assert np.array_equal(room[0], room[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_backend_quantises_by_class_to_the_same_bits(
    by_class: KvqLoops, shape: tuple[int, int, int]
) -> None:
    for kinds, (seed, wild) in product(((2,), (0, 1, 2, 3), (3,)), ((0, 0.0), (1, 0.01), (2, 0.5))):
        bits = block(shape, seed, wild)
        classes = np.random.default_rng(seed).choice(kinds, shape[1]).astype(np.uint8)
        for ratio in (1.0, 0.125):
            wanted = NUMPY.quantise(bits, BF16, None, ratio, classes)
            found = by_class.quantise(bits, BF16, None, ratio, classes)
            assert (wanted is None) == (found is None)
            assert wanted is None or (found is not None and same_tiles(wanted, found))


class _Off(NumpyLoops):
    """Is off by a bit of a context, and takes the coarsest class for the one before."""

    def contexts(self, *given: Any) -> Any:
        found = contexts_of(*given)
        found[0, 0, 0] ^= 1
        return found

    def quantise(self, *given: Any) -> Any:
        bits, dtype, angles, ratio, *classes = given
        return NUMPY.quantise(bits, dtype, angles, ratio, *(np.minimum(c, 2) for c in classes))


def test_a_backend_that_is_off_by_a_bit_is_found_out() -> None:
    assert refinements_agree(NUMPY, BF16)
    assert not refinements_agree(_Off(), BF16)
    assert classes_agree(NUMPY, BF16)
    assert not classes_agree(_Off(), BF16)
