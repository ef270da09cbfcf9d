"""Which backend quantises: the compiled one where it is there and agrees with the reference."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import from_float32
from kvstore.codecs.kvq_tiles import NUMPY, TileBackend, Tiles
from kvstore.codecs.rope import rotation
from kvstore.proto.background import improving
from kvstore.proto.types import DType


def tile_backends(dtype: DType = DType.bfloat16) -> dict[str, TileBackend]:
    """Return what works on this machine for *dtype*, the fastest first; ``numpy`` always does.

    The first call for a dtype waits for the compiler, for seconds.
    """
    return {backend.name: backend for backend in _checked.wait(dtype)}


def best_tile_backend(dtype: DType) -> TileBackend:
    """Return the fastest backend that agrees with the reference on this machine.

    While it is compiled, the reference.
    """
    return _checked(dtype)[0]


def _reference(dtype: DType) -> tuple[TileBackend, ...]:
    return (NUMPY,)


@improving(_reference)
def _checked(dtype: DType) -> tuple[TileBackend, ...]:
    try:
        from kvstore.codecs.kvq_numba import NUMBA
    except ImportError:  # the extra cpu-fast is not there
        return (NUMPY,)
    return (NUMBA, NUMPY) if agrees(NUMBA, dtype) else (NUMPY,)


def agrees(backend: TileBackend, dtype: DType) -> bool:
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
