"""Which loops run refinements and classes of tokens: compiled ones where they are there and agree.

The reference is ``kvq_levels``, ``kvq_classes`` and ``kvq_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.codecs.floats import from_float32
from kvstore.codecs.kvq_backends import same_tiles
from kvstore.codecs.kvq_classes import KINDS, factors_of, moved
from kvstore.codecs.kvq_levels import (
    LEVELS,
    Thirds,
    add_symbols,
    contexts_of,
    refine,
    write_scaled,
)
from kvstore.codecs.kvq_tiles import NUMPY, TileBackend, Tiles, quotients_of
from kvstore.codecs.rope import rotation
from kvstore.proto.background import improving
from kvstore.proto.types import DType


@dataclass(frozen=True, slots=True)
class FineBackend:
    """One implementation of all but quantising by class, with the arguments of the reference."""

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


def fine_backends(dtype: DType = DType.bfloat16) -> dict[str, FineBackend]:
    """Return what works on this machine for *dtype*, the fastest first; ``numpy`` always does.

    The first call for a dtype waits for the compiler, for seconds.
    """
    return {backend.name: backend for backend in _checked.wait(dtype)}


def class_quantisers(dtype: DType = DType.bfloat16) -> dict[str, TileBackend]:
    """Return the same of what quantises by class: only who encodes so waits for its compiler."""
    return {each.name: each for each in _checked_by_class.wait(dtype)}


def best_fine_backend(dtype: DType) -> FineBackend:
    """Return the fastest backend that agrees with the reference on this machine.

    While it is compiled, the reference.
    """
    return _checked(dtype)[0]


def best_class_quantiser(dtype: DType) -> TileBackend:
    """Return the same of what quantises by class."""
    return _checked_by_class(dtype)[0]


def _reference(dtype: DType) -> tuple[FineBackend, ...]:
    return (NUMPY_FINE,)


def _reference_by_class(dtype: DType) -> tuple[TileBackend, ...]:
    return (NUMPY,)


@improving(_reference)
def _checked(dtype: DType) -> tuple[FineBackend, ...]:
    try:
        from kvstore.codecs.kvq_fine_numba import NUMBA_FINE
    except ImportError:  # the extra cpu-fast is not there
        return (NUMPY_FINE,)
    return (NUMBA_FINE, NUMPY_FINE) if agrees(NUMBA_FINE, dtype) else (NUMPY_FINE,)


@improving(_reference_by_class)
def _checked_by_class(dtype: DType) -> tuple[TileBackend, ...]:
    try:
        from kvstore.codecs.kvq_fine_numba import NUMBA_CLASSES
    except ImportError:
        return (NUMPY,)
    is_right = agrees_by_class(NUMBA_CLASSES, dtype)
    return (NUMBA_CLASSES, NUMPY) if is_right else (NUMPY,)


def _samples(dtype: DType) -> tuple[Any, Any, Any]:
    """Return a block, classes of its tokens, and angles to turn it by."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((3, 33, 80), np.float32) * rng.gamma(0.5, 8, (3, 1, 80))
    angles = rotation(np.float32(10000.0) ** -np.linspace(0, 1, 24, dtype=np.float32), 999, 33)
    bits = np.empty(numbers.shape, f"u{dtype.item_bytes}")
    from_float32(numbers.astype(np.float32), dtype, bits)
    return bits, rng.integers(0, KINDS, 33).astype(np.uint8), angles


def agrees(backend: FineBackend, dtype: DType) -> bool:
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


def agrees_by_class(backend: TileBackend, dtype: DType) -> bool:
    """Whether *backend* gives the reference's bits, with and without rotation."""
    bits, classes, angles = _samples(dtype)
    for turned in (None, angles):
        wanted = NUMPY.quantise(bits, dtype, turned, 0.25, classes)
        found = backend.quantise(bits, dtype, turned, 0.25, classes)
        if wanted is None or found is None or not same_tiles(wanted, found):
            return False
    return True


def _refines(backend: FineBackend, dtype: DType, bits: Any, turned: Any, tiles: Tiles) -> bool:
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


def _writes(backend: FineBackend, tiles: Tiles, factors: Any, given: Any) -> bool:
    dtype, turned, bits = given
    one, other = np.empty_like(bits), np.empty_like(bits)
    NUMPY_FINE.write(quotients_of(tiles), tiles, factors, (dtype, turned, one))
    backend.write(backend.quotients(tiles), tiles, factors, (dtype, turned, other))
    return np.array_equal(one, other)
