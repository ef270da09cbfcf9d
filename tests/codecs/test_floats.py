"""Floats of every type and rotations of keys: those of torch and of transformers."""

from __future__ import annotations

import math

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
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.types import DType, RopeParameters

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
    wide = np.zeros((30, 80), out.dtype)
    view = wide[:, ::2].T
    from_float32(values[:1200].reshape(40, 30).copy(), dtype, view)
    assert np.array_equal(view, out[:1200].reshape(40, 30))
    assert not wide[:, 1::2].any()
    assert np.array_equal(to_float32(view, dtype), to_float32(np.ascontiguousarray(view), dtype))


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


LLAMA3 = (
    ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192.0),
)  # fmt: skip
YARN = (("factor", 4.0), ("original_max_position_embeddings", 32768.0))


def frequencies(*rope: object) -> np.ndarray:
    found = inverse_frequencies(RopeParameters(*rope), 128)  # type: ignore[arg-type]
    assert found is not None
    assert found.dtype == np.float32
    return found


def test_plain_frequencies_fall_from_one_by_the_base() -> None:
    found = frequencies(10000.0, 64)
    assert found == pytest.approx([10000.0 ** (-i / 32) for i in range(32)], rel=1e-6)


def test_linear_scaling_divides_all() -> None:
    plain = frequencies(5e5, 128)
    assert frequencies(5e5, 128, "linear", (("factor", 4.0),)) == pytest.approx(plain / 4)


@pytest.mark.parametrize(
    ("scaling", "factors"),
    [("llama3", LLAMA3), ("yarn", YARN), ("linear", (("factor", 4.0),)), ("default", ())],
)
def test_frequencies_are_those_of_transformers(
    scaling: str, factors: tuple[tuple[str, float], ...]
) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if scaling not in ROPE_INIT_FUNCTIONS:
        return  # its plain ones are computed by each model
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, head_dim=128, max_position_embeddings=131072,
        rope_parameters={"rope_type": scaling, "rope_theta": 5e5, **dict(factors)},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS[scaling](config, "cpu")
    assert frequencies(5e5, 128, scaling, factors) == pytest.approx(theirs.numpy(), rel=2e-6)


def test_what_is_not_known_is_not_guessed() -> None:
    for rope in [
        None,
        RopeParameters(10000.0, 64, "none"),
        RopeParameters(10000.0, 64, "dynamic", (("factor", 2.0),)),
        RopeParameters(10000.0, 64, "llama3"),
        RopeParameters(10000.0, 64, "linear", (("factor", 0.0),)),
        RopeParameters(10000.0, 64, "llama3", tuple((n, 1.0) for n, _ in LLAMA3)),
        RopeParameters(10000.0, 63),
        RopeParameters(10000.0, 0),
        RopeParameters(10000.0, 256),
        RopeParameters(0.0, 64),
        RopeParameters(math.inf, 64),
    ]:
        assert inverse_frequencies(rope, 128) is None


def test_turning_is_the_complex_product_and_turning_back_undoes_it() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 10, 24), np.float32)
    cosine, sine = rotation(frequencies(10000.0, 16), 1000, 10)
    turned = rows.copy()
    rotate(turned, cosine, sine)
    before = rows[..., :8] + 1j * rows[..., 8:16]
    angles = (1000 + np.arange(10))[:, None] * frequencies(10000.0, 16).astype(float)
    after = turned[..., :8] + 1j * turned[..., 8:16]
    assert np.abs(after - before * np.exp(1j * angles)).max() < 1e-5
    assert (turned[..., 16:] == rows[..., 16:]).all()
    rotate(turned, cosine, -sine)
    assert np.abs(turned - rows).max() < 1e-5
