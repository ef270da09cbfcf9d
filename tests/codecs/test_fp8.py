from __future__ import annotations

import numpy as np
import pytest
import torch
from contracts.lossy_codec import LossyCodecContract
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import Part
from kvstore.codecs.floats import FLOAT_TYPES, from_float32, to_float32
from kvstore.codecs.fp8 import LARGEST, Fp8Codec, from_e4m3, to_e4m3
from kvstore.codecs.part_codec import HEAD_BYTES
from kvstore.codecs.terms import EncodedLayer, LayerTerms
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.types import Component, DType, Fidelity, LayerKind

CODEC = Fp8Codec()
_every_float = pytest.mark.parametrize("dtype", sorted(FLOAT_TYPES), ids=lambda dtype: dtype.name)


class TestFp8Codec(LossyCodecContract):
    codec = CODEC


def attention(dtype: DType = DType.bfloat16) -> Component:
    return Component(LayerKind.attention, dtype, 1, 3, 20, 37)


def some_parts(component: Component, size: float = 1.0) -> list[Part]:
    rng = np.random.default_rng(5)
    parts = []
    for _ in range(component.parts):
        values = size * rng.standard_normal(component.shape, np.float32)
        values *= np.exp2(rng.integers(-12, 4, component.shape))
        out = np.empty(component.shape, f"<u{component.dtype.item_bytes}")
        from_float32(values.astype(np.float32), component.dtype, out)
        parts.append(out)
    return parts


def encode(parts: list[Part], component: Component) -> tuple[Bytes, EncodedLayer]:
    out = np.empty(CODEC.max_segment_bytes(component), np.uint8)
    encoded = CODEC.encode_layer(parts, LayerTerms(component), out)
    return out[: encoded.stored_bytes], encoded


def decode(data: Bytes, component: Component) -> list[Part]:
    out = [
        np.zeros(component.shape, f"<u{component.dtype.item_bytes}") for _ in range(component.parts)
    ]
    CODEC.decode_layer([data], component, out, None)
    return out


def test_every_code_is_torchs_number() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(from_e4m3(codes), expected, equal_nan=True)


def test_rounding_is_torchs_at_every_tie_and_between() -> None:
    known = np.sort(from_e4m3(np.arange(0x7F, dtype=np.uint8)))
    ties = (known[1:] + known[:-1]) / 2
    near = np.concatenate(
        [known, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, LARGEST)]
    )
    values = np.concatenate([near, -near]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(values), expected)


def test_larger_numbers_saturate() -> None:
    values = np.array([448, 464, 465, 1e30, -1e30], np.float32)
    assert to_e4m3(values).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]


@_every_float
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_each_number_is_within_a_sixteenth_or_a_step_of_the_least(
    dtype: DType, size: float
) -> None:
    component = attention(dtype)
    parts = some_parts(component, size)
    data, encoded = encode(parts, component)
    assert (encoded.fidelity, encoded.error_bound) == (Fidelity.none, 0)
    for index, (part, found) in enumerate(zip(parts, decode(data, component), strict=True)):
        values, numbers = to_float32(part, dtype), to_float32(found, dtype)
        scale = np.abs(values).max(1 if index == 0 else 2, keepdims=True) / 448
        allowed = np.maximum(np.abs(values) / 16, scale * 2.0**-10) * 1.01
        allowed += np.abs(values) * 2.0**-8 + 2.0**-24  # rounding to the dtype
        assert (np.abs(numbers - values) <= allowed).all()


def test_segments_are_scales_then_codes() -> None:
    component = attention()
    parts = some_parts(component)
    data, _ = encode(parts, component)
    heads, tokens, dim = component.shape
    at, expected = HEAD_BYTES, []
    for shape in [(heads, 1, dim), (heads, tokens, 1)]:
        count = 2 * int(np.prod(shape))
        scales = data[at : at + count].view("<f2").reshape(shape).astype(np.float32)
        codes = data[at + count : at + count + heads * tokens * dim].reshape(component.shape)
        at += count + codes.size
        numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()
        expected.append((numbers * torch.from_numpy(scales)).bfloat16().view(torch.int16).numpy())
    assert at == len(data)
    assert [found.tobytes() for found in decode(data, component)] == [e.tobytes() for e in expected]


