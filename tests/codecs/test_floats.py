from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.floats import (
    FLOAT_TYPES,
    from_float32,
    half_down,
    half_up,
    is_finite,
    largest_error,
    to_float32,
)
from kvstore.proto.types import DType

TORCH = {
    DType.bfloat16: (torch.bfloat16, torch.int16),
    DType.float16: (torch.float16, torch.int16),
    DType.float32: (torch.float32, torch.int32),
}
_every_float = pytest.mark.parametrize("dtype", sorted(FLOAT_TYPES), ids=lambda dtype: dtype.name)


def numbers(seed: int = 0) -> np.ndarray:
    """Magnitudes from float16's denormals to its largest number, both signs, ties among them."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal(40_000) * np.exp2(rng.uniform(-24, 13, 40_000))
    ties = (1 + (2 * rng.integers(0, 2048, 4000) + 1) / 4096) * 2.0 ** rng.integers(-5, 5, 4000)
    return np.concatenate([wide, ties, -ties, [0.0, -0.0, 65504, -65504]]).astype(np.float32)


@_every_float
def test_rounding_is_that_of_torch_and_comes_back_unchanged(dtype: DType) -> None:
    values = numbers()
    kind, bits_kind = TORCH[dtype]
    expected = torch.from_numpy(values).to(kind)
    out = np.empty(values.shape, f"<u{dtype.item_bytes}")
    from_float32(values.copy(), dtype, out)
    assert out.tobytes() == expected.view(bits_kind).numpy().tobytes()
    assert np.array_equal(to_float32(out, dtype), expected.float().numpy())


@_every_float
def test_strided_parts_are_read_and_written(dtype: DType) -> None:
    values = numbers()[: 40 * 30].reshape(40, 30)
    dense = np.empty(values.shape, f"<u{dtype.item_bytes}")
    from_float32(values.copy(), dtype, dense)
    wide = np.zeros((30, 80), dense.dtype)
    view = wide[:, ::2].T
    from_float32(values.copy(), dtype, view)
    assert np.array_equal(view, dense)
    assert not wide[:, 1::2].any()
    assert np.array_equal(to_float32(view, dtype), to_float32(dense, dtype))


def test_what_float16_cannot_hold_becomes_its_largest_number() -> None:
    out = np.empty(4, np.uint16)
    from_float32(np.array([65519, 65520, 1e9, -1e9], np.float32), DType.float16, out)
    assert to_float32(out, DType.float16).tolist() == [65504, 65504, 65504, -65504]


@pytest.mark.parametrize(
    ("dtype", "largest", "infinity", "nan"),
    [
        (DType.bfloat16, 0x7F7F, 0xFF80, 0x7F81),
        (DType.float16, 0xFBFF, 0x7C00, 0xFC01),
        (DType.float32, 0x7F7FFFFF, 0x7F800000, 0xFFFFFFFF),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nan_and_infinity_are_found(dtype: DType, largest: int, infinity: int, nan: int) -> None:
    bits = np.full((3, 4), largest, f"<u{dtype.item_bytes}")
    assert is_finite(bits, dtype)
    for bad in (infinity, nan):
        bits[2, 3] = bad
        assert not is_finite(bits, dtype)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_halves_enclose_every_number(value: float) -> None:
    exact = np.array([value], np.float32)
    up, down = half_up(exact), half_down(exact)
    assert float(down[0]) <= value <= float(up[0])
    with np.errstate(over="ignore"):
        next_up = np.nextafter(down, np.float16(np.inf))
    assert up[0] in (down[0], next_up[0])


def test_an_error_is_never_stated_too_small() -> None:
    found = np.array([1, 3e7], np.float32)
    wanted = np.array([1 + 2**-23, -1], np.float32)
    assert largest_error(found, wanted) >= 3e7 + 1
    assert largest_error(found, found) == 0
