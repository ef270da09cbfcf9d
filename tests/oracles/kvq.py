"""Whether loops of kvq give the reference's bits, and what its frames state."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.kvq_numpy import NUMPY_KVQ as NUMPY
from oracles.kvq_numpy import add_symbols, moved, quotients_of, refine

from kvstore.codecs.floats import from_float32
from kvstore.codecs.kvq_body import QUANTISED, Head, parse_refinement
from kvstore.codecs.kvq_models import KINDS, factors_of
from kvstore.codecs.kvq_tiles import LEVELS, KvqLoops, Tiles
from kvstore.codecs.rope import rotation
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameHeader
from kvstore.proto.types import DType


def tiles_agree(backend: KvqLoops, dtype: DType) -> bool:
    """Whether *backend* gives the reference's tiles and numbers, with and without rotation."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((3, 33, 80), np.float32) * rng.gamma(0.5, 8, (3, 1, 80))
    angles = rotation(np.float32(10000.0) ** -np.linspace(0, 1, 24, dtype=np.float32), 999, 33)
    bits = np.empty(numbers.shape, f"u{dtype.item_bytes}")
    from_float32(numbers.astype(np.float32), dtype, bits)
    for turned in (None, angles):
        expected = NUMPY.quantise(bits, dtype, turned, 0.25)
        found = backend.quantise(bits, dtype, turned, 0.25)
        if expected is None or found is None or not same_tiles(expected, found):
            return False
        one, other = np.empty_like(bits), np.empty_like(bits)
        done = NUMPY.dequantise(expected, dtype, turned, one)
        if not (done and backend.dequantise(expected, dtype, turned, other)):
            return False
        if not np.array_equal(one, other):
            return False
    return True


def same_tiles(one: Tiles, other: Tiles) -> bool:
    """Whether both are the same bits."""
    names = Tiles.__slots__
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def _samples(dtype: DType) -> tuple[Any, Any, Any]:
    """Return a block, classes of its tokens, and angles to turn it by."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((3, 33, 80), np.float32) * rng.gamma(0.5, 8, (3, 1, 80))
    angles = rotation(np.float32(10000.0) ** -np.linspace(0, 1, 24, dtype=np.float32), 999, 33)
    bits = np.empty(numbers.shape, f"u{dtype.item_bytes}")
    from_float32(numbers.astype(np.float32), dtype, bits)
    return bits, rng.integers(0, KINDS, 33).astype(np.uint8), angles


def refinements_agree(backend: KvqLoops, dtype: DType) -> bool:
    """Whether *backend* gives the reference's bits, with and without rotation."""
    bits, classes, angles = _samples(dtype)
    for turned in (None, angles):
        plain = NUMPY.quantise(bits, dtype, turned, 1.0)
        if plain is None or not _refines(backend, dtype, bits, turned, plain):
            return False
        if not _writes(backend, plain, factors_of(classes), (dtype, turned, bits)):
            return False
        if not np.array_equal(moved(plain.models, classes), backend.move(plain.models, classes)):
            return False
    return True


def classes_agree(backend: KvqLoops, dtype: DType) -> bool:
    """Whether *backend* gives the reference's bits, with and without rotation."""
    bits, classes, angles = _samples(dtype)
    for turned in (None, angles):
        wanted = NUMPY.quantise(bits, dtype, turned, 0.25, classes)
        found = backend.quantise(bits, dtype, turned, 0.25, classes)
        if wanted is None or found is None or not same_tiles(wanted, found):
            return False
    return True


def _refines(backend: KvqLoops, dtype: DType, bits: Any, turned: Any, tiles: Tiles) -> bool:
    wanted, found = refine(bits, dtype, turned, tiles), backend.refine(bits, dtype, turned, tiles)
    if wanted is None or found is None or len(found) != LEVELS:
        return False
    one, other = quotients_of(tiles), backend.quotients(tiles)
    assert one is not None
    for level, (a, b) in enumerate(zip(wanted, found, strict=True), 1):
        pairs: list[tuple[Any, Any]] = [
            (a.symbols, b.symbols),
            (a.contexts, b.contexts),
            (a.errors, b.errors),
        ]
        pairs.append((a.contexts, backend.contexts(other, tiles.models, level)))
        backend.add(other, b.symbols.copy())
        add_symbols(one, a.symbols.copy())
        if not all(np.array_equal(x, y) for x, y in [*pairs, (one, other)]):
            return False
    return True


def _writes(backend: KvqLoops, tiles: Tiles, factors: Any, given: Any) -> bool:
    dtype, turned, bits = given
    one, other = np.empty_like(bits), np.empty_like(bits)
    wanted = quotients_of(tiles)
    assert wanted is not None
    NUMPY.write(wanted, tiles, factors, (dtype, turned, one))
    backend.write(backend.quotients(tiles), tiles, factors, (dtype, turned, other))
    return np.array_equal(one, other)


def bound_at(header: FrameHeader, prefix: Bytes, level: int) -> float:
    """Return the largest error when *prefix*, the first bytes of a frame, is read at *level*."""
    layout = header.layout
    components = [c for c in layout.components for _ in range(c.layers)]
    bound = 0.0
    for index, component in enumerate(components):
        base = header.segment(prefix, index)
        if not len(base) or base[0] != QUANTISED:
            continue
        head = Head.of(base, len(base), component)
        if level:
            data = header.segment(prefix, index + level * layout.segment_count)
            bound = max(bound, parse_refinement(data, level, head.tiles)[1])
        else:
            bound = max(bound, head.error_bound)
    return bound