def test_latents_have_a_scale_for_each_token() -> None:
    component = Component(LayerKind.mla, DType.bfloat16, 1, 1, 576, 40)
    parts = some_parts(component)
    data, _ = encode(parts, component)
    assert len(data) == HEAD_BYTES + 2 * 40 + 576 * 40
    scales = data[HEAD_BYTES : HEAD_BYTES + 80].view("<f2").astype(np.float32)
    largest = np.abs(to_float32(parts[0], DType.bfloat16)).max((0, 2))
    assert (scales * 448 >= largest).all()
    assert (scales * 448 <= largest * (1 + 2**-9)).all()


def test_channels_of_zeros_come_back_as_zeros() -> None:
    component = attention()
    parts = [np.zeros(component.shape, "<u2") for _ in range(2)]
    parts[0][1, 2, 3] = 0x3F80
    data, _ = encode(parts, component)
    assert all(map(np.array_equal, decode(data, component), parts))


@pytest.mark.parametrize("bad", [0x7F80, 0x7FC0, 0x7F00])
def test_nan_infinity_and_what_no_scale_reaches_are_kept_exactly(bad: int) -> None:
    component = attention()
    parts = some_parts(component)
    parts[0][0, 0, 0] = bad
    data, encoded = encode(parts, component)
    assert data[:2].tolist() == [0, 1]
    assert np.array_equal(decode(data, component)[0], parts[0])
    assert encoded.fidelity is Fidelity.none
    parts[1][0, 0, 0] = bad
    data, encoded = encode(parts, component)
    assert encoded.fidelity is Fidelity.exact
    assert all(map(np.array_equal, decode(data, component), parts))


def test_float16_stays_finite_at_its_ends() -> None:
    component = attention(DType.float16)
    parts = [np.full(component.shape, bits, "<u2") for bits in (0x7BFF, 0xFBFF)]
    data, _ = encode(parts, component)
    assert all(map(np.array_equal, decode(data, component), parts))


def test_states_are_kept_as_they_are() -> None:
    state = Component(LayerKind.state, DType.float32, 1, 1, 400, 1)
    parts = some_parts(state)
    data, layer = encode(parts, state)
    assert (layer.fidelity, len(data)) == (Fidelity.exact, 8 + state.layer_bytes)
    assert np.array_equal(decode(data, state)[0], parts[0])


def test_keys_are_not_rotated() -> None:
    data, _ = encode(some_parts(attention()), attention())
    with pytest.raises(InvalidRequestError, match="position=0"):
        CODEC.decode_layer([data], attention(), some_parts(attention()), 0)


@pytest.mark.parametrize("bad", [0x7F, 0xFF])
def test_codes_of_nan_are_refused(bad: int) -> None:
    data, _ = encode(some_parts(attention()), attention())
    data[-1] = bad
    with pytest.raises(InvalidFrameError, match="code"):
        decode(data, attention())


@pytest.mark.parametrize("bad", [0x7E00, 0x7C00, 0xBC00])
def test_scales_that_are_no_sizes_are_refused(bad: int) -> None:
    data, _ = encode(some_parts(attention()), attention())
    data[HEAD_BYTES : HEAD_BYTES + 2] = np.array([bad], "<u2").view(np.uint8)
    with pytest.raises(InvalidFrameError, match="scale"):
        decode(data, attention())


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), cut=st.integers(-3, 3), dtype=st.sampled_from(list(DType)))
def test_any_bytes_are_refused_or_numbers(seed: int, cut: int, dtype: DType) -> None:
    component = attention(dtype)
    rng = np.random.default_rng(seed)
    data, _ = encode([np.zeros(component.shape, f"<u{dtype.item_bytes}")] * 2, component)
    data = np.append(data, np.zeros(3, np.uint8))[: len(data) + min(cut, 0) if seed % 4 else None]
    for _ in range(rng.integers(1, 20)):
        data[rng.integers(0, len(data))] = rng.integers(0, 256)
    try:
        back = decode(data, component)
    except InvalidFrameError:
        return
    if dtype in FLOAT_TYPES and data[0] and data[1]:
        assert all(np.isfinite(to_float32(part, dtype)).all() for part in back)
